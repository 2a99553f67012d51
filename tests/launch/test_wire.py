"""Two who know the key talk and send files; a stranger is not heard, and a silent one is not waited for."""

import contextlib
import os
import queue
import socket
import threading
import time

import pytest

from polarlm.launch.nodes.wire import Gate, WireError, connect

KEY = b"k" * 32


@pytest.fixture
def gate():
    """An open gate that answers each object with it and with what it has, and puts down what it hears."""
    heard = queue.Queue()

    def attend(wire):
        message = wire.receive()
        heard.put(message)
        wire.send({"heard": message})
        time.sleep(message.get("then", 0))

    with Gate(KEY, attend) as opened:
        opened.heard = heard
        yield opened


def test_objects_go_both_ways(gate):
    wire = connect("127.0.0.1", gate.port, KEY)
    wire.send({"text": "naïve\n", "number": 1.5})
    assert wire.receive() == {"heard": {"text": "naïve\n", "number": 1.5}}
    with pytest.raises(WireError, match="ended"):
        wire.receive()


def test_a_caller_without_the_key_is_not_heard(gate):
    with pytest.raises(WireError):
        connect("127.0.0.1", gate.port, b"x" * 32).send({"text": "let me in"})
    with socket.create_connection(("127.0.0.1", gate.port)) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n" + b"\0" * 200 + b'{"text": "let me in"}\n')
        while rude.recv(100):
            pass
    assert gate.heard.empty()


def test_a_gate_without_the_key_gets_and_gives_nothing():
    heard = queue.Queue()
    with Gate(b"x" * 32, heard.put) as other, pytest.raises(WireError):
        connect("127.0.0.1", other.port, KEY)
    assert heard.empty()


def test_a_proof_sent_back_is_none():
    """An echo knows no key, but could return ours if both sides proved the same thing."""

    def echo():
        connected, _ = server.accept()
        with connected, contextlib.suppress(OSError):
            while data := connected.recv(1000):
                connected.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, daemon=True).start()
        with pytest.raises(WireError, match="does not know"):
            connect("127.0.0.1", server.getsockname()[1], KEY)


def test_silence_is_an_error_in_time(gate):
    wire = connect("127.0.0.1", gate.port, KEY)
    wire.send({"then": 50})
    wire.receive()
    start = time.monotonic()
    with pytest.raises(WireError, match="silent"):
        wire.receive(0.2)
    assert time.monotonic() - start < 40


def test_nobody_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(WireError, match=f"127.0.0.1:{port} cannot be reached"):
        connect("127.0.0.1", port, KEY)


@pytest.mark.parametrize("size", [0, 1, 3_000_001])
def test_a_file_arrives_whole(size, tmp_path):
    content = os.urandom(size)
    (tmp_path / "here").write_bytes(content)
    with Gate(KEY, lambda wire: wire.send_file(tmp_path / "here")) as gate:
        connect("127.0.0.1", gate.port, KEY).receive_file(tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == content


def test_a_file_that_breaks_off_is_an_error(tmp_path):
    def attend(wire):
        wire.send({"bytes": 100})
        wire._socket.sendall(b"only this")

    with Gate(KEY, attend) as gate:
        wire = connect("127.0.0.1", gate.port, KEY)
        with pytest.raises(WireError, match="91 bytes before"):
            wire.receive_file(tmp_path / "there")


def test_a_file_that_has_gone_ends_the_feed_and_no_thread_fails(tmp_path, monkeypatch):
    """As where a node was told to fetch from one that ends just then, and has tidied up."""
    failed, before = [], threading.enumerate()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    ended = threading.Event()

    def attend(wire):
        try:
            wire.send_file(tmp_path / "gone")
        finally:
            ended.set()

    with Gate(KEY, attend) as gate:
        wire = connect("127.0.0.1", gate.port, KEY)
        with pytest.raises(WireError, match="the connection"):
            wire.receive_file(tmp_path / "copy")
        assert ended.wait(60)
        wire.close()
        for thread in threading.enumerate():
            if thread not in before and thread.name.endswith("(_greet)"):
                thread.join(60)
    assert failed == []
