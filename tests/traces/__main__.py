"""`python -m tests.traces record [NAME…]`: record the traces anew. `show NAME` prints one as it is now."""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from tests.traces.documents import write
from tests.traces.scenarios import NAMES, play


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "show"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=" | ".join(NAMES))
    given = parser.parse_args()
    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)
    for name in given.names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            lines = play(name, Path(folder).resolve())
        if given.what == "record":
            write(name, lines)
        else:
            sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
