"""Differences, and that NaN and what is missing are the worst of all."""

import math

import pytest
import torch

from polarlm.verify import Row
from polarlm.verify.compare import differences, is_rounding, merge, relative, worst, worst_name

NAN = math.nan


@pytest.mark.parametrize("values", [[NAN, 1.0], [1.0, NAN], [NAN], []])
def test_nan_is_the_worst(values):
    assert math.isnan(worst(values))
    assert not is_rounding(worst(values), 1.0)


def test_a_difference_is_relative_to_its_tensor_and_a_little_of_all():
    expected = {"a": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "zero": torch.tensor([0.0, 0.01])}
    assert differences(found.items(), expected) == pytest.approx({"a": 0.5 / 5.05, "zero": 0.01 / 0.05})


@pytest.mark.parametrize("found", [None, torch.zeros(3), torch.tensor([NAN, 1.0])])
def test_no_tensor_another_shape_and_nan_are_nan(found):
    (value,) = differences([("a", found)], {"a": torch.ones(2)}).values()
    assert math.isnan(value)


def test_ranks_are_merged_in_the_order_of_the_model():
    of_ranks = [{"b": 1.0, "strange": NAN}, {"b": 3.0, "head.weight": 9.0}]
    merged = merge(of_ranks, ["a", "b"], ignored=["head.weight"])
    assert list(merged) == ["a", "b", "strange"]
    assert merged["b"] == 3.0
    assert math.isnan(merged["a"])  # no rank holds it
    assert worst_name(merged) in ("a", "strange")


def test_series_are_compared_by_their_worst_number():
    assert relative([1.0, 2.2, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.1)
    assert math.isnan(relative([1.0, NAN], [1.0, 2.0]))


GOOD = {"loss": 0.0, "norm": 0.0, "gradients": {"a": 1e-6, "b": 0.0}, "weights": {"a": 0.0, "b": 0.0}}


@pytest.mark.parametrize(
    ("change", "first_wrong"),
    [
        ({"loss": NAN}, None),
        ({"norm": 2e-5}, None),
        ({"gradients": {"a": 1e-6, "b": NAN}}, "b"),
        ({"gradients": {}}, None),
        ({"weights": {"a": 2e-5, "b": 1.0}}, "a"),
    ],
)
def test_one_wrong_number_fails_the_row(change, first_wrong):
    assert Row("x", "m", bound=1e-5, **GOOD).verdict == "ok"
    row = Row("x", "m", bound=1e-5, **GOOD | change)
    assert (row.verdict, row.first_wrong) == ("FAILED", first_wrong)


def test_a_row_that_was_not_tried_is_neither_right_nor_wrong():
    assert Row("x", "m", reason="too few ranks", tried=False).verdict == "not tried"
