"""From the user's sources to one checked run."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from polarlm.config.deck import from_environment
from polarlm.config.errors import UserError
from polarlm.config.files import check_inside
from polarlm.config.layout import resolve_layout
from polarlm.config.model import ModelConfig
from polarlm.config.presets import preset_leaves
from polarlm.config.run import RunConfig
from polarlm.config.sources import Leaves, Value, as_tree, from_flags, from_yaml, merge

_SYNTHETIC_STEPS = 20
_TOLD = 20  # faults in one message


@dataclass(frozen=True)
class LoadedRun:
    """A checked run, and what its user should be told about how it came to be, a line each."""

    config: RunConfig
    notes: list[str]


# Two ways to say one thing, of which a run has one.
_ALTERNATIVES = (
    ("train.steps", "train.tokens"),
    ("train.schedule.warmup_steps", "train.schedule.warmup_tokens"),
    ("data.paths", "data.file_list"),
)


def load_run(
    path: Path | None, *, environment: Mapping[str, str], flags: Sequence[str] = (), devices: int = 1, nodes: int = 1
) -> LoadedRun:
    """Read a run: YAML file < the deck's environment variables < flags.

    Args:
        path: the run file, or None for a run given by variables and flags alone.
        environment: the process's variables.
        flags: raw words such as `["--train.seq-len", "2048"]`.
        devices: ranks where `parallel.ranks` is not given.
        nodes: what the ranks are spread over.

    Raises:
        UserError: whatever is wrong, one line a fault, each with the field, where it was given, and the mend.
    """
    file_leaves = _given(from_yaml(path)) if path else {}
    flag_leaves = from_flags(flags)
    ranks = merge(file_leaves, flag_leaves).get("parallel.ranks")
    world = ranks.value if ranks and isinstance(ranks.value, int) and ranks.value > 0 else devices
    environment_leaves = from_environment(environment, world)

    leaves, replaced = _merge_all(file_leaves, environment_leaves, flag_leaves)
    notes = [
        f"{leaf.origin}={environment[leaf.origin]}: {key} is {leaf.value}"
        for key, leaf in environment_leaves.items()
        if leaves[key] is leaf
    ] + replaced
    if _is_endless(leaves):
        leaves["train.steps"] = Value(_SYNTHETIC_STEPS, "default")
        notes.append(f"train.steps is {_SYNTHETIC_STEPS}, since synthetic data has no end and none was given")
    config = _validate(leaves)
    config = _with_origins(leaves, resolve_layout, config, devices, nodes)
    config, raised = _with_positions(config)
    return LoadedRun(config, notes + raised)


def _given(leaves: Leaves) -> Leaves:
    """Without empty values, and sections whose lines are all commented out; an unknown key remains, to be refused."""
    fields = field_paths(RunConfig)
    known = fields.keys() | {name.rpartition(".")[0] for name in fields}
    return {key: leaf for key, leaf in leaves.items() if leaf.value is not None or key not in known}


def _merge_all(*sources: Leaves) -> tuple[Leaves, list[str]]:
    """The sources merged, and what is to be said of it.

    Of two fields of which a run has one, the later source's stands. Another preset in a later source means another
    model: the earlier sources' fields of one do not outlive it, else `--model GPT1_5B` over a run file with `layers: 2`
    would train two layers under that name.
    """
    merged: Leaves = {}
    notes = []
    for source in sources:
        for new, old in (*_ALTERNATIVES, *(pair[::-1] for pair in _ALTERNATIVES)):
            if new in source and old not in source and old in merged:
                notes.append(f"{new} ({source[new].origin}) replaces {old} ({merged[old].origin})")
                del merged[old]
        preset, before = source.get("model.preset"), merged.get("model.preset")
        fields = [key for key in merged if key.startswith("model.") and key != "model.preset"]
        if preset and fields and (before is None or before.value != preset.value):
            notes.append(f"the preset {preset.value} replaces {', '.join(fields)} ({merged[fields[0]].origin})")
            merged = {key: leaf for key, leaf in merged.items() if key not in fields}
        if _shares_otherwise(merged, source):
            method, degree = source["parallel.context_method"], merged.pop("parallel.context_ulysses")
            replaced = f"replaces parallel.context_ulysses ({degree.origin}), which is of hybrid"
            notes.append(f"parallel.context_method ({method.origin}) {replaced}")
        if _divides_anew(merged, source):
            stands = f"train.global_batch_size ({merged['train.global_batch_size'].origin}) stands"
            notes.append(f"{stands}, and train.gradient_accumulation_steps follows from it")
            del merged["train.gradient_accumulation_steps"]
        merged = merge(merged, source)
    return merged, notes


def _shares_otherwise(merged: Leaves, source: Leaves) -> bool:
    """Whether a later source takes another method than hybrid, the only one with a degree of its own."""
    method = source.get("parallel.context_method")
    degree = "parallel.context_ulysses"
    return method is not None and method.value != "hybrid" and degree in merged and degree not in source


def _divides_anew(merged: Leaves, source: Leaves) -> bool:
    """Whether the batch is said twice, as in a run's own config.yaml, and a later source divides it otherwise."""
    batch = {"train.global_batch_size", "train.gradient_accumulation_steps"}
    divisors = [key for key in source if key.startswith("parallel.") or key == "train.micro_batch_size"]
    return bool(divisors) and batch <= merged.keys() and not batch & source.keys()


