"""The training loop."""

import math
import time

from polarlm.config import UserError
from polarlm.data import Loader
from polarlm.train.progress import ProgressLine
from polarlm.train.run import Run, seed_dropout
from polarlm.train.schedule import learning_rate
from polarlm.train.speed import Speedometer
from polarlm.train.step import StepResult, train_step
from polarlm.train.stop import StopRequest


def fit(run: Run) -> None:
    """Train from where the run stands to its last step, or until it is asked to stop."""
    train, world, progress = run.config.train, run.world, run.progress
    speedometer = Speedometer(run.config, world.device)
    line = ProgressLine(train.steps, progress.step, speaks=world.is_first)
    with _loader(run) as loader, StopRequest() as stop, line:
        steps = range(progress.step + 1, train.steps + 1)
        clock = time.perf_counter()
        for step, microbatches in zip(steps, loader, strict=False):
            lr = learning_rate(step, train)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            seed_dropout(run.config.seed, step, run.engine.dropout_rank)
            result = train_step(
                run.engine,
                run.optimizer,
                microbatches,
                clip=train.optimizer.clip,
                asked_to_stop=bool(stop),
            )
            _refuse_divergence(step, result, run)
            speed = speedometer.measure(time.perf_counter() - clock)

            progress.step, progress.loss = step, result.loss
            progress.samples += train.global_batch_size
            progress.tokens += train.global_batch_size * train.seq_len
            line.step(step, result.loss, speed["tokens_per_sec"], speed["mfu"])

            ends = result.asked_to_stop or step == train.steps
            scores = _validate(run, line) if _is_due(step, train.eval_every, step == train.steps) else {}
            if run.metrics and (scores or ends or step % run.config.log.every == 0):
                run.metrics.write(_metrics_of(run, result, lr) | speed | scores)
            if ends or _is_due(step, run.config.checkpoint.every, False):
                run.save()
            if result.asked_to_stop:
                line.say(f"step {step}: asked to stop by {stop.signal_name or 'another rank'}; saved")
                break
            clock = time.perf_counter()
    if run.metrics:
        run.metrics.close()


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


def _validate(run: Run, line: ProgressLine) -> dict[str, float | None]:
    train = run.config.train
    result = run.validation.run(run.engine, train.micro_batch_size)
    line.validated(run.progress.step, result.loss, result.bits_per_byte)
    scores = {"val_loss": result.loss, "val_bits_per_byte": result.bits_per_byte, "val_tokens": result.tokens}
    return scores | ({"val_loss_of_source": result.loss_of_source} if result.loss_of_source else {})


def _metrics_of(run: Run, result: StepResult, lr: float) -> dict[str, float]:
    progress = run.progress
    return {
        "step": progress.step,
        "samples": progress.samples,
        "tokens": progress.tokens,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "peak_memory_bytes": run.world.device.peak_memory_bytes(),
    }


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
