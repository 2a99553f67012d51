"""The models that are laid out: two small ones, one a family, or the user's own; and each as a run on a layout."""

from collections.abc import Sequence

from polarlm.config import RunConfig, UserError, load_run
from polarlm.verify.compare import BOUNDS
from polarlm.verify.layouts import Layout

# Small, and unkind: a vocabulary that no number of ranks divides, fewer key heads than ranks, documents in a sample.
_SHAPE = ["--model.layers", "4", "--model.hidden", "32", "--model.heads", "4", "--model.vocab-size", "61"]
_BOTH = {
    "gpt": ["--model.family", "gpt", *_SHAPE],
    "llama": ["--model.family", "llama", "--model.kv-heads", "2", *_SHAPE, "--data.mask-documents", "true"],
}
# Clipping acts in every step. A larger eps than training's, since AdamW divides by gradients that are zero but for
# rounding: with 1e-8 they differ between any two layouts.
_TRAIN = {"steps": "3", "seq-len": "32", "optimizer.eps": "1e-6", "optimizer.clip": "0.1"}
_SAMPLES = 16
_MICROBATCHES = 4  # a rank and step, as the most demanding schedule asks for


_EVEN = ["--model.vocab-size", "64"]  # the textbook counts no padding


def models_of(flags: Sequence[str], *, even: bool = False) -> dict[str, list[str]]:
    """Each model's name and flags: the user's own where `flags` say anything of a model, else one of each family.

    Args:
        even: every degree up to 8 is to divide the small models' sizes.
    """
    words = [word.partition("=")[0] for word in flags if word.startswith("--")]
    own = {"own": [*flags]} if any(word == "--model" or word.startswith("--model.") for word in words) else None
    models = own or {name: [*of_family, *_EVEN * even, *flags] for name, of_family in _BOTH.items()}
    defaults = [word for name, value in _TRAIN.items() for word in (f"--train.{name}", value)]
    defaults += ["--train.global-batch-size", str(_SAMPLES)]
    return {name: [*defaults, *own_flags] for name, own_flags in models.items()}


def run_of(model_flags: Sequence[str], layout: Layout) -> RunConfig:
    """A model on a layout.

    Raises:
        UserError: the model's shape or the batch does not allow that layout, or it is not to be compared.
    """
    micro = ["--train.micro-batch-size", str(max(1, _SAMPLES // (layout.data * _MICROBATCHES)))]
    config = load_run(None, environment={}, flags=[*micro, *model_flags, *layout.flags]).config
    train = config.train
    for field, value, only in (
        ("model.dropout", config.model.dropout, 0.0),
        ("train.optimizer.name", train.optimizer.name, "adamw"),
        ("train.z_loss", train.z_loss, 0.0),
        ("train.label_smoothing", train.label_smoothing, 0.0),
    ):
        if value != only:
            raise UserError(f"{field}: the reference of verify knows {only} alone, not {value}")
    if train.precision not in BOUNDS:
        raise UserError(f"train.precision: verify has a bound for {' and '.join(BOUNDS)}, not {train.precision}")
    if not train.optimizer.clip:
        raise UserError("train.optimizer.clip: verify compares clipped steps; give a positive one")
    if config.model.vocab_size is None:
        raise UserError("model.vocab_size is missing: give model.vocab_size")
    return config
