"""The documentation site: `make docs`. It builds without a network, and every warning is an error."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ["PYTHONPATH"] = str(HERE.parent)  # for the notebooks

import generate  # noqa: E402

import plainvit  # noqa: E402

project, author, copyright = "plainvit", "The plainvit authors", "The plainvit authors"  # noqa: A001
version = release = plainvit.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "studies"]

html_theme, html_title = "furo", f"plainvit {version}"
html_static_path: list[str] = []
html_copy_source = False

myst_heading_anchors = 3  # links such as data.md#few-photos, as GitHub makes them
myst_enable_extensions = ["colon_fence"]
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # CHANGELOG and pages that GitHub shows too may skip a heading level

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False

# A notebook runs when it or the package changed; those that need photos are shown without output where there are none.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
if not os.environ.get("PLAINVIT_DATA"):
    nb_execution_excludepatterns = ["tutorials/photos.md", "tutorials/attention.md", "tutorials/serve.md"]


def setup(app) -> None:
    """Write the generated pages before Sphinx lists its sources."""
    generate.write_pages(HERE / "reference")
