"""Runs that are equal to the bit: two of one layout, on the same kind of machine and with the same libraries.

Every run draws what it draws from its seed. What is left are kernels that add up in the order in which threads come by,
and libraries that choose a kernel by timing it; torch has a switch for the former, and refuses an operation without.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polarlm.config import UserError
from polarlm.parallel.device import Device

_WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS gives the same bits (its manual, "Results reproducibility")
# NCCL otherwise chooses by its tuner, and may sum inside the switch; a ring's order is fixed by who stands where.
_VARIABLES = {"cuda": {"CUBLAS_WORKSPACE_CONFIG": _WORKSPACES[0], "NCCL_ALGO": "Ring"}}


def be_deterministic(device: Device) -> None:
    """From here on let this process give the same bits for the same work; before any product and any communication.

    Raises:
        UserError: CUBLAS_WORKSPACE_CONFIG asks for what is not deterministic.
    """
    variables = deterministic_variables(device)
    workspace = variables.get("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
    if workspace not in _WORKSPACES:
        raise UserError(
            f"train.deterministic: CUBLAS_WORKSPACE_CONFIG={workspace} in the environment lets results differ; "
            f"unset it, or use {' or '.join(_WORKSPACES)}"
        )
    os.environ.update(variables)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def deterministic_variables(device: Device) -> dict[str, str]:
    """What the device's libraries are told by the environment: the user's own value, or ours."""
    ours = _VARIABLES.get(device.torch.type, {})
    return {name: os.environ.get(name) or value for name, value in ours.items()}


@contextmanager
def naming_nondeterminism() -> Iterator[None]:
    """Turns torch's refusal of an operation into a line.

    Raises:
        UserError: an operation has no deterministic implementation on the device.
    """
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:  # a pipeline's schedule raises its own error from torch's
            if named := re.search(r"(\S+) does not have a deterministic implementation", str(cause)):
                raise UserError(
                    f"train.deterministic: {named[1]} has no deterministic implementation here; "
                    "use train.deterministic false"
                ) from None
            cause = cause.__cause__
        raise
