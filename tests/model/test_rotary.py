import math

import torch

from polarlm.config import ModelConfig
from polarlm.model import Rotary
from polarlm.model.rotary import rotate


def config(**fields):
    shape = {"layers": 1, "hidden": 64, "heads": 4, "vocab_size": 8, "max_positions": 8}
    return ModelConfig(family="llama", **shape, **fields)


def as_complex(x):
    """Pairs (x_i, x_{i + D/2}) as complex numbers."""
    return torch.complex(*x.chunk(2, -1))


def test_rotation_is_multiplication_by_a_unit_complex_number():
    rotary = Rotary(config(rope_base=500000.0))
    x = torch.randn(2, 4, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.arange(40), torch.arange(40).flip(0) * 3])
    turned = rotate(x, rotary(positions))
    exponents = torch.arange(8, dtype=torch.float64) / 8
    angles = positions[:, None, :, None].double() * 500000.0**-exponents
    expected = as_complex(x) * torch.polar(torch.ones_like(angles), angles)
    assert turned.dtype == torch.float64
    torch.testing.assert_close(as_complex(turned), expected, rtol=0, atol=2e-5)  # the angles are fp32


def test_scores_depend_on_the_distance_alone():
    rotary = Rotary(config())
    q, k = torch.randn(2, 1, 4, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        at = [rotary(torch.tensor([[position]])) for position in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum(-1)

    torch.testing.assert_close(score(9, 2), score(107, 100), rtol=0, atol=1e-4)
    assert (score(9, 2) - score(9, 3)).abs().max() > 1e-2


def test_llama3_scaling_pair_by_pair():
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
    plain = Rotary(config(head_dim=128, rope_base=500000.0)).frequencies(torch.device("cpu")).tolist()
    scaled = Rotary(config(head_dim=128, rope_base=500000.0, rope_scaling=fields)).frequencies(torch.device("cpu"))
    kinds = set()
    for before, after in zip(plain, scaled.tolist(), strict=True):
        turns = 8192 * before / (2 * math.pi)
        kind = "slow" if turns < 1 else "fast" if turns > 4 else "between"
        share = {"slow": 0.0, "fast": 1.0, "between": (turns - 1) / 3}[kind]
        assert math.isclose(after, before * share + before / 8 * (1 - share), rel_tol=1e-5)
        kinds.add(kind)
    assert kinds == {"slow", "between", "fast"}


def test_half_precision_is_rotated_in_full():
    rotation = Rotary(config())(torch.arange(5)[None] + 1000)
    x = torch.randn(1, 4, 5, 16)
    turned = rotate(x.bfloat16(), rotation)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned, rotate(x.bfloat16().float(), rotation).bfloat16(), rtol=0, atol=0)
