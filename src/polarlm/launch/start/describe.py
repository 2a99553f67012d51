"""A prepared launch in words: what would be run, what it sets, and why."""

import shlex
import sys
from collections.abc import Sequence
from textwrap import indent, wrap

from polarlm.launch.start.prepare import Launch

__all__ = ["describe"]

_WIDTH = 110


def describe(launch: Launch) -> str:
    """The whole of a launch as text; its `export` lines and its command can be pasted into a shell."""
    width = max(len(part) for part, _ in launch.reasons)
    lines = [f"{part:<{width}}  {reason}" for part, reason in launch.reasons]
    lines += [f"warning: {warning}" for warning in launch.warnings]
    if launch.host_file:
        path, text = launch.host_file
        lines += ["", f"host file, to be written: {path}", indent(text.rstrip("\n"), "  ")]
    lines += ["", "environment"]
    exports = [(f"export {each.name}={shlex.quote(each.value)}", each.why) for each in launch.settings]
    width = max(len(export) for export, _ in exports) if exports else 0
    lines += [f"  {export:<{width}}  # {why}" for export, why in exports]
    if launch.dropped:
        lines.append(f"  unset {' '.join(launch.dropped)}  # the place of this process, not of a rank")
    if launch.kept:
        lines.append(f"  # kept as they are set: {', '.join(launch.kept)}")
    if launch.kind not in ("local", "torchrun"):
        lines.append("  # and each rank, on its host: RANK, WORLD_SIZE, LOCAL_RANK as its launcher numbered it;")
        lines.append("  # GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, unless set: the interface that leads to MASTER_ADDR")
    title = f"command, as {launch.spread.world} processes of this machine" if launch.kind == "local" else "command"
    command = _openmpi_in_lines(launch.command) if launch.kind == "openmpi" else shlex.join(launch.command)
    return "\n".join([*lines, "", title, f"  {command}"])


def _openmpi_in_lines(command: Sequence[str]) -> str:
    """One command to a shell, in which the variables to be forwarded, dozens, fill lines of their own."""
    first = last = command.index(sys.executable)
    while command[first - 2] == "-x":
        first -= 2
    tied = "\N{NO-BREAK SPACE}"  # so that a name stays with its -x
    pairs = " ".join(f"-x{tied}{name}" for name in command[first + 1 : last : 2])
    forwarded = [line.replace(tied, " ") for line in wrap(pairs, _WIDTH, break_on_hyphens=False)]
    return " \\\n    ".join([shlex.join(command[:first]), *forwarded, shlex.join(command[last:])])
