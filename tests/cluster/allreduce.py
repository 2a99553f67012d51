"""One rank: takes the place its launcher gives it, adds up over all ranks, and writes both into `rank-<rank>.json`."""

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from polarlm.launch import meet, rank_from

place = meet(rank_from(os.environ), os.environ)
where = f"tcp://{place.master_addr}:{place.master_port}"
dist.init_process_group("gloo", init_method=where, rank=place.rank, world_size=place.world)
total = torch.tensor(10.0**place.rank, dtype=torch.float64)
dist.all_reduce(total)
dist.destroy_process_group()
if "fail" in sys.argv:  # one rank does, and the others wait for nothing
    if place.rank == 1:
        raise ValueError("the cause")
    time.sleep(300)
found = {**dataclasses.asdict(place), "host": socket.gethostname(), "total": total.item()}
Path(f"rank-{place.rank}.json").write_text(json.dumps(found))
