"""What one call of `polarlm verify` is to try, as its processes are told."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

_TASK, _RESULT = "task.json", "result.json"


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        layouts: their names.
        flags: fields of the run that all layouts share, as words of a command line.
        ranks: how many there are.
        traffic: count what a step sends, instead of comparing what it computes.
        quiet: print nothing on the way.
    """

    layouts: list[str]
    flags: list[str] = field(default_factory=list)
    ranks: int = 1
    traffic: bool = False
    quiet: bool = False

    def save(self, folder: Path) -> None:
        """Lay it into a folder, for `load`."""
        (folder / _TASK).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Task":
        """The task that lies in a folder."""
        return cls(**json.loads((folder / _TASK).read_text(encoding="utf-8")))


def save_result(folder: Path, records: list[dict]) -> None:
    """Lay what came out beside the task."""
    (folder / _RESULT).write_text(json.dumps(records), encoding="utf-8")


def load_result(folder: Path) -> list[dict]:
    """What came out of the folder's task: a record a row."""
    return json.loads((folder / _RESULT).read_text(encoding="utf-8"))
