"""Training images and classes of datasets that a recipe names, so that a plan does not need the files."""

from plainvit.config import Config
from plainvit.data.known import SETS

IMAGES = {name: known.images for name, known in SETS.items()} | {"jft": 303_000_000, "digits": 1_437}
CLASSES = {name: known.classes for name, known in SETS.items()} | {"jft": 18_291, "digits": 10}


def count_training_images(config: Config) -> int | None:
    """Images that a run on a known dataset trains on, without the held-out ones; None for other data."""
    images = IMAGES.get(config.data)
    if not images:
        return None
    splits = SETS[config.data].splits if config.data in SETS else ()
    if not {"val", "test"} <= set(splits):  # with both, none are held out; one of the two alone is the test set
        images -= round(images * config.holdout)
    return max(round(config.train_fraction * images), 1)
