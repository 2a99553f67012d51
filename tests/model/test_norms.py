"""RMSNorm's two ways against its formula in float64, and what the fused one keeps."""

import pytest
import torch

from polarlm.model import RMSNorm


def _gradients(norm, x, grad):
    output = norm(x)
    return [output.detach(), *torch.autograd.grad(output, (x, norm.weight), grad)]


def _formula(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(
    ("precision", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)]
)
def test_both_ways_are_the_formula_in_float64(is_fused, precision, bound):
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(2, 16, 48, generator=generator).to(precision) for _ in range(2))
    norm = RMSNorm(48, eps=1e-5, dtype=torch.float64 if precision == torch.float64 else torch.float32)
    norm.is_fused = is_fused
    torch.nn.init.normal_(norm.weight, 1.0, 0.3, generator=generator)
    exact = [value.detach().double().requires_grad_() for value in (x, norm.weight)]
    output = _formula(*exact, 1e-5)
    expected = [output, *torch.autograd.grad(output, exact, grad.double())]
    for found, value in zip(_gradients(norm, x.requires_grad_(), grad), expected, strict=True):
        assert (found.double() - value).norm() <= bound * value.norm()
    assert norm(x).dtype == precision


def test_the_fused_way_is_differentiated_right_by_small_steps():
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    norm = RMSNorm(8, eps=1e-5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x),
                                    (x, norm.weight.detach().requires_grad_()))  # fmt: skip


def test_the_fused_way_keeps_its_input_and_a_number_a_token():
    kept = {True: [], False: []}
    x = torch.randn(4, 16, 64, requires_grad=True)
    for is_fused, shapes in kept.items():
        norm = RMSNorm(64, eps=1e-5)
        norm.is_fused = is_fused
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, shapes=shapes: shapes.append((t.shape, t.data_ptr())) or t, lambda t: t
        ):
            norm(x)
    wide = [{pointer for shape, pointer in shapes if shape == x.shape} for shapes in kept.values()]
    assert wide[0] == {x.data_ptr()}
    assert len(wide[1]) > 1
