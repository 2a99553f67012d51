"""Rotary position embedding (RoFormer, arXiv 2104.09864), in the half-split layout of Hugging Face's Llama."""

import math

import torch
from torch import Tensor, nn

from polarlm.config import ModelConfig, RopeScaling

Rotation = tuple[Tensor, Tensor]  # (cos, signed sin), fp32 [B, 1, S, D] each: broadcast over the heads


class Rotary(nn.Module):
    """Positions to the rotation that every block shares.

    It keeps no buffer: the frequencies are a handful of values, and computed each time they are right on any device,
    after `to_empty`, and on every pipeline stage.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.base, self.scaling = config.head_dim, config.rope_base, config.rope_scaling

    def forward(self, positions: Tensor) -> Rotation:
        """positions int64 [B, S] (or [1, S], the same for every row) -> (cos, signed sin), fp32 [B, 1, S, D]."""
        angles = positions[:, None, :, None].float() * self.frequencies(positions.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians a position for each of the D/2 pairs: base^(-2i/D), fp32 [D/2]."""
        exponents = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        frequencies = self.base**-exponents
        return frequencies if self.scaling is None else _stretch(frequencies, self.scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama-3's scaling: slow pairs turn `factor` times slower, fast ones as before, those between in between.

    A pair is slow when it turns less than `low_freq_factor` times over the original context, fast when more than
    `high_freq_factor` times.
    """
    turns = frequencies * scaling.original_max_positions / (2 * math.pi)
    fast = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, fast.clamp(0, 1))


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (x_i, x_{i + D/2}) of x [B, A, S, D] by the angle of their position, in fp32."""
    cos, signed_sin = rotation
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin).type_as(x)
