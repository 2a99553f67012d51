"""PBS and Slurm, as far as a run's jobs need them: a script's directives, submitting it, and what became of jobs."""

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from polarlm.config import UserError
from polarlm.launch.machines.hosts import short_host_name

__all__ = ["BATCH_SCHEDULERS", "BatchScheduler", "Wanted", "clock"]

_PATIENCE_S = 60
# What a directive's line can hold as it is, in every scheduler: no blank, quote or line's end.
_PLAIN = re.compile(r"[\w.,@:+=/%^-]+")

_PBS_WORDS = {"Q": "queued", "R": "running", "H": "waiting", "W": "waiting", "E": "ending", "S": "suspended"}
_SLURM_WORDS = {"PENDING": "queued", "COMPLETING": "ending"}


@dataclass(frozen=True)
class Wanted:
    """What a job asks its scheduler for.

    Attributes:
        logs: where the job's own output goes, relative to where it is submitted.
        warning_s: how long before the walltime's end the scheduler itself, where it can, sends SIGUSR1.
        options: more words of the scheduler, a directive each; `{queue}` in one stands for the queue.
        is_known_site: the machine hands out whole nodes, so that cores need not be asked for.
    """

    name: str
    nodes: int
    ranks_per_node: int
    walltime_s: int
    logs: Path
    warning_s: int
    queue: str | None = None
    account: str | None = None
    filesystems: str | None = None
    options: tuple[str, ...] = ()
    is_known_site: bool = False

    def __post_init__(self) -> None:
        """
        Raises:
            UserError: a value that would break out of its line of the script.
        """
        for flag, value in (
            ("--queue", self.queue),
            ("--account", self.account),
            ("--filesystems", self.filesystems),
            ("RUN", str(self.logs)),
        ):
            if value is not None and not _PLAIN.fullmatch(value):
                raise UserError(
                    f"{flag}: {value!r} cannot stand in a job script's directive; use letters, digits, -_.:"
                )
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise UserError(f"--option: {option!r} is no option of a scheduler, such as --option=--gres=gpu:4")


