"""DeepSpeed (0.19): ``attach(engine, "runs/7")`` replaces its ``save_checkpoint`` and ``load_checkpoint``.

docs/frameworks/deepspeed.md is the page for users.
"""

from aiockpt.integrations.deepspeed.engine_methods import attach

__all__ = ["attach"]
