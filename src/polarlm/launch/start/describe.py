"""A prepared launch in words: what would be run, what it sets, and why."""

import shlex
from textwrap import indent

from polarlm.launch.start.prepare import Launch

__all__ = ["describe"]


def describe(launch: Launch) -> str:
    """The whole of a launch as text; its `export` lines and its last line can be pasted into a shell."""
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
    return "\n".join([*lines, "", title, indent(shlex.join(launch.command), "  ")])
