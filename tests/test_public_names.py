"""The public surface changes only on purpose."""

import inspect

import pytest

import aiockpt
from tests.run_python import run_python

PUBLIC = frozenset(
    """
    BackgroundSaveError BadStepError Best BlockingCallError Cadence CheckpointError Checkpointer ClosedError
    CommitConflictError CommitError CommitTimeoutError Copied CorruptionError Deadlines Description ForkedProcessError
    Future IO Lazy Limits LoadFuture LoadResult Loader LoaderPart NewerFormatError NoValidCheckpointError Preempted
    Preemption Pruned Publish Published RNG RankError RankFailedError RankTimeoutError Ranks RanksDisagreeError
    ReceivedVersion ReplicasDifferError Retention Rewind RewindExhaustedError SaveCancelledError SaveFuture SaveResult
    SaveSkippedError ShardedSampler Shards Span StateMismatchError StepExistsError StepInfo StepNotFoundError
    StorageAccessError StorageError StorageFullError StorageTimeoutError Stream StreamLoader TensorInfo Tier
    TornSnapshotError UnsupportedStateError UsageError Verified WriterLostError per_rank receive register_codec
    trainable
    """.split()  # noqa: SIM905  one block of names reads better than a list of strings
)


def test_the_public_names_are_these() -> None:
    assert sorted(aiockpt.__all__) == sorted(PUBLIC)
    assert all(hasattr(aiockpt, name) for name in PUBLIC)


def test_what_the_module_needs_for_itself_is_not_shown() -> None:
    assert not {"TYPE_CHECKING", "import_module", "_HOMES"} & set(dir(aiockpt))
    assert set(dir(aiockpt)) >= PUBLIC | {"__version__"}


@pytest.mark.parametrize("face", [aiockpt.Checkpointer, aiockpt.Loader, aiockpt.RNG, aiockpt.SaveFuture])
def test_each_method_is_told_by_itself_and_with_defaults_that_can_be_read(face: type) -> None:
    methods = [value for name, value in vars(face).items() if inspect.isfunction(value) and name[0] != "_"]
    assert methods
    for method in methods:
        assert not (method.__doc__ or "The same").startswith("The same"), method
        assert "<lambda>" not in str(inspect.signature(method)), method


def test_a_module_of_the_package_is_imported_when_it_is_first_used() -> None:
    script = "import sys, aiockpt; print('aiockpt.monitor' in sys.modules, aiockpt.monitor.TraceFile.__name__)"
    assert run_python("-c", script).stdout.split() == ["False", "TraceFile"]


def test_importing_starts_nothing() -> None:
    script = "import threading, sys, aiockpt; print(threading.active_count(), 'trio' in sys.modules)"
    assert run_python("-c", script).stdout.split() == ["1", "False"]
