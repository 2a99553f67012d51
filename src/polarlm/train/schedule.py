"""The learning rate of each step, as a function of the step alone; nothing to save, nothing to drift."""

import math

from polarlm.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of optimizer step `step`, counted from 1; a linear warm-up reaches the peak at step `warmup_steps`.

    After it the rate is `constant`, falls to `min_lr` at the last step by half a `cosine` (arXiv 1608.03983) or in a
    line (`linear`), falls as √(warmup / step) but not below `min_lr` (`inverse_sqrt`, arXiv 1706.03762), or stays at
    the peak until the last `decay_steps`, in which it falls to `min_lr` in a line (`wsd`, arXiv 2404.06395).
    """
    schedule, peak = train.schedule, train.optimizer.lr
    warmup = schedule.warmup_steps
    assert train.steps is not None
    if step <= warmup:
        return peak * step / warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        return max(schedule.min_lr, peak * math.sqrt(max(1, warmup) / step))
    falls = train.steps - warmup
    if schedule.name == "wsd":
        falls = min(falls, schedule.decay_steps or math.ceil(train.steps / 10))
    left = min(1.0, max(0.0, (train.steps - step) / max(1, falls)))
    share = (1 - math.cos(math.pi * left)) / 2 if schedule.name == "cosine" else left
    return schedule.min_lr + (peak - schedule.min_lr) * share
