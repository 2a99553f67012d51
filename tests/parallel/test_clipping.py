"""The gradient norm is right to fp32's last digits for large tensors too, on any layout."""

import pytest
import torch

from parallel.reference import run_config, whole
from polarlm.parallel import Engine
from ranks import run_ranks

LARGE = ["--model.vocab-size", "50000", "--model.hidden", "64"]


def _norms(world, flags):
    """Our norm before clipping to 1 and after, and that of the gathered gradients in float64."""
    engine = Engine(run_config("gpt", world.size, [*LARGE, *flags]), world)
    for number, parameter in enumerate(engine.model.parameters()):
        torch.manual_seed(number)  # replicas hold the same
        parameter.grad = torch.empty_like(parameter)
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        local.normal_()
    exact = torch.stack([whole(p.grad).double().norm() for p in engine.model.parameters()]).norm().item()
    ours = engine.clip_gradients(1.0)
    return ours / exact - 1, engine.clip_gradients(0.0)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ""),
        (2, ""),
        (2, "--parallel.zero-stage 3"),
        (2, "--parallel.tensor 2"),
        (4, "--parallel.tensor 2 --parallel.zero-stage 1"),
    ],
)
def test_the_norm_is_exact(ranks, flags):
    for error, clipped in run_ranks(ranks, _norms, flags.split()):
        assert abs(error) < 1e-6
        assert clipped == pytest.approx(1, rel=1e-5)
