"""Whole runs, small ones: every recipe takes steps, the first losses are golden, options do their work."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import plant_classes
from small_runs import losses

import plainvit
from plainvit.commands.runs import describe_results
from plainvit.config import About, Augment, Config, Optim, ResNetConfig, ViTConfig, count_steps
from plainvit.data.decode import DataError
from plainvit.data.generated import Shapes
from plainvit.data.loader import Loader
from plainvit.data.sources import open_source
from plainvit.data.splits import find_data_problems, open_splits
from plainvit.models import ViT, build
from plainvit.names import configure
from plainvit.recipes import list_recipes, recipe
from plainvit.runtime.distributed import World
from plainvit.runtime.folder import Folder, read_metrics
from plainvit.train.loop import train
from plainvit.train.run import fit
from plainvit.train.schedule import learning_rate
from plainvit.train.setup import build_objective, build_training, choose_compile
from plainvit.train.transfer import complete_config
from plainvit.weights.published import TO_START

pytestmark = pytest.mark.usefixtures("no_figures")
GOLDEN = Path(__file__).parent / "golden" / "losses.json"
DATA = os.environ.get("PLAINVIT_DATA")
TINY = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=(4, 4), image_size=(16, 16), classes=0)
SHAPES = "shapes:size=16,count=60,classes=3"


def tiny(**settings: Any) -> Config:
    plain: dict[str, Any] = {"augment": Augment(crop="none"), "optim": Optim(lr=1e-3), "workers": 0, "evaluations": 2}
    plain |= {"model": TINY, "data": SHAPES, "batch": 12, "steps": 6, "holdout": 0.2}
    return Config(**plain | settings)


# recipes --------------------------------------------------------------------------------------------------------------


def small_model(config: Config) -> ViTConfig | ResNetConfig | None:
    """The recipe's model in everything but its size."""
    model = config.model
    if isinstance(model, ResNetConfig):
        return model.replace(blocks=(1, 1), widen=1, image_size=(32, 32))
    if model is None:
        return None
    hidden = 16 if model.representation else 0
    size = {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "representation": hidden}
    stem = model.stem.replace(blocks=(1,)) if model.stem else None
    return model.replace(image_size=(32, 32), patch=(2, 2) if stem else (8, 8), stem=stem, **size)


def smaller(config: Config, init: Path) -> Config:
    optim = config.optim
    return config.replace(
        model=small_model(config),
        init=str(init) if config.model is None else "",
        image_size=32 if config.image_size else 0,
        data="shapes:size=32,count=64,classes=3",
        batch=12,
        micro_batch=0,
        steps=2,
        optim=optim.replace(warmup=min(optim.warmup, 1), cooldown=min(optim.cooldown, 1)),
        workers=0,
        evaluations=1,
    )


