"""Which optimizer has the state that this rank keeps? Itself, but for torch's ``ZeroRedundancyOptimizer``.

That one gives each rank some of the parameters, and an optimizer of its own for them in ``optim``; its ``state_dict()``
wants all state gathered on one rank before. Saving and loading need no such thing: each rank saves what its own optimizer
has, by the names of the parameters, and takes that of the parameters that it has when it loads. So the state moves between
any number of ranks, and between ``ZeroRedundancyOptimizer`` and the optimizer that it wraps.
"""

from __future__ import annotations

import sys

from torch.optim import Optimizer

from aiockpt.state.tree import Path, refuse

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def keeper_of(optimizer: Optimizer, path: Path = ()) -> Optimizer:
    """Return the optimizer that has the state of the parameters that *optimizer*, at *path*, has on this rank.

    Raises:
        UnsupportedStateError: it is one that steps while the gradients are computed, which has no such optimizer.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        refuse(
            path,
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True; make it with overlap_with_ddp=False, or call "
            "consolidate_state_dict(to=rank) on all ranks and save its state_dict() on that one",
        )
    return inner
