"""Parameter counts against published sizes and against `transformers` models on the meta device."""

import pytest
import torch
import transformers

from polarlm.config import ModelConfig
from polarlm.model import Transformer
from polarlm.plan import count_parameters


def _transformers_count(model_class, config):
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())


def test_gpt2_small():
    ours = ModelConfig(family="gpt", layers=12, hidden=768, heads=12, vocab_size=50257, max_positions=1024)
    theirs = _transformers_count(transformers.GPT2LMHeadModel, transformers.GPT2Config())
    assert count_parameters(ours) == theirs == 124_439_808


@pytest.mark.parametrize("tied", [True, False])
def test_llama_with_grouped_heads(tied):
    ours = ModelConfig(
        family="llama", layers=3, hidden=64, heads=4, kv_heads=2, ffn=176, vocab_size=257, tied_embeddings=tied
    )
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=176,
        vocab_size=257, tie_word_embeddings=tied,
    )  # fmt: skip
    assert count_parameters(ours) == _transformers_count(transformers.LlamaForCausalLM, config)


def test_qwen3_has_query_and_key_norms():
    ours = ModelConfig(
        family="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, vocab_size=100, qk_norm=True
    )
    config = transformers.Qwen3Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, vocab_size=100, tie_word_embeddings=False,
    )  # fmt: skip
    assert count_parameters(ours) == _transformers_count(transformers.Qwen3ForCausalLM, config)


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"bias": True, "tied_embeddings": False},
        {"bias": False, "qkv_bias": True, "norm": "layernorm"},
        {"qk_norm": True, "kv_heads": 2, "head_dim": 24},
        {"position_embedding": "learned", "activation": "swiglu", "norm": "rmsnorm"},
    ],
)
def test_our_own_model_under_every_switch(family, switches):
    config = ModelConfig(family=family, layers=2, hidden=64, heads=4, vocab_size=61, max_positions=32, **switches)
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
