"""Two processes of one job that talk: whoever does not know the job's key is not heard.

The key goes to the nodes in an environment variable, which other users of a machine cannot read; a port they can reach.
Each side proves that it knows the key (HMAC of the other's fresh challenge), so a node takes no file from a stranger.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Gate", "Wire", "WireError", "connect"]

PATIENCE_S = 60.0  # without a byte from the other side
_CHALLENGE, _BLOCK = 32, 1 << 20


class WireError(Exception):
    """The other side is gone, silent or a stranger; says which."""


class Wire:
    """A connection of two who know the key: JSON objects, and files."""

    def __init__(self, connected: socket.socket, key: bytes, role: bytes) -> None:
        """
        Args:
            role: `gate` or `caller`, so that no side's proof can be sent back to it as the other's.
        """
        self._socket = connected
        self._reader = connected.makefile("rb")
        connected.settimeout(PATIENCE_S)
        with self._as_wire_error():
            self.peer: str = connected.getpeername()[0]  # the other side's address
            self._shake_hands(key, role)

    def send(self, message: dict[str, Any]) -> None:
        """Send one object."""
        with self._as_wire_error():
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, patience_s: float | None = PATIENCE_S) -> dict[str, Any]:
        """Wait for the next object, for ever with None."""
        with self._as_wire_error():
            self._socket.settimeout(patience_s)
            line = self._reader.readline()
            self._socket.settimeout(PATIENCE_S)
        if not line.endswith(b"\n"):
            raise WireError("the connection ended")
        return json.loads(line)

    def send_file(self, path: Path) -> None:
        """Send a whole file, its length first.

        Raises:
            WireError: the other side is gone; or the file is, as where this side is about to end.
        """
        with self._as_wire_error(), path.open("rb") as file:
            self.send({"bytes": os.fstat(file.fileno()).st_size})
            self._socket.sendfile(file)

    def receive_file(self, path: Path, check_room: Callable[[int], None] | None = None) -> None:
        """Write what `send_file` sends.

        Args:
            check_room: called with its length before anything is written.

        Raises:
            OSError: it cannot be written here.
        """
        left = self.receive()["bytes"]
        if check_room:
            check_room(left)
        with path.open("wb") as file:
            while left:
                with self._as_wire_error():
                    block = self._reader.read1(min(left, _BLOCK))
                if not block:
                    raise WireError(f"the connection ended {left} bytes before the file's end")
                file.write(block)
                left -= len(block)

    def close(self) -> None:
        """End the connection; the other side's next word fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.close()
        self._socket.close()

    def _shake_hands(self, key: bytes, role: bytes) -> None:
        own = secrets.token_bytes(_CHALLENGE)
        self._socket.sendall(own)
        theirs = self._reader.read(_CHALLENGE)
        other_role = b"caller" if role == b"gate" else b"gate"
        self._socket.sendall(hmac.digest(key, role + own + theirs, hashlib.sha256))
        proof = self._reader.read(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, hmac.digest(key, other_role + theirs + own, hashlib.sha256)):
            raise WireError("the other side does not know this job's key")

    @contextlib.contextmanager
    def _as_wire_error(self):
        try:
            yield
        except TimeoutError:
            raise WireError("the other side is silent") from None
        except OSError as error:
            raise WireError(f"the connection broke ({error.strerror or error})") from None


class Gate:
    """Listens on a port that the system chooses; hands each caller who knows the key to `attend`, each in a thread."""

    def __init__(self, key: bytes, attend: Callable[[Wire], None]) -> None:
        self._key, self._attend = key, attend
        self._listener = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._greet, args=(connected,), daemon=True).start()

    def _greet(self, connected: socket.socket) -> None:
        try:
            wire = Wire(connected, self._key, b"gate")
        except WireError:  # a stranger; those of the job say themselves what they miss
            connected.close()
            return
        try:
            self._attend(wire)
        except WireError:  # the caller has gone, and knows why
            pass
        finally:
            wire.close()


def connect(host: str, port: int, key: bytes, patience_s: float = PATIENCE_S) -> Wire:
    """Call a gate.

    Raises:
        WireError: it cannot be reached, or does not know the key.
    """
    try:
        connected = socket.create_connection((host, port), timeout=patience_s)
    except OSError as error:
        raise WireError(f"{host}:{port} cannot be reached ({error.strerror or error})") from None
    return Wire(connected, key, b"caller")
