"""A run in memory: everything the loop works with, built from the run's folder."""

import hashlib
import json
import logging
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from polarlm.checkpoint import Checkpoints, load_weights, saved_checkpoints
from polarlm.config import RunConfig, UserError
from polarlm.data import (
    AnySamples,
    IndexedDataset,
    StepShapes,
    load_run_tokenizer,
    load_tokenizer,
    open_split,
    read_paths,
)
from polarlm.launch import short_host_name
from polarlm.parallel import Engine, World, be_deterministic
from polarlm.train.environment import describe_environment
from polarlm.train.events import EventLog
from polarlm.train.hosts import check_hosts
from polarlm.train.loss_scale import LossScale
from polarlm.train.metrics import MetricsLog
from polarlm.train.optimizer import build_optimizer
from polarlm.train.progress import Progress
from polarlm.train.sources import SourceLosses
from polarlm.train.trackers import Trackers
from polarlm.train.validation import Validation

_log = logging.getLogger("polarlm.train")


@dataclass
class Run:
    """One rank's view of a run."""

    folder: Path
    config: RunConfig
    world: World
    engine: Engine
    optimizer: Optimizer
    samples: AnySamples
    shapes: StepShapes
    validation: Validation | None
    source_losses: SourceLosses
    checkpoints: Checkpoints
    progress: Progress
    metrics: MetricsLog | None  # on the first rank only, as events
    events: EventLog | None
    data_record: dict[str, Any]
    bad_steps: list[int] = field(default_factory=list)  # since this process began

    def save(self, and_wait: bool) -> None:
        """Write a checkpoint of the present step, and wait until the disk has it if asked to; every rank calls.

        Raises:
            UserError: it cannot be written; or, where saves are in the background, the one before could not.
        """
        record = asdict(self.progress) | {"config": self.config.model_dump(mode="json"), "data": self.data_record}
        self.checkpoints.save(self.progress.step, self.engine.model, self.optimizer, record)
        if and_wait:
            self.checkpoints.wait()

    def rewind(self, first_sample: int) -> None:
        """Go back to the newest checkpoint, and from there pass over the global batch that begins at this sample.

        Raises:
            UserError: there is no checkpoint yet.
        """
        progress = _resume(self.checkpoints, self.engine, self.optimizer, self.data_record, self.config)
        if progress is None:
            raise UserError(
                "train.on_bad_step: nothing to rewind to, no checkpoint is saved yet; set checkpoint.every, or use skip"
            )
        passed_over = sorted({*self.progress.passed_over, *progress.passed_over, first_sample})
        self.progress = replace(progress, passed_over=passed_over)
        if self.metrics:
            self.metrics.cut(progress.step)


