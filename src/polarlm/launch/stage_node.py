"""One node's part in `polarlm env stage`: `python -m polarlm.launch.stage_node FOLDER TO`

It ends well even where it failed, for launchers end all nodes when one ends badly; what failed it tells the head.
"""

import contextlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from polarlm.config import UserError
from polarlm.launch.nodes.call import KEY, call_head
from polarlm.launch.nodes.staging import pack, room_needed, unpack
from polarlm.launch.nodes.wire import Gate, Wire, WireError, connect

__all__ = ["stage"]

_PATIENCE_S = 3600  # a node that hangs does not hold the job


def stage(call: Callable[[dict[str, Any]], Wire], key: bytes, source: Path, to: Path) -> None:
    """Do what the head says, until the end.

    Args:
        call: with what is to be said first, gives the wire to the head.
        source: the environment, for whoever is told to make the file.
        to: where it goes; its folder is made, for its owner alone.

    Raises:
        WireError: the head is gone.
    """
    tar = to.with_name(f".{to.name}.{os.getpid()}.tar")
    try:
        with Gate(key, lambda wire: wire.send_file(tar)) as gate:
            wire = call({"port": gate.port})
            while (order := wire.receive(None))["do"] != "end":
                answer = _get(order, key, source, tar)
                wire.send(answer)
                if "complaint" not in answer:
                    wire.send(_put(tar, source, to))
            wire.close()
    finally:
        with contextlib.suppress(OSError):
            tar.unlink()


def _get(order: dict[str, Any], key: bytes, source: Path, tar: Path) -> dict[str, Any]:
    """Make the file, or fetch it from another node."""
    try:
        tar.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if tar.parent.stat().st_uid not in (os.geteuid(), 0):
            raise UserError(f"{tar.parent}: belongs to another user; stage --to another folder")
        if order["do"] == "make":
            pack(source, tar)
        else:
            feeder = connect(order["address"], order["port"], key)
            _fetch(feeder, tar)
    except WireError as error:
        return {"complaint": str(error), "is_feeders": True}
    except (UserError, OSError) as error:
        return {"complaint": _words(error, tar.parent), "is_feeders": False}
    return {"has": True}


def _fetch(feeder: Wire, tar: Path) -> None:
    def check_room(size: int) -> None:
        free = shutil.disk_usage(tar.parent).free
        if free < room_needed(size):
            raise UserError(
                f"{tar.parent}: has {free >> 20} MiB free of the {room_needed(size) >> 20} that are needed; "
                "stage --to another folder"
            )

    try:
        feeder.receive_file(tar, check_room)
    finally:
        feeder.close()


def _put(tar: Path, source: Path, to: Path) -> dict[str, Any]:
    try:
        unpack(tar, source, to)
    except (UserError, OSError) as error:
        return {"complaint": _words(error, to)}
    return {"path": str(to), "bytes": tar.stat().st_size}


def _words(error: Exception, path: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    return str(error)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End as an error does, which takes gigabytes of half a copy along."""
    sys.exit(128 + number)


def main() -> int:
    """Take part."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, _leave)
    signal.alarm(_PATIENCE_S)
    source, to = Path(sys.argv[1]), Path(os.path.expanduser(os.path.expandvars(sys.argv[2]))).absolute()
    try:
        stage(call_head, bytes.fromhex(os.environ[KEY]), source, to)
    except WireError as error:
        print(f"error: the process that started this one: {error}", file=sys.stderr)
    except Exception:  # a defect here must not end the others either; the head sees that the wire ended
        traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(main())
