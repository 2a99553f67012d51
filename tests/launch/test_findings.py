"""Each finding of the doctor from made-up facts, and that each fault and warning says how to mend it."""

from dataclasses import replace

import pytest

from polarlm.launch import Finding, Folder, NodeFacts, clocks, examine, folder, report, same_everywhere

GIB = 1 << 30
SOUND = NodeFacts(
    host="n1",
    full_name="n1.site.org",
    own_addresses=("10.0.0.1",),
    python="3.12.3",
    executable="/soft/bin/python",
    polarlm="0.1.0",
    maker="NVIDIA",
    driver="550.54",
    devices=4,
    torch="2.11.0+cu126",
    built_for="CUDA 12.6",
    torch_devices=4,
    exchange_on="nccl, NVIDIA A100",
    exchange_bytes_per_s=90e9,
    mpi="pals 1.3.4 (/usr/bin/mpiexec)",
    commands=("qsub", "qstat"),
    folders=(Folder("runs", "/work/runs", "", 500 * GIB), Folder("temporary", "/tmp", "", 50 * GIB)),
)


def complaints(facts, scheduler=None, several=False):
    """(status, topic, the line) of what is not ok on a machine; with several, beside a sound second one."""
    nodes = [facts, replace(SOUND, host="n2")] if several else [facts]
    found = examine(nodes, scheduler, {node.host: 0.0 for node in nodes} if several else {})
    return [(each.status, each.topic, str(each)) for each in found if each.status != "ok"]


def test_a_sound_machine_has_nothing_but_ok():
    assert complaints(SOUND) == []
    assert complaints(SOUND, scheduler="pbs", several=True) == []
    lines = report(examine([SOUND], "pbs", {})).splitlines()
    assert lines[1] == "ok       driver     NVIDIA 550.54, 4 devices"
    assert lines[3] == "ok       exchange   two ranks all-reduce at 90.00 GB/s (nccl, NVIDIA A100)"
    assert {line[17:20] == "  " for line in lines} == {False}


