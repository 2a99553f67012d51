"""The checkpoints of a run.

polarlm checkpoint list [RUN]                      steps, sizes, layouts, losses
polarlm checkpoint verify [RUN]                    compare every byte with its digest; exit code 1 where one differs
polarlm checkpoint show [RUN] --step 200           everything one says of itself
polarlm checkpoint prune [RUN] --keep-last 2 --keep-every 1000 --keep-best
polarlm checkpoint export-weights [RUN] --output model.safetensors
"""

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarlm.cli.runs import add_run_argument, folder_of

if TYPE_CHECKING:
    from polarlm.checkpoint import Saved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list | verify | show | prune | export-weights")
    listing = verbs.add_parser("list", help="steps, sizes, layouts, losses")
    listing.add_argument("--json", action="store_true", help="the same as a JSON list")
    verify = verbs.add_parser("verify", help="compare every byte with its digest")
    show = verbs.add_parser("show", help="everything a checkpoint says of itself, as JSON")
    show.add_argument("--step", type=int, help="by default the newest complete one")

    prune = verbs.add_parser("prune", help="delete what no rule keeps; the newest complete one always stays")
    prune.add_argument("--keep-last", type=_at_least_one, metavar="K", help="the newest K")
    prune.add_argument("--keep-every", type=_at_least_one, metavar="N", help="steps that N divides")
    prune.add_argument("--keep-best", action="store_true", help="the one of the lowest validation loss")
    prune.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")

    export = verbs.add_parser("export-weights", help="weights as one safetensors file, of one checkpoint or their mean")
    export.add_argument("--step", type=int, nargs="+", help="several are averaged; by default the newest complete one")
    export.add_argument("--output", type=Path, required=True, metavar="FILE")
    for verb in (listing, verify, show, prune, export):
        add_run_argument(verb)


def run(arguments: argparse.Namespace) -> int | None:
    """Do what the verb says."""
    folder = folder_of(arguments.run)
    verbs = {"list": _list, "verify": _verify, "show": _show, "prune": _prune, "export-weights": _export}
    return verbs[arguments.verb](folder, arguments)


def _list(folder: Path, arguments: argparse.Namespace) -> None:
    from polarlm.checkpoint import saved_checkpoints

    losses = _validation_losses(folder)
    records = [_describe(each, losses) for each in saved_checkpoints(folder)]
    if arguments.json:
        print(json.dumps(records, indent=2))
        return
    for record in records:
        loss = "" if record["loss"] is None else f"loss {record['loss']:.4f}"
        val_loss = "" if record["val_loss"] is None else f"val {record['val_loss']:.4f}"
        state = "complete" if record["fault"] is None else f"NOT TO BE USED: {record['fault']}"
        size = f"{record['bytes'] / 2**20:,.1f} MiB"
        print(
            f"step {record['step']:<8} {size:>12}  {loss:<12} {val_loss:<10}  {record['layout']:<28} {state}".rstrip()
        )
    if not records:
        print(f"{folder}: no checkpoints")


def _verify(folder: Path, arguments: argparse.Namespace) -> int:
    from polarlm.checkpoint import saved_checkpoints

    saved = saved_checkpoints(folder, with_digests=True)
    if not saved:
        print(f"{folder}: no checkpoints")
    for each in saved:
        print(f"step {each.step}: {each.fault or 'every byte is as it was written'}")
    return int(any(each.fault for each in saved) or not saved)


def _show(folder: Path, arguments: argparse.Namespace) -> None:
    (saved,) = _chosen(folder, [arguments.step] if arguments.step is not None else [])
    print(json.dumps(_describe(saved, _validation_losses(folder)) | {"progress": saved.progress}, indent=2))


def _prune(folder: Path, arguments: argparse.Namespace) -> None:
    from polarlm.checkpoint import Saved, prune, saved_checkpoints
    from polarlm.config import UserError
    from polarlm.launch import lock

    if not (arguments.keep_last or arguments.keep_every or arguments.keep_best):
        raise UserError("prune: say what to keep: --keep-last K, --keep-every N, --keep-best")
    complete = [each for each in saved_checkpoints(folder) if each.fault is None]
    kept = {each.step for each in complete[-(arguments.keep_last or 1) :]}
    if arguments.keep_best:
        losses = {step: loss for step, loss in _validation_losses(folder).items() if step in {s.step for s in complete}}
        if not losses:
            raise UserError(f"{folder}: --keep-best: no checkpoint's step has a validation loss; set train.eval_every")
        kept.add(min(losses, key=losses.__getitem__))

    def keeps(saved: Saved) -> bool:
        return saved.step in kept or bool(arguments.keep_every and saved.step % arguments.keep_every == 0)

    with contextlib.nullcontext() if arguments.dry_run else lock.hold(folder):  # a run that saves deletes, too
        deleted = prune(folder, keeps, dry_run=arguments.dry_run)
    if not deleted:
        print(f"{folder}: nothing to delete")
    for each in deleted:
        print(f"{'would delete' if arguments.dry_run else 'deleted'} step {each.step} ({each.bytes / 2**20:,.1f} MiB)")


def _export(folder: Path, arguments: argparse.Namespace) -> None:
    from polarlm.checkpoint import export_weights

    chosen = _chosen(folder, arguments.step or [])
    count = export_weights([each.folder for each in chosen], arguments.output)
    of = " and ".join(f"step {each.step}" for each in chosen)
    print(f"{arguments.output}: {count:,} parameters, {'the mean of ' if len(chosen) > 1 else ''}{of}")


def _chosen(folder: Path, steps: Sequence[int]) -> "list[Saved]":
    """The complete checkpoints of these steps, or the newest.

    Raises:
        UserError: one is not there, or not complete.
    """
    from polarlm.checkpoint import saved_checkpoints
    from polarlm.config import UserError

    saved = {each.step: each for each in saved_checkpoints(folder)}
    complete = [step for step, each in saved.items() if each.fault is None]
    there = f"complete are {', '.join(map(str, complete)) or 'none'}"
    for step in steps or complete[-1:] or [None]:
        if step not in saved:
            raise UserError(f"{folder}: no checkpoint{'' if step is None else f' of step {step}'} there; {there}")
        if fault := saved[step].fault:
            raise UserError(f"{folder}: step {step} is not a complete checkpoint, {fault}; {there}")
    return [saved[step] for step in steps or complete[-1:]]


def _describe(saved: "Saved", losses: dict[int, float]) -> dict[str, Any]:
    return {
        "step": saved.step,
        "tokens": _number(saved.progress.get("tokens")),
        "bytes": saved.bytes,
        "loss": _number(saved.progress.get("loss")),
        "val_loss": losses.get(saved.step),
        "layout": saved.layout,
        "fault": saved.fault,
    }


def _number(value: Any) -> int | float | None:
    """What is none is shown as unknown."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _validation_losses(folder: Path) -> dict[int, float]:
    from polarlm.report import read_metrics

    if not (folder / "metrics.jsonl").exists():
        return {}
    losses = {step["step"]: step.get("val_loss") for step in read_metrics(folder)}
    return {step: loss for step, loss in losses.items() if isinstance(loss, int | float) and math.isfinite(loss)}


def _at_least_one(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
