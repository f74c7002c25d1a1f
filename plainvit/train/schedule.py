"""The learning rate of each step: warm-up, schedule, cooldown."""

import math

from plainvit.config import Optim


def learning_rate(optim: Optim, step: int, steps: int, planned: int = 0) -> float:
    """The learning rate of a step, counted from 0, in a run of `steps` (big_vision's formulas).

    Warm-up rises linearly from 0, cooldown falls linearly to 0; both are steps, or below 1 a fraction of the run. A
    warm-up of less than a step is none: it would be a step at rate 0. If --hours shortened a run of `planned` steps,
    both shrink in proportion.
    """
    scale = steps / planned if planned else 1.0
    warmup, cooldown = (value * scale if value >= 1 else value * steps for value in (optim.warmup, optim.cooldown))
    warmup = warmup if warmup >= 1 else 0.0
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
        case "steps":  # fractions of the whole run, warm-up included (BiT)
            lr = optim.lr * 0.1 ** sum(step >= fraction * steps for fraction in optim.milestones)
    if warmup:
        lr *= min(1.0, step / warmup)
    if cooldown:
        lr *= min(1.0, (steps - step) / cooldown)
    return lr
