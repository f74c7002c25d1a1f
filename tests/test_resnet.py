"""The padding of BiT's pooling, and its new head.

The logits of BiT and hybrids are compared with timm in test_weights_parity.py, and with NumPy float64 in
test_weights_google.py; the structure of the named models with timm in test_config.py, their compute with the paper's
Table 6 in test_paper_tables.py.
"""

import tiny
import torch

from plainvit import Trace


def test_bit_max_pool_pads_with_zeros() -> None:
    """Pre-norm values may be negative; the border's maximum is then the padding's zero, not the values'."""
    model, trace = tiny.bit(), Trace("root")
    with torch.no_grad():
        model.body.root.weight.zero_()
        model.body.root.weight[:, :, 3, 3] = 1.0  # standardized: a positive center among negative places
    black = torch.zeros(1, 3, 32, 32, dtype=torch.float64)  # -1 everywhere after normalization
    model(black, trace)
    assert (model.body.root(black * 2 - 1)[..., :2, :] < 0).all()  # all that the pool's first row sees
    assert not trace["root"][..., 0, :].any()


def test_replace_head_attaches_one_layer_of_zeros() -> None:
    model, images = tiny.bit(), tiny.images(size=(32, 32))
    features = model.features(images)
    assert model.replace_head(5)(images).tolist() == [[0.0] * 5] * 2
    assert model.config.classes == 5
    assert torch.equal(model.replace_head(0)(images), features)