class BatchScheduler(ABC):
    """One kind of scheduler: its name and title, the program that submits, and the variable with a job's id."""

    name: str
    title: str
    program: str
    job_variable: str
    _marker: str
    _own_variables: tuple[str, ...]
    _quiet: tuple[str, ...] = ()
    _answers: tuple[int, ...] = (0,)  # exit codes of an answer

    def directives(self, wanted: Wanted) -> list[str]:
        """The lines that the scheduler reads at a script's head."""
        return [f"{self._marker} {words}" for words in self._words(wanted)]

    def check_program(self) -> None:
        """
        Raises:
            UserError: what submits is not here.
        """
        if shutil.which(self.program) is None:
            raise UserError(
                f"{self.program} is not on the PATH of {short_host_name()}: submit where {self.title} is, "
                "or see the script with --dry-run"
            )

    def submit(self, script: Path, after: str | None = None) -> str:
        """Submit, to start when job `after` has ended however it did, and return the job's id.

        Raises:
            UserError: there is no such program here, or it refused the job.
        """
        self.check_program()
        command = [self.program, *(self._dependency(after) if after else []), *self._quiet, str(script)]
        # A job that submits the next one must not hand it its own place and size.
        own = [name for name in os.environ if name.startswith(self._own_variables) and name != "SLURM_CONF"]
        environment = {name: value for name, value in os.environ.items() if name not in own}
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
        if answer.returncode:
            said = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
            raise UserError(f"{self.program} refused the job: {' '.join(said.split())}")
        return self._job_id(answer.stdout)

    def states(self, jobs: Iterable[str]) -> dict[str, str] | None:
        """What the scheduler says of the jobs it knows, a word by each number; None where it cannot be asked."""
        try:
            answer = subprocess.run(
                self._question(list(jobs)), capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return self._states(answer.stdout) if answer.returncode in self._answers else None

    @abstractmethod
    def _words(self, wanted: Wanted) -> list[str]:
        """The words of each directive."""

    @abstractmethod
    def _dependency(self, job: str) -> list[str]:
        """The options that let a job wait for another's end, good or bad."""

    def _job_id(self, said: str) -> str:
        return said.split()[-1] if said.split() else ""

    @abstractmethod
    def _question(self, jobs: list[str]) -> list[str]:
        """The command that tells of these jobs, among others maybe."""

    @abstractmethod
    def _states(self, said: str) -> dict[str, str]:
        """A word by each job's number, from what that command printed."""


class _Pbs(BatchScheduler):
    name, title, program, job_variable, _marker = "pbs", "PBS", "qsub", "PBS_JOBID", "#PBS"
    _own_variables = ("PBS_",)
    _answers = (0, 35, 153)  # one of the jobs has ended, or is not known

    def _words(self, wanted: Wanted) -> list[str]:
        cores = "" if wanted.is_known_site else f":ncpus={wanted.ranks_per_node}"
        # Names hold no `=` there.
        words = [f"-N {wanted.name.replace('=', '_')}", f"-l select={wanted.nodes}{cores}", "-l place=scatter"]
        words.append(f"-l walltime={clock(wanted.walltime_s)}")
        words += [f"-l filesystems={wanted.filesystems}"] if wanted.filesystems else []
        words += _options(wanted, "-q {queue}")
        words += [f"-A {wanted.account}"] if wanted.account else []
        return [*words, "-r y", "-j oe", "-k doe", f"-o {wanted.logs}/"]

    def _dependency(self, job: str) -> list[str]:
        return ["-W", f"depend=afterany:{job}"]

    def _question(self, jobs: list[str]) -> list[str]:
        return ["qstat", "-f", *jobs]

    def _states(self, said: str) -> dict[str, str]:
        pairs = re.findall(r"^Job Id: (\S+)$.*?^\s*job_state = (\w)", said, re.MULTILINE | re.DOTALL)
        return {job.partition(".")[0]: _PBS_WORDS.get(letter, "ended") for job, letter in pairs}


class _Slurm(BatchScheduler):
    name, title, program, job_variable, _marker = "slurm", "Slurm", "sbatch", "SLURM_JOB_ID", "#SBATCH"
    _own_variables = ("SLURM_", "SLURMD_")
    _quiet = ("--parsable",)

    def _words(self, wanted: Wanted) -> list[str]:
        words = [f"--job-name={wanted.name}", f"--nodes={wanted.nodes}", f"--ntasks-per-node={wanted.ranks_per_node}"]
        words += ["--exclusive", f"--time={clock(wanted.walltime_s)}"]
        words += [f"--licenses={wanted.filesystems}"] if wanted.filesystems else []
        words += _options(wanted, "--partition={queue}")
        words += [f"--account={wanted.account}"] if wanted.account else []
        words += [f"--output={wanted.logs}/job-%j.log", "--open-mode=append", "--requeue"]
        return [*words, f"--signal=B:USR1@{min(wanted.warning_s, 65535)}"]

    def _dependency(self, job: str) -> list[str]:
        return [f"--dependency=afterany:{job}"]

    def _job_id(self, said: str) -> str:
        return super()._job_id(said).partition(";")[0]  # `123;cluster`

    def _question(self, jobs: list[str]) -> list[str]:
        # Asked for jobs by number it fails as a whole where it has forgotten one.
        return ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%i %T"]

    def _states(self, said: str) -> dict[str, str]:
        pairs = (line.split() for line in said.splitlines())
        return {pair[0]: _SLURM_WORDS.get(pair[1], pair[1].lower()) for pair in pairs if len(pair) == 2}


BATCH_SCHEDULERS: dict[str, BatchScheduler] = {each.name: each for each in (_Pbs(), _Slurm())}


def _options(wanted: Wanted, queue: str) -> list[str]:
    """The queue, in the site's own words where it has some, and the further options."""
    is_said = any("{queue}" in option for option in wanted.options)
    words = wanted.options if is_said else (queue, *wanted.options)
    return [word.replace("{queue}", wanted.queue or "") for word in words if wanted.queue or "{queue}" not in word]


def clock(seconds: float) -> str:
    """Seconds as HH:MM:SS."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
