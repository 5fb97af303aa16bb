"""Checkpoints that others wrote: read as a state, saved as a step, or loaded into live objects.

- `open_checkpoint` sees what kind of checkpoint a path is, and returns its state; its tensors are mapped from the files.
- `save_as_step` makes a step of it, from which everything else goes on.
- `load` fills modules, optimizers and tensors from it, sharded in any way, as ``Checkpointer.load`` does from ours.
- `write_dcp` makes of a step what plain DCP loads.

What is unpickled is unpickled with a list of what is allowed: a file runs no code, unless its user says that it may.
"""

from aiockpt.convert.foreign.checkpoint import Foreign, open_checkpoint
from aiockpt.convert.foreign.loading import load
from aiockpt.convert.foreign.saving import save_as_step
from aiockpt.convert.foreign.to_dcp import write_dcp

__all__ = ["Foreign", "load", "open_checkpoint", "save_as_step", "write_dcp"]
