"""`plainvit.save` is atomic: the old file stays until the new one is complete on disk."""

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import plainvit
from plainvit.weights import writing

SMALL: dict[str, Any] = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 8, "image_size": 16, "classes": 3}


def small(**settings: Any) -> Any:
    return tiny.vit(torch.float32, **SMALL | settings)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "plainvit": ("m.safetensors", {}),
    "google": ("m.npz", {}),
    "timm": ("m.safetensors", {"drop": ("activation",)}),
    "timm pth": ("m.pth", {"drop": ("activation",)}),
    "timm folder": ("m", {}),
    "transformers": ("m", {}),
    "torchvision": ("m.pth", {"drop": ("activation",)}),
}


def save(format_: str, folder: Path, model: Any = None) -> Path:
    name, more = SAVED[format_]
    return plainvit.save(small() if model is None else model, folder / name, format=format_.split()[0], **more)


def fail_midway(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Every writer writes half of something and breaks."""

    def broken(*arguments: Any, **_: Any) -> None:
        target = next(a for a in arguments if isinstance(a, (str, Path)) or hasattr(a, "write"))
        if hasattr(target, "write"):
            target.write(b"half")
        else:
            Path(target).write_bytes(b"half")
        raise error

    monkeypatch.setattr(writing, "write_safetensors", broken)
    monkeypatch.setattr(torch, "save", broken)
    monkeypatch.setattr(np, "savez", broken)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("format_", SAVED)
def test_failed_write_keeps_the_old_files(
    tmp_path: Path, format_: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old weights and, in a folder, the old descriptions: a new config.json over old weights is a broken model."""
    save(format_, tmp_path)
    before = tree(tmp_path)
    with monkeypatch.context() as broken:
        fail_midway(broken, error)
        with pytest.raises(type(error)):
            save(format_, tmp_path, small(mlp_dim=24))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("format_", ["timm folder", "transformers"])
def test_run_folder_is_not_overwritten(tmp_path: Path, format_: str) -> None:
    """Their config.json has the name of the run's, without which it cannot go on, nor be compared."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"kind": "run"}')
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="the folder of a run"):
        save(format_, tmp_path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("format_", SAVED)
def test_failed_first_write_leaves_no_files(tmp_path: Path, format_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_midway(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises((OSError, ValueError)):
        save(format_, tmp_path)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("format_", SAVED)
def test_missing_folder_is_a_one_line_error(tmp_path: Path, format_: str) -> None:
    with pytest.raises(ValueError, match="no folder") as caught:
        save(format_, tmp_path / "missing")
    assert "\n" not in str(caught.value)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("format_", SAVED)
def test_unwritable_folder_is_a_one_line_error(format_: str) -> None:
    """/proc takes no files, not even from root."""
    with pytest.raises((ValueError, OSError)) as caught:
        save(format_, Path("/proc"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_", ["timm folder", "transformers"])
def test_file_instead_of_a_folder_is_a_one_line_error(tmp_path: Path, format_: str) -> None:
    (tmp_path / "m").write_text("old")
    with pytest.raises(ValueError, match="is a file") as caught:
        save(format_, tmp_path)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "m").read_text() == "old"


MODES = [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)]


@pytest.mark.parametrize(("format_", "mask", "mode"), [(name, *MODES[at % 4]) for at, name in enumerate(SAVED)])
def test_file_mode_follows_the_umask(tmp_path: Path, format_: str, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        path = save(format_, tmp_path)
        assert os.umask(mask) == mask, "the umask itself stays"
    finally:
        os.umask(before)
    files = list(path.iterdir()) if path.is_dir() else [path]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}


def test_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synced, renamed, and the folder synced: a power cut leaves the old file or the new."""
    events: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        events.append("folder synced" if is_folder else "file synced")
        sync(handle)

    def renamed(*arguments: Any, **more: Any) -> None:
        events.append("renamed")
        rename(*arguments, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save("plainvit", tmp_path)
    assert events == ["file synced", "renamed", "folder synced"]


def test_loaded_file_can_be_overwritten(tmp_path: Path) -> None:
    """What was loaded is no view into the file."""
    for format_ in ("plainvit", "google"):
        path = save(format_, tmp_path)
        model = plainvit.load(path, dtype=None)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        save(format_, tmp_path, model)
        path.write_bytes(bytes(path.stat().st_size))
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("format_", ["timm folder", "transformers"])
def test_old_shards_are_removed(tmp_path: Path, format_: str) -> None:
    """A folder that held shards with an index is written anew: what loads is what was saved."""
    folder = save(format_, tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    name = "classifier.bias" if format_ == "transformers" else "head.bias"
    index = {"metadata": {}, "weight_map": {name: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert plainvit.load(folder).config.mlp_dim == 8
    new = small(mlp_dim=24)
    assert plainvit.load(save(format_, tmp_path, new)).config.mlp_dim == 24


@pytest.mark.parametrize("named", ["../precious.safetensors", "notes.txt", 1])
def test_index_removes_only_shards(tmp_path: Path, named: str | int) -> None:
    folder = save("timm folder", tmp_path)
    kept = [tmp_path / "precious.safetensors", folder / "notes.txt"]
    for path in kept:
        path.write_text("mine")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"any": named}}))
    assert plainvit.load(save("timm folder", tmp_path, small(mlp_dim=24))).config.mlp_dim == 24
    assert [path.read_text() for path in kept] == ["mine", "mine"]


# What a full disk does, in a process of its own: {kind of error: its text}, then the files that are left
FULL = textwrap.dedent("""
    import json, resource, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_weights_save as tests

    format_, folder, limit = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    model = tests.small(mlp_dim=24)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        tests.save(format_, folder, model)
        said = ["saved", ""]
    except (ValueError, OSError) as error:
        said = ["one line" if len(str(error).splitlines()) == 1 else "many lines", str(error)]
    except BaseException as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps(said))
""")


def save_on_full_disk(format_: str, folder: Path, limit: int) -> list[str]:
    tests = str(Path(__file__).parent)
    command = [sys.executable, "-c", FULL, tests, format_, str(folder), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("format_", SAVED)
def test_file_size_limit_is_a_one_line_error(tmp_path: Path, format_: str) -> None:
    """The limit on a file's size stops the writer midway, as a full disk does; nothing has to be mounted."""
    save(format_, tmp_path)
    before = tree(tmp_path)
    kind, said = save_on_full_disk(format_, tmp_path, 3000)
    assert kind == "one line", said
    assert tree(tmp_path) == before


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 kB in memory."""
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=40k", "tmpfs", folder], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run([str(unmount), "-l", folder], check=True)  # lazily: a broken writer may hold a file open


@pytest.mark.parametrize("format_", ["plainvit", "google", "timm pth", "transformers"])
def test_full_disk_is_a_one_line_error(full_disk: Path, format_: str) -> None:
    (full_disk / "other").write_bytes(bytes(2**15))
    with pytest.raises((ValueError, OSError)) as caught:
        save(format_, full_disk)
    assert len(str(caught.value).splitlines()) == 1
    assert {path.name for path in full_disk.iterdir()} == {"other"}
