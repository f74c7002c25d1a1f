"""The learning rate of each step: warm-up, schedule, cooldown."""

import math

from plainvit.config import Optim


def learning_rate(optim: Optim, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0, in a run of `steps` (big_vision's formulas).

    Warm-up rises linearly from 0, cooldown falls linearly to 0; both are steps, or below 1 a fraction of the run.
    """
    warmup, cooldown = (share if share >= 1 else share * steps for share in (optim.warmup, optim.cooldown))
    progress = min(max((step - warmup) / max(steps - warmup, 1), 0.0), 1.0)
    match optim.schedule:
        case "constant":
            lr = optim.lr
        case "linear":
            lr = optim.lr_end + (optim.lr - optim.lr_end) * (1 - progress)
        case "cosine":
            lr = optim.lr_end + (optim.lr - optim.lr_end) * 0.5 * (1 + math.cos(math.pi * progress))
        case "rsqrt":
            lr = optim.lr / math.sqrt(1 + max(step - warmup, 0) / optim.timescale)
        case "steps":  # shares of the whole run, warm-up included (BiT)
            lr = optim.lr * 0.1 ** sum(step >= share * steps for share in optim.milestones)
    if warmup:
        lr *= min(1.0, step / warmup)
    if cooldown:
        lr *= min(1.0, (steps - step) / cooldown)
    return lr
