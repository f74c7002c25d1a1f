"""Damage to a file that plainvit wrote is noticed, and the same model is written as the same bytes by every process."""

import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import test_weights_save as saving
import torch
from children import in_child
from safetensors import safe_open

import plainvit
from plainvit.weights.files import CHECKSUM, DamagedError

FLIPS = 120


def content(model: Any) -> tuple[Any, ...]:
    weights = {name: (x.dtype, tuple(x.shape), x.numpy().tobytes()) for name, x in model.state_dict().items()}
    return model.config, model.about, weights


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize("format_", ["plainvit", "timm", "timm pth", "google"])
def test_flipped_bit_is_an_error_or_changes_nothing(tmp_path: Path, format_: str) -> None:
    """Anywhere in what was written: half of the bits are in the header, or in the file next to it in its place."""
    path = saving.save(format_, tmp_path)
    wanted, sound = content(plainvit.load(path)), {one: one.read_bytes() for one in tmp_path.iterdir()}
    meaning = max(tmp_path.glob("*.json"), default=path)
    header = 8 + int.from_bytes(sound[path][:8], "little") if meaning == path else len(sound[meaning])
    draw, refused = random.Random(0), 0
    for number in range(FLIPS):
        target = meaning if number % 2 else path
        damaged = bytearray(sound[target])
        at = draw.randrange(header) if number % 2 else draw.randrange(len(damaged))
        damaged[at] ^= 1 << draw.randrange(8)
        target.write_bytes(damaged)
        try:
            assert content(plainvit.load(path)) == wanted, (target, at)
        except ValueError:
            refused += 1
        target.write_bytes(sound[target])
    assert refused >= FLIPS // 2, "every flip of a weight is refused"


def test_damaged_weights_end_the_command_with_exit_code_3(tmp_path: Path) -> None:
    from plainvit.cli import main

    path = saving.save("plainvit", tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-64] + bytes(64))
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), str(tmp_path / "out.safetensors"), "--format", "plainvit"])
    assert ended.value.code == 3
    assert not (tmp_path / "out.safetensors").exists()


def test_rewritten_file_loads_unless_it_was_changed(tmp_path: Path) -> None:
    path = saving.save("plainvit", tmp_path)
    wanted, (tensors, metadata) = content(plainvit.load(path)), read(path)
    for kept in (metadata, {"plainvit": metadata["plainvit"]}):  # with its checksum, or as before there was one
        safetensors.torch.save_file(tensors, path, kept)
        assert content(plainvit.load(path)) == wanted
    edited = tensors | {"head.bias": tensors["head.bias"] + 1}
    safetensors.torch.save_file(edited, path, metadata)
    with pytest.raises(DamagedError, match=CHECKSUM):  # which to leave out for it to load
        plainvit.load(path)
    safetensors.torch.save_file(edited, path, {key: value for key, value in metadata.items() if key != CHECKSUM})
    assert torch.equal(plainvit.load(path).head.bias, edited["head.bias"])


# Writes the same model in every format, into the folder given
WRITE = """
import sys
from pathlib import Path
import test_weights_save as saving

for format_ in saving.SAVED:
    (Path(sys.argv[1]) / format_).mkdir(parents=True)
    saving.save(format_, Path(sys.argv[1]) / format_)
"""


def test_two_processes_write_the_same_bytes_in_every_format(tmp_path: Path) -> None:
    for seed in "12":
        in_child(WRITE, str(tmp_path / seed), PYTHONHASHSEED=seed)
    one, other = (saving.tree(tmp_path / seed) for seed in "12")
    assert len([name for name, data in one.items() if data]) >= len(saving.SAVED)
    assert one == other
