"""``python -m aiockpt.worker``: the writer process; started by `aiockpt.worker.process` only."""

import os
import sys

if __name__ == "__main__":
    niceness, *descriptors = map(int, sys.argv[1:])
    if niceness:  # before any thread starts, those of numpy's libraries among them; the priority at the disk follows it
        os.nice(niceness)
    from aiockpt.worker.root import main

    main(*descriptors)