@pytest.mark.parametrize(
    ("change", "status", "topic", "words"),
    [
        ({"torch_complaint": "ImportError: libcudart"}, "fault", "torch", "cannot be used: ImportError: libcudart"),
        ({"torch": "2.11.0+cpu", "built_for": ""}, "fault", "torch", "for the CPU alone, beside NVIDIA's driver and 4"),
        ({"torch_devices": 0}, "fault", "torch", "sees 0 of 4 devices"),
        ({"torch_devices": 3}, "fault", "torch", "sees 3 of 4 devices"),
        ({"devices_complaint": "`nvidia-smi -L` gave no answer"}, "fault", "driver", "gave no answer"),
        ({"devices": 0, "torch_devices": 0}, "warning", "driver", "NVIDIA 550.54 is here, and shows no device"),
        ({"exchange_complaint": "RuntimeError: connect"}, "fault", "exchange", "cannot all-reduce: RuntimeError: con"),
        ({"exchange_complaint": "rank 0 was ended by SIGALRM"}, "fault", "exchange", "no end in 2 minutes"),
        (
            {"mpi": "", "mpi_complaint": "it says: foo; name a launcher"},
            "warning",
            "mpi",
            "it says: foo — name a launch",
        ),
        ({"own_addresses": ()}, "warning", "name", "n1 resolves to nothing"),
        (
            {"folders": (Folder("runs", "/r", "Read-only file system", 9),)},
            "fault",
            "runs",
            "/r: cannot be written (Re",
        ),
        ({"folders": (Folder("runs", "/r", "", GIB // 2),)}, "fault", "runs", "0.5 GiB free of at least 1.0 GiB"),
        ({"folders": (Folder("temporary", "/t", "", 2 * GIB),)}, "warning", "temporary", "/t: 2.0 GiB free"),
    ],
)
def test_what_is_wrong_with_one_machine_is_found(change, status, topic, words):
    found = [each for each in complaints(replace(SOUND, **change)) if each[1] == topic]
    assert [each[:2] for each in found] == [(status, topic)]
    assert words in found[0][2]
    assert " — " in found[0][2]


def test_a_machine_without_accelerators_is_well():
    laptop = replace(SOUND, maker="", driver="", devices=0, torch_devices=0, mpi="", commands=())
    assert complaints(replace(laptop, torch="2.11.0+cpu", built_for="")) == []
    assert complaints(laptop) == []


def test_l17_a_name_that_is_loopback_matters_between_machines_only():
    loopback = replace(SOUND, own_addresses=("127.0.1.1", "::1"), full_name="localhost")
    assert complaints(loopback) == []
    assert "getfqdn() says localhost, and is not asked" in report(examine([loopback], None, {}))
    ((status, topic, line),) = complaints(loopback, several=True)
    assert (status, topic) == ("warning", "name")
    assert "n1: n1 resolves to 127.0.1.1, ::1, which is loopback — " in line
    assert "MASTER_ADDR" in line


def test_several_machines_need_a_launcher_that_is_there():
    without = replace(SOUND, mpi="", commands=())
    assert complaints(without) == []
    assert [each[:2] for each in complaints(without, several=True)] == [("fault", "mpi")]
    assert [each[:2] for each in complaints(without, scheduler="slurm")] == [("fault", "scheduler")]
    with_srun = replace(without, commands=("srun",))
    assert examine([with_srun, replace(with_srun, host="n2")], "slurm", {})[4].status == "ok"


@pytest.mark.parametrize(
    ("change", "topic", "words"),
    [
        ({"torch": "2.10.0"}, "torch", "n3: torch is 2.10.0, and 2.11.0+cu126 on n1"),
        ({"polarlm": "0.0.9"}, "polarlm", "n3: polarlm is 0.0.9, and 0.1.0 on n1"),
        ({"python": "3.11.1"}, "python", "n3: python is 3.11.1"),
        ({"devices": 3, "torch_devices": 3}, "devices", "n3: devices is 3, and 4 on n1"),
        ({"sees": False}, "folders", "n3: does not see what another node wrote"),
    ],
)
def test_the_node_that_differs_is_the_one_that_is_named(change, topic, words):
    nodes = [SOUND, replace(SOUND, host="n2"), replace(SOUND, host="n3", **change)]
    (finding,) = [each for each in examine(nodes, None, {}) if each.status == "fault"]
    assert finding.topic == topic
    assert words in str(finding)


def test_a_node_whose_ranks_exchange_slowly_is_named():
    nodes = [SOUND, replace(SOUND, host="n2"), replace(SOUND, host="n3", exchange_bytes_per_s=40e9)]
    (finding,) = [each for each in examine(nodes, None, {}) if each.status == "warning"]
    assert "n3: 40.00 GB/s, where half of the nodes have 90.00 or more" in str(finding)


def test_a_clock_that_is_minutes_off_is_named():
    assert clocks({"n1": 0.0}) == []
    (well,) = clocks({"n1": 0.0, "n2": 0.4, "n3": -1.0})
    assert (well.status, well.what) == ("ok", "3 hosts agree within 1.4 s")
    (off,) = clocks({"n1": 0.0, "n2": -600.0, "n3": 0.1})
    assert (off.status, off.host, off.what) == ("warning", "n2", "the clock is 600 s behind")


def test_the_same_everywhere_says_nothing():
    assert same_everywhere("torch", {"a": "2.11", "b": "2.11"}) == []
    assert [each.host for each in same_everywhere("torch", {"a": "1", "b": "2", "c": "2"})] == ["a"]


def test_the_room_a_run_needs_is_what_counts():
    small = Folder("checkpoints", "/r", "", 100)
    assert folder(small, 50, 90).status == "ok"
    assert folder(small, 50, 200).status == "warning"
    assert folder(small, 150, 200).status == "fault"


def test_what_is_said_of_hosts_alike_is_one_line():
    found = [Finding("fault", "torch", "old", "renew it", host) for host in ("a", "b", "c")]
    found += [Finding("ok", "exchange", f"{rate} GB/s", host=host) for rate, host in ((1, "a"), (2, "b"))]
    found += [Finding("warning", "exchange", "slow", "leave it out", "c")]
    assert report(found).splitlines() == [
        "fault    torch      a, b, c: old — renew it",
        "ok       exchange   a and 1 more: 1 GB/s",
        "warning  exchange   c: slow — leave it out",
    ]


def test_a_fault_without_a_mend_cannot_be():
    with pytest.raises(AssertionError):
        Finding("fault", "torch", "old")
