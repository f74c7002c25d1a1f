"""Models with random images, for the tests of their analysis."""

from typing import Any

import torch
from torch import Tensor

from plainvit.analyse.subject import Subject
from plainvit.evaluate.predictor import Predictor


def pixels(model: Any, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, *model.config.image_size), dtype=torch.uint8, generator=generator)


def predictor(model: Any) -> Predictor:
    return Predictor(model.float(), device="cpu", precision="fp32")


def make_subject(model: Any, count: int = 3) -> Subject:
    return Subject(predictor(model), pixels(model, count), [f"{number}.png" for number in range(count)], None)
