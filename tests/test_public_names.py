"""The public surface changes only on purpose."""

from __future__ import annotations

import subprocess
import sys

import aiockpt

PUBLIC = frozenset(
    """
    BackgroundSaveError Best Cadence CheckpointError Checkpointer CommitConflictError CommitTimeoutError Copied
    CorruptionError Deadlines Description Future IO LoadFuture LoadResult Loader LoaderPart NoValidCheckpointError Pruned RNG
    RankError Ranks
    Retention SaveFuture SaveResult ShardedSampler Span StateMismatchError StepInfo StepNotFoundError StorageError
    Stream StreamLoader TensorInfo Tier TornSnapshotError UnsupportedStateError UsageError Verified WriterLostError per_rank
    register_codec
    """.split()  # noqa: SIM905  one block of names reads better than a list of strings
)


def test_the_public_names_are_these() -> None:
    assert sorted(aiockpt.__all__) == sorted(PUBLIC)
    assert all(hasattr(aiockpt, name) for name in PUBLIC)


def test_importing_starts_nothing() -> None:
    script = "import threading, sys, aiockpt; print(threading.active_count(), 'trio' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.split() == ["1", "False"]
