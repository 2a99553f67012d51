"""The names of layouts: what they mean, and which of them a word chooses."""

import pytest

from polarlm.config import UserError
from polarlm.verify import NAMES, choose_layouts, parse_layout
from polarlm.verify.models import models_of, run_of


def test_a_name_says_its_ranks_and_fields():
    layout = parse_layout("pipeline2-zbvzerobubble-ulysses2-zero3-groups2-data4")
    assert (layout.ranks, layout.data) == (16, 4)
    assert " ".join(layout.flags) == (
        "--parallel.pipeline 2 --parallel.pipeline-schedule zbvzerobubble --parallel.context-method ulysses "
        "--parallel.context 2 --parallel.zero-stage 3 --parallel.hybrid 2 --parallel.ranks 16"
    )


def test_every_name_of_the_list_means_something_and_stands_there_once():
    assert len(set(NAMES)) == len(NAMES)
    assert {parse_layout(name).ranks for name in NAMES} == {1, 2, 4, 8}
    assert [layout.name for layout in choose_layouts("all")] == list(NAMES)


def test_the_small_models_can_take_every_layout_of_the_list_but_for_norms_that_gpt_has_not():
    for family, flags in models_of([]).items():
        for name in NAMES:
            if family == "gpt" and name.endswith("plainnorms"):
                with pytest.raises(UserError, match=r"train\.fused_norms: .* model\.norm is layernorm"):
                    run_of(flags, parse_layout(name))
            else:
                assert run_of(flags, parse_layout(name)).parallel.ranks == parse_layout(name).ranks


@pytest.mark.parametrize("axis", ["data", "zero1", "zero2", "zero3", "tensor", "ring", "ulysses", "hybrid", "pipeline"])
def test_the_list_has_every_axis_and_a_word_chooses_all_that_have_it(axis):
    chosen = [layout.name for layout in choose_layouts(axis)]
    assert chosen == [name for name in NAMES if f"-{axis}" in f"-{name}"]
    assert chosen


def test_names_are_joined_by_commas_and_may_be_of_no_list():
    chosen = choose_layouts("tensor2,tensor8-data2,tensor2")
    assert [(layout.name, layout.ranks) for layout in chosen] == [("tensor2", 2), ("tensor8-data2", 16)]


@pytest.mark.parametrize("name", ["inner4-hybrid8", "hybrid8-inner4"])
def test_a_hybrid_has_2_neighbours_that_share_heads_unless_it_says(name):
    flags = " ".join(parse_layout(name).flags)
    assert "--parallel.context-ulysses 4" in flags
    assert "--parallel.context-ulysses 2" not in flags
    assert "--parallel.context-ulysses 2" in " ".join(parse_layout("hybrid8").flags)


@pytest.mark.parametrize("wanted", ["tensr2", "tensor2-wat", "2tensor", ","])
def test_a_word_that_means_nothing_is_named(wanted):
    with pytest.raises(UserError, match="--layouts: "):
        choose_layouts(wanted)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("data0", "'data0' in 'data0' cannot be: a degree is 1 or more"),
        ("data2-tensor2-data4", "'data4' in 'data2-tensor2-data4' cannot be: data has its degree already, 2"),
        (
            "ring2-ulysses2",
            "'ulysses2' in 'ring2-ulysses2' cannot be: sequences are shared by ring already; .* hybrid4",
        ),
        ("hybrid4-ring2", "'ring2' in 'hybrid4-ring2' cannot be: sequences are shared by hybrid already"),
    ],
)
def test_an_axis_has_one_degree(wanted, why):
    with pytest.raises(UserError, match=f"--layouts: {why}"):
        choose_layouts(wanted)
