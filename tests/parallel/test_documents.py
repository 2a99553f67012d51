"""Packed documents on ranks that share sequences: each document is as if it were alone."""

import pytest
import torch

from parallel.reference import DOCUMENTS, assert_close, assert_same_run, global_batch, plain_steps, train
from ranks import run_ranks

ULYSSES, RING = ("--parallel.context-method", "ulysses"), ("--parallel.context-method", "ring")
HYBRID = ("--parallel.context-method", "hybrid", "--parallel.context-ulysses")
LAYOUTS = {
    "alone": (1, []),
    "zero 3 x2": (2, ["--parallel.zero-stage", "3"]),
    "tensor 2": (2, ["--parallel.tensor", "2"]),
    "ulysses 2": (2, ["--parallel.context", "2", *ULYSSES]),
    "ulysses 2 x zero 3": (4, ["--parallel.context", "2", *ULYSSES, "--parallel.zero-stage", "3"]),
    "ring 2": (2, ["--parallel.context", "2", *RING]),
    "ring 4": (4, ["--parallel.context", "4", *RING]),
    "hybrid 2 x 2": (4, ["--parallel.context", "4", *HYBRID, "2"]),
    "hybrid 2 x 4, zero 3": (8, ["--parallel.context", "8", *HYBRID, "4", "--parallel.zero-stage", "3"]),
    "ring 2 x tensor 2": (4, ["--parallel.context", "2", *RING, "--parallel.tensor", "2"]),
}


@pytest.mark.parametrize(
    ("family", "layout"), [*(("llama", layout) for layout in LAYOUTS), ("gpt", "ulysses 2"), ("gpt", "ring 4")]
)
def test_documents_do_not_see_each_other_on_any_layout(family, layout):
    ranks, flags = LAYOUTS[layout]
    results = run_ranks(ranks, train, family, flags, 2, 0.1, True)
    assert_same_run(results, plain_steps(family, 0.1, packed=True))


def test_the_documents_try_what_can_go_wrong():
    lengths = {length for document in DOCUMENTS for length in document}
    assert {1, 16} <= lengths  # of one token, and over every share
    borders = range(2, 16, 2)  # of the eight chunks of a ring of four
    cut = {border for row in DOCUMENTS for border in borders if border not in torch.tensor(row).cumsum(0)}
    assert cut == set(borders)
    with pytest.raises(AssertionError):  # masks change the gradients, so that a lost mask would be seen
        assert_close(plain_steps("llama", 0.1, packed=True)[1], plain_steps("llama", 0.1)[1])
    assert torch.equal(global_batch(0, packed=True)[0], global_batch(0)[0])
