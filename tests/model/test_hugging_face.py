"""Our models compute what `transformers`' own do: logits, loss and every gradient, in fp32."""

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from polarlm.config import ModelConfig
from polarlm.model import Transformer

VOCABULARY, HIDDEN, FFN, HEADS, LAYERS, POSITIONS = 97, 64, 96, 4, 2, 64
SHAPE = {
    "hidden": HIDDEN,
    "ffn": FFN,
    "heads": HEADS,
    "layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_positions": POSITIONS,
}
LLAMA_SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}

LLAMA_NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
}
LLAMA_NAMES |= {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"}
LLAMA_NAMES |= {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
LLAMA_NAMES |= {f"feed_forward.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}

GPT2_NAMES = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
GPT2_TRANSPOSED = ("attention.output", "feed_forward.up", "feed_forward.down")


def llama_value(name, theirs):
    """Their tensor for our parameter's name, from a mapping of their tensors by their names."""
    owner, _, kind = name.rpartition(".")
    if not owner.startswith("blocks."):
        return theirs[f"{LLAMA_NAMES[owner]}.{kind}"]
    _, number, part = owner.split(".", 2)
    return theirs[f"model.layers.{number}.{LLAMA_NAMES[part]}.{kind}"]


def gpt2_value(name, theirs):
    """As `llama_value`; GPT-2 stores its matrices transposed, and query, key and value in one."""
    owner, _, kind = name.rpartition(".")
    if not owner.startswith("blocks."):
        return theirs[f"{GPT2_NAMES[owner]}.{kind}"]
    _, number, part = owner.split(".", 2)
    block = f"transformer.h.{number}"
    if part in ("attention.q", "attention.k", "attention.v"):
        value = theirs[f"{block}.attn.c_attn.{kind}"].chunk(3, -1)["qkv".index(part[-1])]
        return value.mT if kind == "weight" else value
    value = theirs[f"{block}.{GPT2_NAMES[part]}.{kind}"]
    return value.mT if kind == "weight" and part in GPT2_TRANSPOSED else value


def gpt2():
    theirs = GPT2Config(
        n_embd=HIDDEN, n_inner=FFN, n_head=HEADS, n_layer=LAYERS, vocab_size=VOCABULARY, n_positions=POSITIONS
    )
    return GPT2LMHeadModel(theirs), ModelConfig(family="gpt", **SHAPE), gpt2_value


def llama(kv_heads, tied, scaled):
    rope = LLAMA3 if scaled else {"rope_type": "default", "rope_theta": 500000.0}
    theirs = LlamaConfig(
        **LLAMA_SHAPE,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        rope_parameters=rope,
    )
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 16}
    ours = ModelConfig(
        family="llama",
        **SHAPE,
        kv_heads=kv_heads,
        norm_eps=1e-6,
        rope_base=500000.0,
        tied_embeddings=tied,
        rope_scaling=scaling if scaled else None,
    )
    return LlamaForCausalLM(theirs), ours, llama_value


def qwen2():
    theirs = Qwen2Config(**LLAMA_SHAPE, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True)
    ours = ModelConfig(family="llama", **SHAPE, kv_heads=2, norm_eps=1e-6, qkv_bias=True, tied_embeddings=True)
    return Qwen2ForCausalLM(theirs), ours, llama_value


def qwen3():
    theirs = Qwen3Config(**LLAMA_SHAPE, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
    ours = ModelConfig(family="llama", **SHAPE, kv_heads=2, head_dim=32, norm_eps=1e-6, qk_norm=True)
    return Qwen3ForCausalLM(theirs), ours, llama_value


FAMILIES = {
    "gpt2": gpt2,
    "llama-mqa": lambda: llama(1, tied=True, scaled=False),
    "llama-gqa": lambda: llama(2, tied=False, scaled=False),
    "llama-mha": lambda: llama(4, tied=False, scaled=False),
    "llama-3.1": lambda: llama(2, tied=True, scaled=True),
    "qwen2": qwen2,
    "qwen3": qwen3,
}


@pytest.fixture(params=FAMILIES)
def pair(request):
    """(their model, ours with the same weights, how to find their value of our parameter)."""
    torch.manual_seed(0)
    theirs, config, value = FAMILIES[request.param]()
    for parameter in theirs.parameters():  # away from initial values, where biases, gains and so much else do nothing
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    ours = Transformer(config)
    tensors = theirs.state_dict()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(value(name, tensors))
    return theirs.eval(), ours.eval(), value


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (3, POSITIONS), generator=torch.Generator().manual_seed(1))


def test_same_logits(pair, tokens):
    theirs, ours, _ = pair
    with torch.no_grad():
        expected = theirs(tokens).logits
        logits = ours(tokens, torch.arange(POSITIONS)[None])
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5


def test_same_number_of_parameters(pair, tokens):
    theirs, ours, _ = pair
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_same_loss_and_gradients(pair, tokens):
    theirs, ours, value = pair
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[0, 5:20] = -100
    labels = tokens.clone()
    labels[:, 1:] = targets[:, :-1]
    expected = theirs(tokens, labels=labels).loss * (targets != -100).sum()
    expected.backward()
    loss = ours(tokens, torch.arange(POSITIONS)[None], targets=targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient = value(name, gradients)
        # The bias of a key moves every score of a query alike: its gradient is zero, and what is left is rounding.
        assert name.endswith("k.bias") or (parameter.grad - gradient).norm() < 1e-5 * gradient.norm(), name
