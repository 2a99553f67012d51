import pytest
import torch

from polarlm.config import ModelConfig
from polarlm.generate import KVCache
from polarlm.model import CausalAttention, Transformer, initialise

VOCABULARY = 61
KINDS = {"gpt": {"family": "gpt"}, "llama-gqa": {"family": "llama", "kv_heads": 2}}


@pytest.fixture(params=KINDS)
def model(request):
    shape = {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": VOCABULARY, "max_positions": 40, "init_std": 0.2}
    config = ModelConfig(**shape, **KINDS[request.param])
    model = Transformer(config)
    initialise(model, config, seed=3)
    return model.eval()


def random_tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))


def whole(model, tokens):
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1])[None])


@pytest.mark.parametrize("prefill", [1, 3, 10])
def test_logits_of_thirty_steps_are_those_without_a_cache(model, prefill):
    tokens = random_tokens(2, 40)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    with KVCache(model, capacity=40) as cache:
        read = [cache.read(some, everything[:, : some.shape[1]]) for some in tokens[:, :10].split(prefill, 1)]
        read += [cache.read(tokens[:, i : i + 1], everything[:, :1]) for i in range(10, 40)]
    assert (torch.cat(read, 1) - whole(model, tokens)).abs().max() < 1e-5


def test_pads_change_nothing_wherever_they_are(model):
    tokens = random_tokens(3, 12)
    is_real = torch.ones(3, 12, dtype=torch.bool)
    is_real[0, :5] = False
    is_real[1, 4:6] = False
    is_real[2, 9:] = False
    with KVCache(model, capacity=12) as cache:
        read = [cache.read(some, real) for some, real in zip(tokens.split(5, 1), is_real.split(5, 1), strict=True)]
    logits = torch.cat(read, 1)
    assert logits.isfinite().all()
    for row in range(3):
        alone = whole(model, tokens[row, is_real[row]][None])
        assert (logits[row, is_real[row]] - alone[0]).abs().max() < 1e-5


def overfill(model, tokens):
    is_real = torch.ones_like(tokens, dtype=torch.bool)
    with KVCache(model, capacity=15) as cache:
        for _ in range(2):
            cache.read(tokens, is_real)


def test_the_model_is_as_before_even_when_reading_failed(model):
    tokens = random_tokens(2, 10)
    before = whole(model, tokens)
    with pytest.raises(AssertionError, match="no room"):
        overfill(model, tokens)
    assert all(type(block.attention.core) is CausalAttention for block in model.blocks.values())
    assert torch.equal(whole(model, tokens), before)
    model(tokens, torch.arange(10)[None], targets=tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
