"""Training images and classes of datasets that a recipe names, so that a plan does not need the files."""

from plainvit.config import Config
from plainvit.data.known import SETS

# As published: ILSVRC-2012; ImageNet's release of 2011; JFT-300M (arXiv 2010.11929); Tiny-ImageNet (CS231n); CIFAR;
# trainval of Oxford-IIIT Pets; Flowers-102; digits of UCI
IMAGES = {
    "imagenet": 1_281_167,
    "imagenet21k": 14_197_122,
    "jft": 303_000_000,
    "tiny-imagenet": 100_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "oxford-pets": 3_680,
    "flowers102": 1_020,
    "digits": 1_437,
}
TASK_IMAGES = {"vtab": 800, "vtab1000": 1_000}  # of each VTAB-1k task, with and without a validation split
CLASSES = {"jft": 18_291, "digits": 10} | {name: known.classes for name, known in SETS.items()}


def count_training_images(config: Config) -> int | None:
    """Images that a run on a known dataset trains on, without the held-out ones; None for other data."""
    images = IMAGES.get(config.data) or TASK_IMAGES.get(config.data.partition("/")[0])
    if images is None:
        return None
    splits = SETS[config.data].splits if config.data in SETS else ()
    if not {"val", "test"} <= set(splits):  # a dataset with its own validation images holds none out
        images -= round(images * config.holdout)
    return max(round(config.train_fraction * images), 1)
