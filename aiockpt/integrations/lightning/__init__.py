"""Lightning (2.6): ``Trainer(callbacks=[AsyncCheckpoint("runs/7", every_n_train_steps=500)])``.

The callback saves the whole training in the background and goes on by itself from the newest checkpoint when the same
program is started again: in the middle of an epoch, with the very next batch, the same random numbers and the same
metrics. It replaces ``ModelCheckpoint``; where that one is kept, `AiockptCheckpointIO` writes what it saves. Both import
names of Lightning are supported, ``lightning`` and ``pytorch_lightning``; where both are installed, import yours before
this module.
"""

from aiockpt.integrations.lightning.callback import AsyncCheckpoint
from aiockpt.integrations.lightning.plugin import AiockptCheckpointIO

__all__ = ["AiockptCheckpointIO", "AsyncCheckpoint"]
