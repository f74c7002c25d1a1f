"""The documentation site: `make docs`. It builds without a network, and every warning is an error."""

import hashlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
# For the kernels of the notebooks: this checkout, and the commands of this environment.
os.environ["PYTHONPATH"] = str(HERE.parent)
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
os.environ["COLUMNS"] = "100"

import generate  # noqa: E402
from myst_nb.core import render  # noqa: E402

import plainvit  # noqa: E402

project, author, copyright = "plainvit", "The plainvit authors", "The plainvit authors"  # noqa: A001
version = release = plainvit.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "studies"]

html_theme, html_title = "furo", f"plainvit {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
smartquotes = False  # -- is a flag
default_role = "code"
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"  # prompts and printed output are not copied

myst_heading_anchors = 4  # links such as data.md#few-photos, as GitHub makes them
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # pages that GitHub shows too may skip a heading level

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!plainvit\.(create|load|save|fit|Predictor|Trace)$).*")
]  # types of other libraries


def _hash_package() -> str:
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "plainvit").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


# A notebook runs when it or the package changed; those that need photos are shown without output where there are none.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / f"notebooks-{_hash_package()}")
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
if not os.environ.get("PLAINVIT_DATA"):
    nb_execution_excludepatterns = ["tutorials/photos.md", "tutorials/attention.md", "tutorials/serve.md"]


def merge_streams(outputs: list) -> list:
    """Join what a cell printed, standard output first. myst-nb's own function breaks lines where a read ended."""
    streams = {}
    for output in outputs:
        if output["output_type"] == "stream" and streams.setdefault(output["name"], output) is not output:
            streams[output["name"]]["text"] += output["text"]
    rest = [output for output in outputs if output["output_type"] != "stream"]
    return [streams[name] for name in ("stdout", "stderr") if name in streams] + rest


render.coalesce_streams = merge_streams


def setup(app) -> None:
    """Write the generated pages before Sphinx lists its sources."""
    generate.write_pages(HERE / "reference")
    app.connect("autodoc-process-docstring", show_examples_as_code, priority=1)


def show_examples_as_code(app, kind, name, thing, options, lines: list[str]) -> None:  # noqa: ARG001
    """`Example:` in a docstring introduces code."""
    lines[:] = ["Example::" if line == "Example:" else line for line in lines]
    for index in [index for index, line in enumerate(lines) if line == "Example::"]:
        lines.insert(index + 1, "")
