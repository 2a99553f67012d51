"""Show or follow what the ranks of a run wrote.

polarlm logs                          the first rank of the newest run
polarlm logs demo -f --rank 3         follow another's
polarlm logs demo --host nid001234    every rank of a host
"""

import argparse

from polarlm.cli.runs import add_run_argument, folder_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `RUN`, the choice of logs, and how much of them."""
    add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is added, until Ctrl-C")
    parser.add_argument("--rank", type=int, metavar="R", help="by default 0, or every rank of the host that is named")
    parser.add_argument("--host", metavar="H", help="by default where the rank last ran")
    parser.add_argument("-n", "--lines", type=int, default=40, metavar="N", help="lines from the end (default: 40)")


def run(arguments: argparse.Namespace) -> None:
    """Print; several logs each under its name, or followed, line by line behind it."""
    from polarlm.config import UserError
    from polarlm.launch import follow, rank_logs, tail

    if arguments.lines < 1:
        raise UserError(f"--lines: {arguments.lines} lines cannot be; give at least 1")
    folder = folder_of(arguments.run)
    logs = rank_logs(folder, arguments.rank, arguments.host)
    if arguments.follow:
        for log, line in follow(lambda: rank_logs(folder, arguments.rank, arguments.host), arguments.lines):
            print(f"{log.host}.{log.rank}: {line}" if len(logs) > 1 else line, flush=True)
    for number, log in enumerate(logs):
        if len(logs) > 1:
            print(f"{'' if number == 0 else chr(10)}==> {log.path} <==")
        print("\n".join(tail(log, arguments.lines)))
