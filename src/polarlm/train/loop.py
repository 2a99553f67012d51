"""The training loop."""

import math
import time

from polarlm.config import UserError
from polarlm.data import Loader
from polarlm.train.run import Run, seed_dropout
from polarlm.train.schedule import learning_rate
from polarlm.train.step import StepResult, train_step
from polarlm.train.stop import StopRequest
from polarlm.train.watch import AfterSave, Watch
from polarlm.train.watchdog import Watchdog


def fit(run: Run, after_save: AfterSave | None = None) -> None:
    """Train from where the run stands to its last step, or until it is asked to stop.

    Args:
        after_save: called on the first rank after each checkpoint; what goes wrong there is told, and ends nothing.
    """
    train, progress = run.config.train, run.progress
    with (
        _loader(run) as loader,
        StopRequest() as stop,
        Watch(run, after_save) as watch,
        Watchdog(train.step_timeout) as watchdog,
    ):
        steps = range(progress.step + 1, train.steps + 1)
        clock = time.perf_counter()
        for step, microbatches in zip(steps, loader, strict=False):
            lr = learning_rate(step, train)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            seed_dropout(run.config.seed, step, run.engine.dropout_rank)
            watchdog.begin()
            with watch.step(step):
                result = train_step(
                    run.engine,
                    run.optimizer,
                    microbatches,
                    clip=train.optimizer.clip,
                    asked_to_stop=bool(stop),
                    sources=run.source_losses,
                )
            _refuse_divergence(step, result, run)
            progress.step, progress.loss = step, result.loss
            progress.samples += train.global_batch_size
            progress.tokens += train.global_batch_size * train.seq_len
            watch.took(result, lr, time.perf_counter() - clock)

            ends = result.asked_to_stop or step == train.steps
            if _is_due(step, train.eval_every, step == train.steps):
                watchdog.begin()
                watch.validated(run.validation.run(run.engine, train.micro_batch_size))
            watch.write_metrics(ends)
            if ends or _is_due(step, run.config.checkpoint.every, False):
                watchdog.begin()
                run.save()
                watch.saved()
            if result.asked_to_stop:
                watch.say(f"step {step}: asked to stop by {stop.signal_name or 'another rank'}; saved")
                break
            clock = time.perf_counter()


def _loader(run: Run) -> Loader:
    train = run.config.train
    return Loader(
        run.samples,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=run.engine.data_rank,
        ranks=run.engine.data_ranks,
        start_sample=run.progress.samples,
        mask_documents=run.config.data.mask_documents,
    )


def _is_due(step: int, every: int, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)


def _refuse_divergence(step: int, result: StepResult, run: Run) -> None:
    """Stop before a broken step is saved or counted; the newest checkpoint is from before it."""
    if math.isfinite(result.loss) and math.isfinite(result.grad_norm):
        return
    saved = run.checkpoints.newest()
    raise UserError(
        f"train.optimizer.lr: step {step} gave loss {result.loss} and gradient norm {result.grad_norm}; "
        f"lower the learning rate (now {run.config.train.optimizer.lr}) or warm up longer; "
        f"newest checkpoint: {'none' if saved is None else f'step {saved}'}"
    )
