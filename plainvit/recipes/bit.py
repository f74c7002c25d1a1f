"""Big Transfer: fine-tuning by BiT-HyperRule, and the paper's ResNets pre-trained with SGD.

    plainvit finetune bit --init runs/r50x1-jft --data DIR

Source: BiT (arXiv 1912.11370), section 3.3; ViT (arXiv 2010.11929), Table 7. The ViT paper ran its ResNets with this
rule and with its own Table 4, and kept the better.
"""

from plainvit.config import Augment, Config, DataSummary, Optim, Preprocess
from plainvit.recipes import Recipe, describe_recipe
from plainvit.recipes.paper import pretraining


def bit(data: DataSummary = DataSummary(images=10_000, classes=100, side=224)) -> Config:  # noqa: B008
    """Fine-tune a BiT ResNet by BiT-HyperRule: steps, resolution and mixup follow the training images.

    Source: BiT (arXiv 1912.11370), section 3.3; 500 steps under 20,000 images, 10,000 under 500,000, then 20,000
    Command: plainvit finetune bit --init WEIGHTS --data DATA
    Expected: BiT-L R152x4 at its 480 px: Pets 96.62 %, ImageNet 87.54 %; CIFAR-10 99.37 %; others not reported
    Cost: 0.0184 exaFLOPs with 500 steps for BiT-R50x1
    """
    # The published rule has no warm-up; the released code uses 100 steps on small datasets and 500 on others.
    # R152x4, and the released code for all models, resize to 512 and crop 480 instead of 448 and 384
    if data.images < 20_000:
        steps = 500
    elif data.images < 500_000:
        steps = 10_000
    else:
        steps = 20_000
    resize, crop = (160, 128) if data.side < 96 else (448, 384)
    return Config(
        image_size=crop,
        steps=steps,
        batch=512,
        optim=Optim(name="sgd", lr=0.003, schedule="steps", milestones=(0.3, 0.6, 0.9), clip=0.0),
        augment=Augment(crop="random", resize=resize / crop, mixup=0.1 if data.images >= 20_000 else 0.0),
        preprocess=Preprocess(resize="squash"),
    )


# Table 7 compares the two optimizers on ResNets: the rows of Table 3, except for these settings
SGD = Optim(
    name="sgd",
    lr=0.03 * 4096 / 256,
    weight_decay=1e-4,
    warmup=5_000,
    schedule="linear",  # not stated; the schedule of all rows on JFT
    lr_end=1e-5,
    clip=0.0,
)


def _describe_pretraining(name: str, model: str, expected: str, exaflops: str) -> Recipe:
    return describe_recipe(
        lambda: pretraining(name).replace(optim=SGD),
        summary=f"{model} pre-trained on JFT-300M with SGD, 7 epochs.",
        source="ViT (arXiv 2010.11929), Table 7; JFT is not public: give images of your own",
        command=f"{name}-sgd --data DATA",
        expected=f"ImageNet {expected} % after fine-tuning (Table 7)",
        cost=f"{exaflops} exaFLOPs",
    )


RECIPES: dict[str, Recipe] = {
    "bit": bit,
    "r50x1-jft-sgd": _describe_pretraining("r50x1-jft", "BiT-R50x1", "78.24", "52.5"),
    "r152x2-jft-sgd": _describe_pretraining("r152x2-jft", "BiT-R152x2", "84.37", "584"),
}
