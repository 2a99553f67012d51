"""FLOPs by hand: the products of a small GPT and of a small Llama, counted on paper."""

import pytest

from polarlm.config import ModelConfig
from polarlm.plan import attention_score_flops, hardware_flops, megatron_tflops_per_device, model_flops

GPT = ModelConfig(family="gpt", layers=2, hidden=64, heads=4, ffn=256, vocab_size=256)
LLAMA = ModelConfig(family="llama", layers=2, hidden=64, heads=4, kv_heads=2, ffn=176, vocab_size=256)
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
