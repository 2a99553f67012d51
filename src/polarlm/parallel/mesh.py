"""The mesh: the ranks of a run as a grid, whose axes are the ways to share the work.

Ranks are numbered with tensor parallelism innermost, where the network is fastest, then context (ring around Ulysses,
arXiv 2405.07719), data and pipeline (arXiv 2104.04473). The same grid is looked at in two ways: by which tokens a rank
holds, and by which weights.
"""

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polarlm.config import ParallelConfig
from polarlm.parallel.world import World


class Mesh:
    """A run's grid of ranks; on one process every axis is 1 and no mesh of torch's is made.

    Attributes:
        tokens: axes (pipeline, data, ring, ulysses, tensor): who holds which samples, and which part of each. Ring and
            Ulysses together are the context axis. An axis of one rank is left out.
        weights: axes (pipeline, replicate, shard, tensor): who holds which part of each parameter. Data and context
            ranks share out or repeat the same parameters, so the two together are replicate x shard.
    """

    def __init__(self, parallel: ParallelConfig, world: World) -> None:
        assert parallel.ranks == world.size, f"the run is laid out for {parallel.ranks} ranks, not {world.size}"
        self.world = world
        self.tokens: DeviceMesh | None = None
        self.weights: DeviceMesh | None = None
        if world.size == 1:
            return
        axes = {axis: getattr(parallel, axis) for axis in ("pipeline", "data", "ring", "ulysses", "tensor")}
        self.tokens = _grid(world, **{axis: ranks for axis, ranks in axes.items() if ranks > 1})
        shards = parallel.shards
        replicas = parallel.data * parallel.context // shards
        self.weights = _grid(
            world, pipeline=parallel.pipeline, replicate=replicas, shard=shards, tensor=parallel.tensor
        )

    def size(self, axis: str) -> int:
        """Ranks along an axis of either view, or along `context`."""
        if axis == "context":
            return self.size("ring") * self.size("ulysses")
        mesh = self._view(axis)
        return mesh[axis].size() if mesh is not None and axis in mesh.mesh_dim_names else 1

    def rank(self, axis: str) -> int:
        """This rank's place along an axis of either view, or along `context`."""
        if axis == "context":
            return self.rank("ring") * self.size("ulysses") + self.rank("ulysses")
        mesh = self._view(axis)
        return mesh.get_local_rank(axis) if mesh is not None and axis in mesh.mesh_dim_names else 0

    def group(self, axis: str) -> ProcessGroup:
        """The ranks along an axis of either view that this rank is one of; where there is more than one."""
        mesh = self._view(axis)
        assert mesh is not None, f"one process has no group along {axis}"
        return mesh.get_group(axis)

    def _view(self, axis: str) -> DeviceMesh | None:
        return self.weights if axis in ("replicate", "shard") else self.tokens


def _grid(world: World, **axes: int) -> DeviceMesh:
    return init_device_mesh(world.device.torch.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
