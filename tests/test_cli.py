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
from plainvit.cli import VERBS, main
from plainvit.planning import cost
from plainvit.verbs.runs import RUNS
from plainvit.weights.published import TO_START

COMMAND = Path(sys.executable).with_name("plainvit")
Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    """Standard output of a call that must go well, and silently otherwise."""
    main(list(arguments))
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: Capture, *arguments: str, code: int = 2) -> str:
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


def test_no_match_is_refused(capsys: Capture) -> None:
    assert "'*Z*'" in refused(capsys, "models", "*Z*")


@pytest.mark.parametrize("size", ["0", "-32"])
def test_no_size_is_refused(capsys: Capture, size: str) -> None:
    assert "image_size" in refused(capsys, "models", "BiT-*", "--image-size", size)


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
def test_inspect_refuses_in_one_line(capsys: Capture, arguments: list[str], part: str) -> None:
    assert part in refused(capsys, "inspect", *arguments)


def broken(photo: Path, how: str) -> bytes:
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
def test_a_broken_photo_is_refused_in_one_line(capsys: Capture, photo: Path, how: str) -> None:
    photo.write_bytes(broken(photo, how))
    refused(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)


def test_a_broken_photo_is_named(capsys: Capture, photo: Path) -> None:
    photo.write_bytes(broken(photo, "no image"))
    line = refused(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)
    assert photo.name in line


