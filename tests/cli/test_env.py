"""`polarlm env` as a user types it: staging in a job whose srun is a stand-in, and what is said of nodes that fail."""

import subprocess
import venv

import pytest

from polarlm import cli
from stand_ins import put_srun


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "polar_bear.py").write_text("")
    yield tmp_path / "env"
    assert not list(tmp_path.glob(".polarlm*"))


def test_every_node_gets_a_copy_that_works(environment, tmp_path, monkeypatch, capfd):
    put_srun(tmp_path, monkeypatch, "n[1-2]")
    assert cli.main(["env", "stage", "env", "--to", "$TMPDIR/copy"]) == 0, capfd.readouterr()
    said = capfd.readouterr()
    assert said.out.startswith("2 of 2 nodes have its ")
    assert "it has different paths" in said.out
    environment.rename(tmp_path / "away")
    for node in ("0", "1"):
        python = tmp_path / "nodes" / node / "copy" / "bin" / "python"
        subprocess.run([python, "-c", "import polar_bear"], check=True)


def test_a_node_that_fails_is_named_and_the_other_is_used(environment, tmp_path, monkeypatch, capfd):
    put_srun(tmp_path, monkeypatch, "n[1-2]")
    (tmp_path / "nodes" / "1").mkdir(parents=True)
    (tmp_path / "nodes" / "1" / "copy").write_text("a file of mine")
    assert cli.main(["env", "stage", "env", "--to", "$TMPDIR/copy"]) == 1
    lines = capfd.readouterr().out.splitlines()
    copy = tmp_path / "nodes" / "1" / "copy"
    assert lines[0].startswith(f"FAILED  n2: {copy}: is there already, and no staged environment")
    assert lines[1].startswith("1 of 2 nodes have its ")
    assert lines[2] == f"use it: {tmp_path}/nodes/0/copy/bin/polarlm train run.yaml"
    assert copy.read_text() == "a file of mine"


def test_what_is_no_environment_is_a_users_mistake(tmp_path, capsys):
    assert cli.main(["env", "stage", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: there is no bin/python" in capsys.readouterr().err


def test_a_dry_run_makes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["env", "create", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert " -m venv --system-site-packages --without-pip " in said
    assert "\ntorch==" in said
    assert list(tmp_path.iterdir()) == []
