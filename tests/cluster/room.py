"""A room of machines within this one, made of the kernel's namespaces: a login machine and four nodes.

Each has a name, an address and a network of its own; processes and files they share, as nodes share a file system.
Nothing outside the room is touched, no port or Slurm of this machine is in its way, and all that runs in it dies with
its first process, which dies with us.
"""

import os
import subprocess
import time
from pathlib import Path

LOGIN = "login"
NODES = ("nid0001", "nid0002", "nid0003", "nid0004")
LOGIN_ADDRESS = "10.0.0.254"
ADDRESSES = {name: f"10.0.0.{number}" for number, name in enumerate(NODES, 1)}

# The first process. A node is a process that sleeps in namespaces of its own, and a cable to the room's bridge.
_FIRST_PROCESS = f"""
set -e
cd "$1"
hostname {LOGIN}
mount --bind hosts /etc/hosts
ip link set lo up
ip link add nodes type bridge
ip address add {LOGIN_ADDRESS}/24 dev nodes
ip link set nodes up
add_node() {{
  unshare --net --uts sleep infinity &
  until [ "$(readlink /proc/$!/ns/uts)" != "$(readlink /proc/$$/ns/uts)" ]; do sleep 0.01; done
  ip link add "to-$1" type veth peer name eth0 netns $!
  ip link set "to-$1" master nodes up
  nsenter --net --uts -t $! sh -ec "hostname $1; ip link set lo up; ip address add $2/24 dev eth0; ip link set eth0 up"
  echo $! > "$1.pid"
}}
{"; ".join(f"add_node {name} {address}" for name, address in ADDRESSES.items())}
touch ready
wait
"""

# What ssh is between real machines: another environment, in the home folder. Its options mean nothing here.
_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
cd "$HOME"
exec env -i HOME="$HOME" TMPDIR=FOLDER/tmp PATH=/usr/bin:/bin:/usr/sbin:/sbin \\
  nsenter --net --uts -t "$(cat FOLDER/$host.pid)" sh -c "$*"
"""

_PATIENCE_S = 20


class Room:
    """The room, while it is entered.

    Attributes:
        folder: where it keeps what it needs.
        tmp: its machines' TMPDIR. What is killed leaves files there by its process's number, and every room counts
            its processes anew.
        ssh: a program that starts another on a node: `ssh HOST COMMAND ...`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tmp, self.ssh = folder, folder / "tmp", folder / "ssh"

    def __enter__(self) -> "Room":
        self.tmp.mkdir()
        hosts = {LOGIN: LOGIN_ADDRESS, **ADDRESSES}
        text = "".join(f"{address} {name}\n" for name, address in hosts.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}")
        self.ssh.write_text(_SSH.replace("FOLDER", str(self.folder)))
        self.ssh.chmod(0o755)
        new_namespaces = "unshare --net --uts --mount --pid --mount-proc --fork --kill-child".split()
        program = ["bash", "-c", _FIRST_PROCESS, "room", str(self.folder)]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *new_namespaces, *program], stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.folder / "ready").exists():
            assert self._process.poll() is None, "the room's first process has ended"
            assert time.monotonic() < deadline, "the room is not ready"
            time.sleep(0.02)
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._first_pid = children.read_text().split()[0]
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(
        self,
        *words: object,
        node: str = LOGIN,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess:
        """Run a program on a machine of the room, to its end; its output comes back as text."""
        enter = ["nsenter", "--net", "--uts", "--mount", "--pid", "-t", self._first_pid]
        if node != LOGIN:
            enter += ["nsenter", "--net", "--uts", "-t", (self.folder / f"{node}.pid").read_text().strip()]
        command = [*enter, "env", "-C", str(folder or self.folder), *map(str, words)]
        return subprocess.run(
            command,
            env={**(os.environ if environment is None else environment), "TMPDIR": str(self.tmp)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
