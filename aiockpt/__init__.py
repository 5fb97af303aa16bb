"""aiockpt: an asyncio checkpoint engine for PyTorch training. The public names, and nothing else."""

from aiockpt.adapters.native import per_rank
from aiockpt.adapters.rng import RNG
from aiockpt.checkpointer import Checkpointer
from aiockpt.engine.keep import Description, Pruned, StepInfo, TensorInfo, Verified
from aiockpt.errors import (
    BackgroundSaveError,
    CheckpointError,
    CommitConflictError,
    CommitTimeoutError,
    CorruptionError,
    NoValidCheckpointError,
    StateMismatchError,
    StepNotFoundError,
    StorageError,
    UnsupportedStateError,
    UsageError,
)
from aiockpt.options import IO, Best, Deadlines, Retention
from aiockpt.runtime.future import Future, LoadFuture, LoadResult, SaveFuture, SaveResult

__version__ = "0.1.0"

__all__ = [
    "IO",
    "RNG",
    "BackgroundSaveError",
    "Best",
    "CheckpointError",
    "Checkpointer",
    "CommitConflictError",
    "CommitTimeoutError",
    "CorruptionError",
    "Deadlines",
    "Description",
    "Future",
    "LoadFuture",
    "LoadResult",
    "NoValidCheckpointError",
    "Pruned",
    "Retention",
    "SaveFuture",
    "SaveResult",
    "StateMismatchError",
    "StepInfo",
    "StepNotFoundError",
    "StorageError",
    "TensorInfo",
    "UnsupportedStateError",
    "UsageError",
    "Verified",
    "per_rank",
]
