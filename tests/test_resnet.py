"""The structure of BiT and of hybrids.

Their logits are compared with timm in test_weights_parity.py, and with NumPy float64 in test_weights_google.py.
"""

import pytest
import tiny
import torch

from plainvit import Trace
from plainvit.models import build
from plainvit.names import configure


def test_bit_max_pool_pads_with_zeros() -> None:
    """Pre-norm values may be negative; the border's maximum is then the padding's zero, not the values'."""
    model, trace = tiny.bit(), Trace("root")
    with torch.no_grad():
        model.body.root.weight.zero_()
        model.body.root.weight[:, :, 3, 3] = 1.0  # standardised: a positive centre among negative places
    black = torch.zeros(1, 3, 32, 32, dtype=torch.float64)  # -1 everywhere after normalisation
    model(black, trace)
    assert (model.body.root(black * 2 - 1)[..., :2, :] < 0).all()  # all that the pool's first row sees
    assert not trace["root"][..., 0, :].any()


# Structure ------------------------------------------------------------------------------------------------------------

STEMS = {  # name: units per stage, feature map at 224 px and its channels, grid of tokens
    "R+ViT-Ti/16": ((), (56, 56), 64, (7, 7)),
    "R50x1+ViT-B/32": ((3, 4, 6, 3), (7, 7), 2048, (7, 7)),
    "R50x1+ViT-L/16": ((3, 4, 9), (14, 14), 1024, (14, 14)),
}


def trace_shapes(name: str) -> tuple[torch.nn.Module, Trace]:
    """The shapes of a full-sized pass, without its numbers."""
    with torch.device("meta"):
        model, trace = build(configure(name)).eval(), Trace("*")
        model(torch.empty(1, 3, 224, 224), trace)
    return model, trace


def strides(stages: torch.nn.ModuleList) -> list[list[int]]:
    """Stride of each unit, which must sit on the 3 x 3 convolution."""
    for stage in stages:
        for unit in stage:
            assert unit.conv1.stride == unit.conv3.stride == (1, 1)
            assert unit.conv2.kernel_size == (3, 3)
    return [[unit.conv2.stride[0] for unit in stage] for stage in stages]


@pytest.mark.parametrize("name", STEMS)
def test_structure_of_hybrids(name: str) -> None:
    units, size, channels, grid = STEMS[name]
    model, trace = trace_shapes(name)
    stages = model.stem.stages
    assert tuple(map(len, stages)) == units
    assert strides(stages) == [[2 if stage else 1] + [1] * (count - 1) for stage, count in enumerate(units)]
    assert trace["root"].shape == (1, 64, 56, 56)
    last = trace[f"stage{len(units)}"] if units else trace["root"]
    assert last.shape == (1, channels, *size)
    assert model.config.grid == grid
    assert trace["patches"].shape[1] == grid[0] * grid[1]


def test_replace_head_attaches_one_layer_of_zeros() -> None:
    model = tiny.bit()
    images = tiny.images(size=(32, 32))
    features = model.features(images)
    assert model.replace_head(5)(images).tolist() == [[0.0] * 5] * 2
    assert model.config.classes == 5
    assert torch.equal(model.replace_head(0)(images), features)
