"""A world of one rank."""

import pytest
import torch

from polarlm.parallel import Device, World


@pytest.fixture
def alone():
    return World(0, 1, Device(torch.device("cpu")))
