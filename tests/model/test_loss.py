"""The fused loss against the plain one: the same sum, the same gradients, never all the logits."""

import pytest
import torch
import torch.nn.functional as F

from polarlm.model import IGNORED, CrossEntropy, loss


def _plain(hidden, weight, targets):
    logits = F.linear(hidden, weight).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def _run(function, hidden, weight, targets, scale=1 / 7, autocast=False):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total = function(hidden, weight, targets)
    (total * scale).backward()
    return total.detach(), hidden.grad, weight.grad


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 170, 24, generator=generator)
    weight = torch.randn(101, 24, generator=generator)
    targets = torch.randint(101, (3, 170), generator=generator)
    targets[0, :60] = targets[2, 100:] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_logits", [1, 101 * 300, 1 << 20])
def test_sum_and_gradients_are_the_plain_ones(inputs, chunk_logits, monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", chunk_logits)
    for got, expected in zip(_run(CrossEntropy(), *inputs), _run(_plain, *inputs), strict=True):
        assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("chunk_logits", [1, 1 << 20])
def test_rows_are_kept_where_they_are_asked_for_and_in_training_only(inputs, chunk_logits, monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", chunk_logits)
    hidden, weight, targets = inputs
    module, plain = CrossEntropy(), _run(CrossEntropy(), *inputs)
    module.rows = []
    for got, expected in zip(_run(module, *inputs), plain, strict=True):
        assert torch.equal(got, expected)
    module.eval()(*inputs)
    (rows,) = module.rows
    alone = [_plain(hidden[row : row + 1], weight, targets[row : row + 1]).item() for row in range(3)]
    assert rows[:, 0].tolist() == pytest.approx(alone, rel=1e-6)
    assert rows[:, 1].tolist() == [110, 170, 100]


def test_under_autocast_the_products_are_bf16_and_the_gradients_fp32(inputs):
    got, expected = _run(CrossEntropy(), *inputs, autocast=True), _run(_plain, *inputs, autocast=True)
    assert [x.dtype for x in got] == [torch.float32] * 3
    assert got[0] == pytest.approx(expected[0].item(), rel=1e-3)
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_large_logits_do_not_overflow(inputs):
    hidden, weight, targets = inputs
    for got, expected in zip(_run(CrossEntropy(), hidden * 1e4, weight, targets),
                             _run(_plain, hidden * 1e4, weight, targets), strict=True):  # fmt: skip
        assert torch.isfinite(got).all()
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.01, 0.0), (0.0, 0.1), (0.02, 0.3)])
def test_z_loss_and_label_smoothing_are_their_formulas_and_only_in_training(inputs, z_loss, smoothing):
    def by_torch(hidden, weight, targets):
        logits = F.linear(hidden, weight).flatten(0, 1)
        wanted = targets.flatten()
        loss = F.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
        return loss + z_loss * (logits.logsumexp(1) ** 2)[wanted != IGNORED].sum()

    module = CrossEntropy(z_loss, smoothing)
    for got, expected in zip(_run(module, *inputs), _run(by_torch, *inputs), strict=True):
        assert (got - expected).norm() <= 1e-6 * expected.norm()
    module.eval()
    assert module(*inputs) == pytest.approx(_plain(*inputs).item(), rel=1e-6)


def test_without_trained_tokens_all_is_zero(inputs):
    hidden, weight, targets = inputs
    assert all((x == 0).all() for x in _run(CrossEntropy(), hidden, weight, torch.full_like(targets, IGNORED)))


def test_without_gradients_none_are_made(inputs):
    hidden, weight, targets = inputs
    with torch.no_grad():
        total = CrossEntropy()(hidden, weight, targets)
    assert total == pytest.approx(_plain(hidden, weight, targets).item(), rel=1e-6)


def test_more_chunks_make_bf16_no_worse(inputs, monkeypatch):
    exact = _run(CrossEntropy(), *inputs)[2]

    def error():
        return (_run(CrossEntropy(), *inputs, autocast=True)[2] - exact).norm() / exact.norm()

    one_chunk = error()
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 1)
    monkeypatch.setattr(loss, "_FEWEST_ROWS", 4)
    assert 0 < error() < 1.2 * one_chunk


def test_the_gradient_of_a_bf16_weight_is_rounded_once(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_LOGITS", 1)
    tokens = 40 * loss._FEWEST_ROWS  # in 40 chunks, each of which adds as much
    hidden, weight = torch.ones(1, tokens, 8, dtype=torch.bfloat16), torch.zeros(16, 8, dtype=torch.bfloat16)
    _, _, grad = _run(CrossEntropy(), hidden, weight, torch.zeros(1, tokens, dtype=torch.int64), scale=1 / tokens)
    assert grad.dtype == torch.bfloat16
    expected = torch.full((16, 8), 1 / 16) - F.one_hot(torch.tensor(0), 16)[:, None]
    torch.testing.assert_close(grad.float(), expected, rtol=2**-8, atol=0)
