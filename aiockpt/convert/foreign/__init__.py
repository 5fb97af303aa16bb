"""Foreign checkpoints (of other libraries): read as a state, saved as a step, or loaded into live objects.

- `open_checkpoint` detects the kind of checkpoint at a path, and returns its state; tensors are mapped from the files.
- `save_as_step` saves it as a step.
- `load` fills modules, optimizers and tensors from it, sharded in any way, as ``Checkpointer.load`` does from ours.
- `write_dcp` exports a step as a checkpoint that plain DCP loads, `write_torch` as a file of ``torch.save``.

Unpickling is restricted to a list of allowed names: a file runs no code unless the caller allows it.
"""

from aiockpt.convert.foreign.checkpoint import Foreign, open_checkpoint
from aiockpt.convert.foreign.loading import load
from aiockpt.convert.foreign.saving import save_as_step
from aiockpt.convert.foreign.to_dcp import write_dcp
from aiockpt.convert.foreign.to_torch import write_torch

__all__ = ["Foreign", "load", "open_checkpoint", "save_as_step", "write_dcp", "write_torch"]
