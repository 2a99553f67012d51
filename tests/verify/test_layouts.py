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


def test_both_small_models_can_take_every_layout_of_the_list():
    for flags in models_of([]).values():
        for name in NAMES:
            assert run_of(flags, parse_layout(name)).parallel.ranks == parse_layout(name).ranks


@pytest.mark.parametrize("axis", ["data", "zero1", "zero2", "zero3", "tensor", "ring", "ulysses", "pipeline"])
def test_the_list_has_every_axis_and_a_word_chooses_all_that_have_it(axis):
    chosen = [layout.name for layout in choose_layouts(axis)]
    assert chosen == [name for name in NAMES if f"-{axis}" in f"-{name}"]
    assert chosen


def test_names_are_joined_by_commas_and_may_be_of_no_list():
    chosen = choose_layouts("tensor2,tensor8-data2,tensor2")
    assert [(layout.name, layout.ranks) for layout in chosen] == [("tensor2", 2), ("tensor8-data2", 16)]


@pytest.mark.parametrize("wanted", ["tensr2", "tensor2-wat", "2tensor", ",", "data0", "data2-data2", "ring2-ulysses2"])
def test_a_word_that_means_nothing_is_named(wanted):
    with pytest.raises(UserError, match="--layouts: "):
        choose_layouts(wanted)
