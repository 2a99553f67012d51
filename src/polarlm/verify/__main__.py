"""`python -m polarlm.verify FOLDER` does the task that lies in FOLDER, and lays the result beside it."""

import sys
from pathlib import Path

from polarlm.config import UserError
from polarlm.verify.run import do_task
from polarlm.verify.task import Task, save_result


def main() -> int:
    """Fork all ranks from this process; 0 whatever they found, 2 for a user's mistake."""
    folder = Path(sys.argv[1])
    try:
        save_result(folder, do_task(Task.load(folder)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