def test_a_photo_too_large_to_be_true_is_refused(capsys: Capture, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    refused(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--image", str(photo), code=3)


# The command itself ---------------------------------------------------------------------------------------------------


def test_version(capsys: Capture) -> None:
    assert printed(capsys, "--version") == f"plainvit {plainvit.__version__}\n"


@pytest.mark.parametrize(
    "words", mostly_slow(["models ViT-B/16", "models ViT-B/16 --json", "models --help", "--help"], 2)
)
@pytest.mark.parametrize(("unread", "code", "said"), [(True, 0, ""), (False, 5, "plainvit: No space left on device")])
def test_output_that_nobody_takes(words: str, unread: bool, code: int, said: str) -> None:
    """`plainvit models --json | head -1`, and a full disk: what is short is written when the process ends."""
    ends = os.pipe() if unread else (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
    os.close(ends[0])
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "plainvit", *words.split()]
    done = subprocess.run(command, stdout=ends[1], stderr=subprocess.PIPE, text=True, env=buffered, check=False)
    os.close(ends[1])
    assert (done.returncode, done.stderr.count("\n")) == (code, 0 if unread else 1)
    assert done.stderr.startswith(said)


def test_an_error_of_the_system_is_said_without_its_number(capsys: Capture, tmp_path: Path) -> None:
    words = ("train", "digits", "--exclude", str(tmp_path / "none.txt"), "--out", str(tmp_path / "run"))
    assert refused(capsys, *words) == f"plainvit: {tmp_path / 'none.txt'}: No such file or directory\n"


@pytest.mark.parametrize(
    "arguments",
    [["modls"], ["models", "--imagesize", "3"], ["models", "--image-size", "big"], ["inspect"], ["--verbose"]],
)
def test_wrong_usage_exits_with_2(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err


@pytest.mark.parametrize(
    ("words", "line"),
    mostly_slow(
        [
            ("probe A B --data digits", "probe takes one MODEL: 'B' is a word too many"),
            ("convert A B C --format timm", "convert takes one MODEL and one TARGET: 'C' is a word too many"),
            ("models A B", "models takes one PATTERN: 'B' is a word too many"),
            ("vtab A --init B --data-root C", "vtab takes flags alone: 'A' is a word too many"),
            ("train digits other", "train takes one RECIPE: 'other' is a word too many"),
            ("doctor --json digits", "the recipe comes first: plainvit doctor digits ..."),
            ("train digits --class-weights True", "--class-weights takes no value, got 'True'"),
            ("train digits --model.class-token=True", "--model.class-token takes no value, got 'True'"),
            (
                "train vit-b16-i1k --model.class-token True",
                "--model.class-token takes no value; --model.no-class-token turns it off",
            ),
            (
                "train digits --preprocess squash",
                "unknown flag '--preprocess'; nearest: --preprocess.resize, --preprocess.crop, "
                "--preprocess.interpolation",
            ),
            ("evaluate A --data B --antialias --no-antialias", "--antialias and --no-antialias contradict each other"),
            ("evaluate A --data B --interpolation lanczos --no-antialias", "--interpolation lanczos always"),
            ("evaluate A --data B --workers -2", "--workers is a number of processes, or -1"),
            ("probe A --data B --workers -2", "--workers is a number of processes, or -1"),
            ("predict A B --workers -2", "--workers is a number of processes, or -1"),
            ("weights *nothing*", "no published weights match '*nothing*'"),
            ("recipes *nothing*", "no recipe matches '*nothing*'"),
            ("evaluate A --data B --devices 0", "--devices is at least 1, got 0"),
            ("predict A B --batch 0", "batch is 0: at least 1"),
            ("inspect ViT-B/16 --heads 3", "--heads goes with a weights file"),
            ("inspect A --image B", "--image goes with a model's name"),
        ],
        2,
    ),
)
def test_a_word_too_many_and_a_flag_misused(capsys: Capture, words: str, line: str) -> None:
    assert refused(capsys, *words.split()).startswith(f"plainvit: {line}")


@pytest.mark.parametrize("columns", mostly_slow(["40", "300"], 2))
def test_flags_are_found_in_help_of_any_width(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    line = refused(capsys, "train", "digits", "--preprocess.interpolatio", "nearest")
    assert "; nearest: --preprocess.interpolation, " in line


def test_a_flag_like_no_other_is_answered_by_few(capsys: Capture) -> None:
    line = refused(capsys, "train", "digits", "--zzzzzz")
    assert "`plainvit train --help` lists them all" in line
    assert line.count(" --") == 4  # three of them, and --help


OPTIONS = {
    "models": ["PATTERN", "--image-size", "--json"],
    "inspect": ["--image", "--image-size", "--seed", "--json"],
    "train": ["--optim.lr", "--augment.mixup", "--data", "--epochs", "--init"],
}


def helped(capsys: Capture, *arguments: str) -> str:
    """What a call for help prints; it must succeed, by returning or by exiting with 0."""
    try:
        main(list(arguments))
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("word", ["export", "serve"])
def test_what_is_no_verb_but_a_page(capsys: Capture, word: str) -> None:
    assert "docs/production.md" in refused(capsys, word)
    assert (Path(__file__).parent.parent / "docs" / "production.md").is_file()


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(capsys: Capture, verb: str) -> None:
    out = helped(capsys, *verb.split(), "--help")
    parameters = inspect.signature(VERBS[verb]).parameters
    named = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name not in ("config", "pixels")]
    named += ["mean", "std", "resize", "crop", "interpolation"] if "pixels" in parameters else []
    options = [f"--{name.replace('_', '-')}" for name in named]
    for option in ("--help", *options, *OPTIONS.get(verb, ())):
        assert option in out


def told(capsys: Capture, *arguments: str) -> str:
    """The help without its boxes and line breaks."""
    return " ".join(word for word in helped(capsys, *arguments, "--help").split() if word != "\u2502")


@pytest.mark.parametrize("verb", mostly_slow(["train digits", "train r50x1-jft", *VERBS], 3))
def test_help_shows_no_words_of_python(capsys: Capture, verb: str) -> None:
    out = told(capsys, *verb.split()).replace("--model.layer-scale {None}|FLOAT", "")  # where None is a choice
    for word in ("{None", "|None", "True,False", "SOURCE", "SPEC", "every default is"):
        assert word not in out
    positional = re.search(r"positional arguments (.*?) options ", out)
    assert not positional or "(default: " not in positional[1]
    assert "(default: )" not in out or verb.split()[0] in RUNS  # of which some settings are empty lists
    if "--device STR" in out:
        assert "--device STR cpu, cuda, cuda:1; auto: a GPU where there is one" in out
    if "--workers" in out:
        assert re.search("--workers INT [Pp]rocesses that read images; -1: as many as suit the machine", out)


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("models", "[PATTERN]"),
        ("recipes", "[PATTERN]"),
        ("weights", "[PATTERN]"),
        ("paper", "[TABLE] [CARD ...]"),
        ("compare", "CARD ..."),
        ("train", "[RECIPE]"),
        ("doctor", "[RECIPE]"),
        ("inspect", "MODEL"),
        ("analyse", "MODEL"),
        ("data info", "DATA"),
    ],
)
def test_usage_tells_what_may_be_left_out(capsys: Capture, verb: str, usage: str) -> None:
    line = helped(capsys, *verb.split(), "--help").splitlines()[0]
    assert re.search(rf"(?<!\[){re.escape(usage)}(?!\])", line)


@pytest.mark.parametrize("verb", ["train", "finetune", "plan", "doctor"])
def test_help_of_runs_describes_the_recipe_and_the_model(capsys: Capture, verb: str) -> None:
    out = told(capsys, verb)
    assert "[RECIPE] A name from `plainvit recipes`, or FILE.py:FUNCTION" in out
    assert "--model NAME a model from `plainvit models`" in out
    assert "--recipe" not in out


def test_doctor_lists_only_what_it_reads(capsys: Capture) -> None:
    flags = set(re.findall(r"--[a-z][\w.-]*(?= [A-Z{[])|--json", told(capsys, "doctor")))
    assert {"--json", "--batch", "--devices"} <= flags
    assert not flags & {"--out", "--restarts"}
    assert "unknown flag '--search'" in refused(capsys, "doctor", "--search")


def test_each_setting_is_explained_by_words_of_its_own(capsys: Capture) -> None:
    names = {
        "model": ("width", "depth", "heads", "pool", "posemb", "norm", "activation", "classes"),
        "masked": ("depth", "width", "heads"),
        "augment": ("crop", "area", "aspect", "resize", "pad", "flip"),
    }
    flags = ["--seed", *(f"--{part}.{name}" for part, inner in names.items() for name in inner)]
    out, said = told(capsys, "train", "digits"), list[str]()
    for flag in flags:
        text = re.search(rf"{re.escape(flag)} (?:{{\S+}}|[A-Z]+(?: [A-Z]+)?) ([^(].*?) \(default", out)
        assert text, flag
        said.append(text[1])
    assert [text for text in said if said.count(text) > 1] == ["of MAE's decoder"] * 2


def test_weights_by_pattern_and_names_in_one_piece(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = json.loads(printed(capsys, "weights", "*mae*", "--json"))
    assert found
    assert all("mae" in name for name in found)
    lines = printed(capsys, "weights").splitlines()
    for name, entry in json.loads(printed(capsys, "weights", "--json")).items():
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert f" {entry['parameters'] / 1e6:.1f}M " in row
        assert row.split()[-1] == entry["licence"].split()[-1]
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


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
def test_help_names_every_verb(capsys: Capture, arguments: list[str]) -> None:
    out = helped(capsys, *arguments)
    assert all(verb in out for verb in VERBS)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_the_installed_command() -> None:
    found = run("models", "ViT-B/16", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    assert json.loads(found.stdout)[0]["parameters"] == 86_567_656


def test_the_installed_command_refuses() -> None:
    found = run("models", "nothing")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "plainvit: no model matches 'nothing'; `plainvit models` lists them all\n"


def test_inspect_leaves_no_gradients_on(capsys: Capture) -> None:
    """The report runs without autograd, and does not switch it off for others."""
    printed(capsys, "inspect", "ViT-Ti/16", "--image-size", "32", "--json")
    assert torch.is_grad_enabled()
