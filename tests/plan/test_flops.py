"""FLOPs by hand: the products of a small GPT and of a small Llama, counted on paper, and by torch as they are run."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polarlm.config import ModelConfig
from polarlm.model import Transformer, initialise
from polarlm.plan import attention_score_flops, hardware_flops, megatron_tflops_per_device, model_flops

SIZE = {"layers": 2, "hidden": 64, "heads": 4, "vocab_size": 256, "max_positions": 128}
GPT = ModelConfig(family="gpt", ffn=256, **SIZE)
LLAMA = ModelConfig(family="llama", kv_heads=2, ffn=176, **SIZE)
BATCH, SEQ = 4, 128
TOKENS = BATCH * SEQ


def test_gpt_step_is_three_forwards():
    assert model_flops(GPT, TOKENS, SEQ, causal=False) == 3 * 150_994_944 == 452_984_832


def test_gpt_step_is_the_published_formula():
    layers, hidden, vocab = 2, 64, 256
    published = 72 * BATCH * SEQ * layers * hidden**2 * (1 + SEQ / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops(GPT, TOKENS, SEQ, causal=False) == pytest.approx(published, rel=1e-12)


def test_full_recompute_repeats_the_blocks_but_not_the_head():
    assert hardware_flops(GPT, TOKENS, SEQ, recompute="full", causal=False) == 587_202_560
    assert hardware_flops(GPT, TOKENS, SEQ, recompute="none", causal=False) == 452_984_832


def test_every_second_block_repeats_half_of_it():
    repeated = 587_202_560 - 452_984_832
    got = hardware_flops(GPT, TOKENS, SEQ, recompute="full", recompute_every=2, causal=False)
    assert got == 452_984_832 + repeated // 2


def test_selective_recompute_repeats_the_attention_scores_alone():
    assert hardware_flops(GPT, TOKENS, SEQ, recompute="selective", causal=False) == 452_984_832 + 100_663_296 // 3


def test_attention_scores_alone():
    assert 3 * GPT.layers * attention_score_flops(GPT, TOKENS, SEQ, causal=False) == 100_663_296


def test_llama_with_grouped_heads_full_and_causal():
    assert model_flops(LLAMA, TOKENS, SEQ, causal=False) == 434_110_464
    assert model_flops(LLAMA, TOKENS, SEQ, causal=True) == 383_778_816


@pytest.mark.parametrize(("recompute", "passes"), [("none", 3), ("full", 4)])
def test_megatron_formula_keeps_the_original_head_term(recompute, passes):
    got = megatron_tflops_per_device(GPT, BATCH, SEQ, seconds=2.0, devices=8, recompute=recompute)
    inner = 1 + 128 / 384 + 256 / (16 * 2 * 64)
    assert got == pytest.approx(24 * passes * 4 * 128 * 2 * 64**2 * inner / (2.0 * 8 * 1e12))


def test_megatron_formula_in_numbers():
    """The deck's command, 24·3·1·1024·48·1536²·(1 + 1024/9216 + 50257/1179648) operations, in 2 s on 4 devices."""
    deck = ModelConfig(preset="GPT1_5B")
    got = megatron_tflops_per_device(deck, 1, 1024, seconds=2.0, devices=4, recompute="none")
    assert got == pytest.approx(1.20411, rel=1e-5)


def _counted_by_torch(model, loss_of):
    """Operations of a step's matrix products, as torch meets them; attention in plain products, so not halved."""
    transformer = Transformer(model)
    initialise(transformer, model, seed=1)
    tokens = torch.randint(model.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    in_place = {torch.ops.aten.addmm_: _product}  # torch knows this operation, but not in place
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        loss_of(transformer, tokens, torch.arange(SEQ).expand(BATCH, -1)).backward()
    return counter.get_total_flops()


def _product(total, left, right, **_):
    return 2 * left[0] * left[1] * right[1]


def _plain_loss(transformer, tokens, positions):
    return torch.nn.functional.cross_entropy(transformer(tokens, positions).flatten(0, 1), tokens.flatten())


def _own_loss(transformer, tokens, positions):
    return transformer(tokens, positions, None, tokens)


@pytest.mark.parametrize("loss_of", [_plain_loss, _own_loss])
@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_a_step_is_what_torch_counts(model, loss_of):
    assert _counted_by_torch(model, loss_of) == model_flops(model, TOKENS, SEQ, causal=False)


def test_tiles_repeat_the_feed_forward():
    whole, tiled = (hardware_flops(GPT, TOKENS, SEQ, recompute="none", tile=tile) for tile in (SEQ, SEQ // 2))
    assert tiled - whole == 2 * TOKENS * 4 * 64 * 256  # 2 layers, H 64, F 256
