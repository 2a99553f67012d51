"""The layouts that `polarlm verify` tries, by names that say what they are.

A name is its words, joined by hyphens: an axis with its degree (`data2 tensor2 ring2 ulysses2 hybrid4 pipeline2`),
`inner4` for the neighbours that share heads in a hybrid, else 2, `zero3` for a ZeRO stage, `groups2` for one whose
shares are repeated in groups, a pipeline schedule, `offload`, `fullrecompute`, `hostactivations`
beside it, `tile`, `math` for attention in plain products, `plainnorms`.
`pipeline2-1f1b-tensor2-zero3-data2` is one of 8 ranks. Any name of these words may be asked for, in the list or not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from polarlm.config import UserError

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")

_SWITCHES = {
    "offload": ("--parallel.offload", "parameters"),
    "selectiverecompute": ("--train.recompute", "selective"),
    "fullrecompute": ("--train.recompute", "full"),
    "hostactivations": ("--train.offload-activations", "host"),
    "tile": ("--train.tile", "4"),
    "math": ("--train.attention", "math"),
    "plainnorms": ("--train.fused-norms", "false"),
    **{schedule: ("--parallel.pipeline-schedule", schedule) for schedule in SCHEDULES},
}
_DEGREES = {
    "data": (),  # what is left of the ranks
    "tensor": ("--parallel.tensor",),
    "pipeline": ("--parallel.pipeline",),
    "ring": ("--parallel.context-method", "ring", "--parallel.context"),
    "ulysses": ("--parallel.context-method", "ulysses", "--parallel.context"),
    "hybrid": ("--parallel.context-method", "hybrid", "--parallel.context"),
}
_ACROSS_SEQUENCES = {"ring", "ulysses", "hybrid"}
_INNER = "--parallel.context-ulysses"
_NUMBERS = {"zero": ("--parallel.zero-stage",), "groups": ("--parallel.hybrid",), "inner": (_INNER,)}

NAMES = (
    "alone",
    "data2",
    "data4",
    *(f"zero{stage}-data{ranks}" for stage in (1, 2, 3) for ranks in (2, 4)),
    *(f"zero{stage}-groups2-data4" for stage in (1, 2, 3)),
    "zero3-data2-offload",
    "zero3-data8",
    "tensor2",
    "tensor4",
    "tensor2-data2",
    "tensor2-zero3-data2",
    "ring2",
    "ring4",
    "ring2-data2",
    "ring2-zero3-data2",
    "ring2-tensor2",
    "ulysses2",
    "ulysses4-zero3",
    "ulysses2-zero2-data2",
    "ulysses2-tensor2",
    "hybrid4",
    "hybrid4-tensor2",
    "hybrid4-zero3-data2",
    "hybrid8-inner4",
    "ring2-tensor2-zero3-data2",
    "ulysses2-tensor2-zero2-data2",
    *(f"pipeline2-{schedule}" for schedule in SCHEDULES),
    "pipeline4-1f1b",
    "pipeline2-1f1b-data2",
    *(f"pipeline2-1f1b-zero{stage}-data2" for stage in (1, 2, 3)),
    "pipeline2-interleaved1f1b-zero3-data2",
    *(f"pipeline2-{schedule}-zero2-data2" for schedule in SCHEDULES[-3:]),
    "pipeline2-1f1b-tensor2",
    "pipeline2-zbvzerobubble-tensor2",
    "pipeline2-1f1b-ring2",
    "pipeline2-dualpipev-ring2",
    "pipeline2-1f1b-ulysses2",
    "pipeline2-zbvzerobubble-ulysses2",
    "pipeline2-1f1b-tensor2-zero3-data2",
    "pipeline2-zbvzerobubble-tensor2-zero2-data2",
    "pipeline2-interleaved1f1b-ring2-tensor2",
    "pipeline2-1f1b-ulysses2-zero3-data2",
    "pipeline2-1f1b-ring2-tensor2-zero3",
    "pipeline2-1f1b-hybrid4",
    "selectiverecompute",
    "fullrecompute",
    "zero3-data2-selectiverecompute",
    "zero3-data2-fullrecompute",
    "tensor2-selectiverecompute",
    "tensor2-fullrecompute",
    "ring2-fullrecompute",
    "hybrid4-fullrecompute",
    "pipeline2-1f1b-fullrecompute",
    "tile",
    "tensor2-tile",
    "ring2-tile-fullrecompute",
    "fullrecompute-hostactivations",
    "zero3-data2-fullrecompute-hostactivations",
    "tensor2-fullrecompute-hostactivations",
    "ring2-fullrecompute-hostactivations",
    "pipeline2-1f1b-fullrecompute-hostactivations",
    "math",
    "ring2-math",
    "tensor2-plainnorms",
)


@dataclass(frozen=True)
class Layout:
    """One way to lay a run over some ranks.

    Attributes:
        data: how many of them take other samples.
        flags: its fields as words of a command line, `parallel.ranks` among them.
    """

    name: str
    ranks: int
    data: int
    flags: tuple[str, ...]


def parse_layout(name: str) -> Layout:
    """The layout of a name.

    Raises:
        UserError: a word of it means nothing.
    """
    flags: list[str] = []
    degrees: dict[str, int] = {}
    for word in name.split("-") if name != "alone" else ():
        if word in _SWITCHES:
            flags += _SWITCHES[word]
            continue
        match = re.fullmatch(r"([a-z]+)(0|[1-9]\d*)", word)
        axis, number = (match[1], match[2]) if match else ("", "")
        if axis in _DEGREES:
            if fault := _degree_fault(axis, number, degrees):
                raise UserError(f"--layouts: {word!r} in {name!r} cannot be: {fault}")
            degrees[axis] = int(number)
        elif axis not in _NUMBERS:
            raise UserError(
                f"--layouts: {word!r} in {name!r} means nothing; words are {', '.join([*_DEGREES, *_NUMBERS])} with "
                f"a number, {', '.join(_SWITCHES)}"
            )
        option = (_DEGREES | _NUMBERS)[axis]
        flags += [*option, number] if option else []
    if "hybrid" in degrees and _INNER not in flags:
        flags += [_INNER, "2"]
    ranks = prod(degrees.values())
    return Layout(name, ranks, degrees.get("data", 1), (*flags, "--parallel.ranks", str(ranks)))


def _degree_fault(axis: str, number: str, degrees: dict[str, int]) -> str | None:
    """Why an axis cannot have this degree beside the others of a layout."""
    if number == "0":
        return "a degree is 1 or more"
    if axis in degrees:
        return f"{axis} has its degree already, {degrees[axis]}"
    others = _ACROSS_SEQUENCES & degrees.keys()
    if axis in _ACROSS_SEQUENCES and others:
        return f"sequences are shared by {others.pop()} already; a ring of 2 x Ulysses of 2 is hybrid4-inner2"
    return None


def choose_layouts(wanted: str) -> list[Layout]:
    """The layouts that `all` or a list `NAME,NAME` asks for; a part of a name stands for all in the list that have it.

    Raises:
        UserError: one of them is neither.
    """
    if wanted == "all":
        return [parse_layout(name) for name in NAMES]
    chosen: dict[str, Layout] = {}
    for item in filter(None, re.split(r"[,\s]+", wanted)):
        chosen |= {layout.name: layout for layout in _matching(item)}
    if not chosen:
        raise UserError("--layouts: names none; give `all`, or names such as tensor2,zero3-data2")
    return list(chosen.values())


def _matching(item: str) -> Sequence[Layout]:
    if item in NAMES:
        return [parse_layout(item)]
    matching = [parse_layout(name) for name in NAMES if any(word.startswith(item) for word in name.split("-"))]
    return matching or [parse_layout(item)]
