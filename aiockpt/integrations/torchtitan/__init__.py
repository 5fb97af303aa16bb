"""torchtitan (0.3): ``checkpoint=AiockptManager.Config(enable=True, interval=500)`` in place of its own manager.

Every option of torchtitan's manager is supported with the same meaning. A checkpoint has everything that torchtitan saves
(the model and the optimizers by the names of their parameters, schedulers, loader, the trainer's counters), and the random
generators, which torchtitan leaves out: resumed on the same ranks, a run continues exactly as the one that was killed.

A folder of torchtitan's own manager is read: its checkpoints are loaded as torchtitan loads them, until this manager has
committed one.
"""

from aiockpt.integrations.torchtitan.manager import RNG, AiockptManager

__all__ = ["RNG", "AiockptManager"]
