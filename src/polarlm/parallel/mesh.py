"""The mesh: the ranks of a run as a grid whose axes are the ways to share the work."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polarlm.config import ParallelConfig
from polarlm.parallel.world import World


def build_mesh(parallel: ParallelConfig, world: World) -> DeviceMesh | None:
    """The mesh of a run with axes (dp_replicate, dp_shard), or None for one process, which runs the model unwrapped."""
    assert parallel.ranks == world.size, f"the run is laid out for {parallel.ranks} ranks, not {world.size}"
    if world.size == 1:
        return None
    return init_device_mesh(world.device.torch.type, (parallel.data, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
