"""A run's folder: one for each run, found again, and pointed to."""

import os
import socket
import subprocess
import sys
from functools import partial

import pytest

from polarlm.launch import run_folder, short_host_name, short_name
from polarlm.verify.workers import run_forked


def test_a_taken_name_counts_on(tmp_path):
    names = [run_folder.create(tmp_path / "runs", "demo").name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]
    assert all((tmp_path / "runs" / name / "logs").is_dir() for name in names)


def _create(root):
    return [run_folder.create(root, "demo").name for _ in range(20)]


def test_runs_that_start_together_get_different_folders(tmp_path):
    names = [name for names in run_forked([partial(_create, tmp_path)] * 4, timeout=60) for name in names]
    assert len(set(names)) == len(names) == 80


def test_find_returns_the_newest_of_a_family(tmp_path):
    assert run_folder.find(tmp_path / "none", "demo") is None
    for name in ["demo", *[f"demo-{n}" for n in range(2, 11)], "demo-big", "demo-x-12", "my-demo", "demo-01"]:
        (tmp_path / name).mkdir()
    (tmp_path / "demo-77").write_text("not a folder")
    assert run_folder.find(tmp_path, "demo").name == "demo-10"
    assert run_folder.find(tmp_path, "dem") is None
    assert run_folder.find(tmp_path, "d.mo") is None


def test_the_newest_stays_the_newest_when_an_older_one_is_deleted(tmp_path):
    for _ in range(3):
        run_folder.create(tmp_path, "demo")
    os.rmdir(tmp_path / "demo-2" / "logs")
    (tmp_path / "demo-2").rmdir()
    assert run_folder.create(tmp_path, "demo") == run_folder.find(tmp_path, "demo") == tmp_path / "demo-4"


def test_latest_and_logfiles_point_to_the_last_announced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        folder = run_folder.create(tmp_path / "runs", name)
        run_folder.announce(folder)
    latest = tmp_path / "runs" / "latest"
    assert os.readlink(latest) == "other"
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "logs").is_dir()
    lines = (tmp_path / "logfiles").read_text().splitlines()
    assert len(lines) == 2
    assert lines[-1] == str(run_folder.log_path(folder, short_host_name(), 0))
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["demo", "latest", "other"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("x3001c0s7b0n0.hsn.cm.polaris.alcf.anl.gov", "x3001c0s7b0n0"),
        ("nid0001", "nid0001"),
        ("NID0001.local", "nid0001"),
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_hosts_are_compared_by_their_first_label(name, short):
    assert short_name(name) == short


def test_the_host_is_asked_for_its_name_when_it_is_needed(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.cluster")
    monkeypatch.setattr(socket, "getfqdn", lambda *_: "localhost")
    assert short_host_name() == "node7"


def test_importing_the_package_asks_nothing_of_the_machine():
    code = """
import socket, subprocess, os, sys
def refuse(*arguments, **named):
    raise AssertionError("asked at import")
socket.gethostname = socket.getfqdn = subprocess.Popen = os.fork = refuse
import polarlm, polarlm.launch, polarlm.report, polarlm.cli
assert not {"torch", "mpi4py"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_in_the_place_of_latest_leaves_no_link_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/latest").mkdir(parents=True)
    folder = run_folder.create(tmp_path / "runs", "one")
    with pytest.raises(IsADirectoryError):
        run_folder.announce(folder)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["latest", "one"]
