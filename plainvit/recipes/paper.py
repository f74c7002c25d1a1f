"""The paper's own runs: every row of its Table 3 (pre-training) and Table 4 (fine-tuning).

    plainvit train vit-b16-i21k --data-root DIR
    plainvit finetune ft-cifar10 --init runs/vit-b16-i21k --data-root DIR

Source: "An Image is Worth 16x16 Words", arXiv 2010.11929. What it leaves open is taken from the released code
(google-research: vision_transformer, big_vision) and said so where it is.
"""

from functools import partial
from typing import Literal, NamedTuple

from plainvit.config import Augment, Config, Optim, Preprocess, ViTConfig
from plainvit.names import configure
from plainvit.recipes import Recipe, describe_recipe


class Dataset(NamedTuple):
    """What the rows of Table 3 on one dataset share."""

    title: str
    epochs: int
    decay: Literal["linear", "cosine"]
    weight_decay: float
    dropout: float
    clip: float
    # big_vision holds out 51,200 of ImageNet-21k's 14 million images, and 1 % of ImageNet's; JFT is the user's own data
    holdout: float
    # The paper does not state its loss. The released code uses a sigmoid per class and a low initial bias of the head,
    # so that the first steps need not learn that most classes are absent
    head_bias: float


JFT, I21K, I1K = "", "imagenet21k", "imagenet"
DATASETS = {
    JFT: Dataset("JFT-300M", 7, "linear", 0.1, 0.0, 0.0, 0.0, -10.0),
    I21K: Dataset("ImageNet-21k", 90, "linear", 0.03, 0.1, 0.0, 0.004, -10.0),
    I1K: Dataset("ImageNet", 300, "cosine", 0.3, 0.1, 1.0, 0.01, -6.9),
}


class Pretraining(NamedTuple):
    """A row of Table 3, with its result and its cost."""

    model: str
    data: str
    lr: float
    accuracy: str  # on ImageNet after ft-imagenet at 384 px (Tables 5 and 6)
    exaflops: str  # as `plainvit.planning.cost` counts them
    epochs: int = 0  # if not the dataset's


# Table 3. All rows: Adam with betas 0.9 and 0.999, batches of 4,096, 10,000 steps of linear warm-up, 224 pixels.
# "ViT-*" on ImageNet are the four that Table 5 reports. Tables 5 and 6 differ for H/14, 88.04 and 88.08. Table 5 does
# not say how long L was pre-trained on ImageNet-21k; the cost that Table 2 gives for L/16 fits 90 epochs.
PRETRAINING: dict[str, Pretraining] = {
    "vit-b16-jft": Pretraining("ViT-B/16", JFT, 8e-4, "84.15", "224"),
    "vit-b32-jft": Pretraining("ViT-B/32", JFT, 8e-4, "80.73", "56.3"),
    "vit-l32-jft": Pretraining("ViT-L/32", JFT, 6e-4, "84.37", "196"),
    "vit-l16-jft": Pretraining("ViT-L/16", JFT, 4e-4, "86.30", "784"),
    "vit-l16-jft-14ep": Pretraining("ViT-L/16", JFT, 4e-4, "87.12", "1,567", 14),
    "vit-h14-jft": Pretraining("ViT-H/14", JFT, 3e-4, "88.08", "4,259", 14),
    "r50x1-jft": Pretraining("BiT-R50x1", JFT, 1e-3, "77.54", "52.5"),
    "r50x2-jft": Pretraining("BiT-R50x2", JFT, 1e-3, "82.12", "206"),
    "r101x1-jft": Pretraining("BiT-R101x1", JFT, 8e-4, "80.67", "99.7"),
    "r152x1-jft": Pretraining("BiT-R152x1", JFT, 6e-4, "81.88", "147"),
    "r152x2-jft": Pretraining("BiT-R152x2", JFT, 6e-4, "84.97", "584"),
    "r50+vit-b16-jft": Pretraining("R50x1+ViT-B/16", JFT, 8e-4, "85.58", "274"),
    "r50+vit-b32-jft": Pretraining("R50x1+ViT-B/32", JFT, 8e-4, "84.90", "108"),
    "r50+vit-l32-jft": Pretraining("R50x1+ViT-L/32", JFT, 2e-4, "85.68", "247"),
    "r50+vit-l16-jft": Pretraining("R50x1+ViT-L/16", JFT, 4e-4, "86.60", "834"),
    "r50+vit-l16-jft-14ep": Pretraining("R50x1+ViT-L/16", JFT, 4e-4, "87.12", "1,669", 14),
    "vit-b16-i21k": Pretraining("ViT-B/16", I21K, 1e-3, "83.97", "134"),
    "vit-b32-i21k": Pretraining("ViT-B/32", I21K, 1e-3, "81.28", "33.8"),
    "vit-l16-i21k": Pretraining("ViT-L/16", I21K, 1e-3, "85.15", "470"),
    "vit-l32-i21k": Pretraining("ViT-L/32", I21K, 1e-3, "80.99", "118"),
    "vit-l16-i21k-30ep": Pretraining("ViT-L/16", I21K, 1e-3, "", "157", 30),
    "vit-l32-i21k-30ep": Pretraining("ViT-L/32", I21K, 1e-3, "", "39.2", 30),
    "vit-b16-i1k": Pretraining("ViT-B/16", I1K, 3e-3, "77.91", "40.1"),
    "vit-b32-i1k": Pretraining("ViT-B/32", I1K, 3e-3, "73.38", "10.1"),
    "vit-l16-i1k": Pretraining("ViT-L/16", I1K, 3e-3, "76.53", "141"),
    "vit-l32-i1k": Pretraining("ViT-L/32", I1K, 3e-3, "71.16", "35.1"),
}
CORE_DAYS = {"vit-h14-jft": "2,500", "vit-l16-jft-14ep": "680", "vit-l16-i21k": "230"}  # TPUv3, Table 2


