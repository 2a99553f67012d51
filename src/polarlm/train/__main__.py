"""One rank of a run: `python -m polarlm.train RUN_FOLDER`, started by a launcher.

The folder is all it is told: the resolved run in config.yaml, and the checkpoints to go on from, if there are any.
"""

import errno
import logging
import os
import sys
from pathlib import Path

from polarlm.config import UserError, load_run_folder
from polarlm.launch import LISTEN_FD, Rank, meet, rank_from
from polarlm.parallel import end_with, join_world
from polarlm.train.loop import fit
from polarlm.train.run import open_run
from polarlm.train.watch import AfterSave
from polarlm.train.watchdog import Watchdog

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)  # what the disk says, and no fault of ours


def main(after_save: AfterSave | None = None) -> int:
    """Join the other ranks, train, and part; 2 for a user's mistake. For `after_save` see `fit`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    folder = Path(sys.argv[1])
    listen_fd = os.environ.get(LISTEN_FD)
    try:
        config = load_run_folder(folder)
        # Meeting and loading may hang too, so the time runs from here to the first step, where `fit` starts it anew.
        with Watchdog(config.train.step_timeout) as watchdog:
            watchdog.begin()
            place = meet(rank_from(os.environ) or Rank(0, 1, 0, 1, None, None), os.environ)
            with join_world(
                place.rank,
                place.world,
                place.local_rank,
                place.master_addr or "127.0.0.1",
                place.master_port or 0,
                int(listen_fd) if listen_fd else None,
            ) as world:
                fit(open_run(folder, config, world), after_save)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(
            f"error: {folder}: cannot be written ({error.strerror}); mend that, and go on with --resume",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    end_with(main)
