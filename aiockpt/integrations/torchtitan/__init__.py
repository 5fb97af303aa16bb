"""torchtitan (0.3): ``checkpoint=AiockptManager.Config(enable=True, interval=500)`` in place of its own manager.

Every option of torchtitan's manager is there and means what it means there. What is saved is what torchtitan saves (the
model and the optimizers by the names of their parameters, schedulers, loader, the trainer's counters), and the random
generators, which torchtitan leaves out: a run that is resumed on the same ranks is the run that was killed.

A folder that torchtitan's own manager has written is read: what it has is loaded as torchtitan loads it until there is a
checkpoint of this one.
"""

from aiockpt.integrations.torchtitan.manager import RNG, AiockptManager

__all__ = ["RNG", "AiockptManager"]
