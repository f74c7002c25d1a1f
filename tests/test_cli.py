"""The command as a user meets it: what it prints, where errors go, and its exit codes."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Capture, fail, run
from tiny import mostly_slow

import plainvit
from plainvit.cli import COMMANDS, TASKS
from plainvit.commands.flags import list_flags, parse
from plainvit.commands.predict import InferenceFlags
from plainvit.commands.runs import COMMON_FLAGS
from plainvit.planning import cost
from plainvit.recipes.starters import RECIPES as STARTERS
from plainvit.weights.published import TO_START

COMMAND = Path(sys.executable).with_name("plainvit")


def printed(capsys: Capture, *arguments: str) -> str:
    """Standard output of a command that must work, and print nothing else."""
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    return out


# models ---------------------------------------------------------------------------------------------------------------


def test_models_lists_every_name_with_its_parameters(capsys: Capture) -> None:
    lines = printed(capsys, "models").splitlines()
    assert len(lines) == 1 + len(plainvit.list_models())
    for name, line in zip(plainvit.list_models(), lines[1:], strict=True):
        assert line.startswith(f"{name} ")
        assert f" {cost.summary(name)['parameters']:,} " in line
    assert max(map(len, lines)) <= 80  # nothing is cut in an ordinary terminal


def test_models_by_pattern_and_size_as_json(capsys: Capture) -> None:
    rows = json.loads(printed(capsys, "models", "*L/*", "--image-size", "384", "--json"))
    assert rows == [cost.summary(name, 384) for name in plainvit.list_models("*L/*")]
    lines = printed(capsys, "models", "--image-size", "384").splitlines()
    unfit = [line.split()[0] for line in lines if "does not fit" in line]
    assert unfit == ["ViT-H/14", "ViT-g/14", "ViT-G/14"]


# inspect --------------------------------------------------------------------------------------------------------------


def test_inspect_as_json(capsys: Capture) -> None:
    report = json.loads(printed(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--json"))
    model = plainvit.create("ViT-Ti/16", image_size=32)
    assert report["name"] == "ViT-Ti/16"
    assert (report["settings"]["width"], report["settings"]["image_size"]) == (192, [32, 32])
    steps = {step["name"]: step for step in report["steps"]}
    assert list(steps) == model.trace_names()
    assert steps["block3/attention"]["shape"] == [1, 3, 5, 5]
    assert steps["block3/attention"]["mean"] == pytest.approx(1 / 5)  # rows of a softmax over five tokens
    assert steps["logits"]["shape"] == [1, 1000]


def test_a_run_folder_may_have_the_name_of_a_model(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit-small").mkdir()
    plainvit.save(plainvit.create("ViT-Ti/16", image_size=32, classes=3), tmp_path / "vit-small" / "model.safetensors")
    assert json.loads(printed(capsys, "inspect", "vit-small", "--json"))["settings"]["classes"] == 3


# plan -----------------------------------------------------------------------------------------------------------------


def test_a_recipe_is_planned_without_data(capsys: Capture) -> None:
    plan = json.loads(printed(capsys, "plan", "photos", "--json"))
    assert plan["flops_per_image"]["training"] > 0


# The command itself ---------------------------------------------------------------------------------------------------


def test_version(capsys: Capture) -> None:
    assert printed(capsys, "--version") == f"plainvit {plainvit.__version__}\n"


@pytest.mark.parametrize(
    "words", mostly_slow(["models ViT-B/16", "models ViT-B/16 --json", "models --help", "--help"], 2)
)
@pytest.mark.parametrize(
    ("closed", "code", "message"), [(True, 0, ""), (False, 5, "plainvit: No space left on device")]
)
def test_stdout_that_cannot_be_written(words: str, closed: bool, code: int, message: str) -> None:
    """`plainvit models --json | head -1`, and a full disk."""
    ends = os.pipe() if closed else (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    os.close(ends[0])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "plainvit", *words.split()]
    done = subprocess.run(command, stdout=ends[1], stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    os.close(ends[1])
    assert (done.returncode, done.stderr.count("\n")) == (code, 0 if closed else 1)
    assert done.stderr.startswith(message)


def test_an_error_of_the_system_is_printed_without_its_number(capsys: Capture, tmp_path: Path) -> None:
    words = ("train", "digits", "--exclude", str(tmp_path / "none.txt"), "--out", str(tmp_path / "run"))
    assert fail(capsys, *words, code=2) == f"plainvit: {tmp_path / 'none.txt'}: No such file or directory"


def test_an_error_without_a_message_is_printed_by_its_type(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out() -> None:
        raise TimeoutError

    monkeypatch.setitem(COMMANDS, "models", time_out)
    assert fail(capsys, "models", code=2) == "plainvit: TimeoutError"


WRONG = {  # command: words that the line must name
    "modls": "'modls' models",
    "--verbose": "'--verbose'",
    "export": "MODEL",
    "serve": "MODEL",
    "inspect": "MODEL",
    "inspect ViT-X/16": "ViT-S/16",
    "inspect ViT-Ti/16 --image-size 33": "32 48",
    "inspect ViT-B/16 --heads 3": "--heads ViT-B/16",
    "models *Z*": "'*Z*'",
    "models BiT-* --image-size 0": "image_size",
    "models --imagesize 3": "'--imagesize' --image-size",
    "models --image-size big": "--image-size 'big'",
    "models A B": "'B' [PATTERN]",
    "weights *nothing*": "'*nothing*'",
    "recipes *nothing*": "'*nothing*'",
    "convert A B C --format timm": "'C' MODEL TARGET",
    "convert A B --format tim": "--format 'tim'",
    "export A --format": "--format",
    "completion tcsh": "'tcsh' 'bash' 'zsh' 'fish'",
    "vtab A --init B --data-root C": "'A' flags",
    "train digits other": "'other' [RECIPE]",
    "train digit": "'digit' digits",
    "plan digits --measure --on h200": "--measure --on",
    "train digits --class-weights True": "'True' switches",
    "train digits --model.class-token=True": "--model.class-token 'True'",
    "train digits --model.widen 2": "'widen'",
    "train digits --model.std 0": "--model.std 0.0",
    "train digits --model.norm-pooled --model.norm post": "--model.norm-pooled norm pre",
    "doctor --model.depth 2": "--model.depth --model",
    "train digits --preprocess squash": "'--preprocess' --preprocess.resize --preprocess.crop",
    "train digits --augment.area 0.5": "--augment.area 2",
    "train digits --zzzzzz": "'--zzzzzz'",
    "train digits --devices 0": "--devices 0",
    "train digits --restarts -1": "--restarts -1",
    "doctor --search": "'--search'",
    "evaluate A --data B --antialias yes": "--antialias 'yes'",
    "evaluate A --data B --workers -2": "--workers -2",
    "evaluate A --data B --devices 0": "--devices 0",
    "predict A B --batch 0": "--batch 0",
    "export A --images 1": "--images 2",
    "weights *mae* --for cpu": "PATTERN --for --task",
    "bench A --images 0": "--images 1",
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_usage_is_one_line_that_names_the_argument(capsys: Capture, command: str) -> None:
    code, out, err = run(capsys, *command.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    words = re.sub(r"[,;:()]", " ", err).split()
    assert [word for word in WRONG[command].split() if word not in words] == []


# Flags and help -------------------------------------------------------------------------------------------------------


def parsed(command: str) -> functools.partial[object]:
    name = next(name for name in COMMANDS if command.startswith(f"{name} "))
    return parse(COMMANDS[name], name, command.removeprefix(name).split())


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("train digits --optim.lr 1e-3 --batch 8", {"optim.lr": 1e-3, "batch": 8}),
        ("train --optim.betas 0.9 0.95 digits", {"optim.betas": (0.9, 0.95)}),
        ("train digits --track wandb tensorboard", {"track": ("wandb", "tensorboard")}),
        ("train digits --model.patch 2 --model ViT-S/16", {"model.patch": (2,), "model": "ViT-S/16"}),
        ("train digits --model.no-class-token --recompute", {"model.class_token": False, "recompute": True}),
        ("train digits --image-size=16 --head-bias -6.9", {"image_size": 16, "head_bias": -6.9}),
    ],
)
def test_settings_are_the_flags_that_were_given(command: str, settings: dict[str, object]) -> None:
    call = parsed(command)
    assert call.args == ("digits",)
    assert call.keywords["settings"] == settings


def test_other_flags_become_arguments_of_the_function() -> None:
    call = parsed("predict runs/a x.png y.png --out rows.csv --mean 0.5 --top 3")
    assert call.args == ("runs/a", ("x.png", "y.png"))
    assert call.keywords == {
        "out": Path("rows.csv"),
        "top": 3,
        "flags": InferenceFlags(mean=(0.5,)),
    }


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_every_command_below_its_task(capsys: Capture, arguments: list[str]) -> None:
    out = printed(capsys, *arguments)
    listed = re.findall(r"^  plainvit ([a-z]+(?: [a-z]+)?) +[A-Z]", out.partition("First steps")[0], re.M)
    assert listed == list(COMMANDS)
    assert [line for line in out.splitlines() if line in TASKS] == list(TASKS)
    assert max(map(len, out.splitlines())) <= 120
    family = re.findall(r"^  plainvit (data \w+)", printed(capsys, "data"), re.M)
    assert family == ["data info", "data check", "data pack"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_argument(capsys: Capture, command: str) -> None:
    out = printed(capsys, *command.split(), "--help-all")
    for flag in list_flags(COMMANDS[command]):
        assert (flag.metavar if flag.is_word else flag.option) in out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_argument_has_its_own_explanation_of_one_line(command: str) -> None:
    texts = {flag.name: flag.help for flag in list_flags(COMMANDS[command])}
    assert [name for name, text in texts.items() if not 3 < len(text) <= 115 or text.endswith(".")] == []
    starts = [text.split()[0] for text in texts.values()]
    assert [word for word in starts if not word[0].isupper() and word not in ("k-NN:", "paper:")] == []
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("command", COMMON_FLAGS)
def test_short_help_lists_ten_flags_and_says_how_to_list_all(capsys: Capture, command: str) -> None:
    out = printed(capsys, command, "--help")
    flags = re.findall(r"^  (--[a-z.-]+)", out, re.M)
    assert {"--data", "--init", "--model", "--image-size", "--batch"} <= set(flags)
    assert len(flags) <= 10
    assert "--help-all" in out


def test_help_shows_the_values_of_the_recipe(capsys: Capture) -> None:
    out = " ".join(printed(capsys, "train", "digits", "--help").split())
    for value in ("64", "120", "0.002", "digits"):  # batch, epochs, optim.lr, data
        assert f"(default: {value})" in out


# Lists ----------------------------------------------------------------------------------------------------------------


def test_recipes_lists_those_to_start_with(capsys: Capture) -> None:
    out = printed(capsys, "recipes")
    assert [name for name in plainvit.list_recipes() if re.search(rf"^{re.escape(name)} ", out, re.M)] == list(STARTERS)
    assert "plainvit recipes '*'" in out
    for pattern, names in (([], list(STARTERS)), (["ft-*"], plainvit.list_recipes("ft-*"))):
        assert [row["name"] for row in json.loads(printed(capsys, "recipes", *pattern, "--json"))] == names


def test_weights_by_pattern_and_names_in_one_piece(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = json.loads(printed(capsys, "weights", "*mae*", "--json"))
    assert found
    assert all("mae" in name for name in found)
    lines = printed(capsys, "weights").splitlines()
    for name, entry in json.loads(printed(capsys, "weights", "--json")).items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert f" {entry['parameters'] / 1e6:.1f}M " in row
        assert row.split()[-1].removesuffix("*") == entry["license"].split()[-1]
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines[-2:]] == list(TO_START.values())


def test_convert_as_json(capsys: Capture, tmp_path: Path) -> None:
    plainvit.save(plainvit.create("ViT-Ti/16", image_size=32, classes=3), tmp_path / "a.safetensors")
    words = ("convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.npz"), "--format", "google")
    said = json.loads(printed(capsys, *words, "--json"))
    assert said == {"path": str(tmp_path / "b.npz"), "format": "google"}
    assert Path(said["path"]).is_file()


@pytest.mark.parametrize(("pattern", "code"), [("ViT-B/16", 0), ("nothing", 2)])
def test_the_installed_command(pattern: str, code: int) -> None:
    done = subprocess.run([COMMAND, "models", pattern], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("86,567,656" in done.stdout) == (code == 0)
    assert done.stderr.count("\n") == (0 if code == 0 else 1)
