"""bf16 and fp16: matrix products in them; weights, gradients, moments and every sum over ranks in fp32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.reference import assert_close, rank_batches, run_config, whole
from polarlm.parallel import Engine
from polarlm.train import build_optimizer
from polarlm.train.step import as_tensors
from ranks import run_ranks

BF16, FP16 = (["--train.precision", name] for name in ("bf16", "fp16"))
PARAMETERS = [*BF16, "--train.parameter-precision", "bf16"]
LAYOUTS = {f"zero {stage}": ["--parallel.zero-stage", str(stage)] for stage in (0, 1, 2, 3)}
LAYOUTS["recomputed, zero 3"] = ["--parallel.zero-stage", "3", "--train.recompute", "selective"]
SUMS = ("reduce_scatter", "allreduce")


class Carried(TorchDispatchMode):
    """The type of each tensor that a sum over ranks carries, and of each matrix product's result."""

    def __init__(self):
        super().__init__()
        self.sums, self.products = [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        if any(name in str(operation) for name in SUMS):
            self.sums += [tensor.dtype for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.products.append(output.dtype)
        return output


def _step(world, flags, micro, loss_scale=1.0):
    """The gradients of a step, the loss, and the types of everything."""
    config = run_config("llama", world.size, flags)
    engine = Engine(config, world)
    optimizer = build_optimizer(engine.model, config.train.optimizer)
    batches = [as_tensors(batch) for batch in rank_batches(0, engine.data_rank, engine.data_ranks, micro)]
    with Carried() as carried:
        loss = engine.forward_backward(batches, 100.0, loss_scale)
    engine.clip_gradients(0.0, loss_scale)
    named = dict(engine.model.named_parameters())
    gradients = {name: whole(parameter.grad) for name, parameter in named.items()}
    types = {"gradients": {parameter.grad.dtype for parameter in named.values()}}
    optimizer.step()
    types["parameters"] = {parameter.dtype for parameter in named.values()}
    types["moments"] = {value.dtype for state in optimizer.state.values() for value in state.values()}
    return loss, gradients, types | {"sums": set(carried.sums), "products": set(carried.products)}


@pytest.mark.parametrize(
    ("layout", "flags", "product"),
    [*((layout, BF16, torch.bfloat16) for layout in LAYOUTS), ("zero 2", FP16, torch.float16)],
)
def test_only_products_are_in_half_precision(layout, flags, product):
    [(loss, gradients, _)] = run_ranks(1, _step, flags, 2)
    for rank_loss, rank_gradients, types in run_ranks(2, _step, [*LAYOUTS[layout], *flags], 2):
        assert types.pop("products") == {product}
        sums = types.pop("sums")
        assert torch.float32 in sums
        assert sums <= {torch.float32, torch.float64}  # the loss is summed in the latter
        assert types == {kind: {torch.float32} for kind in ("gradients", "parameters", "moments")}
        # The microbatches are the same ones, so their products are too, and fp32 sums differ by fp32's rounding.
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        assert_close(rank_gradients, gradients)


@pytest.mark.parametrize(("flags", "bits", "loss_scale"), [(BF16, 8, 1.0), (PARAMETERS, 8, 1.0), (FP16, 11, 2.0**12)])
def test_half_precision_is_near_fp32(flags, bits, loss_scale):
    [(loss, gradients, _)] = run_ranks(1, _step, [], 8)
    [(half_loss, half_gradients, _)] = run_ranks(1, _step, flags, 8, loss_scale)
    assert half_loss == pytest.approx(loss, rel=2 ** (-bits - 1))
    for name, difference in _differences(half_gradients, gradients).items():
        # bf16 keeps 8 bits, so a product is off by 2^-9 of itself; a gradient is the end of some ten in a row.
        assert 1e-5 < difference < 10 * 2**-bits, f"{name}: {difference:.1e}"


def test_without_a_loss_scale_fp16_loses_what_is_small():
    [(_, gradients, _)] = run_ranks(1, _step, [], 8)
    unscaled, scaled = (run_ranks(1, _step, FP16, 8, scale)[0][1] for scale in (1.0, 2.0**12))
    assert max(_differences(unscaled, gradients).values()) > 5 * max(_differences(scaled, gradients).values())


def _differences(found, expected):
    return {name: (found[name] - value).norm() / value.norm() for name, value in expected.items()}
