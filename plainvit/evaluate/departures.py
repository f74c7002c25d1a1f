"""In what a user's number was made in another way than the paper's beside it.

    plainvit paper 5 runs/pets          below it: "oxford-pets: at 224x224 pixels, the paper's at 384"

The paper's way is Table 4 (arXiv 2010.11929, B.1.1), which the recipes ft-* hold as well.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from plainvit.evaluate.card import Card

# Test images that the sets' authors publish; of ReaL those that have a label
OFFICIAL = {
    "cifar10": 10_000,
    "cifar100": 10_000,
    "imagenet": 50_000,
    "imagenet-real": 46_837,
    "oxford-pets": 3_669,
    "flowers102": 6_149,
}
# Table 4: steps of fine-tuning, all of them of 512 images at 384 pixels
STEPS = {
    "cifar10": 10_000,
    "cifar100": 10_000,
    "imagenet": 20_000,
    "imagenet-real": 20_000,
    "oxford-pets": 500,
    "flowers102": 500,
}
VTAB_STEPS = 2_500
BATCH, PIXELS = 512, (384,)
LARGER = (512, 518)  # of ImageNet in Table 2


def departures(table: int, spec: str, card: Card, run: Mapping[str, Any]) -> str:
    """In words, or "" where nothing does; `run` is the config of the run, {} where it is not there."""
    found = [*_images(spec, card), *_pixels(table, spec, card), *_training(spec, run)]
    return f"{spec.removeprefix('vtab1000/')}: {'; '.join(found)}" if found else ""


def _images(spec: str, card: Card) -> Iterator[str]:
    official = OFFICIAL.get(spec)
    if official and card.images != official:
        yield f"{card.images:,} images, where the official test set has {official:,}"


def _pixels(table: int, spec: str, card: Card) -> Iterator[str]:
    wanted = LARGER if table == 2 and spec.startswith("imagenet") else PIXELS
    seen = list(card.preprocess.get("image_size", ()))
    if seen and seen not in [[size, size] for size in wanted]:
        yield f"at {'x'.join(map(str, seen))} pixels, the paper's at {' or '.join(map(str, wanted))}"


def _training(spec: str, run: Mapping[str, Any]) -> Iterator[str]:
    wanted = STEPS.get(spec, VTAB_STEPS)
    if not run:
        yield "how it was trained is not known, as its run is not there"
    elif not run.get("init"):
        yield "trained from scratch, the paper's fine-tuned"
    elif (run.get("steps"), run.get("batch")) != (wanted, BATCH):
        length = f"{run['steps']:,} steps" if run.get("steps") else f"{run.get('epochs', 0):g} epochs"
        yield f"{length} of batches of {run.get('batch')}, the paper's {wanted:,} steps of {BATCH}"
