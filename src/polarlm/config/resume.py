"""What a run may change when it goes on, and what it may not."""

from polarlm.config.errors import UserError
from polarlm.config.run import RunConfig

_FIXED = ("model", "data", "seed", "train.seq_len", "train.global_batch_size")


def check_same_run(before: RunConfig, after: RunConfig) -> None:
    """A resumed run keeps its model, data, seed, sequence length and global batch; all else may change.

    Raises:
        UserError: names each field that may not change, with both values.
    """
    old, new = (_leaves(config.model_dump(mode="json")) for config in (before, after))
    changed = [
        f"{field}: {old.get(field)} in the run, {new.get(field)} now"
        for field in sorted(old.keys() | new.keys())
        if old.get(field) != new.get(field) and any(field == fixed or field.startswith(f"{fixed}.") for fixed in _FIXED)
        and field != "model.preset"
    ]  # fmt: skip
    if changed:
        raise UserError(
            f"{'; '.join(changed)}: a resumed run keeps these; put them back, or start a new run from its weights "
            "with train.init_from"
        )


def _leaves(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves
