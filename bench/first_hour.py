"""The first minute with your own photos by timm and scikit-learn: frozen features, logistic regression, new photos.

    python bench/first_hour.py --data photos/ --new new-photos/ --weights vit_ti16_augreg.safetensors

Both folders have one folder of images for each class. The peer of `plainvit finetune --init WEIGHTS --data photos/`,
whose first result `plainvit evaluate RUN/first --data new-photos/` measures on the same new photos.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.data import create_transform, resolve_model_data_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Folder of training photos")
    parser.add_argument("--new", type=Path, required=True, help="Folder of new photos of the same classes")
    parser.add_argument("--weights", required=True, help="Weights of timm's --model, as safetensors")
    parser.add_argument("--model", default="vit_tiny_patch16_224.augreg_in21k_ft_in1k", help="Name of a timm model")
    options = parser.parse_args()
    started = time.perf_counter()
    model = timm.create_model(options.model)
    model.load_state_dict(load_file(options.weights))
    model.reset_classifier(0)
    features, labels = extract(model.eval(), options.data)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    classifier = GridSearchCV(pipeline, {"logisticregression__C": [0.01, 0.03, 0.1, 0.3, 1.0]}, cv=5)
    classifier.fit(features, labels)
    seconds = time.perf_counter() - started
    new, truth = extract(model, options.new)
    top1 = float(np.mean(classifier.predict(new) == truth))
    print(json.dumps({"photos": len(labels), "seconds": round(seconds, 1), "new": len(new), "top1": top1}))


@torch.inference_mode()
def extract(model: torch.nn.Module, folder: Path, batch: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Features and class names of all images in a folder of class folders."""
    transform = create_transform(**resolve_model_data_config(model))
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    rows = []
    for start in range(0, len(files), batch):
        images = [transform(Image.open(path).convert("RGB")) for path in files[start : start + batch]]
        rows.append(model(torch.stack(images)).numpy())
    return np.concatenate(rows), np.array([path.parent.name for path in files])


if __name__ == "__main__":
    main()
