"""Compilation of the blocks by torch's own compiler."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from polarlm.config import UserError
from polarlm.model import CausalAttention
from polarlm.parallel.device import Device


def compile_blocks(blocks: Iterable[nn.Module], device: Device) -> None:
    """Have each block's forward and backward compiled at its first call; modules and names stay as they are.

    Blocks of one shape share one compiled code, so that the time it takes does not grow with the layers. Dropout is
    drawn by the very operations of an eager run, so that compiling changes no step.

    Raises:
        UserError: what torch's compiler needs on a CPU is not there: a C++ compiler, Python's headers.
    """
    if device.torch.type == "cpu":
        _check_compiler()
    # Without the latter, kernels that add up in different orders would be chosen by timing them.
    options = {"fallback_random": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
    # Its shapes are the documents' lengths, new in every batch: it stays eager. On the class, for all blocks' one code.
    CausalAttention.attend_documents = torch.compiler.disable(CausalAttention.attend_documents)
    for block in blocks:
        block.compile(options=options)


def _check_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second, which an eager run need not wait
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "train.compile: this host has no C++ compiler; install g++ or name one by CXX, or use train.compile false"
        ) from None
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise UserError(
            "train.compile: Python.h is missing, which compiled code includes; install python3-dev or the like, "
            "or use train.compile false"
        )
