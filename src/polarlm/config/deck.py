"""The environment variables of the "LLMs on Polaris" workshop deck, as fields of a run."""

from collections.abc import Mapping

from polarlm.config.errors import UserError
from polarlm.config.sources import Leaves, Value, parse_scalar

_FIELDS = {
    "MODEL_SIZE_KEY": "model.preset",
    "SEQ_LEN": "train.seq_len",
    "MICRO_BATCH": "train.micro_batch_size",
    "GAS": "train.gradient_accumulation_steps",
    "ZERO_STAGE": "parallel.zero_stage",
    "MPSIZE": "parallel.tensor",
    "PPSIZE": "parallel.pipeline",
    "DATA_FILE_LIST": "data.file_list",
    "WANDB_MODE": "log.wandb_mode",
}
_SEQUENCE_PARALLEL = ("megatron", "ds")

VARIABLES = (*_FIELDS, "USE_FLASH_ATTN", "SP_TYPE", "SPSIZE")


def from_environment(environment: Mapping[str, str], devices: int) -> Leaves:
    """The leaves that the deck's variables give; an empty variable is an unset one.

    `SP_TYPE=megatron` without `MPSIZE` makes tensor = devices / PPSIZE; `SP_TYPE=ds` without `SPSIZE` makes
    context = devices / PPSIZE by Ulysses, and tensor 1 or `MPSIZE`, which then divides the devices too.

    Args:
        environment: the process's variables.
        devices: the run's ranks, for the two degrees that the deck derives from the world size.

    Raises:
        UserError: an unknown `SP_TYPE`, a degree that is no whole number, or `SPSIZE` where it means nothing.
    """
    given = {name: text for name, text in environment.items() if text.strip()}
    leaves = {field: Value(parse_scalar(given[name]), name) for name, field in _FIELDS.items() if name in given}
    if "USE_FLASH_ATTN" in given:
        leaves["train.attention"] = Value(_kernel(given["USE_FLASH_ATTN"]), "USE_FLASH_ATTN")
    return leaves | _sequence_parallel(given, devices)


def _sequence_parallel(given: Mapping[str, str], devices: int) -> Leaves:
    kind = given.get("SP_TYPE")
    if kind not in (None, *_SEQUENCE_PARALLEL):
        raise UserError(f"SP_TYPE: {kind!r} is unknown; known: {', '.join(_SEQUENCE_PARALLEL)}")
    if kind != "ds" and _degree(given, "SPSIZE", 1) > 1:
        raise UserError(
            f"SPSIZE: {given['SPSIZE']} is the degree of SP_TYPE=ds, and SP_TYPE is {kind or 'not set'}; "
            "set SP_TYPE=ds, or leave SPSIZE out (the degree of SP_TYPE=megatron is MPSIZE)"
        )
    if kind is None:
        return {}
    share = max(1, devices // (_degree(given, "PPSIZE", 1) * _degree(given, "MPSIZE", 1)))
    open_tensor = {} if "MPSIZE" in given else {"parallel.tensor": Value(1 if kind == "ds" else share, "SP_TYPE")}
    if kind == "megatron":
        return open_tensor
    origin = "SPSIZE" if "SPSIZE" in given else "SP_TYPE"
    return open_tensor | {
        "parallel.context": Value(_degree(given, "SPSIZE", share), origin),
        "parallel.context_method": Value("ulysses", "SP_TYPE"),
    }


def _kernel(text: str) -> str:
    if text.lower() in ("1", "true", "on", "yes"):
        return "flash"
    if text.lower() in ("0", "false", "off", "no"):
        return "math"
    raise UserError(f"USE_FLASH_ATTN: {text!r} is neither on (1) nor off (0)")


def _degree(given: Mapping[str, str], name: str, default: int) -> int:
    try:
        degree = int(given.get(name, default))
    except ValueError:
        degree = 0
    if degree < 1:
        raise UserError(f"{name}: {given[name]!r} is not a whole number from 1")
    return degree
