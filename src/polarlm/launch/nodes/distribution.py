"""Who feeds whom, while a file spreads over nodes: one makes it, and each that has it feeds two others at a time.

Nobody waits for a slow or broken node: who needs the file is fed by whoever has it and a hand free. So the number of
those that have it triples in the time of one copy, and the shared file system is read once.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polarlm.launch.nodes.wire import Wire, WireError

__all__ = ["HANDS", "Distribution", "Outcome"]

HANDS = 2  # how many a node feeds at a time
MOST_TRIES = 3
LAST_CALL_S = 60.0  # after one node has called, how long the next may take


@dataclass
class Outcome:
    """How it went on one node: `path` where it has it, else `complaint` why not; fed by nobody if it made the file."""

    path: str = ""
    complaint: str = ""
    bytes: int = 0
    fed_by: str = ""
    seconds: float = 0.0


@dataclass
class _Feeder:
    address: str
    port: int
    busy: int = 0


class _NoWay(Exception):
    """There is nobody to get the file from."""


class Distribution:
    """The head's side, a thread for each node; `stage_node.py` is the nodes'.

    A node says first on which port it feeds. It is told to `make` the file or to `fetch` it from another, answers that
    it `has` it or what its `complaint` is, and then how it ended; and feeds others until it is told to `end`.
    """

    def __init__(self, hosts: int) -> None:
        """
        Args:
            hosts: how many should call.
        """
        self.outcomes: dict[str, Outcome] = {}
        self._hosts = hosts
        self._change = threading.Condition()
        self._feeders: dict[str, _Feeder] = {}
        self._maker: str | None = None
        self._not_made: list[str] = []  # complaints
        self._called: set[str] = set()
        self._last_call = time.monotonic()
        self._over = threading.Event()

    def attend(self, host: str, first: dict[str, Any], wire: Wire) -> None:
        """Lead one node to its end."""
        start = time.monotonic()
        with self._change:
            self._called.add(host)
            self._last_call = start
        try:
            outcome = self._lead(host, first["port"], wire)
        except (WireError, _NoWay) as error:
            outcome = Outcome(complaint=str(error))
        outcome.seconds = time.monotonic() - start
        self._settle(host, outcome)
        while not self._over.wait(LAST_CALL_S / 4):
            self._look_whether_over()
        with contextlib.suppress(WireError):  # it is gone
            wire.send({"do": "end"})

    def _lead(self, host: str, port: int, wire: Wire) -> Outcome:
        broken: list[str] = []
        while True:
            with self._source(host, broken) as (feeder, order):
                wire.send(order)
                answer = wire.receive(None)
                complaint = answer.get("complaint")
                if not complaint:
                    self._has_it(host, wire.peer, port)
                    break
            is_feeders = bool(feeder) and answer["is_feeders"]
            if is_feeders and len(broken) + 1 < MOST_TRIES:
                broken.append(feeder)
                continue
            if not feeder:
                self._could_not_make(complaint)
            return Outcome(complaint=f"{complaint} (from {feeder})" if is_feeders else complaint)
        return Outcome(**wire.receive(None), fed_by=feeder)

    def _has_it(self, host: str, address: str, port: int) -> None:
        """Before its own feeder's hand is free, so that who waits comes to this one first."""
        with self._change:
            self._feeders[host] = _Feeder(address, port)
            self._change.notify(HANDS)

    @contextlib.contextmanager
    def _source(self, host: str, broken: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """(who feeds this host, what to tell it); nobody where it is to make the file. Waits until there is a way."""
        name, feeder = self._take(host, broken)
        try:
            yield name, {"do": "fetch", "address": feeder.address, "port": feeder.port} if feeder else {"do": "make"}
        finally:
            if feeder:
                with self._change:
                    feeder.busy -= 1
                    self._change.notify()

    def _take(self, host: str, broken: list[str]) -> tuple[str, _Feeder | None]:
        """A feeder with a hand free, rather not one that broke off before; or nobody.

        Raises:
            _NoWay: nobody could make the file.
        """
        with self._change:
            while True:
                free = {name: feeder.busy for name, feeder in self._feeders.items() if feeder.busy < HANDS}
                if free:
                    name = min(free, key=lambda each: (each in broken, free[each]))
                    feeder = self._feeders[name]
                    feeder.busy += 1
                    return name, feeder
                if not self._feeders and len(self._not_made) >= MOST_TRIES:
                    raise _NoWay(f"no node could make it: {self._not_made[-1]}")
                if not self._feeders and self._maker is None:
                    self._maker = host
                    return "", None
                self._change.wait()

    def _could_not_make(self, complaint: str) -> None:
        with self._change:
            self._not_made.append(complaint)

    def _settle(self, host: str, outcome: Outcome) -> None:
        with self._change:
            self.outcomes[host] = outcome
            if outcome.complaint:
                self._feeders.pop(host, None)
                if self._maker == host:
                    self._maker = None  # so that another makes it, should nobody else have it
                self._change.notify_all()
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        """All that called have ended, and no other is to be waited for."""
        with self._change:
            waited = time.monotonic() - self._last_call > LAST_CALL_S
            if self._called == self.outcomes.keys() and (len(self._called) >= self._hosts or waited):
                self._over.set()
