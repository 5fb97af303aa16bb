"""Trains, saves to memory, a disk and a bucket that is down, says what the state is, and dies by SIGKILL.

Run as ``python -m tests.crash.tiers_child MEMORY DISK BUCKET``.
"""

import os
import signal
import sys

from aiockpt.backends.s3 import S3Backend
from aiockpt.storage.retry import Retrying, RetryPolicy
from tests.small_run import Run, small_checkpointer


def main(memory: str, disk: str, bucket: str) -> None:
    """Save two steps, each committed on the disk, print the digest of the second, and die."""
    run = Run(1)
    away = Retrying(S3Backend(bucket, connect_timeout_s=1), RetryPolicy(attempts=1))
    ckpt = small_checkpointer([memory, disk, away])
    for step in (1, 2):
        run.train()
        ckpt.save(step, run.state).result()
    print(run.digest(), flush=True)  # noqa: T201  what the test compares with
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
