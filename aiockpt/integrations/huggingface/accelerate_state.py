"""State of a loop of accelerate: prepared and registered objects, and each rank's position in its data."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

import aiockpt
from aiockpt.integrations.huggingface.engine_inside import EngineInside, bare_scheduler
from aiockpt.integrations.huggingface.loader_position import LoaderPosition
from aiockpt.integrations.huggingface.loop_habit import TrainingTraces
from aiockpt.integrations.indices import length_of

logger = logging.getLogger("aiockpt")


class LoopState:
    """The state of one Accelerator's loop, and the positions in the data of its prepared loaders."""

    def __init__(self, accelerator: Any, inside: EngineInside) -> None:
        self._accelerator = accelerator
        self._inside = inside
        self.training = TrainingTraces(accelerator)
        self._positions: list[LoaderPosition] = []

    def models(self) -> list[tuple[str, Any]]:
        """Return the prepared models, each with its name in the state."""
        return self._named("model", self._accelerator._models)

    def position(self, loader: Any) -> LoaderPosition:
        """Return the position in a loader, which is tracked from now on."""
        found = next((one for one in self._positions if one.loader is loader), None)
        if found is None:
            found = LoaderPosition(loader, self.training)
            self._positions.append(found)
        return found

    def position_of(self, reading: Any) -> LoaderPosition | None:
        """Return the position in the loader that *reading* reads, if that is tracked."""
        return next((one for one in self._positions if one.reads(reading)), None)

    def positions(self) -> list[LoaderPosition]:
        """Return the positions in the loaders that are prepared now."""
        loaders = self._accelerator._dataloaders
        self._positions = [one for one in self._positions if any(one.loader is loader for loader in loaders)]
        return [self.position(loader) for loader in loaders]

    @staticmethod
    def _named(kind: str, objects: Iterable[Any]) -> list[tuple[str, Any]]:
        return [(f"{kind}_{number}" if number else kind, one) for number, one in enumerate(objects)]

    def build(self, saves: int, iteration: int) -> dict[str, Any]:
        """Return the present state; only its values, if it is for a load."""
        accelerator = self._accelerator
        state: dict[str, Any] = {
            **dict(self.models()),
            **dict(self._named("optimizer", accelerator._optimizers)),
            **dict(self._named("scheduler", map(bare_scheduler, accelerator._schedulers))),
            **dict(self._named("registered", accelerator._custom_objects)),
        }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        state["rng"] = aiockpt.RNG()
        if self._inside.engine is not None:
            state |= self._inside.build_state()
        state["accelerate"] = {
            "step": accelerator.step,
            "syncs": bool(accelerator.sync_gradients),
            "saves": saves,
            "iteration": iteration,
            "ranks": accelerator.num_processes,
            "registered": len(accelerator._custom_objects),
            "loaders": [one.shared() for one in self.positions()],
        }
        state["rank"] = aiockpt.per_rank(self._own())
        return state

    def _own(self) -> dict[str, Any]:
        """Return the part of one rank: positions in its data, and gradients between the batches of one optimizer step."""
        return {"loaders": [one.own() for one in self.positions()], "gradients": self._gradients()}

    def _gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the accumulated gradients with which the optimizer has not stepped yet."""
        accelerator = self._accelerator
        if accelerator.sync_gradients:
            return {}
        if (kind := accelerator.distributed_type.name) in ("FSDP", "DEEPSPEED"):
            logger.warning("save_state() between the batches of one step: their gradients are not saved under %s", kind)
            return {}
        models = ((name, accelerator.unwrap_model(model)) for name, model in self.models())
        return {
            name: {key: one.grad for key, one in model.named_parameters() if one.grad is not None}
            for name, model in models
        }

    def go_on(self, state: dict[str, Any], same_ranks: bool) -> int:
        """Set the values that are not objects, after a load into *state*; return the number after its step."""
        accelerator, shared = self._accelerator, state["accelerate"]
        own = state["rank"].value or self._own()  # the control run of `aiockpt prove` loads nothing
        accelerator.step = shared["step"]
        accelerator.sync_gradients = shared["syncs"]
        accelerator.project_configuration.iteration = shared["iteration"]
        if not same_ranks:
            logger.warning("saved by %d ranks: the epoch begins anew, split over the present ranks", shared["ranks"])
            return int(shared["saves"])
        for name, model in self.models():
            held = own["gradients"].get(name, {})
            for key, parameter in accelerator.unwrap_model(model).named_parameters():
                parameter.grad = held[key].to(parameter.device) if key in held else None
        for position, values, values_of_rank in self._pair(shared["loaders"], own["loaders"]):
            position.go_on(values, values_of_rank)
        return int(shared["saves"])

    def _pair(self, shared: list[Any], own: list[Any]) -> list[tuple[LoaderPosition, Any, Any]]:
        """Return the loaders that resume, each with its saved position: by number, or if more or fewer of them
        were saved, by the length of their data.
        """
        here, saved = self.positions(), list(zip(shared, own, strict=True))
        if len(here) == len(saved):
            return [(position, *one) for position, one in zip(here, saved, strict=True)]
        logger.warning(
            "%d loaders were prepared when the checkpoint was made, and here are %d: those whose data have as many samples "
            "resume, and others begin anew",
            *(len(saved), len(here)),
        )
        pairs: list[tuple[LoaderPosition, Any, Any]] = []
        for position in here:
            length = length_of(position.loader.dataset)
            number = next((n for n, (values, _) in enumerate(saved) if values.get("length") == length), None)
            if number is not None:
                pairs.append((position, *saved.pop(number)))
        return pairs
