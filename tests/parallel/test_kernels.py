"""`train.attention` decides which kernel computes attention."""

import pytest
import torch

from polarlm.config import UserError, load_run
from polarlm.parallel import Device, Engine, World
from polarlm.parallel.kernels import choose_kernel
from ranks import run_ranks

FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"


ALONE = World(0, 1, Device(torch.device("cpu")))


def _config(flags="", environment=None):
    words = "--model.layers 1 --model.hidden 32 --model.heads 2 --model.vocab-size 61 --train.seq-len 8 --train.steps 1"
    return load_run(None, environment=environment or {}, flags=f"{words} {flags}".split()).config


def _kernels(world, config):
    """The attention operations that a step really ran, on a CPU, whose plain choice is its flash kernel."""
    engine = Engine(config, world)
    tokens = torch.arange(8)[None]
    with torch.profiler.profile() as profile:
        engine.forward_backward([(tokens, tokens, None, tokens)], 8)
    return {event.key for event in profile.key_averages()} & {FLASH, MATH}


@pytest.mark.parametrize(("text", "kernel"), [("", FLASH), ("1", FLASH), ("0", MATH)])
def test_the_decks_variable_chooses_the_kernel(text, kernel):
    assert _kernels(ALONE, _config(environment={"USE_FLASH_ATTN": text})) == {kernel}


@pytest.mark.parametrize(("name", "kernels"), [("auto", {FLASH}), ("flash", {FLASH}), ("math", set())])
def test_a_ring_runs_on_the_kernel_it_is_told(name, kernels):
    config = _config(f"--train.attention {name} --parallel.ranks 2 --parallel.context 2")
    assert run_ranks(2, _kernels, config) == [kernels, kernels]


def _gradients(world, config):
    """All ranks' gradients by name, added up."""
    engine = Engine(config, world)
    tokens = torch.arange(16).reshape(2, 8)
    positions = torch.arange(8).repeat(2, 1)
    engine.forward_backward([(tokens, positions, None, tokens.flip(0))], 16)
    return {name: parameter.grad.full_tensor() if world.size > 1 else parameter.grad
            for name, parameter in engine.model.named_parameters()}  # fmt: skip


def test_a_rings_plain_products_give_the_gradients_of_one_process():
    plain = "--train.attention math --model.family llama"  # without biases, of which the keys' has no gradient
    config = _config(f"{plain} --parallel.ranks 2 --parallel.context 2 --parallel.zero-stage 2")
    alone = _gradients(ALONE, _config(plain))
    for gradients in run_ranks(2, _gradients, config):
        assert gradients.keys() == alone.keys()
        for name, gradient in gradients.items():
            assert (gradient - alone[name]).norm() <= 1e-5 * alone[name].norm(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_kernel_that_the_device_lacks_is_one_line(precision):
    config = _config(f"--train.attention flash --model.dropout 0.1 --train.precision {precision}")
    with pytest.raises(UserError) as error:
        Engine(config, ALONE)
    assert str(error.value) == (
        f"train.attention: flash, but cpu has no flash kernel for {precision}, head dim 16, dropout 0.1; "
        "use auto or math"
    )


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
@pytest.mark.parametrize(("ring", "needs"), [("", ""), ("--parallel.ranks 2 --parallel.context 2", ", ring attention")])
def test_a_kernel_of_another_device_is_one_line_that_says_what_there_is(name, ring, needs):
    with pytest.raises(UserError) as error:
        choose_kernel(_config(f"--train.attention {name} {ring}"), ALONE.device)
    assert str(error.value) == (
        f"train.attention: {name}, but cpu has no {name} kernel for fp32, head dim 16{needs}; use auto or flash or math"
    )


@pytest.mark.parametrize(("flags", "kernel"), [("", "flash"), ("--model.dropout 0.1", "math")])
def test_auto_says_what_torch_chooses(flags, kernel):
    config = _config(flags)
    assert Engine(config, ALONE).kernel == kernel
    assert _kernels(ALONE, config) == {FLASH if kernel == "flash" else MATH}


@pytest.mark.parametrize("flags", ["", "--data.mask-documents", "--train.precision bf16", "--model.kv-heads 1"])
def test_a_fused_kernel_that_the_device_has_is_used(flags):
    config = _config(f"--train.attention flash --model.family llama {flags}")
    state = torch.get_rng_state()
    assert choose_kernel(config, ALONE.device) == "flash"
    assert torch.equal(torch.get_rng_state(), state)
    assert _kernels(ALONE, config) == {FLASH}
