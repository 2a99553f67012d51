"""First on the path of a run that is to be interrupted: its first rank pauses after every step, and so all wait."""

import sys
import time

PAUSE_S = 0.2

if sys.orig_argv[1:3] == ["-m", "polarlm.cli.rank"]:
    from polarlm.train.metrics import MetricsLog

    _write = MetricsLog.write

    def _write_and_pause(self, line):
        _write(self, line)
        time.sleep(PAUSE_S)

    MetricsLog.write = _write_and_pause
