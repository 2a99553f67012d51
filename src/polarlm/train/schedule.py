"""The learning rate of each step, as a function of the step alone; nothing to save, nothing to drift."""

import math

from polarlm.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of optimizer step `step`, counted from 1.

    Linear warm-up reaches the peak at step `warmup_steps`; then it is constant, or a half cosine that reaches `min_lr`
    at the last step (arXiv 1608.03983).
    """
    schedule, peak = train.schedule, train.optimizer.lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    assert train.steps is not None
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, train.steps - schedule.warmup_steps))
    return schedule.min_lr + (peak - schedule.min_lr) * (1 + math.cos(math.pi * progress)) / 2
