import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polarlm.config import ModelConfig
from polarlm.model import CausalAttention, CrossEntropy, Transformer, draw, initialise

VOCABULARY = 61


def config(family="llama", **fields):
    shape = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab_size": VOCABULARY, "max_positions": 32}
    return ModelConfig(**{"family": family, "init_std": 0.2} | shape | fields)


def build(family="llama", **fields):
    shape = config(family, **fields)
    model = Transformer(shape)
    initialise(model, shape, seed=3)
    return model


def random_tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_documents_in_one_row_are_as_if_alone(family):
    model = build(family, kv_heads=2)
    lengths = (5, 1, 9)
    tokens = random_tokens(2, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    documents = torch.cat([torch.full((n,), number) for number, n in enumerate(lengths)]).expand(2, -1)
    packed = model(tokens, positions, documents)
    alone = [model(part, torch.arange(part.shape[1])[None]) for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-5)
    assert (model(tokens, positions) - packed).abs().max() > 1e-2


def test_no_token_sees_the_future():
    model = build()
    tokens = random_tokens(1, 12)
    changed = tokens.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCABULARY
    positions = torch.arange(12)[None]
    before, after = model(tokens, positions), model(changed, positions)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-6)
    assert (after[:, 7:] - before[:, 7:]).abs().max() > 1e-2


def test_loss_is_the_sum_over_trained_tokens():
    model = build()
    tokens, positions = random_tokens(2, 10), torch.arange(10)[None]
    targets = random_tokens(2, 11)[:, 1:].clone()
    targets[0, 3:] = -100
    chosen = model(tokens, positions).double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -(chosen * (targets != -100)).sum()
    assert model(tokens, positions, targets=targets).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_without_trained_tokens_gives_zeros():
    model = build()
    loss = model(random_tokens(2, 10), torch.arange(10)[None], targets=torch.full((2, 10), -100))
    loss.backward()
    assert loss.item() == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_loss_in_bf16_is_summed_in_fp32():
    hidden, weight = torch.randn(1, 512, 16).bfloat16(), torch.randn(VOCABULARY, 16).bfloat16()
    targets = random_tokens(1, 512)
    loss = CrossEntropy()(hidden, weight, targets)
    exact = CrossEntropy()(hidden.float(), weight.float(), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_gradient_of_a_tied_embedding_is_the_sum_of_both_uses(family):
    tied = build(family, tied_embeddings=True)
    untied = build(family, tied_embeddings=False)
    untied.head.weight.data.copy_(untied.embedding.tokens.weight.data)
    tokens, positions, targets = random_tokens(2, 10), torch.arange(10)[None], random_tokens(2, 10)
    for model in (tied, untied):
        model(tokens, positions, targets=targets).backward()
    both = untied.embedding.tokens.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.tokens.weight.grad, both, rtol=1e-5, atol=1e-5)


def test_a_tied_head_is_one_parameter_wherever_the_model_goes():
    with torch.device("meta"):
        model = Transformer(config(tied_embeddings=True))
    model.to_empty(device="cpu")
    initialise(model, model.config, seed=3)
    model.double()
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.tokens.weight" in names
    assert "head.weight" not in names
    assert model.head.weight is model.embedding.tokens.weight


def test_from_the_meta_device_is_the_same_model():
    with torch.device("meta"):
        model = Transformer(config())
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    initialise(model, model.config, seed=3)
    tokens, positions = random_tokens(2, 10), torch.arange(10)[None]
    assert torch.equal(model(tokens, positions), build()(tokens, positions))


def test_building_draws_nothing():
    before = torch.get_rng_state()
    Transformer(config("gpt"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_two_stages_are_the_whole(family):
    whole, first, last = (build(family, layers=3, tied_embeddings=False) for _ in range(3))
    first.norm = first.head = None
    del first.blocks["2"]
    last.embedding = None
    del last.blocks["0"], last.blocks["1"]
    names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    tokens, positions, targets = random_tokens(2, 10), torch.arange(10)[None], random_tokens(2, 10)
    loss = last(first(tokens, positions), positions, targets=targets)
    assert torch.equal(loss, whole(tokens, positions, targets=targets))


def test_initial_values_depend_on_seed_and_name_alone():
    whole = dict(build(layers=3).named_parameters())
    stage = Transformer(config(layers=3))
    stage.embedding = stage.head = None
    del stage.blocks["0"]
    initialise(stage, stage.config, seed=3)
    for name, parameter in reversed(list(stage.named_parameters())):
        assert torch.equal(parameter, whole[name])
        assert torch.equal(draw(name, parameter.shape, stage.config, seed=3), parameter)
    a, b = whole["blocks.0.attention.q.weight"], whole["blocks.1.attention.q.weight"]
    assert not torch.equal(a, b)
    assert not torch.equal(a, draw("blocks.0.attention.q.weight", a.shape, stage.config, seed=4))


def test_a_tied_head_on_its_own_starts_as_the_embedding():
    tied = config(tied_embeddings=True)
    head = draw("head.weight", (VOCABULARY, 32), tied, seed=3)
    assert torch.equal(head, draw("embedding.tokens.weight", (VOCABULARY, 32), tied, seed=3))


def test_spread_of_the_initial_values():
    shape = config("gpt", layers=8, hidden=256, init_std=0.02, qk_norm=True)
    model = Transformer(shape)
    initialise(model, shape, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 1e-3, name


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_runs_on_the_flash_kernel(kv_heads):
    q, k = torch.randn(2, 4, 16, 8, requires_grad=True), torch.randn(2, kv_heads, 16, 8, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # any other kernel is an error in here
        CausalAttention()(q, k, k).sum().backward()


def test_dropout_acts_in_training_only():
    model = build("gpt", dropout=0.5)
    tokens, positions = random_tokens(2, 10), torch.arange(10)[None]
    model.eval()
    assert torch.equal(model(tokens, positions), build("gpt")(tokens, positions))
    model.train()
    assert not torch.equal(model(tokens, positions), model(tokens, positions))


def test_attention_probabilities_are_dropped_too():
    core, x = CausalAttention(dropout=0.5), torch.ones(1, 1, 64, 8)
    dropped = core(x, x, x)
    assert dropped.std() > 0.1
    assert torch.allclose(core.eval()(x, x, x), x)