def _is_endless(leaves: Leaves) -> bool:
    """Random ids and no length, as in the deck's own command, whose length was the job's."""
    paths = leaves["data.paths"].value if "data.paths" in leaves else ["synthetic"]
    return (
        "data.file_list" not in leaves
        and paths in ("synthetic", ["synthetic"])
        and not {"train.steps", "train.tokens"} & leaves.keys()
    )


def load_run_folder(folder: Path) -> RunConfig:
    """The resolved configuration that a run wrote into its folder.

    Raises:
        UserError: the folder holds no run, or its config.yaml is damaged.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise UserError(f"{folder}: no config.yaml there, so this is not a run folder")
    check_inside(path, folder)
    return _validate(_given(from_yaml(path)))


def run_of(record: Any, where: Path) -> RunConfig:
    """The run that a checkpoint was saved in, from its record of it.

    Raises:
        UserError: it is no run.
    """
    try:
        return RunConfig.model_validate(record)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(map(str, fault["loc"]))
        raise UserError(f"{where}: the run that it was saved in is damaged ({path}: {fault['msg']})") from None


def dump_run(config: RunConfig) -> str:
    """The resolved run as YAML that `load_run` reads back to the same values; open fields are left out."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude_none=True), sort_keys=False)


def with_tokenizer(config: RunConfig, tokenizer: str, vocab_size: int) -> RunConfig:
    """The same run with `data.tokenizer` explicit, and `model.vocab_size` filled in from it or checked against it.

    Raises:
        UserError: `model.vocab_size` is smaller than the tokenizer's.
    """
    model = config.model
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UserError(f"model.vocab_size: {model.vocab_size} is less than the {vocab_size} ids of {tokenizer}")
    model = model.model_copy(update={"vocab_size": model.vocab_size or vocab_size})
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    return config.model_copy(update={"model": model, "data": data})


def _with_positions(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """`model.max_positions` made explicit; a longer sequence raises it, and says so."""
    longest, given = config.train.seq_len, config.model.max_positions
    if given is not None and given >= longest:
        return config, []
    notes = [] if given is None else [f"model.max_positions raised from {given} to train.seq_len {longest}"]
    return config.model_copy(update={"model": config.model.model_copy(update={"max_positions": longest})}), notes


def _validate(leaves: Leaves) -> RunConfig:
    try:
        return RunConfig.model_validate(as_tree(leaves))
    except ValidationError as error:
        if "model.preset" in leaves:
            leaves = preset_leaves(leaves["model.preset"].value) | leaves
        faults = error.errors()
        more = [f"and {len(faults) - _TOLD} faults more"] if len(faults) > _TOLD else []
        raise UserError(*(_describe(fault, leaves) for fault in faults[:_TOLD]), *more) from None


def check_preset(name: str) -> ModelConfig:
    """The model that a preset alone gives.

    Raises:
        UserError: there is none of this name, or a user's own has a field that is wrong or lacks one.
    """
    try:
        return ModelConfig.model_validate({"preset": name})
    except ValidationError as error:
        fault: dict[str, Any] = {**error.errors()[0]}
        fault["loc"] = ("model", *fault["loc"])
        raise UserError(f"preset {name}: {_describe(fault, preset_leaves(name))}") from None


def _describe(fault: Any, leaves: Leaves) -> str:
    """One pydantic fault as one line: where it was given, the field, what is wrong, the mend."""
    path = ".".join(str(part) for part in fault["loc"] if not isinstance(part, int)) or "model"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
    named = re.match(r"([a-z_.]+)(?:: | (?=is missing))", message)
    if fault["type"] == "value_error" and named:
        path, message = f"{path}.{named[1]}", message[named.end() :]
    elif fault["type"] == "extra_forbidden":
        message = f"unknown field{_near(path)}"
    elif fault["type"] == "missing":
        message = "is missing; `polarlm init run.yaml` writes a run file to start from"
    elif fault["type"] in ("list_type", "tuple_type"):
        message = f"{fault['input']!r}: should be a list: `[a, b]`, or on the command line `a b`"
    elif not isinstance(fault["input"], dict):
        message = f"{fault['input']!r}: {message[0].lower()}{message[1:]}"
    return _placed(path, message, leaves)


def _placed(path: str, message: str, leaves: Leaves) -> str:
    """The origin before the message; a flag or variable is an origin of its own name."""
    related = ((f"{path}.", f"{key}.", leaf.origin) for key, leaf in leaves.items())
    origin = next((origin for one, other, origin in related if one.startswith(other) or other.startswith(one)), None)
    return f"{origin}: {path}: {message}" if origin else f"{path}: {message}"


def _with_origins(leaves: Leaves, step: Any, *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except UserError as error:
        faults = (fault.partition(": ") for fault in error.args)
        raise UserError(*(_placed(path, message, leaves) for path, _, message in faults)) from None


def _near(path: str) -> str:
    known = field_paths(RunConfig)
    last = path.rpartition(".")[2]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.75) or [
        other for other in known if other.rpartition(".")[2] == last
    ]
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(_siblings(path, known))}"


def _siblings(path: str, known: Iterable[str]) -> list[str]:
    parent = path.rpartition(".")[0]
    return sorted({key.removeprefix(f"{parent}.").partition(".")[0] for key in known if key.startswith(parent)})


def field_paths(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Every field of a section, by its dotted path, with what it means."""
    paths: dict[str, str] = {}
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            paths |= field_paths(inner, f"{prefix}{name}.")
        else:
            paths[f"{prefix}{name}"] = field.description or ""
    return paths
