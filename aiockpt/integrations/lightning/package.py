"""Import of Lightning under the one of its two names that this program uses.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code twice, with separate classes: a callback of one is not a
callback for the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from aiockpt import UsageError

_NAMES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}


def _choose() -> str:
    """Return the name that is already imported, else the one that is installed."""
    for known in (sys.modules.__contains__, lambda name: find_spec(_NAMES[name]) is not None):
        found = [name for name in _NAMES if known(name)]
        if found:
            return found[0]
    raise ImportError("neither lightning nor pytorch_lightning is installed: pip install lightning")


NAME = _choose()
FABRIC = "lightning.fabric" if NAME == "lightning.pytorch" else "lightning_fabric"
callbacks: Any = import_module(f"{NAME}.callbacks")
SIGTERMException: Any = import_module(f"{NAME}.utilities.exceptions").SIGTERMException
call: Any = import_module(f"{NAME}.trainer.call")
TorchCheckpointIO: Any = import_module(f"{FABRIC}.plugins.io.torch_io").TorchCheckpointIO
set_sampler_epoch: Callable[[Any, int], None] = import_module(f"{FABRIC}.utilities.data")._set_sampler_epoch


def check_trainer(trainer: Any) -> None:
    """Refuse a trainer of the other package.

    Raises:
        UsageError: *trainer* is of the other package.
    """
    if not isinstance(trainer, import_module(NAME).Trainer):
        theirs = type(trainer).__module__.split(".trainer", maxsplit=1)[0]
        raise UsageError(
            f"this Trainer is {theirs}'s, and aiockpt.integrations.lightning was imported for {NAME}: "
            f"write `import {theirs}` before the import of aiockpt.integrations.lightning"
        )
