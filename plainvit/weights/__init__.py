"""Files -> models -> files: published weights from every library, and back.

model = plainvit.load("B_16.npz", classes=10, image_size=384)
plainvit.save(model, "vit.safetensors", format="timm")
plainvit convert B_16.npz folder/ --format transformers
"""

from plainvit.weights.reading import inspect_weights, load
from plainvit.weights.writing import convert, save

__all__ = ["convert", "inspect_weights", "load", "save"]
