"""An environment spreads over nodes, which are threads here, each with a folder of its own; and works when it is there.

One makes the file, each feeds two others at a time; who fails is named, who is slow is waited for by nobody.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

import pytest

from polarlm.config import UserError
from polarlm.launch import stage_node
from polarlm.launch.nodes import call, distribution, staging
from polarlm.launch.nodes.distribution import HANDS, Distribution
from polarlm.launch.nodes.staging import pack, replace_path, unpack
from polarlm.launch.nodes.wire import Gate, WireError, connect
from polarlm.launch.stage_node import stage

KEY = b"k" * 32


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An environment with a module, a program, and a `.pth` that names a folder inside it."""
    folder = tmp_path_factory.mktemp("made") / "env"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "polar_bear.py").write_text("COLOUR = 'white'\n")
    (folder / "more").mkdir()
    (folder / "more" / "polar_fox.py").write_text("COLOUR = 'blue'\n")
    (packages / "more.pth").write_text(f"{folder / 'more'}\n")
    program = folder / "bin" / "bear"
    program.write_text(f"#!{folder}/bin/python\nimport sys, polar_bear\nprint(polar_bear.__file__, sys.prefix)\n")
    program.chmod(0o755)
    return folder


@pytest.fixture
def environment(made, tmp_path):
    """A copy of it that a test may move away."""
    pack(made, tmp_path / "made.tar")
    (tmp_path / "shared").mkdir()
    unpack(tmp_path / "made.tar", made, tmp_path / "shared" / "env")
    (tmp_path / "shared" / "env" / staging.MARK).unlink()
    return tmp_path / "shared" / "env"


