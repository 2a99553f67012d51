"""Bytes of the states, against the figures that the ZeRO paper prints."""

import pytest

from polarlm.plan import state_bytes


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_papers_model_takes_what_its_figure_1_says(zero_stage, gigabytes):
    total = state_bytes(7_500_000_000, zero_stage, 64, parameter=2, gradient=2, optimizer=12).total
    assert round(total / 1e9, 1) == gigabytes


def test_fp32_by_hand():
    states = state_bytes(1000, 2, 4)
    assert (states.parameters, states.gradients, states.optimizer) == (4000, 1000, 3000)
    assert states.total == 8000
    assert state_bytes(1000, 0, 1, parameter=0).total == 16_000
