"""One node's part in `polarlm doctor`.

python -m polarlm.launch.node_facts [--sign FILE] PURPOSE=FOLDER ... -- PROBE ...
"""

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

from polarlm.launch.nodes.call import call_head
from polarlm.launch.nodes.facts import gather_facts
from polarlm.launch.nodes.wire import WireError


def main() -> int:
    """Call the head, say what time it is here, look around, and tell."""
    words, probe = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="polarlm.launch.node_facts")
    parser.add_argument("--sign", type=Path)
    parser.add_argument("folders", nargs="+")
    arguments = parser.parse_args(words)
    folders = {purpose: Path(path) for purpose, _, path in (word.partition("=") for word in arguments.folders)}
    try:
        wire = call_head({"clock": time.time()})
        wire.send(asdict(gather_facts(folders, probe, os.environ, arguments.sign)))
    except WireError as error:
        print(f"error: the process that started this one: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