@pytest.fixture
def spread(environment, tmp_path):
    """Stage on nodes; `each` may do something to a node before it calls. Gives the outcomes by node."""

    def run(nodes, each=lambda name: None, hosts=None):
        head = Distribution(hosts or len(nodes))

        def attend(wire):
            first = wire.receive()
            head.attend(first.pop("host"), first, wire)

        def node(name):
            def call(about):
                wire = connect("127.0.0.1", gate.port, KEY)
                wire.send({"host": name, **about})
                return wire

            each(name)
            stage(call, KEY, environment, tmp_path / name / "env")

        with Gate(KEY, attend) as gate:
            threads = [threading.Thread(target=node, args=(name,), daemon=True) for name in nodes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive()
        assert not list(tmp_path.glob("n*/.env*"))
        return head.outcomes

    return run


def run_python(environment, code):
    command = [environment / "bin" / "python", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


NODES = [f"n{number}" for number in range(1, 8)]


def test_seven_nodes_have_it_and_one_made_it(spread, environment, tmp_path, monkeypatch):
    made, feeding, most = [], {}, []
    real_pack = staging.pack
    monkeypatch.setattr(stage_node, "pack", lambda source, tar: made.append(tar) or real_pack(source, tar))
    real_send = stage_node.Wire.send_file

    def send(wire, path):
        feeding[path] = feeding.get(path, 0) + 1
        most.append(feeding[path])
        time.sleep(0.2)
        real_send(wire, path)
        feeding[path] -= 1

    monkeypatch.setattr(stage_node.Wire, "send_file", send)
    all_are_there = threading.Barrier(7)
    outcomes = spread(NODES, lambda name: all_are_there.wait(20))
    assert [outcomes[name].complaint for name in NODES] == [""] * 7
    assert len(made) == 1
    assert max(most) <= HANDS
    fed_by = [outcomes[name].fed_by for name in NODES]
    assert fed_by.count("") == 1
    assert len(set(fed_by)) > 2  # not all by the one that made it
    environment.rename(environment.with_name("away"))
    for name in NODES:
        copy = tmp_path / name / "env"
        assert run_python(copy, "import polar_bear; print(polar_bear.__file__)").startswith(str(copy))


def test_who_fails_is_named_and_who_is_slow_is_not_waited_for(spread, tmp_path, monkeypatch):
    (tmp_path / "n3").write_text("a file, where its folder should be")
    real_get = stage_node._get

    def slow_get(order, key, source, tar):
        if tar.parent.name == "n5":
            time.sleep(2.5)
        return real_get(order, key, source, tar)

    monkeypatch.setattr(stage_node, "_get", slow_get)
    # The slow node comes after another has begun to make the file, else all would have to wait for that.
    outcomes = spread(NODES, lambda name: time.sleep(0.5) if name == "n5" else None)
    complaints = {name: outcome.complaint for name, outcome in outcomes.items() if outcome.complaint}
    assert list(complaints) == ["n3"]
    assert "n3: File exists" in complaints["n3"] or "n3: Not a directory" in complaints["n3"]
    others = [outcomes[name].seconds for name in NODES if name not in ("n3", "n5")]
    assert max(others) < 2.5 <= outcomes["n5"].seconds


def test_the_one_that_makes_it_may_fail(spread, tmp_path, monkeypatch):
    tries = []

    def pack_at_second(source, tar):
        tries.append(tar)
        if len(tries) == 1:
            raise OSError(28, "No space left on device", str(tar))
        staging.pack(source, tar)

    monkeypatch.setattr(stage_node, "pack", pack_at_second)
    outcomes = spread(NODES[:3])
    failed = [name for name, outcome in outcomes.items() if outcome.complaint]
    assert len(failed) == 1
    assert "No space left on device" in outcomes[failed[0]].complaint
    assert len(tries) == 2


def test_where_nobody_can_make_it_all_say_so(spread, monkeypatch):
    def pack(source, tar):
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(stage_node, "pack", pack)
    outcomes = spread(NODES[:5])
    assert [("Permission denied" in outcome.complaint) for outcome in outcomes.values()] == [True] * 5
    assert sum("no node could make it" in outcome.complaint for outcome in outcomes.values()) == 2


def test_a_feed_that_breaks_off_is_begun_again_from_another(spread, monkeypatch):
    real, broken = stage_node.Wire.send_file, []

    def breaks_once(wire, path):
        if not broken:
            broken.append(path.parent.name)
            wire.send({"bytes": 10_000_000})
            return
        real(wire, path)

    monkeypatch.setattr(stage_node.Wire, "send_file", breaks_once)
    outcomes = spread(NODES[:4])
    assert broken
    assert [outcome.complaint for outcome in outcomes.values()] == [""] * 4


def test_a_node_without_room_says_how_much_it_needs(spread, monkeypatch):
    usage = stage_node.shutil.disk_usage

    def full(path):
        real = usage(path)
        return type(real)(real.total, real.used, 1 << 20) if "n2" in str(path) else real

    monkeypatch.setattr(stage_node.shutil, "disk_usage", full)
    monkeypatch.setattr(stage_node, "room_needed", lambda size: 5 << 20)
    first = threading.Event()
    real_pack = staging.pack
    monkeypatch.setattr(stage_node, "pack", lambda source, tar: (first.set(), real_pack(source, tar)))
    outcomes = spread(NODES[:2], lambda name: first.wait(20) if name == "n2" else None)
    assert "has 1 MiB free of the 5 that are needed" in outcomes["n2"].complaint
    assert outcomes["n1"].complaint == ""


def test_a_node_that_dies_or_never_calls_keeps_nobody(spread, monkeypatch):
    monkeypatch.setattr(distribution, "LAST_CALL_S", 0.5)
    real_put = stage_node._put

    def put(tar, source, to):
        if "n2" in str(to):
            raise WireError("dead")
        return real_put(tar, source, to)

    def node_may_die(*arguments):
        with contextlib.suppress(WireError):
            stage_once(*arguments)

    stage_once = stage
    monkeypatch.setattr(sys.modules[__name__], "stage", node_may_die)
    monkeypatch.setattr(stage_node, "_put", put)
    start = time.monotonic()
    outcomes = spread(["n1", "n2"], hosts=3)
    assert time.monotonic() - start < 50
    assert outcomes["n1"].complaint == ""
    assert "the connection" in outcomes["n2"].complaint


_PACKS_FOR_EVER = """
import sys, time
from polarlm.launch import stage_node

class Head:
    def receive(self, patience): return {"do": "make"}

def pack(source, tar):
    tar.write_bytes(b"half of it")
    print("begun", flush=True)
    time.sleep(60)

stage_node.call_head, stage_node.pack = lambda said: Head(), pack
sys.exit(stage_node.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM])
def test_a_node_that_is_told_to_end_leaves_no_half_copy(number, tmp_path):
    to = tmp_path / "local/env"
    words = [sys.executable, "-c", _PACKS_FOR_EVER, str(tmp_path), str(to)]
    with subprocess.Popen(words, env=os.environ | {call.KEY: KEY.hex()}, stdout=subprocess.PIPE) as node:
        assert node.stdout.readline() == b"begun\n"
        assert list(to.parent.iterdir())
        node.send_signal(number)
        assert node.wait(20) == 128 + number
    assert list(to.parent.iterdir()) == []


def test_a_copy_works_without_the_original(environment, tmp_path):
    pack(environment, tmp_path / "tar")
    (tmp_path / "node").mkdir()
    unpack(tmp_path / "tar", environment, tmp_path / "node" / "env")
    environment.rename(tmp_path / "gone")
    copy = tmp_path / "node" / "env"
    program = subprocess.run([copy / "bin" / "bear"], capture_output=True, text=True, check=True)
    assert program.stdout.split() == [str(next(copy.glob("lib/*/site-packages")) / "polar_bear.py"), str(copy)]
    assert run_python(copy, "import polar_fox; print(polar_fox.__file__)") == str(copy / "more" / "polar_fox.py")
    script = f"source {copy}/bin/activate && command -v python"
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.strip() == str(copy / "bin" / "python")


def test_only_a_copy_of_ours_is_replaced(environment, tmp_path):
    pack(environment, tmp_path / "tar")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="is there already, and no staged environment"):
        unpack(tmp_path / "tar", environment, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for _ in range(2):
        unpack(tmp_path / "tar", environment, tmp_path / "copy")
        (tmp_path / "copy" / "old").touch()
    unpack(tmp_path / "tar", environment, tmp_path / "copy")
    assert not (tmp_path / "copy" / "old").exists()


def test_what_is_no_environment_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    pack(tmp_path / "folder", tmp_path / "tar")
    with pytest.raises(UserError, match="bin/python: does not run there"):
        unpack(tmp_path / "tar", tmp_path / "folder", tmp_path / "copy")


def test_a_longer_name_is_another_path(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").write_text("#!/v/1/bin/python\n/v/1-2/x /v/1\n")
    (tmp_path / "bin" / "binary").write_bytes(b"\0/v/1/")
    replace_path(tmp_path, Path("/v/1"), Path("/new"))
    assert (tmp_path / "bin" / "run").read_text() == "#!/new/bin/python\n/v/1-2/x /new\n"
    assert (tmp_path / "bin" / "binary").read_bytes() == b"\0/v/1/"
