"""Initial values: each parameter is drawn from a generator of its own, seeded by (seed, qualified name).

So they depend on no order of construction, on no layout, and not on which other parts of the model are present.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polarlm.config import ModelConfig

# What a block adds to the residual stream.
_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


def draw(
    name: str,
    shape: Sequence[int],
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The initial value of the whole parameter of that qualified name, drawn on the CPU in fp32 wherever it goes.

    Weights are normal(0, init_std); those that end a residual branch are divided by √(2 · layers), so that the stream
    keeps its scale with depth (GPT-2; Megatron-LM, arXiv 1909.08053). Biases are 0, the gains of norms 1.
    """
    if name == "head.weight" and config.tied_embeddings:
        name = "embedding.tokens.weight"  # a last pipeline stage holds its own copy of the one parameter
    owner, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(shape, dtype=dtype, device=device)
    if owner.endswith("norm"):
        return torch.ones(shape, dtype=dtype, device=device)
    std = config.init_std / math.sqrt(2 * config.layers) if name.endswith(_RESIDUAL) else config.init_std
    value = torch.empty(tuple(shape), device="cpu").normal_(0, std, generator=_generator(seed, name))
    return value.to(device=device, dtype=dtype)


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Give every parameter of a model on one device its initial value."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, parameter.shape, config, seed))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:4], "little"))  # torch's CPU engine takes 32 bits
