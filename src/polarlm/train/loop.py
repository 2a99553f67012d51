"""The training loop."""

import math
import time
from functools import partial

from polarlm.config import UserError
from polarlm.data import Batch, Loader
from polarlm.parallel import naming_nondeterminism
from polarlm.train.loss_scale import OVERFLOW
from polarlm.train.run import Run, seed_dropout
from polarlm.train.schedule import learning_rate
from polarlm.train.steady import MOST_IN_A_ROW, PASSED_OVER
from polarlm.train.step import StepResult, train_step
from polarlm.train.stop import StopRequest
from polarlm.train.watch import AfterSave, Watch
from polarlm.train.watchdog import Watchdog


def fit(run: Run, after_save: AfterSave | None = None) -> None:
    """Train from where the run stands to its last step, or until it is asked to stop.

    Args:
        after_save: called on the first rank after each checkpoint; what goes wrong there is told, and ends nothing.
    """
    with StopRequest() as stop, Watch(run, after_save) as watch, Watchdog(run.config.train.step_timeout) as watchdog:
        while (bad_sample := _train(run, stop, watch, watchdog)) is not None:
            run.rewind(bad_sample)
            watch.rewound(bad_sample)


@naming_nondeterminism()
def _train(run: Run, stop: StopRequest, watch: Watch, watchdog: Watchdog) -> int | None:
    """Take steps to the run's end; or return the first sample of a global batch that is to be passed over, from the
    last checkpoint on."""
    train, progress = run.config.train, run.progress
    with _loader(run) as loader:
        steps = range(progress.step + 1, train.steps + 1)
        clock = time.perf_counter()
        for step, microbatches in zip(steps, loader, strict=False):
            watchdog.begin()
            with watch.step(step):
                # A save that failed behind ends the run on every rank at once, as a signal to one of them does.
                result = _take(run, step, microbatches, bool(stop) or run.checkpoints.failed)
            if result.fault and _remedy(run, watch, step, result) == "rewind":
                return progress.samples
            shape = run.shapes.at(progress.samples)
            progress.count(step, result, train, shape.tokens)
            watch.took(result, time.perf_counter() - clock, shape)

            ends = result.asked_to_stop or step == train.steps
            if _is_due(step, train.eval_every, step == train.steps):
                watchdog.begin()
                watch.validated(run.validation.run(run.engine, train.micro_batch_size))
            watch.write_metrics(ends)
            if ends or _is_due(step, run.config.checkpoint.every, False):
                watchdog.begin()
                # What is done after a save reads that checkpoint, which the next save may delete.
                run.checkpoints.wait()
                watch.saved(run.checkpoints.completed())
                watchdog.begin()
                watch.saves()
                run.save(and_wait=ends)
            watch.saved(run.checkpoints.completed())
            if result.asked_to_stop:
                watch.say(f"step {step}: asked to stop by {stop.signal_name or 'another rank'}; saved")
                break
            clock = time.perf_counter()
    return None


def _take(run: Run, step: int, microbatches: list[Batch], asked_to_stop: bool) -> StepResult:
    """The step, unless a rewind has found its samples bad."""
    train, progress = run.config.train, run.progress
    if progress.samples in progress.passed_over:
        (stops,) = run.world.sum(float(asked_to_stop))
        return StepResult(math.nan, math.nan, stops > 0, fault=PASSED_OVER)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(step - progress.skipped, train)
    seed_dropout(run.config.seed, step, run.engine.dropout_rank)
    return train_step(
        run.engine,
        run.optimizer,
        microbatches,
        clip=train.optimizer.clip,
        asked_to_stop=asked_to_stop,
        sources=run.source_losses,
        fault_of=partial(progress.fault, spike_factor=train.spike_factor),
        loss_scale=progress.loss_scale.scale if progress.loss_scale else 1.0,
    )


def _remedy(run: Run, watch: Watch, step: int, result: StepResult) -> str:
    """What becomes of a run whose step went wrong, before it is counted or saved: `skip` or `rewind`.

    Raises:
        UserError: the run ends here.
    """
    if result.fault in (PASSED_OVER, OVERFLOW):
        return "skip"
    watch.went_wrong(step, result)
    run.bad_steps.append(step)
    in_a_row = run.bad_steps[-MOST_IN_A_ROW:] == list(range(step - MOST_IN_A_ROW + 1, step + 1))
    if run.config.train.on_bad_step != "stop" and not in_a_row:
        return run.config.train.on_bad_step
    saved = run.checkpoints.newest()
    raise UserError(
        f"train.optimizer.lr: step {step} gave {result.fault}; "
        f"lower the learning rate (now {run.config.train.optimizer.lr}) or warm up longer, or see train.on_bad_step; "
        f"newest checkpoint: {'none' if saved is None else f'step {saved}'}"
    )


def _loader(run: Run) -> Loader:
    train = run.config.train
    return Loader(
        run.samples,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=run.engine.data_rank,
        ranks=run.engine.data_ranks,
        start_sample=run.progress.samples,
        shapes=run.shapes,
        mask_documents=run.config.data.mask_documents,
    )


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)
