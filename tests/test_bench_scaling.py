"""bench.scaling records what FSDP and DDP exchange, on a fake process group."""

import pytest

from bench import scaling
from plainvit.names import configure
from plainvit.planning.cost import parameters

RANKS = 8


def test_fsdp_gathers_weights_twice_and_scatters_gradients_once() -> None:
    config = configure("ViT-Ti/16")
    found, weights = scaling.record_fsdp(config, RANKS), 4 * parameters(config)
    names = [name for name, _ in found.collectives]
    units = config.depth + 1
    assert (names.count("allgather"), names.count("reduce_scatter")) == (2 * units - 1, units)  # not the root again
    assert found.shard_bytes * RANKS == pytest.approx(weights, rel=0.01)
    sent = (3 * weights - found.collectives[0][1]) * (RANKS - 1) / RANKS
    assert found.sent(RANKS) == pytest.approx(sent, rel=0.01)


def test_ddp_reduces_every_gradient_once() -> None:
    config = configure("ViT-Ti/16")
    found, weights = scaling.list_ddp(config), 4 * parameters(config)
    assert sum(size for _, size in found.collectives) == weights
    assert found.sent(RANKS) == pytest.approx(2 * weights * (RANKS - 1) / RANKS)


def test_communication_is_exposed_below_the_batch_that_hides_it() -> None:
    config = configure("ViT-H/14")
    traffic = scaling.list_ddp(config)
    batch = scaling.find_hiding_batch(config, "ddp", RANKS, traffic)
    assert batch > 1

    def exposed(images: int) -> float:
        return scaling.estimate(scaling.make_step(config, "ddp", RANKS, images), traffic)["exposed"]

    assert exposed(batch) == 0 < exposed(batch - 1)
