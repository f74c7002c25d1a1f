"""Published weights by name: model, recipe, data and image size.

    plainvit weights          plainvit.load("vit_b16_augreg_i21k_i1k_224")

published.csv has the addresses, licenses and parameter counts of timm and transformers (tests compare them with the
installed libraries), and ImageNet top-1 and ReaL from timm's results files.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Published:
    hub: str
    family: str
    license: str
    parameters: int  # of the image model, its head or projection included
    image_size: int
    top1: float | None = None
    real: float | None = None

    @property
    def restriction(self) -> str:
        """What the license restricts; "" if it allows any use."""
        if "-nc-" in self.license:
            return "non-commercial"
        return "" if self.license in ("apache-2.0", "mit") else "own terms"


def _read() -> dict[str, Published]:
    convert: dict[str, Any] = {"parameters": int, "image_size": int, "top1": float, "real": float}
    lines = Path(__file__).with_name("published.csv").read_text(encoding="utf-8").splitlines()
    rows = [{key: convert.get(key, str)(text) for key, text in row.items() if text} for row in csv.DictReader(lines)]
    return {row.pop("name"): Published(**row) for row in rows}


PUBLISHED = _read()
TO_START = {"CPU": "vit_s16_augreg_i21k_i1k_224", "GPU": "vit_b16_augreg_i21k_224"}  # to fine-tune from, for photos
# (machine, task) -> name and reason
RECOMMENDED: dict[tuple[str, str], tuple[str, str]] = {
    ("cpu", "features"): (
        "dinov2_s14_lvd142m_518",
        "self-supervised features that need no fine-tuning, in the smallest model; use --image-size 224",
    ),
    ("gpu", "features"): (
        "dinov2_l14_reg4_lvd142m_518",
        "the strongest of the freely licensed self-supervised features; registers keep attention maps clean",
    ),
    ("cpu", "finetune"): (TO_START["CPU"], "a small model with supervised pre-training, which needs few epochs"),
    ("gpu", "finetune"): (TO_START["GPU"], "pre-trained on ImageNet-21k, with published fine-tuning recipes (ft-*)"),
    ("cpu", "dense"): (
        "dinov2_s14_reg4_lvd142m_518",
        "patch features for segmentation and matching; registers remove artifacts from the patches",
    ),
    ("gpu", "dense"): (
        "dinov2_b14_reg4_lvd142m_518",
        "patch features for segmentation and matching; dinov3_b16_lvd1689m_256 is stronger, with a license of its own",
    ),
}
