"""The machines of a job, from fake environments and real files: pure, no scheduler is here."""

import socket

import pytest

from polarlm.config import UserError
from polarlm.launch import find_allocation
from polarlm.launch.machines import allocation
from polarlm.launch.machines.hostlist import Host


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No scheduler's program on the path, none of its files, and a host name of our own."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(allocation, "PBS_FILES", tmp_path / "aux")
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop.home")
    (tmp_path / "bin").mkdir()
    (tmp_path / "aux").mkdir()


def names(found):
    return " ".join(host.name for host in found.hosts)


def slots(found):
    return [host.slots for host in found.hosts]


def node_file(tmp_path, lines):
    path = tmp_path / "nodes"
    path.write_text("\n".join(lines.split(" ")) + "\n")
    return str(path)


def test_nowhere_is_this_machine():
    found = find_allocation({})
    assert (names(found), found.scheduler, found.is_here) == ("laptop", None, True)


@pytest.mark.parametrize(
    ("lines", "hosts", "counts"),
    [
        ("a a a a b b b b", "a b", [4, 4]),
        ("a a b b a b", "a b", [3, 3]),
        ("a a a a a a a a", "a", [8]),
        ("a a a b", "a b", [3, 1]),
        ("b  a ", "b a", [1, 1]),
        ("x1.hsn.cm x2.hsn.cm", "x1.hsn.cm x2.hsn.cm", [1, 1]),
    ],
)
def test_b02_nodes_are_distinct_hosts_and_lines_are_slots(lines, hosts, counts, tmp_path):
    found = find_allocation({"PBS_NODEFILE": node_file(tmp_path, lines), "PBS_JOBID": "1.s"})
    assert (names(found), slots(found), found.scheduler, found.job_id) == (hosts, counts, "pbs", "1.s")
    assert found.uneven == (len(set(counts)) > 1)
    assert found.slots_given == (max(counts) > 1)


def test_a_node_file_is_handed_on_only_when_it_lists_each_host_once(tmp_path):
    path = node_file(tmp_path, "a b")
    assert str(find_allocation({"PBS_NODEFILE": path}).node_file) == path
    assert find_allocation({"PBS_NODEFILE": node_file(tmp_path, "a a b")}).node_file is None


def test_cobalts_node_file(tmp_path):
    path = node_file(tmp_path, "thetagpu01 thetagpu02")
    found = find_allocation({"COBALT_NODEFILE": path, "COBALT_JOBID": "77"})
    assert (names(found), found.scheduler, found.job_id) == ("thetagpu01 thetagpu02", "cobalt", "77")


@pytest.mark.parametrize(
    ("environment", "hosts", "counts"),
    [
        ({"SLURM_JOB_NODELIST": "nid[1-2]"}, "nid1 nid2", [1, 1]),
        ({"SLURM_NODELIST": "a,b"}, "a b", [1, 1]),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}, "n1 n2 n3", [4, 4, 3]),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS_PER_NODE": "4"}, "n1 n2", [4, 4]),
        ({"SLURM_JOB_NODELIST": "", "SLURM_NODELIST": "a"}, "a", [1]),
    ],
)
def test_l20_slurms_list_alone_is_enough(environment, hosts, counts):
    found = find_allocation(environment)
    assert (names(found), slots(found), found.scheduler) == (hosts, counts, "slurm")


@pytest.mark.parametrize(
    ("value", "devices"),
    [("4", 4), ("a100:4", 4), ("a100:2,v100:1", 3), ("gpu:a100:8", 8), ("", None), ("a100", None), ("9" * 5000, None)],
)
def test_slurm_says_how_many_devices(value, devices):
    found = find_allocation({"SLURM_JOB_NODELIST": "a", "SLURM_GPUS_PER_NODE": value})
    assert found.devices_per_node == devices


def test_slurm_says_how_many_cores():
    found = find_allocation({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "64(x2),32"})
    assert found.cpus_per_node == 32


def test_l15_the_job_id_without_its_file_says_what_was_missing(tmp_path):
    for environment in ({"PBS_JOBID": "123.s"}, {"PBS_JOBID": "123.s", "PBS_NODEFILE": str(tmp_path / "gone")}):
        with pytest.raises(UserError, match=r"PBS_NODEFILE.*no `qstat` here.*--hostfile"):
            find_allocation(environment)
    with pytest.raises(UserError, match=r"PBS_NODEFILE=.*gone is not there"):
        find_allocation({"PBS_NODEFILE": str(tmp_path / "gone")})
    with pytest.raises(UserError, match="SLURM_JOB_ID=5 is set, but SLURM_JOB_NODELIST is not"):
        find_allocation({"SLURM_JOB_ID": "5"})


def test_l15_qstat_is_asked_last(tmp_path):
    program = tmp_path / "bin" / "qstat"
    answer = "Job Id: 123.s\n    job_state = R\n    exec_host = x1/0*4+x\n\t2/0*4\n    exec_vnode = x\n"
    program.write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = '-f 123.s' ] || exit 1\ntouch {tmp_path}/asked\n/bin/cat <<'E'\n{answer}E\n"
    )
    program.chmod(0o755)
    program.write_text(program.read_text().replace("touch", "/usr/bin/touch"))
    assert names(find_allocation({"PBS_JOBID": "123.s", "PBS_NODEFILE": node_file(tmp_path, "a b")})) == "a b"
    assert not (tmp_path / "asked").exists()
    assert names(find_allocation({"PBS_JOBID": "123.s"})) == "x1 x2"
    assert (tmp_path / "asked").exists()


def test_l16_a_jobs_file_is_found_by_its_exact_id(tmp_path):
    (tmp_path / "aux" / "1234.s").write_text("wrong\n")
    with pytest.raises(UserError):
        find_allocation({"PBS_JOBID": "123.s"})
    with pytest.raises(UserError):
        find_allocation({"PBS_JOBID": "123"})
    (tmp_path / "aux" / "123.s").write_text("right\n")
    assert names(find_allocation({"PBS_JOBID": "123.s"})) == "right"
    assert names(find_allocation({"PBS_JOBID": "123"})) == "right"


def test_l17_a_host_is_known_by_its_first_label(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "x3001")
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "localhost")
    found = find_allocation({"PBS_NODEFILE": node_file(tmp_path, "x3001.hsn.cm x3002.hsn.cm x3003 x3004")})
    assert found.is_here
    assert len(found.hosts) == 4


def test_l18_empty_variables_count_as_unset():
    empty = dict.fromkeys(("PBS_NODEFILE", "PBS_JOBID", "COBALT_NODEFILE", "SLURM_JOB_NODELIST", "SLURM_JOB_ID"), "")
    assert names(find_allocation(empty)) == "laptop"


def test_b03_a_host_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--hostfile: .*nofile: cannot be read"):
        find_allocation({}, host_file=tmp_path / "nofile")


def test_what_a_user_says_counts_before_the_scheduler(tmp_path):
    environment = {"SLURM_JOB_NODELIST": "n[1-4]"}
    assert find_allocation(environment, hosts="a,b:2").hosts == (Host("a"), Host("b", 2))
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=2")
    found = find_allocation(environment, host_file=path)
    assert (slots(found), found.slots_given, found.scheduler) == ([2, 2], True, None)
    with pytest.raises(UserError, match="--hosts and --hostfile"):
        find_allocation({}, hosts="a", host_file=path)