def open_run(folder: Path, config: RunConfig, world: World) -> Run:
    """Build the run of a folder, at its newest complete checkpoint if it has one, else at its beginning.

    Raises:
        UserError: the hosts do not go together; the data or the tokenizer cannot be used, or is not what the checkpoint
            was trained on; no checkpoint can be written, or none that is there can be used.
    """
    if config.train.deterministic:
        be_deterministic(world.device)
    check_hosts(folder, config, world)
    data_record = _agreed_data(config, world)
    engine = Engine(config, world)
    offloads = config.parallel.offload == "optimizer"
    optimizer = build_optimizer(engine.model, config.train.optimizer, in_host_memory=offloads)
    checkpoints = Checkpoints(
        folder / "checkpoints", config.checkpoint.keep_last, world, config.checkpoint.in_background
    )
    environment = describe_environment(config, world)
    with ExitStack() as opened:
        events = None
        if world.is_first:
            _write_json(folder / "environment.json", environment)
            # It hears of the checkpoints that are passed over, too.
            events = EventLog(folder / "events.jsonl")
            opened.callback(events.close)
        progress = _resume(checkpoints, engine, optimizer, data_record, config)
        opened.pop_all()
    if progress is None:
        progress = Progress(loss_scale=LossScale.of(config.train))
        if config.train.init_from:
            load_weights(Path(config.train.init_from), engine.model)
    if events:
        events.step = progress.step
    group = config.train.global_batch_size if config.data.group_by_length else None
    samples = open_split(config.data, config.train.seq_len, config.seed, "train", config.model.vocab_size, group)
    return Run(
        folder=folder,
        config=config,
        world=world,
        engine=engine,
        optimizer=optimizer,
        samples=samples,
        shapes=StepShapes(config, samples),
        validation=_open_validation(config, folder),
        source_losses=SourceLosses(engine, _scored_sources(config)),
        checkpoints=checkpoints,
        progress=progress,
        metrics=_open_metrics(folder, config, progress.step) if world.is_first else None,
        events=events,
        data_record=data_record,
    )


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Let a rank's dropout in a step depend on (seed, step, rank) alone, so that a resumed run repeats it."""
    digest = hashlib.sha256(f"dropout:{seed}:{step}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:4], "little"))


def _resume(
    checkpoints: Checkpoints, engine: Engine, optimizer: Optimizer, data_record: dict[str, Any], config: RunConfig
) -> Progress | None:
    step = checkpoints.newest()
    if step is None:
        _check_nothing_saved(checkpoints)
        return None
    saved = checkpoints.progress(step)
    progress = Progress.from_record(saved, step, config, checkpoints.folder / f"step-{step}")
    saved_data = saved["data"]
    for name, digest in data_record.items():
        if saved_data.get(name) != digest:
            raise UserError(
                f"{name}: the run was trained on data with digest {saved_data.get(name)}, and finds {digest}; "
                "bring the old data back, or start a new run with train.init_from"
            )
    # The moments are the checkpoint's; the numbers (decay, betas) are the configuration's, as config.yaml says them.
    numbers = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    checkpoints.load(step, engine.model, optimizer)
    for group, own in zip(optimizer.param_groups, numbers, strict=True):
        group.update(own)
    return progress


def _check_nothing_saved(checkpoints: Checkpoints) -> None:
    """Where every checkpoint is damaged, do not begin again as if there had been none.

    Raises:
        UserError: names them.
    """
    world, folder = checkpoints.world, checkpoints.folder
    looks = world.is_first and folder.is_dir()
    names = world.from_first([saved.folder.name for saved in saved_checkpoints(folder.parent)] if looks else [])
    if names:
        raise UserError(
            f"{checkpoints.folder}: none of the checkpoints there ({', '.join(names)}) is as it was written; bring one "
            "back, or move them away to begin again"
        )


def _record_data(config: RunConfig) -> dict[str, Any]:
    """What identifies the tokens a run trains on: each dataset's digest from its manifest, and the tokenizer's."""
    if config.data.is_synthetic:
        return {}
    record: dict[str, Any] = {"data.tokenizer": load_tokenizer(config.data.tokenizer).digest}
    for path in read_paths(config.data):
        record[f"data.paths: {path.prefix}"] = IndexedDataset(path.prefix).identity()
    return record


def _agreed_data(config: RunConfig, world: World) -> dict[str, Any]:
    """What identifies the data, the same on every rank. Where one reads other data than the first, as from a node-local
    disk with an older copy, or cannot read it, every rank stops; none is left waiting.

    Raises:
        UserError: names the data, the host, and what is wrong there or what each of the two found.
    """
    found = world.gather((short_host_name(), *_try_to_record(config)))
    for host, _, complaint in found:
        if complaint:
            raise UserError(complaint if world.size == 1 else f"{complaint} (on {host})")
    first_host, first, _ = found[0]
    for host, other, _ in found:
        for name, identity in first.items():
            if other.get(name) != identity:
                raise UserError(
                    f"{name}: {host} finds {other.get(name)} there, and the first rank's host {first_host} {identity}; "
                    "bring the same data to every host"
                )
    return first


def _try_to_record(config: RunConfig) -> tuple[dict[str, Any], str | None]:
    """(what identifies the data, None), or (nothing, why it cannot be read)."""
    try:
        return _record_data(config), None
    except UserError as error:
        return {}, str(error)
    except OSError as error:
        return {}, f"data.paths: cannot be read ({error})"


def _open_metrics(folder: Path, config: RunConfig, step: int) -> MetricsLog:
    return MetricsLog(folder / "metrics.jsonl", step, Trackers(config.log.trackers, folder, config))


def _open_validation(config: RunConfig, folder: Path) -> Validation | None:
    if not config.train.eval_every:
        return None
    samples = open_split(config.data, config.train.seq_len, config.seed, "validation", config.model.vocab_size)
    is_text = not config.data.is_synthetic
    token_bytes = load_run_tokenizer(folder).token_bytes() if is_text else None
    sources = _scored_sources(config)
    shapes = StepShapes(config, samples)
    return Validation(samples, config.train.eval_samples, token_bytes, config.data.mask_documents, sources, shapes)


def _scored_sources(config: RunConfig) -> list[str]:
    """The datasets whose own loss is asked for."""
    if config.data.is_synthetic or not config.log.per_source:
        return []
    return [path.prefix for path in read_paths(config.data)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)
