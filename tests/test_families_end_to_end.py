"""One small random model of each family, through all commands: fine-tune, probe, analyse, export, predict, serve."""

import json
from pathlib import Path

import numpy as np
import pytest
import test_weights_families as families
import tiny
from pictures import encode, photo
from servers import serving

import plainvit
from plainvit.cli import main
from plainvit.evaluate.predictor import Predictor

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters' own deprecations
FAMILIES = {"CLIP": "clip projection", "SigLIP": "siglip", "DINOv2": "dinov2 gated", "DINOv3": "dinov3", "EVA-02": ""}
FAMILIES |= {"MAE": "mae", "I-JEPA": "ijepa", "AIMv2": "aimv2", "BEiT": "beit", "ViTHybrid": ""}


def make(family: str, folder: Path) -> Path:
    if family == "EVA-02":
        families.make_timm("eva02_base_patch14_224", folder)
    elif family == "ViTHybrid":
        families.make_hybrid(folder, (32, 32))
    else:
        families.make(FAMILIES[family], folder)
    return folder


@pytest.mark.parametrize("family", tiny.mostly_slow(FAMILIES, 10))
def test_family_works_in_every_command(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights, run = str(make(family, tmp_path / "weights")), tmp_path / "run"
    main(["finetune", "--init", weights, "--data", "digits", "--steps", "2", "--batch", "8", "--out", str(run)])
    assert plainvit.load(run).config.classes == 10
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    capsys.readouterr()
    main(["probe", weights, "--data", "digits", "--json"])
    assert json.loads(capsys.readouterr().out)  # a row per layer and kind of probe
    main(["analyse", str(run)])
    assert list(run.rglob("*.html"))
    main(["export", str(run), "--images", "16"])  # compares the graph with PyTorch
    assert (run / "exports" / "model.onnx").exists()
    image = photo(40, 30, seed=1)
    (tmp_path / "photo.png").write_bytes(encode(image))
    capsys.readouterr()
    main(["predict", str(run), str(tmp_path / "photo.png"), "--json"])
    predicted = json.loads(capsys.readouterr().out)["predictions"]
    with serving(Predictor(run, device="cpu")) as server:
        answer = server.post(content=encode(image)).json()["results"][0]["predictions"]
    assert np.allclose([one["probability"] for one in answer], [one["probability"] for one in predicted], atol=1e-5)
