"""Lightning (2.6): ``Trainer(callbacks=[AsyncCheckpoint("runs/7", every_n_train_steps=500)])``.

The callback saves the whole training in the background. When the same program is started again, it resumes from the newest
checkpoint by itself: in the middle of an epoch, with the very next batch, the same random numbers and the same metrics. It
replaces ``ModelCheckpoint``; if you keep that, `AiockptCheckpointIO` writes its checkpoints. Both import names of Lightning
are supported, ``lightning`` and ``pytorch_lightning``; where both are installed, import yours before this module.
"""

from aiockpt.integrations.lightning.callback import AsyncCheckpoint
from aiockpt.integrations.lightning.plugin import AiockptCheckpointIO

__all__ = ["AiockptCheckpointIO", "AsyncCheckpoint"]
