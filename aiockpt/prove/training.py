"""Observation of training between two saves, without a change to the script: torch's own global hooks.

- at each optimizer step: weights, gradients and state of that optimizer, and the settings of its groups, as before it;
- each call of an outermost module with gradients: its input tensors that are data (they need no gradient), and the random
  generators before it;
- ``Tensor.backward``: the value of the loss. (The method is wrapped: torch has no hook there.)

Parameters are identified by their places in the optimizer's groups, and recorded with their names in the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from aiockpt.prove import records
from aiockpt.prove.digests import digest, digest_bytes, digest_value, random_states, sum_of_rows, tensors_in, text_of
from aiockpt.prove.recorder import Recorder


class Training:
    """Watches all training of this process until `close`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: dict[int, str] = {}
        self._optimizers: dict[int, tuple[str, Optimizer]] = {}
        self._pending: dict[int, tuple[int, int, dict[str, Any] | None]] = {}
        self._depth = 0
        self._random: dict[str, str] = {}
        self._clear()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            # always_call: else a forward that raises leaves `_depth` above 0, and no later call counts as outermost.
            register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._backward = torch.Tensor.backward
        torch.Tensor.backward = self._watched_backward()  # type: ignore[method-assign]

    def close(self) -> None:
        """Remove the hooks."""
        torch.Tensor.backward = self._backward  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

    def learn_names(self, state: Mapping[str, Any]) -> None:
        """Read the names of parameters from a *state* that is saved or loaded."""
        for key, value in state.items():
            if isinstance(value, nn.Module):
                for name, parameter in value.named_parameters(remove_duplicate=False):
                    self._names.setdefault(id(parameter), f"{key}.{name}")
            elif isinstance(value, torch.Tensor):
                self._names.setdefault(id(value), key)
            elif type(value) is dict and all(type(name) is str for name in value):
                self.learn_names({f"{key}.{name}": inner for name, inner in value.items()})

    def end(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return weights and optimizer state as they are now, of all optimizers."""
        weights: dict[str, str] = {}
        slots: dict[str, str] = {}
        for kind, optimizer in self._optimizers.values():
            for key, parameter in _parameters(optimizer):
                weights[f"{kind} {key}"] = digest(parameter)
            for key, value in _slots(optimizer).items():
                slot, _, place = key.partition(" ")
                slots[f"{slot} {kind} {place}"] = value
        return weights, slots

    # ------------------------------------------------------------------ the hooks

    def _clear(self) -> None:
        self._inputs: list[str] = []
        self._samples = self._rows = 0
        self._randoms: list[dict[str, str]] = []
        self._losses: list[str] = []

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._random = random_states()

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled():
            return
        given = [tensor for tensor in tensors_in([args, kwargs]) if not tensor.requires_grad]
        if given:
            self._inputs.append(digest_bytes("".join(map(digest, given)).encode()))
            self._samples += sum(map(sum_of_rows, given))
            self._rows += max(len(tensor) if tensor.dim() else 0 for tensor in given)
            self._randoms.append(self._random)

    def _watched_backward(self) -> Any:
        plain, losses_of = self._backward, self

        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.numel() == 1:
                losses_of._losses.append(text_of(tensor.detach()))
            plain(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

        return backward

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._recorder.check()
        kind = _kind(optimizer)
        # The optimizer is kept, too: another one would get its id once it is collected.
        self._optimizers[id(optimizer)] = kind, optimizer
        parameters = list(_parameters(optimizer))
        self._pending[id(optimizer)] = (
            self._recorder.begin_step(),
            len(self._inputs),
            {
                "optimizer": kind,
                "settings": _settings(optimizer),
                "slots": _slots(optimizer),
                "weights": {key: digest(parameter) for key, parameter in parameters},
                "gradients": _gradients(parameters),
                "names": {
                    key: self._names[id(parameter)] for key, parameter in parameters if id(parameter) in self._names
                },
            },
        )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        count, input_count, fields = self._pending.pop(id(optimizer), (0, 0, None))
        if fields is not None:
            if len(self._inputs) > input_count:  # forward and backward were in the step, as a closure
                fields["gradients"] = _gradients(_parameters(optimizer))
            self._recorder.write(
                records.Stepped,
                at=count,
                inputs=self._inputs,
                samples=records.sum_text(self._samples),
                rows=self._rows,
                random=self._randoms or [random_states()],
                losses=self._losses,
                **fields,
            )
            self._clear()
        self._recorder.end_step()


def _gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {key: digest(parameter.grad) for key, parameter in parameters if parameter.grad is not None}


def _kind(optimizer: Optimizer) -> str:
    """Return the identity of this optimizer in every start of the script: class, and shapes of its parameters."""
    shapes = repr([[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups])
    return f"{type(optimizer).__name__} {xxhash.xxh3_64(shapes.encode()).hexdigest()[:8]}"


def _parameters(optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"g{number}.p{place}", parameter)
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]


def _settings(optimizer: Optimizer) -> dict[str, str]:
    return {
        f"{key} of group {number}": text_of(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _slots(optimizer: Optimizer) -> dict[str, str]:
    """Return each entry of the state: ``exp_avg g0.p3`` → digest."""
    found: dict[str, str] = {}
    for key, parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter)
        for slot, value in state.items() if isinstance(state, Mapping) else ():
            found[f"{slot} {key}"] = digest_value(value)
    everything: Mapping[Any, Any] = optimizer.state
    for rest, state in everything.items():
        if not isinstance(rest, torch.Tensor):
            found[f"{rest} of all"] = digest_value(state)
    return found
