"""What puts a one-device model on many ranks: the world and its mesh, sharding, initial weights.

Nothing here is known to the model: everything is applied from outside, by `build_stages`, and `Engine` is what training
sees of it.
"""

from polarlm.parallel.build import build_stages, initialise
from polarlm.parallel.determinism import (
    be_deterministic,
    deterministic_variables,
    naming_nondeterminism,
)
from polarlm.parallel.device import Device, local_device
from polarlm.parallel.engine import Arrays, Engine
from polarlm.parallel.kernels import PRODUCT_TYPES
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.shard import clip_gradients, distribute, shard
from polarlm.parallel.traffic import TrafficCounter
from polarlm.parallel.world import World, end_with, join_world

__all__ = [
    "PRODUCT_TYPES",
    "Arrays",
    "Device",
    "Engine",
    "Mesh",
    "TrafficCounter",
    "World",
    "be_deterministic",
    "build_stages",
    "clip_gradients",
    "deterministic_variables",
    "distribute",
    "end_with",
    "initialise",
    "join_world",
    "local_device",
    "naming_nondeterminism",
    "shard",
]
