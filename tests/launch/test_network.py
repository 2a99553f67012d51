"""Where ranks of several machines meet: ports by job, addresses that are not loopback, the interface on the way."""

import os
import socket
import subprocess

import pytest

from polarlm.config import UserError
from polarlm.launch import Rank, meet
from polarlm.launch.enter import environment_of
from polarlm.launch.machines import network
from polarlm.launch.machines.network import free_port, interface_to, is_loopback, master_address, port_of_job


def test_b07_ports_of_jobs():
    ids = [str(number) for number in range(990, 1010)] + ["1000[1].s", "1000[2].s", "abc"]
    ports = [port_of_job(job_id) for job_id in ids]
    assert len(set(ports)) == len(ports)
    assert ports == [port_of_job(job_id) for job_id in ids]
    assert all(1024 < port < 32768 for port in ports)
    assert port_of_job("123.polaris-pbs-01") == port_of_job("123.other")


def test_a_taken_port_gives_way_to_the_next():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port(first=port) != port
    assert 1024 < free_port() < 65536


def addresses(table, monkeypatch):
    def look_up(host, *_):
        if host not in table:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (table[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def test_several_machines_never_meet_at_loopback(monkeypatch):
    addresses({"a": "127.0.1.1", "b": "10.0.0.2"}, monkeypatch)
    monkeypatch.setattr(network, "_source_address", lambda other: {"b": "10.0.0.1"}.get(other))
    assert master_address(["a", "b"], is_here=True)[0] == "10.0.0.1"
    assert master_address(["a", "b"], is_here=False)[0] == "a"
    assert master_address(["b", "a"], is_here=True)[0] == "b"
    assert master_address(["unknown", "b"], is_here=True)[0] == "unknown"
    monkeypatch.setattr(network, "_source_address", lambda other: None)
    assert master_address(["a", "c"], is_here=True)[0] == "a"
    assert "set MASTER_ADDR" in master_address(["a", "c"], is_here=True)[1]


def test_this_machine_is_reached_under_no_loopback_address(monkeypatch):
    towards = {"self": "127.0.1.1", "n2": "10.0.0.1", "192.0.2.1": "192.168.1.9"}
    monkeypatch.setattr(network, "_source_address", towards.get)
    monkeypatch.setattr(network, "own_addresses", lambda: {"127.0.0.1", "172.17.0.1"})
    assert network.own_address_towards(["self", "n2"]) == "10.0.0.1"
    assert network.own_address_towards(["self", "unknown"]) == "192.168.1.9"
    towards.pop("192.0.2.1")
    assert network.own_address_towards(["self"]) == "172.17.0.1"
    monkeypatch.setattr(network, "own_addresses", lambda: {"127.0.0.1"})
    assert network.own_address_towards(["self"]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "answer"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("nobody.x", False)]
)
def test_loopback(name, answer, monkeypatch):
    addresses({}, monkeypatch)
    assert is_loopback(name) is answer


def test_the_interface_is_the_one_with_the_address_that_is_sent_from(monkeypatch):
    monkeypatch.setattr(network, "_interfaces", lambda: {"127.0.0.1": "lo", "10.0.0.1": "veth0", "10.1.0.1": "eth0"})
    sources = {"10.0.0.2": "10.0.0.1", "me": "127.0.0.1", "192.0.2.1": "10.1.0.1"}
    monkeypatch.setattr(network, "_source_address", sources.get)
    assert interface_to("10.0.0.2") == "veth0"
    assert interface_to("me") == "eth0"
    monkeypatch.setattr(network, "_source_address", lambda _: None)
    assert interface_to("10.9.9.9") == "veth0"


def test_interfaces_are_those_the_system_lists():
    listed = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True).stdout
    expected = {line.split()[3].partition("/")[0]: line.split()[1] for line in listed.splitlines()}
    found = network._interfaces()
    assert found["127.0.0.1"] == "lo"
    assert found.items() >= expected.items()


# What ranks find


PLACE = Rank(5, 8, 1, 4, "10.0.0.1", 15000)


def test_a_program_finds_torchruns_variables(monkeypatch):
    monkeypatch.setattr("polarlm.launch.enter.interface_to", lambda address: "hsn0")
    found = environment_of(PLACE, {"PMI_RANK": "5", "NCCL_SOCKET_IFNAME": "hsn", "RANK": "0"})
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    assert [found[name] for name in names] == ["5", "8", "1", "4", "10.0.0.1", "15000"]
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("hsn0", "hsn")
    assert int(found["OMP_NUM_THREADS"]) >= 1


def test_one_process_needs_no_place_to_meet():
    found = environment_of(Rank(0, 1, 0, 1, None, None), {})
    assert (found["RANK"], found["WORLD_SIZE"]) == ("0", "1")
    assert not {"MASTER_ADDR", "GLOO_SOCKET_IFNAME"} & found.keys()


def test_one_torchrun_a_node_learns_its_node(monkeypatch):
    monkeypatch.setattr("polarlm.launch.enter.interface_to", lambda address: "hsn0")
    found = environment_of(Rank(1, 2, 0, 1, "10.0.0.1", 15000), {}, per_node=True)
    assert found == {"PET_NODE_RANK": "1", "GLOO_SOCKET_IFNAME": "hsn0", "NCCL_SOCKET_IFNAME": "hsn0"}


def test_threads_are_the_ranks_share(monkeypatch):
    from polarlm.launch.enter import _threads

    for allowed, present, ranks, share in [
        (64, 64, 4, 16),
        (16, 64, 4, 16),
        (64, 64, 1, 64),
        (2, 2, 8, 1),
        (32, 64, 4, 8),
    ]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=allowed: set(range(count)))
        monkeypatch.setattr(os, "cpu_count", lambda count=present: count)
        assert _threads(ranks) == share


def test_ranks_that_were_told_nothing_work_it_out_alike():
    alone = Rank(0, 1, 0, 1, None, None)
    assert meet(alone, {}) == alone
    here = [meet(Rank(rank, 4, rank, 4, None, None), {}) for rank in range(4)]
    assert {(place.master_addr, place.master_port) for place in here} == {("127.0.0.1", here[0].master_port)}
    step = {
        "SLURM_JOB_ID": "1000",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_JOB_NODELIST": "n[1-4]",
    }
    places = [meet(Rank(rank, 2, 0, 1, None, None), step) for rank in range(2)]
    assert {place.master_addr for place in places} == {"n3"}
    assert len({place.master_port for place in places}) == 1
    assert meet(Rank(0, 2, 0, 1, None, None), step | {"SLURM_STEP_ID": "2"}).master_port != places[0].master_port
    assert meet(PLACE, step) == PLACE


def test_ranks_of_several_machines_need_a_place_to_meet():
    with pytest.raises(UserError, match="MASTER_ADDR is not set, and these 8 ranks"):
        meet(Rank(5, 8, 1, 4, None, None), {})
    with pytest.raises(UserError, match="MASTER_PORT is not set"):
        meet(Rank(5, 8, 1, 4, "a", None), {})
