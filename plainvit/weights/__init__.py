"""Files -> models -> files: published weights from every library, and back.

model = plainvit.load("B_16.npz", classes=10, image_size=384)
plainvit.save(model, "vit.safetensors", format="timm")
plainvit convert B_16.npz folder/ --format transformers
"""

from plainvit.weights.reading import load, look
from plainvit.weights.writing import convert, save

__all__ = ["convert", "load", "look", "save"]