def pretraining(name: str) -> Config:
    """A row of Table 3 as a config."""
    row = PRETRAINING[name]
    data = DATASETS[row.data]
    model = configure(row.model, classes=0)
    if isinstance(model, ViTConfig):  # a hidden tanh layer in the head for pre-training (3.1)
        model = model.replace(representation=model.width, dropout=data.dropout)
    return Config(
        model=model,
        data=row.data,
        holdout=data.holdout,
        epochs=row.epochs or data.epochs,
        batch=4096,
        loss="sigmoid",
        head_bias=data.head_bias,
        optim=Optim(
            lr=row.lr,
            schedule=data.decay,
            warmup=10_000,
            lr_end=1e-5 if data.decay == "linear" else 0.0,  # the released code's
            weight_decay=data.weight_decay,  # multiplied by lr, as the same group's later text and code have it
            clip=data.clip,
        ),
        augment=Augment(crop="inception-tf"),
        # Short side to 256, center of 224; TensorFlow's "area" is closest to bilinear with antialiasing
        preprocess=Preprocess(resize="crop", crop=0.875),
    )


def _describe_pretraining(name: str) -> Recipe:
    row = PRETRAINING[name]
    data = DATASETS[row.data]
    days = f"; {CORE_DAYS[name]} TPUv3-core-days (Table 2)" if name in CORE_DAYS else ""
    private = "" if row.data else "; JFT is not public: give images of your own"
    expected = f"ImageNet {row.accuracy} % after ft-imagenet (Table {5 if row.data else 6})"
    return describe_recipe(
        partial(pretraining, name),
        summary=f"{row.model} pre-trained on {data.title}, {row.epochs or data.epochs} epochs.",
        source=f"ViT (arXiv 2010.11929), Table 3{private}",
        command=f"{name} --data-root DIR" if row.data else f"{name} --data DATA",
        expected=expected if row.accuracy else "not reported",
        cost=f"{row.exaflops} exaFLOPs{days}",
    )


class Finetuning(NamedTuple):
    """A row of Table 4, with the warm-up of the released code."""

    title: str
    data: str
    steps: int
    grid: tuple[float, ...]
    dev: float  # fraction of the training images held out during the search; the final run trains on all
    warmup: int
    lr: float  # default without a search: 0.03 in the released code, 0.01 for CIFAR
    size: int = 384
    ema: float = 0.0


