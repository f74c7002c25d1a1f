"""`plainvit.save` is atomic: the old file stays until the new one is complete on disk."""

import os
import resource
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import plainvit
from plainvit.models.fast.inference import InferenceModel
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
    "torchvision": ("m.pt", {"drop": ("activation",)}),
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
@pytest.mark.parametrize("is_first", [False, True], ids=["over old files", "first"])
@pytest.mark.parametrize("format_", SAVED)
def test_failed_write_changes_nothing(
    tmp_path: Path, format_: str, is_first: bool, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old weights and, in a folder, the old descriptions: a new config.json over old weights is a broken model."""
    if not is_first:
        save(format_, tmp_path)
    before = tree(tmp_path)
    fail_midway(monkeypatch, error)
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


@pytest.mark.parametrize(
    ("format_", "name"),
    [("plainvit", "m.pth"), ("google", "m.safetensors"), ("timm", "m.npz"), ("transformers", "m.safetensors")],
)
def test_suffix_of_another_kind_of_file_is_an_error(tmp_path: Path, format_: str, name: str) -> None:
    model = small(numerics="google" if format_ == "google" else "timm")
    with pytest.raises(ValueError, match=name):
        plainvit.save(model, tmp_path / name, format=format_)
    assert tree(tmp_path) == {}


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


@pytest.mark.parametrize("wrap", [torch.compile, InferenceModel])
def test_model_inside_another_is_not_written(tmp_path: Path, wrap: Any) -> None:
    """Under the names of the outer module nothing could load it."""
    path = save("plainvit", tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="model inside"):
        plainvit.save(wrap(small()), path)
    assert path.read_bytes() == before


def test_loaded_file_can_be_overwritten(tmp_path: Path) -> None:
    """What was loaded is no view into the file."""
    for format_ in ("plainvit", "google"):
        path = save(format_, tmp_path)
        model = plainvit.load(path, dtype=None)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        save(format_, tmp_path, model)
        path.write_bytes(bytes(path.stat().st_size))
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("format_", SAVED)
@pytest.mark.parametrize("problem", ["missing folder", "unwritable folder", "file in place of a folder", "full disk"])
def test_unwritable_target_is_a_one_line_error(tmp_path: Path, format_: str, problem: str) -> None:
    """/proc takes no files, not even from root; a limit on the size of files stops a writer as a full disk does."""
    folder = {"missing folder": tmp_path / "missing", "unwritable folder": Path("/proc")}.get(problem, tmp_path)
    if problem == "file in place of a folder":
        (tmp_path / "m").write_text("old")
        for suffix in ("safetensors", "pth", "pt", "npz"):
            (tmp_path / f"m.{suffix}").mkdir()
    model, before = small(mlp_dim=24), tree(tmp_path)
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if problem == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        with pytest.raises((ValueError, OSError)) as caught:
            save(format_, folder, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert len(str(caught.value).splitlines()) == 1
    assert tree(tmp_path) == before
