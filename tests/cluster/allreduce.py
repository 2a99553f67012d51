"""One rank: takes the place its launcher gives it, adds up over all ranks, and writes both into `rank-<rank>.json`."""

import dataclasses
import json
import os
import socket
from pathlib import Path

from polarlm.launch import meet, rank_from
from polarlm.parallel import join_world

place = meet(rank_from(os.environ), os.environ)
with join_world(place.rank, place.world, place.local_rank, place.master_addr, place.master_port) as world:
    (total,) = world.sum(10.0**place.rank)
found = {**dataclasses.asdict(place), "host": socket.gethostname(), "total": total}
Path(f"rank-{place.rank}.json").write_text(json.dumps(found))
