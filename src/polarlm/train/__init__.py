"""The training of a run: the step, the loop, optimizer, schedule, validation, metrics.

`python -m polarlm.train RUN_FOLDER` is one rank; `loop.fit` is the loop, and `step.train_step` the step that everything
else drives too.
"""

from polarlm.train.loop import fit
from polarlm.train.optimizer import build_optimizer
from polarlm.train.run import Progress, Run, open_run
from polarlm.train.schedule import learning_rate
from polarlm.train.sources import SourceLosses
from polarlm.train.step import StepResult, as_tensors, train_step
from polarlm.train.validation import Validation, ValidationResult

__all__ = [
    "Progress",
    "Run",
    "SourceLosses",
    "StepResult",
    "Validation",
    "ValidationResult",
    "as_tensors",
    "build_optimizer",
    "fit",
    "learning_rate",
    "open_run",
    "train_step",
]
