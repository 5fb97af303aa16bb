"""Optimizers of DeepSpeed that need no compiled code: the same names, groups and state."""

from typing import Any, ClassVar

import torch


class Compiled(torch.optim.Optimizer):
    """AdamW's step; it is counted in an integer, and 0 in the group."""

    own: ClassVar[dict[str, Any]] = {"eps": 1e-8, "bias_correction": True}

    def __init__(self, parameters: Any, **how: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01, **self.own, **how})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            group["step"], (first, second) = 0, group["betas"]
            for one in (one for one in group["params"] if one.grad is not None):
                state = self.state[one]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
                state["step"] += 1
                one.mul_(1 - group["lr"] * group["weight_decay"])
                mean = state["exp_avg"].lerp_(one.grad, 1 - first) / (1 - first ** state["step"])
                square = state["exp_avg_sq"].lerp_(one.grad.square(), 1 - second) / (1 - second ** state["step"])
                one.sub_(group["lr"] * mean / (square.sqrt() + group.get("eps", 0.1)))


class FusedAdam(Compiled):
    pass


class DeepSpeedCPUAdam(Compiled):
    own: ClassVar[dict[str, Any]] = {**Compiled.own, "amsgrad": False}


class FusedLamb(Compiled):
    own: ClassVar[dict[str, Any]] = {**Compiled.own, "max_coeff": 10.0}


class FusedLion(Compiled):
    own: ClassVar[dict[str, Any]] = {}
