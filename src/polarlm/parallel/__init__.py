"""What puts a one-device model on many ranks: the world and its mesh, sharding, initial weights.

Nothing here is known to the model; everything is applied from outside, by `build_model`.
"""

from polarlm.parallel.build import build_model, initialise
from polarlm.parallel.device import Device, local_device
from polarlm.parallel.mesh import build_mesh
from polarlm.parallel.shard import clip_gradients, distribute, reduce_gradients_after, shard
from polarlm.parallel.world import World, join_world

__all__ = [
    "Device",
    "World",
    "build_mesh",
    "build_model",
    "clip_gradients",
    "distribute",
    "initialise",
    "join_world",
    "local_device",
    "reduce_gradients_after",
    "shard",
]
