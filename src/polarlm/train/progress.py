"""How far a run has come, in memory and as a checkpoint keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from polarlm.config import Record, RunConfig, TrainConfig, UserError, check_same_run, run_of
from polarlm.train.loss_scale import OVERFLOW, LossScale
from polarlm.train.steady import Typical
from polarlm.train.step import StepResult


class _SavedTypical(Record):
    loss: float = 0.0
    grad_norm: float = 0.0
    steps: NonNegativeInt = 0


class _SavedLossScale(Record):
    scale: float = Field(gt=0)
    clean_steps: NonNegativeInt = 0


class _SavedProgress(Record):
    step: int
    samples: int
    tokens: int
    loss: float | None = None
    typical: _SavedTypical = _SavedTypical()
    passed_over: tuple[NonNegativeInt, ...] = Field((), strict=False)
    loss_scale: _SavedLossScale | None = None
    skipped: NonNegativeInt = 0
    config: dict[str, Any] | None = None
    data: dict[str, Any]


@dataclass
class Progress:
    """How far a run has come. This, the weights and the moments are all there is to resume from."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    typical: Typical = field(default_factory=Typical)
    passed_over: list[int] = field(default_factory=list)  # first samples of the global batches that are jumped over
    loss_scale: LossScale | None = None  # of fp16
    skipped: int = 0  # steps left out because gradients overflowed; the schedule does not count them

    def fault(self, loss: float, grad_norm: float, spike_factor: float | None) -> str | None:
        """What is wrong with a step, or None."""
        if self.loss_scale and self.loss_scale.is_too_large(loss, grad_norm):
            return OVERFLOW
        return self.typical.fault(loss, grad_norm, spike_factor)

    def count(self, step: int, result: StepResult, train: TrainConfig, tokens: int) -> None:
        """Count a step of so many tokens, whether it was taken or left out."""
        self.step = step
        self.samples += train.global_batch_size
        self.tokens += tokens
        if result.fault is None:
            self.loss = result.loss
            self.typical.take_in(result.loss, result.grad_norm)
        if self.loss_scale and result.fault is None:
            self.loss_scale.grow(train.loss_scale.growth_interval)
        if self.loss_scale and result.fault == OVERFLOW:
            self.loss_scale.shrink()
            self.skipped += 1

    @classmethod
    def from_record(cls, record: Mapping[str, Any], step: int, config: RunConfig, where: Path) -> "Progress":
        """What was saved after `step` of this run; an older checkpoint lacks some, one of another precision the scale.

        Raises:
            UserError: the record, at `where`, has other types, or counts what this run cannot have taken.
        """
        try:
            saved = _SavedProgress.model_validate(record)
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"]))
            raise UserError(f"{where}: its progress is damaged ({field}: {fault['msg']}); remove it") from None
        samples = step * config.train.global_batch_size
        most = samples * config.train.seq_len
        least = most if config.data.samples == "stream" else samples
        if (saved.step, saved.samples) != (step, samples) or not least <= saved.tokens <= most:
            raise UserError(
                f"{where}: says step {saved.step}, {saved.samples} samples, {saved.tokens} tokens, where step {step} "
                f"has {samples} and {most}; it is damaged, remove it"
            )
        if saved.config is not None:
            _check_own(saved.config, config, where)
        scale = LossScale.of(config.train)
        if scale and saved.loss_scale:
            scale = LossScale(**saved.loss_scale.model_dump())
        return cls(
            step,
            samples,
            saved.tokens,
            saved.loss,
            Typical(**saved.typical.model_dump()),
            list(saved.passed_over),
            scale,
            saved.skipped,
        )


def _check_own(saved: Mapping[str, Any], config: RunConfig, where: Path) -> None:
    run = run_of(saved, where)
    try:
        check_same_run(run, config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
