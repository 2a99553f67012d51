"""`train.attention` decides which kernel computes attention."""

import pytest
import torch

from polarlm.config import load_run
from polarlm.parallel import Device, Engine, World

FLASH, MATH = "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_attention_math"


def _kernels(environment):
    """The attention operations that a step really ran, on a CPU, whose plain choice is its flash kernel."""
    flags = "--model.layers 1 --model.hidden 32 --model.heads 2 --model.vocab-size 61 --train.seq-len 8 --train.steps 1"
    config = load_run(None, environment=environment, flags=flags.split()).config
    engine = Engine(config, World(0, 1, Device(torch.device("cpu"))))
    tokens = torch.arange(8)[None]
    with torch.profiler.profile() as profile:
        engine.forward_backward([(tokens, tokens, None, tokens)], 8)
    return {event.key for event in profile.key_averages()} & {FLASH, MATH}


@pytest.mark.parametrize(("text", "kernel"), [("", FLASH), ("1", FLASH), ("0", MATH)])
def test_the_decks_variable_chooses_the_kernel(text, kernel):
    assert _kernels({"USE_FLASH_ATTN": text}) == {kernel}
