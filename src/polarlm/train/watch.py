"""What is seen of a run while it trains, in one place outside the loop."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from polarlm.data import StepShape
from polarlm.parallel import deterministic_variables
from polarlm.train.layers import LayerStatistics
from polarlm.train.loss_scale import OVERFLOW
from polarlm.train.profile import Profile
from polarlm.train.progress_line import ProgressLine
from polarlm.train.run import Run
from polarlm.train.speed import Speedometer
from polarlm.train.steady import PASSED_OVER
from polarlm.train.step import StepResult
from polarlm.train.validation import ValidationResult

_log = logging.getLogger("polarlm.train")

# Called on the first rank with the run's folder and the step of a checkpoint that has just been written.
AfterSave = Callable[[Path, int], None]


class Watch:
    """The progress line, `metrics.jsonl` and its trackers, `events.jsonl`, statistics of the layers, the profiler.

    Every rank has one, since some numbers are of all ranks together; the first rank alone speaks and writes.
    """

    def __init__(self, run: Run, after_save: AfterSave | None = None) -> None:
        config, device = run.config, run.world.device
        self._run, self._device, self._after_save = run, device, after_save
        self._line = ProgressLine(config.train.steps, run.progress.step, speaks=run.world.is_first)
        self._speedometer = Speedometer(config, device)
        clip = config.train.optimizer.clip
        self._layers = LayerStatistics(run.engine, run.optimizer, config.log.layer_statistics, clip)
        profiled = config.log.profile if run.world.is_first else 0
        self._profile = Profile(profiled, run.folder, device, self._line.say)
        self._metrics: dict[str, Any] = {}
        self._saves_began: dict[int, float] = {}
        self._open = ExitStack()

    def __enter__(self) -> "Watch":
        self._event("start", ranks=self._run.world.size)
        self._open.enter_context(self._line)
        if self._run.events:
            self._run.events.say = self._line.say
        if self._run.config.train.deterministic:
            told = "".join(f", {name}={value}" for name, value in deterministic_variables(self._device).items())
            self.say(f"deterministic: another run of this layout will be equal to the bit{told}")
        if self._run.config.train.offload_activations == "host" and self._device.torch.type == "cpu":
            self.say("train.offload_activations: this device's memory is the host's, so nothing is saved")
        if step := self._run.progress.step:
            self.say(f"goes on after step {step}")
        self.say(f"attention: {self._run.engine.kernel} ({self._device.name})")
        self._open.enter_context(self._profile)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        # A full disk, which may be what broke the run off, must not hide it by a second error.
        with suppress(OSError) if error else nullcontext():
            self._open.close()
            self._event("end") if error is None else self._event("error", message=f"{kind.__name__}: {error}")
            if self._run.metrics and self._run.events:
                self._run.metrics.close()
                self._run.events.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Look on while the step is taken."""
        with self._layers.of_step(step):
            yield

    def took(self, result: StepResult, seconds: float, shape: StepShape) -> None:
        """Take in the step that the run's progress now counts; its line of metrics waits for `written`."""
        progress, speed = self._run.progress, self._speedometer.measure(seconds, shape)
        if result.fault == PASSED_OVER:  # no work was done that could be measured
            speed = dict.fromkeys(speed, math.nan)
        self._metrics = {
            "step": progress.step,
            "samples": progress.samples,
            "tokens": progress.tokens,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": self._run.optimizer.param_groups[0]["lr"],
            "peak_memory_bytes": self._run.world.device.peak_memory_bytes(),
        }
        if self._run.config.train.seq_len_schedule:
            self._metrics["seq_len"] = shape.seq_len
        if self._run.config.data.samples == "documents":
            self._metrics |= {"seq_len": shape.seq_len, "padding": 1 - shape.tokens / shape.positions}
        if progress.loss_scale:
            self._metrics |= {"loss_scale": progress.loss_scale.scale, "skipped": progress.skipped}
        if result.loss_of_source:
            self._metrics["loss_of_source"] = result.loss_of_source
        self._metrics |= speed | self._layers.values(result.grad_norm)
        if result.fault != PASSED_OVER:
            self._line.step(progress.step, result.loss, speed["tokens_per_sec"], speed["mfu"])
        if self._run.events:
            self._run.events.step = progress.step
        if result.fault == OVERFLOW:
            self._event("overflow", loss_scale=progress.loss_scale.scale)
            self.say(
                f"step {progress.step}: left out, gradients overflowed; loss scale now {progress.loss_scale.scale:,.0f}"
            )
        elif result.fault:
            first_sample = progress.samples - self._run.config.train.global_batch_size
            self._metrics["bad_step"] = self._bad_step(result, first_sample)
            self.say(f"step {progress.step}: left out, {result.fault}")
        self._profile.step()  # the step's time is taken by now: it does not count what the last one writes

    def went_wrong(self, step: int, result: StepResult) -> None:
        """Write down a step that went wrong, before it is known what becomes of it; `took` or a rewind may follow."""
        run, progress = self._run, self._run.progress
        if not (run.metrics and run.events):
            return
        bad_step = self._bad_step(result, progress.samples)
        run.events.step = step
        self._event("bad step", **bad_step)
        if run.config.train.on_bad_step == "stop":
            run.metrics.write({"step": step, "loss": result.loss, "grad_norm": result.grad_norm, "bad_step": bad_step})

    def _bad_step(self, result: StepResult, first_sample: int) -> dict[str, Any]:
        """What was wrong, and with which samples: their place in the order, and their ids in the data."""
        places = range(first_sample, first_sample + self._run.config.train.global_batch_size)
        ids = [int(self._run.samples.id_at(place)) for place in places]
        return {"fault": result.fault, "first_sample": first_sample, "sample_ids": ids}

    def rewound(self, first_sample: int) -> None:
        """Take in that the run went back to its last checkpoint, to pass over the batch that begins at this sample."""
        step = self._run.progress.step
        if self._run.events:
            self._run.events.step = step
        self._event("rewind", first_sample=first_sample, samples=self._run.config.train.global_batch_size)
        self.say(f"a bad step: back at step {step}, to pass over the batch from sample {first_sample} on")

    def validated(self, result: ValidationResult) -> None:
        """Take in an evaluation after the step."""
        self._line.validated(self._run.progress.step, result.loss, result.bits_per_byte)
        scores = {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte, "val_tokens": result.tokens}
        if result.loss_of_source:
            scores["val_loss_of_source"] = result.loss_of_source
        self._metrics |= scores
        self._event("evaluation", **scores, seconds=round(result.seconds, 3))

    def write_metrics(self, is_last: bool) -> None:
        """Write the step's line where it is this step's turn, or where it says more than others."""
        says_more = is_last or any(name in ("val_loss", "bad_step") or "/" in name for name in self._metrics)
        if self._run.metrics and (says_more or self._metrics["step"] % self._run.config.log.every == 0):
            self._run.metrics.write(self._metrics)

    def saves(self) -> None:
        """Take in that a checkpoint of the present step is begun."""
        self._saves_began[self._run.progress.step] = time.perf_counter()

    def saved(self, steps: Iterable[int]) -> None:
        """Take in that the checkpoints of these steps are complete."""
        for step in steps:
            self._event("save", step=step, seconds=round(time.perf_counter() - self._saves_began.pop(step), 3))
            if self._after_save is None or not self._run.world.is_first:
                continue
            try:
                self._after_save(self._run.folder, step)
            except Exception as error:  # whatever it is, the run goes on
                _log.warning("step %d: after the save, %s: %s", step, type(error).__name__, error)

    def say(self, line: str) -> None:
        """Tell the person in front of the terminal."""
        self._line.say(line)

    def _event(self, event: str, **facts: Any) -> None:
        if self._run.events:
            self._run.events.write(event, **facts)
