"""Two hosts on one machine: network namespaces with a cable between, in which neither reaches the other's loopback."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cluster

# Starts each task in the namespace of its node, as srun starts it on the node.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
options = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
start = next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--"))
tasks, each = int(options["ntasks"]), int(options["ntasks-per-node"])
def task(rank):
    own = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each, "SLURM_STEP_ID": 0,
           "SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": f"{{each}}(x{{tasks // each}})"}}
    where = ["ip", "netns", "exec", os.environ["SPACES"].split(",")[rank // each]]
    environment = os.environ | {{name: str(value) for name, value in own.items()}}
    return subprocess.Popen(where + sys.argv[start:], env=environment)
running = [task(rank) for rank in range(tasks)]
sys.exit(max(process.wait() for process in running))
"""
PROGRAM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.environ["GLOO_SOCKET_IFNAME"])
print(total.item(), *names, flush=True)
dist.destroy_process_group()
"""


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


@pytest.fixture
def spaces():
    """Names of two namespaces: 10.77.31.1 on veth `left` in one, 10.77.31.2 on `right` in the other."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.fail("needs root and iproute2")
    names = [f"polarlm-{os.getpid()}-{side}" for side in ("a", "b")]
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add left netns {names[0]} type veth peer name right netns {names[1]}")
        for number, (name, device) in enumerate(zip(names, ("left", "right"), strict=True), 1):
            ip(f"-n {name} address add 10.77.31.{number}/24 dev {device}")
            ip(f"-n {name} link set {device} up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_ranks_of_two_hosts_meet_over_the_cable(launcher, spaces, tmp_path):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "program.py").write_text(PROGRAM)
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "10.77.31.1,10.77.31.2",
        "SLURM_JOB_ID": "1000",
        "SPACES": ",".join(spaces),
    }
    words = ["ip", "netns", "exec", spaces[0], sys.executable, "-m", "polarlm", "launch", "--ranks-per-node", "2"]
    words += ["--launcher", launcher, "--", sys.executable, "program.py"]
    said = subprocess.run(words, cwd=tmp_path, env=os.environ | job, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert "10.0 left left right right" in said.stdout, said.stderr
