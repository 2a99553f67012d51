"""`polarlm launch` and `polarlm sites` as a user meets them: quick, without torch, one line a mistake."""

import os
import subprocess
import sys

import pytest

from polarlm.cli import main

JOB = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1000"}


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("SLURM_", "PBS_", "COBALT_", "MASTER_")):
            monkeypatch.delenv(name)


def _own_seconds(words):
    """Least time of its own that a command takes in five tries, so that what else the machine does counts little."""
    seconds = []
    for _ in range(5):
        before = os.times()
        subprocess.run(words, env=os.environ | JOB, stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(seconds)


def test_a_dry_run_is_quick_and_loads_neither_torch_nor_validation(tmp_path):
    """Quicker than it takes to load what it does without; a busy machine slows both alike."""
    heavy = {"torch", "mpi4py", "numpy", "pydantic"}
    code = f"import sys, polarlm.cli as cli; cli.main(sys.argv[1:]); assert not {heavy} & {{*sys.modules}}"
    whole = _own_seconds([sys.executable, "-c", code, "launch", "--dry-run", "--", "prog"])
    configuration = _own_seconds([sys.executable, "-c", "import polarlm.config.load"])
    assert 0 < whole < configuration
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_can_be_pasted_into_a_shell(monkeypatch, capsys):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert main(["launch", "--dry-run", "--", "echo", "a b"]) == 0
    said = capsys.readouterr().out
    exports = [line.strip() for line in said.splitlines() if line.startswith("  export ")]
    assert any(line.startswith("export MASTER_ADDR=n1 ") for line in exports)
    assert "kept as they are set: PYTHONUNBUFFERED" in said
    assert said.splitlines()[-1].endswith("-- echo 'a b'")
    script = "\n".join(exports) + "\necho $MASTER_ADDR $MASTER_PORT"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True).stdout == "n1 16000\n"


def test_a_laptop_runs_it_itself(tmp_path):
    program = (
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    )
    words = [sys.executable, "-m", "polarlm", "launch", "--ranks", "2", "--", sys.executable, "-c", program]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout, said.stderr) == (0, "0 2 1\n", "")
    assert next((tmp_path / "logs").glob("*.1.log")).read_text() == "1 2 1\n"


def test_b07_two_jobs_at_once_of_any_program_of_torchs(tmp_path):
    """It listens on MASTER_PORT itself, which is free for it and for no other job."""
    program = (
        "import os, torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); "
        "print(dist.get_world_size(), os.environ['MASTER_PORT']); dist.destroy_process_group()"
    )
    words = [sys.executable, "-m", "polarlm", "launch", "--ranks", "2", "--", sys.executable, "-c", program]
    (tmp_path / "other").mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(words, cwd=folder, **pipes) for folder in (tmp_path, tmp_path / "other")]
    said = [job.communicate(timeout=120) for job in jobs]
    assert [(job.returncode, err) for job, (_, err) in zip(jobs, said, strict=True)] == [(0, "")] * 2
    (first, second) = (out.split() for out, _ in said)
    assert first[0] == second[0] == "2"
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--dry-run", "what is each rank to run?"),
        ("--dry-run --", "what is each rank to run?"),
        ("-- no-such-program", "no-such-program: there is no such program"),
        ("--dry-run --hostfile nofile train.yaml", "--hostfile: nofile: cannot be read"),
        ("--dry-run --hosts a, -- prog", "--hosts: '' is no host"),
        ("--dry-run --hosts= -- prog", "--hosts: '' is no host"),  # a script's variable that is not set
        (f"--dry-run --hosts a:{'9' * 5000} -- prog", "--hosts: 'a:9999"),
        ("--dry-run --site= -- prog", "no site ''"),
        ("--dry-run --ranks 0 -- prog", "--ranks: 0 cannot be"),
        ("--dry-run --ranks -1 -- prog", "--ranks: -1 cannot be"),
        ("--dry-run --devices-per-node -2 -- prog", "--devices-per-node: -2 cannot be"),
        ("--dry-run --nodes 2 -- prog", "--nodes: 2 cannot be"),
        ("--dry-run --site nowhere -- prog", "no site 'nowhere'"),
        ("--dry-run --ranks-per-node many -- prog", "invalid int value: 'many'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(words, error, capsys, tmp_path):
    assert main(["launch", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert error in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_l21_no_launcher_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "prog").write_text("#!/bin/sh\n")
    (tmp_path / "prog").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main("launch --hosts a,b -- prog".split()) == 2
    assert "pip install mpich" in capsys.readouterr().err


def test_an_account_without_a_home_has_no_machines_of_its_own(monkeypatch, capsys):
    """As in a container that runs under a number no password file knows."""
    from polarlm.config.presets import user_presets_path

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert main(["sites"]) == 0
    assert "perlmutter" in capsys.readouterr().out
    assert not user_presets_path().exists()


def test_the_machines_are_listed_and_shown(monkeypatch, capsys):
    assert main(["sites"]) == 0
    said = capsys.readouterr().out
    assert "perlmutter" in said
    assert "12 x Intel Max 1550" in said
    assert said.splitlines()[-1] == "this is none of them"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "frontier[00001-00002]")
    main(["sites"])
    assert capsys.readouterr().out.splitlines()[-1] == "this is frontier"


def test_what_is_shown_of_a_machine_can_stand_in_a_users_own_file(monkeypatch, capsys, tmp_path):
    from polarlm.launch import site_named

    main(["sites", "polaris"])
    text = capsys.readouterr().out
    ours = site_named("polaris")
    (tmp_path / "polarlm").mkdir()
    (tmp_path / "polarlm/sites.yaml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert site_named("polaris") == ours
    assert main(["sites", "nowhere"]) == 2


RUN = """
model: {family: llama, layers: 1, hidden: 16, heads: 2, vocab_size: 300}
data: {paths: synthetic, tokenizer: bytes}
train: {steps: 1, seq_len: 16, micro_batch_size: 1, eval_every: 0}
"""


def test_train_in_a_job_counts_every_nodes_ranks(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    for name, value in (JOB | {"SLURM_GPUS_ON_NODE": "4"}).items():
        monkeypatch.setenv(name, value)
    assert main("train run.yaml --show-config".split()) == 0
    assert "\n  ranks: 8\n" in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main("train run.yaml".split()) == 2
    assert "srun (this is a Slurm job) is not on the PATH" in capsys.readouterr().err
    assert main("train run.yaml --parallel.ranks 16".split()) == 2
    assert "parallel.ranks: 16 is more than 2 nodes x 4 = 8" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_train_as_a_rank_of_another_launcher_says_what_to_do(monkeypatch, capsys, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main("train run.yaml".split()) == 2
    assert "rank 1 of 4, but PolarLM starts its own ranks" in capsys.readouterr().err
