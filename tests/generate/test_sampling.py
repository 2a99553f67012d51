import math
from collections import Counter

import pytest
import torch

from polarlm.config import UserError
from polarlm.generate import Sampler, Settings


def draws(logits, count, vocab_size=None, **settings):
    sampler = Sampler(Settings(**{"seed": 0} | settings), vocab_size or len(logits))
    return Counter(sampler(logits) for _ in range(count))


def shares(logits, **settings):
    return {token: count / 4000 for token, count in draws(logits, 4000, **settings).items()}


LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 3.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    expected = (LOGITS / temperature).softmax(0).tolist()
    seen = shares(LOGITS, temperature=temperature)
    assert [seen.get(token, 0) for token in range(5)] == pytest.approx(expected, abs=0.03)


def test_top_k_draws_among_the_k_most_likely():
    expected = LOGITS[[4, 1]].softmax(0).tolist()
    seen = shares(LOGITS, top_k=2)
    assert set(seen) == {4, 1}
    assert [seen[4], seen[1]] == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_k_where_many_are_equal():
    assert len(draws(torch.zeros(50), 500, top_k=3)) == 3


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, [0]), (0.6, [0, 1]), (0.85, [0, 1, 2]), (1.0, [0, 1, 2, 3])])
def test_top_p_draws_among_the_fewest_that_reach_it(top_p, kept):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    seen = draws(logits, 1000, top_p=top_p)
    assert sorted(seen) == kept


def test_top_p_counts_the_share_among_the_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()  # among the top 2 the first has 0.57
    assert sorted(draws(logits, 500, top_k=2, top_p=0.5)) == [0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.1}])
def test_temperature_zero_is_the_most_likely_for_any_seed(settings):
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for seed in range(3):
        assert set(draws(logits, 3, **settings | {"temperature": 0, "seed": seed})) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_a_tiny_temperature_is_nearly_zero(temperature):
    assert set(draws(LOGITS * 1e4, 20, temperature=temperature)) == {4}


def test_same_seed_same_draws_and_none_is_new():
    logits = torch.zeros(10**6)
    assert draws(logits, 5, seed=7) == draws(logits, 5, seed=7)
    assert draws(logits, 5, seed=7) != draws(logits, 5, seed=8)
    assert draws(logits, 5, seed=None) != draws(logits, 5, seed=None)


@pytest.mark.parametrize("temperature", [0, 1.0, 100.0])
def test_rows_that_pad_the_vocabulary_are_never_chosen(temperature):
    """Vocabulary 257 + 3 added tokens, padded to 384; the pads look likeliest."""
    logits = torch.randn(384, generator=torch.Generator().manual_seed(2))
    logits[260:] = 10
    assert max(draws(logits, 10000, vocab_size=260, temperature=temperature)) < 260


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("max_tokens", -1),
        ("stop", ("a", "")),
        ("seed", -1),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=f"^{field}: "):
        Settings(**{field: value})
