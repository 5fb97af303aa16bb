"""aiockpt: an asyncio checkpoint engine for PyTorch training. Only the public names.

A name is imported when it is first used, so that ``aiockpt --help`` and the pure layers need not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiockpt.adapters.rng import RNG, per_rank
    from aiockpt.adapters.selection import trainable
    from aiockpt.adapters.sharded_tensors import Shards
    from aiockpt.data.loader import Loader
    from aiockpt.data.sampler import ShardedSampler
    from aiockpt.data.samples import LoaderPart, Span, Stream
    from aiockpt.data.stream import StreamLoader
    from aiockpt.engine.maintenance import Copied, Description, Pruned, StepInfo, TensorInfo, Verified
    from aiockpt.errors import (
        BackgroundSaveError,
        BadStepError,
        BlockingCallError,
        CheckpointError,
        ClosedError,
        CommitConflictError,
        CommitError,
        CommitTimeoutError,
        CorruptionError,
        ForkedProcessError,
        NewerFormatError,
        NoValidCheckpointError,
        RankError,
        RankFailedError,
        RanksDisagreeError,
        RankTimeoutError,
        ReplicasDifferError,
        RewindExhaustedError,
        SaveCancelledError,
        SaveSkippedError,
        StateMismatchError,
        StepExistsError,
        StepNotFoundError,
        StorageAccessError,
        StorageError,
        StorageFullError,
        StorageTimeoutError,
        TornSnapshotError,
        UnsupportedStateError,
        UsageError,
        WriterLostError,
    )
    from aiockpt.futures import Future, LoadFuture, LoadResult, SaveFuture, SaveResult
    from aiockpt.options import IO, Best, Deadlines, Lazy, Limits, Retention, Tier
    from aiockpt.policies.cadence import Cadence
    from aiockpt.publish.publication import Publish, Published
    from aiockpt.publish.receiver import ReceivedVersion, receive
    from aiockpt.runtime.world import Ranks
    from aiockpt.session.checkpointer import Checkpointer
    from aiockpt.session.preemption import Preempted, Preemption
    from aiockpt.session.rewind import Rewind
    from aiockpt.state.codecs import register_codec

__version__ = "0.1.0"

__all__ = [
    "IO",
    "RNG",
    "BackgroundSaveError",
    "BadStepError",
    "Best",
    "BlockingCallError",
    "Cadence",
    "CheckpointError",
    "Checkpointer",
    "ClosedError",
    "CommitConflictError",
    "CommitError",
    "CommitTimeoutError",
    "Copied",
    "CorruptionError",
    "Deadlines",
    "Description",
    "ForkedProcessError",
    "Future",
    "Lazy",
    "Limits",
    "LoadFuture",
    "LoadResult",
    "Loader",
    "LoaderPart",
    "NewerFormatError",
    "NoValidCheckpointError",
    "Preempted",
    "Preemption",
    "Pruned",
    "Publish",
    "Published",
    "RankError",
    "RankFailedError",
    "RankTimeoutError",
    "Ranks",
    "RanksDisagreeError",
    "ReceivedVersion",
    "ReplicasDifferError",
    "Retention",
    "Rewind",
    "RewindExhaustedError",
    "SaveCancelledError",
    "SaveFuture",
    "SaveResult",
    "SaveSkippedError",
    "ShardedSampler",
    "Shards",
    "Span",
    "StateMismatchError",
    "StepExistsError",
    "StepInfo",
    "StepNotFoundError",
    "StorageAccessError",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "Stream",
    "StreamLoader",
    "TensorInfo",
    "Tier",
    "TornSnapshotError",
    "UnsupportedStateError",
    "UsageError",
    "Verified",
    "WriterLostError",
    "per_rank",
    "receive",
    "register_codec",
    "trainable",
]

_HOMES = (
    "aiockpt.errors",
    "aiockpt.options",
    "aiockpt.futures",
    "aiockpt.runtime.world",
    "aiockpt.state.codecs",
    "aiockpt.data.samples",
    "aiockpt.policies.cadence",
    "aiockpt.session.preemption",
    "aiockpt.session.rewind",
    "aiockpt.adapters.rng",
    "aiockpt.data.loader",
    "aiockpt.data.sampler",
    "aiockpt.data.stream",
    "aiockpt.adapters.sharded_tensors",
    "aiockpt.adapters.selection",
    "aiockpt.engine.maintenance",
    "aiockpt.session.checkpointer",
    "aiockpt.publish.publication",
    "aiockpt.publish.receiver",
)
"""The modules that define the public names; the cheapest to import are tried first."""


_SUBMODULES = ("backends", "convert", "integrations", "monitor", "prove", "publish", "testing")
"""Imported when first used as an attribute, as in ``aiockpt.monitor.TraceFile()``."""


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"aiockpt.{name}")
    if name in __all__:
        for home in _HOMES:
            module = import_module(home)
            if name in vars(module):
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module 'aiockpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module", "_HOMES", "_SUBMODULES"})