FAST = ("digits", "cifar10", "vit-b16-jft", "r50x1-jft", "r50+vit-b16-jft", "ft-vtab", "bit", "augreg-s16-i1k")
FAST += ("plain-s16-i1k-90ep", "deit-s16-i1k", "deit3-s16-i1k", "deit3-ft224", "masked-cifar10", "mae-cifar10")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in list_recipes()]
)
def test_every_recipe_takes_two_steps(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    bit = name.startswith("bit-")
    first = ResNetConfig(blocks=(1, 1), classes=3) if bit else TINY.replace(image_size=(32, 32), classes=3)
    if "deit" in name and config.model is None:
        first = first.replace(posemb_prefix="none", layer_scale=1e-4)
    plainvit.save(build(first), tmp_path / "init.safetensors")
    config = smaller(config, tmp_path / "init.safetensors")
    splits = open_splits(config)
    with Folder(tmp_path / "run") as folder:
        run = build_training(complete_config(config, splits), splits, folder, quiet=True)
        before = {name: p.detach().clone() for name, p in run.objective.named_parameters()}
        train(run)
    found = losses(tmp_path / "run")
    assert len(found) == 2
    assert all(math.isfinite(loss) for loss in found)
    assert any(not torch.equal(before[name], p) for name, p in run.objective.named_parameters())


def first_losses(name: str, folder: Path) -> list[float]:
    """30 steps of a small recipe: its own optimizer, schedule and augmentation on a model and batch for a CPU."""
    config = recipe(name)
    settings: dict[str, Any] = {}
    if name == "finetune":
        plainvit.save(
            plainvit.create("ViT-Ti/4", 3, 16, width=16, depth=2, heads=2, mlp_dim=32, seed=0), folder / "w.safetensors"
        )
        settings = {"init": str(folder / "w.safetensors"), "data": SHAPES, "head": "zero"}
    elif name != "digits":
        assert isinstance(config.model, ViTConfig)
        model = config.model.replace(width=32, depth=2, heads=2, mlp_dim=64)
        settings = {"model": model, "data_root": DATA, "batch": 16}
    fit(
        config.replace(steps=30, evaluations=1, workers=0, compile="off", device="cpu", **settings),
        folder / "run",
        quiet=True,
    )
    return losses(folder / "run")


@pytest.mark.parametrize(
    "name",
    ["digits", "finetune", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cifar10", "tiny-imagenet"))],
)
def test_first_losses_are_golden(name: str, tmp_path: Path) -> None:
    """A change of the loop, of the order, of an augmentation or of an initial weight shows here."""
    if name in ("cifar10", "tiny-imagenet") and not DATA:
        pytest.skip("needs PLAINVIT_DATA")
    if torch.__version__ < "2.15":
        pytest.skip("other initial weights: trunc_normal_ drew them in another way")
    found = first_losses(name, tmp_path)
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=2e-4)


@pytest.mark.parametrize(
    ("name", "changes", "compiles"),
    [
        ("ViT-B/16", {"steps": 10_000}, True),
        ("ViT-B/16", {"steps": 200}, False),
        ("ViT-B/16", {"steps": 200, "compile": "on"}, True),
        ("ViT-B/16", {"steps": 10_000, "compile": "off"}, False),
        ("ViT-B/16", {"steps": 10_000, "hours": 0.01}, False),
        ("ViT-B/16", {"steps": 10_000, "hours": 1.0}, True),
        ("ViT-Ti/4", {"steps": 500}, False),
        ("ViT-Ti/4", {"steps": 30_000}, True),
        ("cifar10", {"steps": 12_000, "batch": 512}, True),  # measured: 11.6 ms compiled, 20.5 not
        ("cifar10", {"steps": 2_000, "batch": 512}, False),
    ],
)
def test_runs_on_a_gpu_are_compiled_if_they_win_the_time_back(
    name: str, changes: dict[str, Any], compiles: bool
) -> None:
    size = {} if name == "ViT-B/16" else {"image_size": 32}
    model = recipe(name).model if name == "cifar10" else configure(name, 10, **size)
    run_config = Config(**{"model": model, "batch": 256} | changes)
    assert choose_compile(run_config, "cpu") == (run_config.compile == "on", "")
    chosen, note = choose_compile(run_config, "cuda:0")
    assert chosen == compiles
    assert ("--compile on" in note) == (not compiles and "compile" not in changes)
    if name == "ViT-B/16" and changes == {"steps": 200}:  # a step takes 256 / 4,304 s
        assert "about 3s" in note


# the loop against a loop written by hand ------------------------------------------------------------------------------


def test_the_loop_is_the_plain_loop(tmp_path: Path) -> None:
    """Batches from the loader, cross-entropy, clipped gradients, torch's AdamW, an average: the same weights."""
    settings = {"steps": 10, "ema": 0.9, "fast_path": "off"}  # of whose rounding Adam would make whole steps
    config = tiny(optim=Optim(lr=3e-3, warmup=2, weight_decay=0.1, clip=0.5), **settings)
    done = fit(config, tmp_path, quiet=True)

    train = open_source(SHAPES, "train")  # shapes has validation images of its own: nothing is held out
    model = build(TINY.replace(classes=3)).initialize(torch.Generator().manual_seed(0))
    kernels = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    rest = [p for p in model.parameters() if not any(p is kernel for kernel in kernels)]
    adam = torch.optim.AdamW([{"params": kernels, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    loader = Loader(train, batch=12, size=(16, 16), augment=config.augment, seed=0, workers=0)
    for step, batch in enumerate(loader.batches(0, 10)):
        loss = F.cross_entropy(model(batch.images), batch.labels)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = learning_rate(config.optim, step, 10)
        adam.step()
        decay = min(0.9, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    for name, parameter in done.model.named_parameters():
        torch.testing.assert_close(parameter, average[name], rtol=1e-5, atol=1e-6)


def test_micro_batches_change_nothing_but_memory(tmp_path: Path) -> None:
    """Under SGD: the gradient of a key's bias is 0 but for rounding, of which Adam would make whole steps."""
    config = tiny(augment=Augment(crop="none", mixup=0.5), optim=Optim(name="sgd", lr=0.1))
    whole = fit(config, tmp_path / "whole", quiet=True)
    parts = fit(config.replace(micro_batch=3), tmp_path / "parts", quiet=True)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    for mine, theirs in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_the_seed_decides_everything(tmp_path: Path) -> None:
    model = TINY.replace(dropout=0.2, stochastic_depth=0.2)
    runs = [
        fit(tiny(model=model, seed=seed, workers=workers), tmp_path / f"{at}", quiet=True)
        for at, (seed, workers) in enumerate([(0, 0), (0, 2), (1, 0)])
    ]
    first, again, other = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# options --------------------------------------------------------------------------------------------------------------


def test_metrics_have_a_line_a_step_and_the_validations(tmp_path: Path) -> None:
    fit(tiny(steps=7, evaluations=3), tmp_path, quiet=True)
    lines = list(read_metrics(tmp_path))
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    images = json.loads((tmp_path / "data.json").read_text())["splits"]["train"]["images"]
    assert [line["epoch"] for line in lines if "loss" in line] == [step * 12 / images for step in range(1, 8)]
    assert [line["step"] for line in lines if "val" in line] == [3, 6, 7]
    assert [line["lr"] for line in lines if "loss" in line] == [
        learning_rate(Optim(lr=1e-3), step, 7) for step in range(7)
    ]
    assert all(0 <= line["waiting"] <= 1 for line in lines if "loss" in line)


def test_results_are_those_of_the_final_weights(tmp_path: Path) -> None:
    done = fit(tiny(), tmp_path, quiet=True)
    model = plainvit.load(tmp_path)
    source = open_source(SHAPES, "test")
    images = torch.stack([torch.from_numpy(source.image(i)).permute(2, 0, 1) for i in range(len(source))])
    with torch.no_grad():
        logits = model.eval()(images)
    expected = float((logits.argmax(-1).numpy() == source.labels).mean())
    assert done.metrics["test"]["top1"] == pytest.approx(expected)
    nll = F.cross_entropy(logits, torch.from_numpy(source.labels).long()).item()
    assert done.metrics["test"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert model.about.class_names == source.classes
    assert np.sum(done.metrics["test"]["confusion"]) == len(source)


def test_a_better_validation_before_the_end_is_reported(tmp_path: Path) -> None:
    """And a checkpoint is no model: where the best was kept, the error names the folder of the run."""
    optim = Optim(lr=0.01, schedule="constant", clip=0)
    data = {"data": "shapes:size=16,count=600,classes=3", "holdout": 0.5}  # 600 images tell 33 % from 28
    config = tiny(steps=6, evaluations=3, seed=3, optim=optim, **data)
    done = fit(config, tmp_path / "run", quiet=True, bare=True)
    vals = {line["step"]: line["val"]["top1"] for line in read_metrics(tmp_path / "run") if "val" in line}
    best = max(vals, key=lambda step: (vals[step], -step))
    assert vals[best] > vals[6]
    assert done.metrics["better_before"] == {"step": best, "top1": vals[best]}
    assert sum("--patience" in line for line in describe_results(done.metrics)) == 1
    kept = tmp_path / "run" / "checkpoints" / f"step-{best:08}"
    for path in (kept, kept / "tensors.safetensors"):
        with pytest.raises(ValueError, match=rf"is a checkpoint of a run.*give the run's folder, {tmp_path / 'run'}"):
            plainvit.load(path)


@pytest.mark.slow
def test_search_takes_the_rate_that_does_best_on_held_out_images(tmp_path: Path) -> None:
    model = TINY.replace(image_size=(8, 8))
    config = tiny(data="digits", model=model, batch=32, steps=60, holdout=0.0, optim=Optim(grid=(1e-7, 5e-3)))
    done = fit(config, tmp_path, search=True, quiet=True)
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["lr"] == 5e-3
    searched = {path.name: path for path in (tmp_path / "search").iterdir()}
    assert set(searched) == {"lr-1e-07", "lr-0.005"}
    held = {name: json.loads((path / "results.json").read_text()) for name, path in searched.items()}
    assert all("test" not in numbers for numbers in held.values())  # test images are read once
    assert held["lr-0.005"]["val"]["top1"] > held["lr-1e-07"]["val"]["top1"]
    sizes = [json.loads((path / "data.json").read_text())["splits"] for path in (*searched.values(), tmp_path)]
    fewer = len(open_splits(config.replace(holdout=0.1)).train)
    assert [size["train"]["images"] for size in sizes] == [fewer, fewer, 1437]
    assert 1437 * 0.88 < fewer < 1437 * 0.92
    assert "val" not in done.metrics


@pytest.mark.parametrize("objective", ["classify", "masked"])
def test_every_step_is_in_training_mode_and_every_validation_in_eval_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, objective: Any
) -> None:
    """Of all modules, also in a run with --hours."""
    modes: list[tuple[bool, frozenset[bool]]] = []
    prepend_tokens = ViT.prepend_tokens  # every forward pass calls it once

    def recorded(model: ViT, *arguments: Any) -> torch.Tensor:
        modes.append((torch.is_grad_enabled(), frozenset(module.training for module in model.modules())))
        return prepend_tokens(model, *arguments)

    monkeypatch.setattr(ViT, "prepend_tokens", recorded)
    model = TINY.replace(dropout=0.1, stochastic_depth=0.3)
    fit(tiny(model=model, hours=1.0, objective=objective), tmp_path, quiet=True)
    assert sum(learns for learns, _ in modes) == 6
    assert {modes_of for learns, modes_of in modes if learns} == {frozenset({True})}
    assert {modes_of for learns, modes_of in modes if not learns} == {frozenset({False})}


@pytest.mark.parametrize("changes", [{"objective": "masked"}, {"optim": Optim(name="muon")}])
def test_settings_that_fsdp_does_not_support_are_errors(changes: dict[str, Any]) -> None:
    config = tiny(parallel="fsdp", **changes)
    splits = open_splits(config)
    with pytest.raises(ValueError, match="--parallel ddp"):
        build_objective(complete_config(config, splits), splits, World(size=2))


def test_finetuning_replaces_the_head_and_resamples_the_positions(tmp_path: Path) -> None:
    source = build(TINY.replace(classes=9, image_size=(32, 32), representation=16))
    plainvit.save(source, tmp_path / "w.safetensors")
    frozen = ("blocks.*", "embedding.*", "positions.*", "class_token", "norm.*")
    optim = Optim(lr=1e-2, weight_decay=0.5, frozen=frozen)
    config = tiny(model=None, init=str(tmp_path / "w.safetensors"), image_size=16, optim=optim)
    done = fit(config, tmp_path / "run", quiet=True)
    expected = plainvit.load(tmp_path / "w.safetensors", 3, 16)
    assert done.model.config == expected.config
    for name, tensor in expected.state_dict().items():
        assert torch.equal(done.model.state_dict()[name], tensor) == (not name.startswith("head")), name


@pytest.mark.parametrize("has_init", [False, True])
def test_image_size_also_changes_a_model_that_is_given(tmp_path: Path, has_init: bool) -> None:
    init = str(plainvit.save(build(TINY.replace(classes=3)), tmp_path / "w.safetensors")) if has_init else ""
    config = tiny(init=init, image_size=32)
    model = complete_config(config, open_splits(config)).model
    assert model
    assert model.image_size == (32, 32)


def test_head_bias_starts_the_new_head(tmp_path: Path) -> None:
    config = tiny(loss="sigmoid", head_bias=-4.0, optim=Optim(lr=1e-12), steps=1)
    done = fit(config, tmp_path, quiet=True)
    assert done.model.head is not None
    torch.testing.assert_close(done.model.head.bias, torch.full((3,), -4.0))


def test_a_binary_loss_rejects_smoothed_labels() -> None:
    """Every class of a smoothed label is above 0, and would count as the class."""
    smoothed = tiny(loss="binary", augment=Augment(crop="none", smoothing=0.1))
    with pytest.raises(ValueError, match=r"--augment.smoothing 0"):
        complete_config(smoothed, open_splits(smoothed))
    plain = smoothed.replace(augment=Augment(crop="none"))
    assert complete_config(plain, open_splits(plain)).loss == "binary"


def test_a_teacher_needs_the_classes_in_the_same_order(tmp_path: Path) -> None:
    """Its predictions of a class would be learned as another."""
    teacher = build(TINY.replace(classes=3))
    plainvit.save(teacher, tmp_path / "t.safetensors")
    config = tiny(teacher=str(tmp_path / "t.safetensors"), model=TINY.replace(distillation=True))
    fit(config, tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run")[0] == pytest.approx(math.log(3), rel=1e-5)  # two heads of zeros
    with pytest.raises(DataError, match="has 3 classes, but digits has 10: use a teacher trained on these classes"):
        fit(config.replace(data="digits"), tmp_path / "other", quiet=True)
    teacher.about = About(class_names=("triangle", "square", "circle"))
    plainvit.save(teacher, tmp_path / "t.safetensors")
    with pytest.raises(DataError, match="triangle"):
        fit(config, tmp_path / "other", quiet=True)


def test_images_of_a_run_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are drawn, whose size is known, and validation images, which are evaluated again at the end."""
    read: Counter[tuple[int, int]] = Counter()
    draw = Shapes.draw
    monkeypatch.setattr(Shapes, "draw", lambda self, index: (read.update([(self.stream, index)]), draw(self, index))[1])
    fit(tiny(data="shapes:size=16,count=400,classes=4", train_fraction=0.5), tmp_path / "run", quiet=True, bare=True)
    by_split = [sorted(read[stream, index] for index in range(400)) for stream in (0, 1)]
    assert by_split[0] == [0] * 200 + [1] * 200
    assert by_split[1][:50] == [1] * 50  # the card and the pictures of a report read some of them again


def test_a_fine_tuning_of_few_photos_is_long_enough(tmp_path: Path) -> None:
    photos = str(plant_classes(tmp_path / "photos", {"cat": 6, "dog": 6}))
    weights = plainvit.save(build(TINY.replace(classes=2)), tmp_path / "start.safetensors")
    config = recipe("finetune").replace(data=photos, init=str(weights), batch=2)
    splits = open_splits(config)
    assert [risk for risk, _ in find_data_problems(complete_config(config, splits), splits)] == []
    asked = ({}, {"epochs": 20.0}, {"epochs": 30.0}, {"steps": 15})
    steps = [complete_config(config.replace(**one), splits).steps for one in asked]
    assert steps == [200, 20 * 10 // 2, 30 * 10 // 2, 15]
    assert count_steps(config, 1437) == 20 * 1437 // 2


def test_problems_with_the_number_of_images_are_found(tmp_path: Path) -> None:
    plant_classes(tmp_path, {"cat": 6, "dog": 6})
    (tmp_path / "unicorn").mkdir()
    config = Config(data=str(tmp_path), batch=64, steps=20, init="weights", holdout=0.2)
    found = dict(find_data_problems(config, open_splits(config)))
    assert found == {
        "1 class has no training image (unicorn)": "add images or remove the class folder",
        "a batch of 64 is more than the 10 training images": "use --batch 10",
        "a fine-tuning of 20 steps is short": "use --steps 200 or more",
    }
    (tmp_path / "unicorn").rmdir()
    longer = config.replace(batch=1, steps=500)
    assert dict(find_data_problems(longer, open_splits(longer))) == {}
    for device, machine in {"cpu": "CPU", "cuda:0": "GPU"}.items():
        new = longer.replace(init="", model=TINY, device=device)
        ((_, fix),) = find_data_problems(new, open_splits(new))
        assert f"--init {TO_START[machine]} " in fix
