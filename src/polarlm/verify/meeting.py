"""Where the ranks of one layout after the other meet: on one machine, or as the processes of an allocation."""

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from polarlm.launch import Rank

_PREFIX = "polarlm verify"  # torchrun's store has its own words in it


@dataclass(frozen=True)
class Seat:
    """One rank's way into a layout's world: what `join_world` takes, and how many ranks share this process's cores."""

    rank: int
    local_rank: int
    address: str
    port: int
    listen_fd: int | None
    neighbours: int


class Meetings:
    """This process's ranks: all of them where no launcher started it, else its own one.

    A new port a layout, open before anyone looks for it, so that no rank meets one of the layout before.
    """

    def __init__(self, place: Rank | None) -> None:
        self._place = place
        self._count = 0
        self._listener: socket.socket | None = None
        self._board = None
        if place is not None and place.world > 1:
            torchrun_listens = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            self._board = dist.TCPStore(
                place.master_addr,
                place.master_port,
                is_master=place.rank == 0 and not torchrun_listens,
                wait_for_workers=False,
            )

    @property
    def is_first(self) -> bool:
        """Whether this process holds rank 0, and so speaks for all."""
        return self._board is None or self._place.rank == 0

    def seats(self, ranks: int) -> list[Seat]:
        """The seats of this process in the next layout's world; every process calls, and some get none."""
        self._close()
        self._count += 1
        address = "127.0.0.1" if self._board is None else self._place.master_addr
        port = self._open() if self.is_first else int(self._board.get(f"{_PREFIX} port {self._count}"))
        if self.is_first and self._board is not None:
            self._board.set(f"{_PREFIX} port {self._count}", str(port))
        mine = [(rank, rank) for rank in range(ranks)]
        if self._board is not None:
            mine = [(self._place.rank, self._place.local_rank)] if self._place.rank < ranks else []
        listening = self._listener.fileno() if self._listener else None
        return [Seat(rank, local, address, port, listening if rank == 0 else None, len(mine)) for rank, local in mine]

    def leave(self) -> None:
        """Call when all layouts are done: the first process waits, since it holds what the others read."""
        self._close()
        if self._board is None:
            return
        self._board.set(f"{_PREFIX} left {self._place.rank}", "")
        if self.is_first:
            self._board.wait([f"{_PREFIX} left {rank}" for rank in range(self._place.world)])

    def _open(self) -> int:
        self._listener = socket.create_server(("127.0.0.1" if self._board is None else "", 0), backlog=1024)
        return self._listener.getsockname()[1]

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
