"""The checkpoint manager for Megatron-Bridge, by its documented protocol (0.6): ``custom_manager_class``.

    CheckpointConfig(save="runs/7", load="runs/7", custom_manager_class="aiockpt.integrations.megatron.bridge.BridgeManager")

Model, optimizer, scheduler, training state and random numbers are saved and loaded by `save` and `load` of this package.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import aiockpt
from aiockpt.integrations.megatron.checkpointing import latest, load, open_place, save, wait
from aiockpt.integrations.megatron.flat_buffers import load_optimizer_state, optimizer_state
from aiockpt.integrations.megatron.sharded_leaves import leaf_name, mapping

_parallel: Any = import_module("megatron.core.parallel_state")
_seeds: Any = import_module("megatron.core.tensor_parallel.random")
_microbatches: Any = import_module("megatron.core.num_microbatches_calculator")

logger = logging.getLogger("aiockpt")

_RNG = aiockpt.RNG()


class BridgeManager:
    """Saves and loads for Megatron-Bridge's training loop; all ranks create one, and make the same calls.

    Args:
        checkpoint_config: of Megatron-Bridge. ``save``, ``load``, ``async_save``, ``most_recent_k``, ``ckpt_step``,
            ``save_optim``, ``save_rng``, ``load_optim``, ``load_rng`` and ``finetune`` have the same meaning as there.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config
        self._saving: list[aiockpt.SaveFuture] = []
        self._is_open = False

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """The context by which Megatron-Bridge checks for a checkpoint besides its own files: `find_latest`."""
        return {"local_checkpoint_manager": self}

    def find_latest(self) -> int:
        """Return the newest valid step of the place to load from, or -1."""
        step = self._newest()
        return -1 if step is None else step

    def _newest(self) -> int | None:
        config = self.checkpoint_config
        if config.load is None:
            return None
        if config.load == config.save:
            self._open()
        return latest(config.load)

    # ------------------------------------------------------------------ saving

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save. With ``async_save``, return when the state is copied, else when the step is committed.

        Raises:
            CheckpointError: this save failed, or an earlier one of ``async_save``.
        """
        self._open()
        config = self.checkpoint_config
        iteration = ctx.state.train_state.step
        state = self._ask(ctx, model=True, optim=config.save_optim, rng=config.save_rng, is_loading=False)
        state |= {"iteration": iteration, "flops": ctx.num_floating_point_operations_so_far}
        saving = save(state, f"{config.save}/iter_{iteration:07}", async_sharded_save=True)
        assert saving is not None
        self._saving = [*(one for one in self._saving if not one.done()), saving]
        if not config.async_save:
            saving.result()

    def _open(self) -> None:
        """Open the place; the first time, set the retention of old steps."""
        if not self._is_open:
            kept = self.checkpoint_config.most_recent_k
            open_place(self.checkpoint_config.save, **({"retention": aiockpt.Retention(last=kept)} if kept > 0 else {}))
            self._is_open = True

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """With *blocking*, wait for the saves; otherwise do nothing. *terminate* also releases the places.

        Raises:
            CheckpointError: a save failed.
        """
        if blocking:
            pending, self._saving = self._saving, []
            for saving in pending:
                saving.result()
        if terminate:
            wait()
            self._is_open = False

    # ------------------------------------------------------------------ loading

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load ``ckpt_step``, or the newest valid step; return its iteration and operation count, or (0, 0) without one.

        Raises:
            StateMismatchError: the checkpoint lacks something that is requested.
            CorruptionError: the step is damaged.
        """
        config = self.checkpoint_config
        step = self._newest() if config.ckpt_step is None else config.ckpt_step
        if config.load is None or step is None:
            return 0, 0
        asked = self._ask(
            ctx,
            model=not ctx.skip_load_to_model_and_opt,
            optim=config.load_optim and not (config.finetune or ctx.skip_load_to_model_and_opt),
            rng=config.load_rng and not config.finetune,
            is_loading=True,
        )
        loaded, _, lacking = load(asked, f"{config.load}/iter_{step:07}", strict="return_unexpected")
        self._check(lacking, ctx.strict, asked)
        for name, chunk in self._chunks(ctx.model):
            if name in asked:
                chunk.load_state_dict(loaded[name], strict=ctx.strict)
        if "optimizer" in asked:
            load_optimizer_state(ctx.optimizer, loaded["optimizer"])
            if ctx.opt_param_scheduler is not None and "opt_param_scheduler" in loaded:
                ctx.opt_param_scheduler.load_state_dict(loaded["opt_param_scheduler"])
        if config.finetune:
            return 0, 0
        ctx.state.train_state.load_state_dict(loaded["train_state"])
        _microbatches.update_num_microbatches(
            consumed_samples=ctx.state.train_state.consumed_train_samples, verbose=True
        )
        if loaded.get("rng") is not None:
            _set_generators(loaded["rng"])
        elif "rng" in asked:
            logger.warning("step %d has no %s: the present random numbers go on", step, leaf_name(asked["rng"]))
        return loaded["iteration"], loaded["flops"]

    @staticmethod
    def _check(lacking: set[str], strict: bool, asked: dict[str, Any]) -> None:
        """Refuse missing keys, except random states, which are missing under another parallelism."""
        if "rng" in asked:
            lacking = lacking - {leaf_name(asked["rng"])}
        if lacking and strict:
            found = [f"{key}: not in the checkpoint" for key in sorted(lacking)]
            raise aiockpt.StateMismatchError("the checkpoint", found, "Load with strict=False to go on without them.")

    # ------------------------------------------------------------------ the state

    def _ask(self, ctx: Any, *, model: bool, optim: bool, rng: bool, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state dict of the parts to save or load."""
        chunks = self._chunks(ctx.model) if model else []
        state = {name: chunk.sharded_state_dict() for name, chunk in chunks}
        if ctx.optimizer is not None and optim:
            everything = {f"{name}.{key}": leaf for name, leaves in state.items() for key, leaf in leaves.items()}
            state["optimizer"] = optimizer_state(ctx.optimizer, everything, is_loading=is_loading)
        if not is_loading:
            state["train_state"] = ctx.state.train_state.state_dict()
            if ctx.opt_param_scheduler is not None:
                state["opt_param_scheduler"] = ctx.opt_param_scheduler.state_dict()
        if rng:
            state["rng"] = _generators()
        return state

    @staticmethod
    def _chunks(model: list[Any]) -> list[tuple[str, Any]]:
        """Return the chunks of the model without their wrappers, with their names in the state."""
        found = []
        for number, chunk in enumerate(model):
            while hasattr(chunk, "module"):
                chunk = chunk.module
            found.append((f"model{number}" if len(model) > 1 else "model", chunk))
        return found


def _generators() -> Any:
    """Return the random states of this rank, for its place in the model."""
    places = [
        (_parallel.get_pipeline_model_parallel_rank(), _parallel.get_pipeline_model_parallel_world_size()),
        (_parallel.get_tensor_model_parallel_rank(), _parallel.get_tensor_model_parallel_world_size()),
        (
            _parallel.get_data_parallel_rank(with_context_parallel=True),
            _parallel.get_data_parallel_world_size(with_context_parallel=True),
        ),
    ]
    value = {"generators": _RNG.state_dict(), "tracker": _seeds.get_cuda_rng_tracker().get_states()}
    ranks, sizes = zip(*places, strict=True)
    return mapping.ShardedObject("bridge.rng", value, sizes, ranks, replica_id=0)


def _set_generators(value: Any) -> None:
    _RNG.load_state_dict(value["generators"])
    _seeds.get_cuda_rng_tracker().set_states(value["tracker"])
