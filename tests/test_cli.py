"""The command as a user meets it: what it prints, where errors go, and its exit codes."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import mostly_slow

import plainvit
from plainvit.cli import COMMANDS, TASKS, main
from plainvit.commands.runs import RUNS
from plainvit.planning import cost
from plainvit.recipes.small import RECIPES as STARTERS
from plainvit.weights.published import TO_START

COMMAND = Path(sys.executable).with_name("plainvit")
Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    """Standard output of a call that must go well, and silently otherwise."""
    main(list(arguments))
    out, err = capsys.readouterr()
    assert err == ""
    return out


def error_line(capsys: Capture, *arguments: str, code: int = 2) -> str:
    """The one line on standard error of a call that must fail: 2 is wrong usage, 3 bad data."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert caught.value.code == code
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("plainvit: ")
    return err


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A PNG whose left half is red and right half is blue."""
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    image.paste((0, 0, 255), (20, 0, 40, 20))
    image.save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


# models ---------------------------------------------------------------------------------------------------------------


def test_models_lists_every_name_with_its_parameters(capsys: Capture) -> None:
    lines = printed(capsys, "models").splitlines()
    assert len(lines) == 1 + len(plainvit.list_models())
    for name, line in zip(plainvit.list_models(), lines[1:], strict=True):
        assert line.startswith(f"{name} ")
        assert f" {cost.summary(name)['parameters']:,} " in line
    assert max(map(len, lines)) <= 80  # nothing is cut in an ordinary terminal


def test_models_as_json(capsys: Capture) -> None:
    assert json.loads(printed(capsys, "models", "--json")) == [cost.summary(name) for name in plainvit.list_models()]


def test_models_by_pattern_and_size(capsys: Capture) -> None:
    rows = json.loads(printed(capsys, "models", "*L/*", "--image-size", "384", "--json"))
    assert [row["name"] for row in rows] == plainvit.list_models("*L/*")
    assert rows == [cost.summary(name, 384) for name in plainvit.list_models("*L/*")]


def test_models_at_a_size_that_does_not_fit_all(capsys: Capture) -> None:
    lines = printed(capsys, "models", "--image-size", "384").splitlines()
    dim = [line.split()[0] for line in lines if "does not fit" in line]
    assert dim == ["ViT-H/14", "ViT-g/14", "ViT-G/14"]


def test_models_without_a_match(capsys: Capture) -> None:
    assert "'*Z*'" in error_line(capsys, "models", "*Z*")


@pytest.mark.parametrize("size", ["0", "-32"])
def test_models_with_an_invalid_size(capsys: Capture, size: str) -> None:
    assert "image_size" in error_line(capsys, "models", "BiT-*", "--image-size", size)


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
    assert report["milliseconds"] > 0


def test_inspect_as_a_table(capsys: Capture) -> None:
    text = printed(capsys, "inspect", "ViT-Ti/16", "--image-size", "32")
    for word in ("ViT-Ti/16", "width 192", "block0/attention", "1 x 3 x 5 x 5", "block11/tokens", "logits", "--json"):
        assert word in text
    assert "block1/attention" not in text


def test_inspect_a_photo(capsys: Capture, photo: Path) -> None:
    """Half red, half blue: each of these channels is +1 on one half and -1 on the other, green is -1."""
    report = json.loads(printed(capsys, "inspect", "ViT-Ti/16", "--image", str(photo), "--image-size", "32", "--json"))
    pixels = next(step for step in report["steps"] if step["name"] == "pixels")
    assert pixels["shape"] == [1, 3, 32, 32]
    assert pixels["mean"] == pytest.approx(-1 / 3, abs=0.01)
    assert pixels["std"] == pytest.approx((8 / 9) ** 0.5, abs=0.02)


def test_a_seed_repeats_the_weights(capsys: Capture) -> None:
    def steps(seed: str) -> list[dict[str, object]]:
        text = printed(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--seed", seed, "--json")
        return json.loads(text)["steps"]

    assert steps("3") == steps("3") != steps("4")


@pytest.mark.parametrize("name", ["R+ViT-Ti/16", "BiT-R26x1"])
def test_inspect_other_kinds(capsys: Capture, name: str) -> None:
    text = printed(capsys, "inspect", name, "--image-size", "32")
    assert "root" in text
    assert "logits" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["ViT-X/16"], "nearest: "),
        (["vit-b/16"], "ViT-B/16"),
        (["ViT-Ti/16", "--image-size", "33"], "nearest: 32 or 48"),
        (["ViT-Ti/16", "--image-size", "0"], "image_size"),
        (["ViT-Ti/16", "--image", "/no/such/photo.png"], "/no/such/photo.png"),
    ],
)
def test_inspect_with_invalid_arguments(capsys: Capture, arguments: list[str], part: str) -> None:
    assert part in error_line(capsys, "inspect", *arguments)


def corrupt(photo: Path, how: str) -> bytes:
    whole = photo.read_bytes()
    data = whole.index(b"IDAT")
    return {
        "empty": b"",
        "no image": Path(__file__).read_bytes(),
        "cut off": whole[: data + 10],
        "no data": whole.replace(b"IDAT", b"JDAT"),
        "data ends early": whole[: data - 4] + (4).to_bytes(4, "big") + whole[data:],
    }[how]


@pytest.mark.parametrize("how", ["empty", "no image", "cut off", "no data", "data ends early"])
def test_a_corrupt_photo_is_a_data_error(capsys: Capture, photo: Path, how: str) -> None:
    photo.write_bytes(corrupt(photo, how))
    error_line(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)


def test_the_error_names_the_corrupt_photo(capsys: Capture, photo: Path) -> None:
    photo.write_bytes(corrupt(photo, "no image"))
    line = error_line(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)
    assert photo.name in line


def test_a_decompression_bomb_is_a_data_error(capsys: Capture, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    error_line(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)


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
    assert error_line(capsys, *words) == f"plainvit: {tmp_path / 'none.txt'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    mostly_slow(
        [
            ("modls", "'modls' models"),
            ("--verbose", "'--verbose'"),
            ("inspect", "MODEL"),
            ("models --imagesize 3", "'--imagesize' --image-size"),
            ("models --image-size big", "--image-size 'big'"),
            ("export", "docs/production.md"),
            ("serve", "docs/production.md"),
            ("probe A B --data digits", "'B' MODEL"),
            ("convert A B C --format timm", "'C' MODEL TARGET"),
            ("models A B", "'B' PATTERN"),
            ("vtab A --init B --data-root C", "'A' flags"),
            ("train", "recipes finetune"),
            ("train digits other", "'other' RECIPE"),
            ("doctor --json digits", "plainvit doctor digits"),
            ("train digits --class-weights True", "--class-weights 'True'"),
            ("train digits --model.class-token=True", "--model.class-token 'True'"),
            ("train digits --preprocess squash", "'--preprocess' --preprocess.resize --preprocess.crop"),
            ("train digits --preprocess.antialias", "--preprocess.antialias --preprocess.no-antialias"),
            ("train digits --zzzzzz", "'--zzzzzz' `plainvit train --help-all`"),
            ("train digits --devices 0", "--devices 0"),
            ("train digits --restarts -1", "--restarts -1"),
            ("doctor --search", "'--search'"),
            ("evaluate A --data B --antialias --no-antialias", "--antialias --no-antialias"),
            ("evaluate A --data B --interpolation lanczos --no-antialias", "lanczos --no-antialias"),
            ("evaluate A --data B --workers -2", "--workers -2"),
            ("probe A --data B --workers -2", "--workers -2"),
            ("predict A B --workers -2", "--workers -2"),
            ("weights *nothing*", "'*nothing*'"),
            ("recipes *nothing*", "'*nothing*'"),
            ("evaluate A --data B --devices 0", "--devices 0"),
            ("predict A B --batch 0", "--batch 0"),
            ("inspect ViT-B/16 --heads 3", "--heads ViT-B/16"),
            ("inspect A --image B", "--image"),
        ],
        4,
    ),
)
def test_wrong_usage_is_one_line_that_names_the_argument(capsys: Capture, words: str, parts: str) -> None:
    line = error_line(capsys, *words.split())
    assert [part for part in parts.split() if part not in line.replace(",", "").split(": ", 1)[1]] == []


@pytest.mark.parametrize("columns", mostly_slow(["40", "300"], 2))
def test_flags_are_found_in_help_of_any_width(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    line = error_line(capsys, "train", "digits", "--preprocess.interpolatio", "nearest")
    assert "; nearest: --preprocess.interpolation, " in line


# Help -----------------------------------------------------------------------------------------------------------------


def helped(capsys: Capture, *arguments: str) -> str:
    """What a call for help prints; it must succeed, by returning or by exiting with 0."""
    try:
        main(list(arguments))
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017
    out, err = capsys.readouterr()
    assert err == ""
    return out


def full_help(command: str) -> list[str]:
    """The arguments that list every flag."""
    return [*command.split(), "--help-all" if command.split()[0] in RUNS else "--help"]


def explanations(capsys: Capture, command: str) -> dict[str, str]:
    """Each flag of a command with its explanation, without the default."""
    found: dict[str, str] = {}
    for line in helped(capsys, *full_help(command)).replace("\u2502", " ").splitlines():
        if entry := re.match(r"  ((?:--?[a-z]|\[?[A-Z]{4})\S*)", line):
            flag = entry[1].strip(",")
            found[flag] = " ".join(re.split(r" {2,}", line.strip(), maxsplit=1)[1:])
        elif found and line.startswith("      "):
            found[flag] = f"{found[flag]} {line.strip()}".strip()
    return {flag: re.sub(r" ?\((default: .*|required|repeatable)\)$", "", text) for flag, text in found.items()}


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_lists_every_command_below_its_task(capsys: Capture, arguments: list[str]) -> None:
    out = helped(capsys, *arguments)
    listed = re.findall(r"^  plainvit ([a-z]+(?: [a-z]+)?) +[A-Z]", out, re.M)
    assert listed == list(COMMANDS)
    assert [line for line in out.splitlines() if line in TASKS] == list(TASKS)
    assert max(map(len, out.splitlines())) <= 120


def test_help_of_a_family_lists_its_commands(capsys: Capture) -> None:
    assert re.findall(r"^  plainvit (data \w+)", helped(capsys, "data"), re.M) == [
        "data info",
        "data check",
        "data pack",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_every_flag(capsys: Capture, command: str) -> None:
    out = helped(capsys, *full_help(command))
    parameters = inspect.signature(COMMANDS[command]).parameters
    named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in ("config", "pixels")]
    named = ["for" if name == "machine" else name for name in named]  # a keyword of Python
    named += ["mean", "std", "resize", "crop", "interpolation"] if "pixels" in parameters else []
    named += ["optim.lr", "augment.mixup", "masked.ratio", "data", "epochs", "init"] if command in RUNS else []
    for option in ("--help", *(f"--{name.replace('_', '-')}" for name in named)):
        assert option in out


@pytest.mark.parametrize("command", RUNS)
def test_short_help_of_runs(capsys: Capture, command: str) -> None:
    flags = re.findall(r"^  (--[a-z.-]+)", helped(capsys, command, "digits", "--help"), re.M)
    assert {"--data", "--init", "--model", "--image-size", "--batch"} <= set(flags)
    assert len(flags) <= 14
    assert "--help-all" in helped(capsys, command, "-h")


def test_short_help_shows_the_defaults_of_the_recipe(capsys: Capture) -> None:
    out = helped(capsys, "train", "digits", "--help")
    assert len(re.findall(r"^  --", out, re.M)) <= 12
    for flag, default in (("batch", "64"), ("epochs", "120"), ("optim.lr", "0.002"), ("data", "digits")):
        assert re.search(rf"--{flag} .*?\(default:\s+{default}\)", out, re.S), flag


@pytest.mark.parametrize("command", mostly_slow(["train digits", "train r50x1-jft", *COMMANDS], 5))
def test_each_flag_is_explained_in_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    found = explanations(capsys, command)
    assert len(found) > 1
    assert found.pop("-h")
    starts = {flag: text.split()[0] for flag, text in found.items() if text}
    assert [flag for flag, word in starts.items() if not word[0].isupper() and word not in ("k-NN:", "paper:")] == []
    assert [flag for flag, text in found.items() if not text or len(text) > 115 or text.endswith(".")] == []


@pytest.mark.parametrize("command", mostly_slow(["train digits", "train r50x1-jft", *COMMANDS], 3))
def test_help_shows_no_python(capsys: Capture, command: str) -> None:
    out = " ".join(word for word in helped(capsys, *full_help(command)).split() if word != "\u2502")
    out = out.replace("--model.layer-scale {None}|FLOAT", "")  # where None is a choice
    for word in ("{None", "|None", "True,False", "SOURCE", "SPEC"):
        assert word not in out
    positional = re.search(r"positional arguments (.*?) options ", out)
    assert not positional or "(default: " not in positional[1]
    assert "(default: )" not in out or command.split()[0] in RUNS  # where settings may be empty lists


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("models", "[PATTERN]"),
        ("recipes", "[PATTERN]"),
        ("weights", "[PATTERN]"),
        ("paper", "[TABLE] [CARD ...]"),
        ("compare", "CARD ..."),
        ("train", "[RECIPE]"),
        ("doctor", "[RECIPE]"),
        ("inspect", "MODEL"),
        ("data info", "DATA"),
    ],
)
def test_usage_shows_what_is_optional(capsys: Capture, command: str, usage: str) -> None:
    line = helped(capsys, *command.split(), "--help").splitlines()[0]
    assert re.search(rf"(?<!\[){re.escape(usage)}(?!\])", line)


def test_each_setting_has_its_own_explanation(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    texts = list(explanations(capsys, "train digits").values())
    assert "" not in texts
    assert len(texts) == len(set(texts))


# Lists ----------------------------------------------------------------------------------------------------------------


def test_recipes_lists_those_to_start_with(capsys: Capture) -> None:
    out = printed(capsys, "recipes")
    assert [name for name in plainvit.list_recipes() if re.search(rf"^{re.escape(name)} ", out, re.M)] == list(STARTERS)
    assert "plainvit recipes '*'" in out
    assert [row["name"] for row in json.loads(printed(capsys, "recipes", "--json"))] == list(STARTERS)


def test_recipes_by_pattern(capsys: Capture) -> None:
    for pattern in ("*", "ft-*"):
        rows = json.loads(printed(capsys, "recipes", pattern, "--json"))
        assert [row["name"] for row in rows] == plainvit.list_recipes(pattern)
    assert "plainvit recipes" not in printed(capsys, "recipes", "ft-*")


def test_weights_by_pattern_and_names_in_one_piece(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = json.loads(printed(capsys, "weights", "*mae*", "--json"))
    assert found
    assert all("mae" in name for name in found)
    lines = printed(capsys, "weights").splitlines()
    for name, entry in json.loads(printed(capsys, "weights", "--json")).items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert f" {entry['parameters'] / 1e6:.1f}M " in row
        assert row.split()[-1].removesuffix("*") == entry["licence"].split()[-1]
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines[-2:]] == list(TO_START.values())


def test_convert_as_json(capsys: Capture, tmp_path: Path) -> None:
    plainvit.save(plainvit.create("ViT-Ti/16", image_size=32, classes=3), tmp_path / "a.safetensors")
    words = ("convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.npz"), "--format", "google")
    said = json.loads(printed(capsys, *words, "--json"))
    assert said == {"path": str(tmp_path / "b.npz"), "format": "google"}
    assert Path(said["path"]).is_file()


def test_inspect_says_in_whose_format_a_converted_file_is(capsys: Capture, tmp_path: Path) -> None:
    ours, theirs = (str(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    plainvit.save(plainvit.create("ViT-Ti/16", image_size=32, classes=3, numerics="timm"), ours)
    printed(capsys, "convert", ours, theirs, "--format", "timm")
    assert "note: its weights have the names and shapes of timm" in printed(capsys, "inspect", theirs)
    assert "note:" not in printed(capsys, "inspect", ours)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_the_installed_command() -> None:
    found = run("models", "ViT-B/16", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)[0]["parameters"] == 86_567_656


def test_the_installed_command_exits_with_2() -> None:
    found = run("models", "nothing")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.count("\n") == 1
    assert "'nothing'" in found.stderr


def test_inspect_leaves_no_gradients_on(capsys: Capture) -> None:
    """The report runs without autograd, and does not switch it off for others."""
    printed(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--json")
    assert torch.is_grad_enabled()