# Table 4. All rows: SGD with momentum 0.9, batches of 512, cosine, no weight decay, gradients clipped at norm 1.
# The text keeps 0.06 for ResNets and hybrids, the table lists it for all. Table 2's results on ImageNet alone are at a
# higher resolution and with weights averaged by 0.9999.
IMAGENET = Finetuning("ImageNet", "imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500, 0.03)
FINETUNING: dict[str, Finetuning] = {
    "ft-imagenet": IMAGENET,
    "ft-imagenet-512": IMAGENET._replace(size=512, ema=0.9999),
    "ft-imagenet-518": IMAGENET._replace(size=518, ema=0.9999),
    "ft-cifar10": Finetuning("CIFAR-10", "cifar10", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500, 0.01),
    "ft-cifar100": Finetuning("CIFAR-100", "cifar100", 10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500, 0.01),
    "ft-pets": Finetuning("Oxford-IIIT Pets", "oxford-pets", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100, 0.01),
    "ft-flowers": Finetuning("Oxford Flowers-102", "flowers102", 500, (0.001, 0.003, 0.01, 0.03), 0.1, 100, 0.01),
    # Each task has 200 validation images of its own. Where a flip or a crop would change the label the paper leaves it
    # out: `--augment.flip 0` for dsprites-orientation, dsprites-location and smallnorb-azimuth, `--augment.crop none`
    # for clevr-count, clevr-distance, dmlab, kitti-distance and dsprites-location. `plainvit vtab` does so
    "ft-vtab": Finetuning("a task of VTAB-1k", "", 2_500, (0.01,), 0.0, 200, 0.01),
}
TRANSFERRED: dict[str, tuple[str, str]] = {  # accuracy, and the cost for a model
    "ft-imagenet": ("83.97 % from vit-b16-i21k, 85.15 % from vit-l16-i21k (Table 5)", "3.41 exaFLOPs for ViT-B/16"),
    "ft-imagenet-512": (
        "87.76 ± 0.03 % from vit-l16-jft-14ep, 85.30 ± 0.02 % from vit-l16-i21k (Table 2)",
        "22.2 exaFLOPs for ViT-L/16",
    ),
    "ft-imagenet-518": ("88.55 ± 0.04 % from vit-h14-jft (Table 2)", "62.5 exaFLOPs for ViT-H/14"),
    "ft-cifar10": ("98.95 % from vit-b16-i21k, 99.16 % from vit-l16-i21k (Table 5)", "1.70 exaFLOPs for ViT-B/16"),
    "ft-cifar100": ("91.67 % from vit-b16-i21k, 93.44 % from vit-l16-i21k (Table 5)", "1.70 exaFLOPs for ViT-B/16"),
    "ft-pets": ("94.43 % from vit-b16-i21k, 94.73 % from vit-l16-i21k (Table 5)", "0.0852 exaFLOPs for ViT-B/16"),
    "ft-flowers": ("99.38 % from vit-b16-i21k, 99.61 % from vit-l16-i21k (Table 5)", "0.0852 exaFLOPs for ViT-B/16"),
    "ft-vtab": ("72.72 ± 0.21 % from vit-l16-i21k, mean of the 19 tasks (Table 2)", "0.426 exaFLOPs for ViT-B/16"),
}


def finetuning(name: str) -> Config:
    """A row of Table 4 as a config; the model is that of --init, with a head of zeros."""
    row = FINETUNING[name]
    return Config(
        image_size=row.size,
        data=row.data,
        search_holdout=row.dev,
        steps=row.steps,
        batch=512,
        optim=Optim(name="sgd", lr=row.lr, warmup=row.warmup, grid=row.grid),
        # "Follows BiT": a square of 448, a crop of 384 and a flip; at test time the square alone. Other sizes keep the
        # ratio, as the paper does not give theirs
        augment=Augment(crop="random", resize=448 / 384),
        preprocess=Preprocess(resize="squash"),
        ema=row.ema,
    )


def _describe_finetuning(name: str) -> Recipe:
    row, (expected, cost) = FINETUNING[name], TRANSFERRED[name]
    averaged = " with averaged weights" if row.ema else ""
    return describe_recipe(
        partial(finetuning, name),
        summary=f"Pre-trained weights fine-tuned on {row.title} at {row.size} px{averaged}, {row.steps:,} steps.",
        source=f"ViT (arXiv 2010.11929), {'Table 2 and section 4.1' if row.ema else 'Table 4'}",
        command=f"{name} --init WEIGHTS {'' if row.data else '--data vtab/TASK '}--data-root DIR",
        expected=expected,
        cost=cost,
    )


RECIPES: dict[str, Recipe] = {name: _describe_pretraining(name) for name in PRETRAINING}
RECIPES |= {name: _describe_finetuning(name) for name in FINETUNING}
