"""How many accelerators a process of this machine will see, asked of the makers' own programs, without torch."""

import json
import os
import re
import subprocess
from collections.abc import Mapping

from polarlm.config import UserError

__all__ = ["local_devices"]

_PATIENCE_S = 60


def local_devices(environ: Mapping[str, str] = os.environ) -> int:
    """Count the accelerators a process of this machine will see; 0 when there are none.

    The first maker whose program finds some counts: NVIDIA, AMD, Intel. What a variable such as CUDA_VISIBLE_DEVICES
    hides is not counted.

    Raises:
        UserError: a driver's own program does not answer.
    """
    return _nvidia(environ) or _amd(environ) or _intel(environ)


def _nvidia(environ: Mapping[str, str]) -> int:
    present = sum(line.startswith("GPU ") for line in _ask("nvidia-smi", "-L").splitlines())
    return _visible(environ.get("CUDA_VISIBLE_DEVICES"), present)


def _amd(environ: Mapping[str, str]) -> int:
    """ROCm's runtime hides first, and HIP (which takes CUDA's name too) from what that left."""
    present = len(set(re.findall(r"^GPU\[(\d+)\]", _ask("rocm-smi", "--showid"), re.MULTILINE)))
    present = _visible(environ.get("ROCR_VISIBLE_DEVICES"), present)
    return _visible(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), present)


def _intel(environ: Mapping[str, str]) -> int:
    """Level Zero's devices: each tile of a card, or under ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE the card as a whole."""
    cards = len(_ask_for_json("xpu-smi", "discovery", "-j").get("device_list", []))
    if not cards:
        return 0
    mask = [entry.strip() for entry in environ.get("ZE_AFFINITY_MASK", "").split(",") if entry.strip()]
    if environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() == "COMPOSITE":
        return len({entry.partition(".")[0] for entry in mask}) or cards
    tiles = _ask_for_json("xpu-smi", "discovery", "-d", "0", "-j").get("number_of_tiles", 1)
    return len(mask) or cards * int(tiles)


def _visible(chosen: str | None, present: int) -> int:
    """Apply a list of devices as the driver does: an empty list hides all, a wrong entry all from there on."""
    if chosen is None or not present:
        return present
    devices = [device.strip() for device in chosen.split(",")]
    wrong = (
        number
        for number, device in enumerate(devices)
        if not (device.startswith(("GPU-", "MIG-")) or (device.isdecimal() and int(device) < present))
    )
    return next(wrong, len(devices))


def _ask_for_json(*command: str) -> dict:
    try:
        answer = json.loads(_ask(*command))
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _ask(*command: str) -> str:
    """What a program prints; nothing where there is none of its name."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S)
    except (FileNotFoundError, PermissionError):
        return ""
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"`{' '.join(command)}` gave no answer in {_PATIENCE_S} s: say the number of ranks with parallel.ranks"
        ) from error
    return answer.stdout
