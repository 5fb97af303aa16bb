"""The integration of the made-up framework: ``attach(trainer, "runs/7")``."""

from __future__ import annotations

from typing import Any

import aiockpt
from aiockpt.integrations.contract import MethodCall, Replacements, resume_newest


def attach(trainer: Any, place: Any, **options: Any) -> aiockpt.Checkpointer:
    """Make *trainer* save and load with aiockpt; return the checkpointer that it uses."""
    ckpt = aiockpt.Checkpointer(place, **options)

    def state() -> dict[str, Any]:
        return {
            "model": trainer.model,
            "optimizer": trainer.optimizer,
            "order": trainer.order,
            "done": trainer.done,
            "rng": aiockpt.RNG(),
        }

    def save(call: MethodCall) -> None:
        ckpt.save(trainer.done, state())

    def resume(call: MethodCall) -> None:
        def load(step: int) -> None:
            loaded = state()
            ckpt.load(loaded, step).result()
            trainer.order, trainer.done = loaded["order"], loaded["done"]

        step = call.get("step")
        resume_newest(ckpt, load, None if step is None else [step])

    def end(call: MethodCall) -> None:
        call()
        ckpt.wait()

    methods = Replacements(trainer)
    methods.put(trainer, "save", save)
    methods.put(trainer, "resume", resume, ["step"])
    methods.put(trainer, "end", end)
    return ckpt
