"""A plain PyTorch script that classifies photos with a ViT in timm's format: the peer of `plainvit predict`.

    python bench/bare.py WEIGHTS photos/

Needs only torch, safetensors and Pillow, and preprocesses as timm does for these weights: resize, center crop of 224 px
(90 %), mean and std 0.5. Predicts all photos in one batch and prints the five most probable classes of each as JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

SIZE, CROP, HEAD_WIDTH = 224, 0.9, 64


def read_image(path: Path) -> Tensor:
    image = Image.open(path).convert("RGB")
    short_side = int(SIZE / CROP)
    scale = short_side / min(image.size)
    width, height = (short_side if side == min(image.size) else int(side * scale) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
    pixels = np.array(image.crop((left, top, left + SIZE, top + SIZE)))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 127.5 - 1


@torch.inference_mode()
def forward(w: dict[str, Tensor], images: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    kernel = w["patch_embed.proj.weight"]
    x = F.conv2d(images, kernel, w["patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).mT  # [B, N, D]
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1) + w["pos_embed"]
    for number in range(sum(name.endswith("norm1.weight") for name in w)):
        block = f"blocks.{number}"
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").unflatten(-1, (3, -1, HEAD_WIDTH))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B, H, N, d] each
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(heads, f"{block}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")), f"{block}.mlp.fc2")
    return linear(norm(x, "norm")[:, 0], "head")


def list_files(folder: str) -> list[Path]:
    return sorted(Path(folder).iterdir())


def predict(weights: dict[str, Tensor], files: list[Path]) -> list[dict]:
    best = forward(weights, torch.stack([read_image(path) for path in files])).softmax(-1).topk(5)
    rows = zip(files, best.values.tolist(), best.indices.tolist(), strict=True)
    return [{"name": str(path), "classes": classes, "probabilities": values} for path, values, classes in rows]


def main() -> None:
    weights, folder = sys.argv[1:]
    for row in predict(load_file(weights), list_files(folder)):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
