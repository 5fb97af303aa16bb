"""One fit of a trainer: the points that its loops reach, the state to save, and the resume.

Lightning's loops detect a restart from their counters, and then skip or repeat hooks, validations and scheduler steps, for
checkpoints that were made in the middle of these. Our checkpoints are made between them; so the loops get their counters
and continue as without a restart, from right before the next batch or epoch. The random generators are set there, and not
earlier: the setup before it (loaders, sanity checks, ``on_train_start``) also draws numbers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal

import torch

import aiockpt
from aiockpt.integrations.contract import MethodCall, Replacements
from aiockpt.integrations.lightning import trainer_state
from aiockpt.integrations.lightning.data_position import DataPosition
from aiockpt.integrations.lightning.package import set_sampler_epoch

logger = logging.getLogger("aiockpt")

Point = Literal["batch", "epoch"]
"""Point at which a checkpoint was made: after a batch and its validation, or after an epoch with all of its hooks."""


class Resume:
    """The state of one fit.

    Args:
        trainer: Lightning's.
        callback: our callback, which is notified of the points that the loops reach.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer, self._callback = trainer, callback
        self._replacements = Replacements()
        self._data: DataPosition | None = None
        self._from: aiockpt.Checkpointer | None = None
        self._saved: dict[str, Any] | None = None
        self._step, self._url = 0, ""
        self._first: tuple[int, dict[str, Any], trainer_state.Restored] | None = None
        self._has_weights = self._has_position = False
        self._own: dict[str, Any] | None = None
        self._random: Any = None
        self._replacements.put(
            trainer._checkpoint_connector, "resume_start", self._begin_restore, ("checkpoint_path", "weights_only")
        )

    def undo(self) -> None:
        """Restore the trainer's own methods."""
        self._replacements.undo()

    def follow_loops(self) -> None:
        """Attach to the loops of a fit."""
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        put = self._replacements.put
        put(fit, "setup_data", self._set_up_again)
        put(fit, "_load_combined_loader_states", self._set_up_data)
        put(fit, "on_advance_start", self._begin_epoch)
        put(epoch, "on_run_start", self._begin_batches, ("data_fetcher",))
        put(epoch, "on_advance_end", self._end_batch)
        put(fit, "on_advance_end", self._end_epoch)

    # ------------------------------------------------------------------ save

    def state(self, point: Point) -> dict[str, Any]:
        """Return the state to save, at a point between two batches or two epochs."""
        trainer, module = self._trainer, self._trainer.lightning_module
        assert self._data is not None
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        logged = {name: torch.as_tensor(one).detach().clone() for name, one in trainer.callback_metrics.items()}
        mine = {"data": self._data.state(), "logged": logged}
        state = {**self._trained(), "rng": aiockpt.RNG(), "rank": aiockpt.per_rank(mine), "loaders": self._data.loaders}
        checkpoint = trainer_state.collect(trainer)  # on all ranks, as its hooks may be collective
        if trainer.global_rank == 0:
            state["lightning"] = {
                **checkpoint,
                "aiockpt": {
                    "point": point,
                    "ranks": trainer.world_size,
                    "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
                    "pruned": trainer_state.find_pruned(module),
                    "batches": batches,
                    "samples": self._data.samples(batches),
                },
            }
        return state

    def _trained(self) -> dict[str, Any]:
        """Return what lies in tensors, which any number of ranks loads."""
        trainer = self._trainer
        return {
            "model": trainer.strategy.model,
            "optimizers": list(trainer.optimizers),
            "schedulers": [one.scheduler for one in trainer.lr_scheduler_configs],
        }

    # ------------------------------------------------------------------ load

    def load_first(self, checkpointer: aiockpt.Checkpointer, step: int | None) -> int | None:
        """Pass callbacks, the datamodule and hooks their part before optimizers are made; return the step that is loaded.

        Lightning does the same at this point: a callback then makes the groups of its optimizers, or removes schedulers.
        """
        trainer = self._trainer
        state: dict[str, Any] = {} if trainer.global_rank else {"lightning": None}  # rank 0 saved it
        loaded = checkpointer.load(state, step).result()
        saved = trainer.strategy.broadcast(state.get("lightning"))
        if loaded is None or saved is None:
            return None
        trainer_state.begin_pruning(trainer.lightning_module, saved["aiockpt"]["pruned"])
        if trainer.strategy.restore_checkpoint_after_setup:
            state = {"model": trainer.strategy.model}
            weights = checkpointer.load(state, step, strict=trainer.lightning_module.strict_loading).result()
            assert weights is not None
            if weights.step != loaded.step:
                return self.load_first(checkpointer, weights.step)
        reads = partial(self._callback.read_weights, loaded.step)
        self._first = (loaded.step, saved.pop("aiockpt"), trainer_state.Restored(saved, reads))
        self._has_weights = trainer_state.restore_first(trainer, self._first[2])
        return loaded.step

    def load(self, checkpointer: aiockpt.Checkpointer, step: int | None) -> aiockpt.LoadResult | None:
        """Fill the objects that exist before the data does; the rest is loaded when the loops reach it."""
        trainer = self._trainer
        if self._first is None and self.load_first(checkpointer, step) is None:
            return None
        assert self._first is not None
        _, self._saved, checkpoint = self._first
        trainer_state.restore_loops(trainer, checkpoint)
        trainer_state.prepare_callbacks(trainer, self._saved)
        state = self._trained()
        # A callback has removed them, and makes its own when an epoch begins; or a hook has replaced what is loaded.
        if not state["schedulers"] or "lr_schedulers" in checkpoint:
            del state["schedulers"]
        if "optimizer_states" in checkpoint:
            del state["optimizers"]
        only = [key for key in state if key != "model"] if self._has_weights else None
        loaded = checkpointer.load(state, step, only=only, strict=trainer.lightning_module.strict_loading).result()
        assert loaded is not None
        if loaded.step != self._first[0]:  # a part of the newest step is damaged that was not read before
            self._first = None
            return self.load(checkpointer, loaded.step)
        trainer_state.restore_replaced(trainer, checkpoint)
        self._from, self._step, self._url = checkpointer, loaded.step, loaded.url
        if self._has_ended():
            self._log_end()
        return loaded

    def _log_end(self) -> None:
        if self._trainer.global_rank == 0:
            logger.warning(
                "%s: all that this fit would train is trained in step %d, and nothing is left to do; raise max_epochs or "
                "max_steps to train on, or begin anew in another folder or by resume=False",
                *(self._url, self._step),
            )

    def _begin_restore(self, call: MethodCall) -> None:
        """Skip a checkpoint of aiockpt, which the callback loads; let Lightning load others."""
        path = call.get("checkpoint_path")
        is_ours = path is not None and self._callback.accept_path(path)
        fits = self._trainer.state.fn == "fit"
        if not is_ours:
            call()
        elif not fits:
            self._trainer._checkpoint_connector._loaded_checkpoint = self._callback.load_weights(self._trainer)
        if fits and (is_ours or path is None) and not self._trainer.strategy.restore_checkpoint_after_setup:
            self._callback.begin(self._trainer)

    def _set_up_data(self, call: MethodCall) -> None:
        """Register the loaders before the first read."""
        self._data = DataPosition(self._trainer.fit_loop._combined_loader)
        if self._saved is None:
            call()
        else:
            self._load_position()

    def _set_up_again(self, call: MethodCall) -> None:
        """Resume in loaders that were set up early, for example for the number of batches in ``configure_optimizers``."""
        call()
        if self._saved is not None and not self._has_position:
            self._load_position()
            iter(self._trainer.fit_loop._data_fetcher)

    def register_loaders(self) -> None:
        """Register the loaders that another callback has set up already."""
        fit = self._trainer.fit_loop
        if fit._combined_loader is not None:
            self._data = DataPosition(fit._combined_loader)
            iter(fit._data_fetcher)

    def _load_position(self) -> None:
        """Load the state of this rank, and continue its loaders."""
        fit = self._trainer.fit_loop
        assert self._saved is not None
        assert self._from is not None
        assert self._data is not None
        self._has_position = True
        self._load_own(self._from, self._data)
        for loader in fit._combined_loader.flattened:
            set_sampler_epoch(loader, fit.epoch_progress.current.processed)
        if self._saved["point"] == "batch":
            progress = fit.epoch_loop.batch_progress.current
            passed, seen = self._data.recount(self._saved, self._trainer.world_size)
            progress.ready = progress.started = progress.processed = progress.completed = passed
            self._data.go_on(self._own and self._own["data"], passed, seen)

    def _load_own(self, checkpointer: aiockpt.Checkpointer, data: DataPosition) -> None:
        """Load the state of this rank: loaders, generators, what was logged last."""
        assert self._saved is not None
        state: dict[str, Any] = {"rng": aiockpt.RNG(), "loaders": data.loaders}
        if self._saved["ranks"] == self._trainer.world_size:
            state["rank"] = aiockpt.per_rank(None)
        checkpointer.load(state, self._step).result()
        self._random = aiockpt.RNG().state_dict()
        self._own = state["rank"].value if "rank" in state else None

    def _go_on(self) -> None:
        """Restore the saved run; no random number is drawn between this call and its next batch or epoch."""
        trainer, own, data = self._trainer, self._own, self._data
        fit = trainer.fit_loop
        for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop, fit.epoch_loop.automatic_optimization):
            loop._restarting = False
        trainer_state.restore_accumulation(trainer)
        if own is not None and data is not None:
            # What schedules and early stopping look at; means over the epoch begin anew, as with Lightning.
            logged = {name: one.to(trainer.strategy.root_device) for name, one in own["logged"].items()}
            trainer._logger_connector._callback_metrics.update(logged)
            data.write_own(own["data"])
        self._saved = self._own = None
        aiockpt.RNG().load_state_dict(self._random)

    def stop(self) -> None:
        """Note that training stops, as on SIGTERM: a save follows only if that is between two batches or epochs."""
        fit = self._trainer.fit_loop
        total, batches = fit.epoch_progress.total, fit.epoch_loop.batch_progress.total
        if batches.completed != batches.ready:  # in the middle of a batch, by another error
            return
        if total.completed == total.ready:
            self._callback.reach(self._trainer, "epoch", ends=True)
        elif self._data is not None and self._saved is None and not fit.epoch_loop._should_accumulate():
            self._callback.reach(self._trainer, "batch", ends=True)

    # ------------------------------------------------------------------ the loops

    def _begin_epoch(self, call: MethodCall) -> None:
        fit = self._trainer.fit_loop
        if self._saved is not None and self._saved["point"] == "epoch" and self._data is not None:
            self._go_on()
            fit._resuming_from_checkpoint = False  # the loaders are begun anew, as between any two epochs
        call()

    def _begin_batches(self, call: MethodCall) -> None:
        saved, data, fetcher = self._saved, self._data, call.get("data_fetcher")
        fit = self._trainer.fit_loop
        if data is not None and self._trainer.current_epoch > 0 and not (fit.is_resuming or fit.epoch_loop.restarting):
            data.begin()  # the loaders are begun anew by the method itself, then
        call()
        if data is not None and saved is not None:
            data.pass_over(fetcher, fit.epoch_loop.batch_progress.current.ready)
            self._go_on()
            # Saved after the last batch of the last epoch, whose end alone is left.
            if fit.epoch_loop._num_ready_batches_reached() and self._is_last_epoch(1):
                self._log_end()
        if data is not None:
            data.watch(fetcher)

    def _end_batch(self, call: MethodCall) -> None:
        call()
        epoch = self._trainer.fit_loop.epoch_loop
        if not epoch._should_accumulate():
            in_mid_epoch = not epoch._num_ready_batches_reached()
            self._callback.reach(self._trainer, "batch", ends=in_mid_epoch and epoch.done)

    def _end_epoch(self, call: MethodCall) -> None:
        call()
        fit = self._trainer.fit_loop
        if fit.epoch_loop._num_ready_batches_reached():
            stops = self._trainer.should_stop and fit._can_stop_early
            self._callback.reach(self._trainer, "epoch", ends=stops or self._has_ended())
            self._callback.check_monitor(self._trainer)

    def _has_ended(self) -> bool:
        """Return whether this fit has no epoch or no step left."""
        fit = self._trainer.fit_loop
        return self._is_last_epoch(0) or bool(fit.max_steps != -1 and self._trainer.global_step >= fit.max_steps)

    def _is_last_epoch(self, left: int) -> bool:
        """Return whether no epoch follows the next *left* ones."""
        fit = self._trainer.fit_loop
        return bool(fit.max_epochs != -1 and fit.epoch_progress.current.processed + left >= fit.max_epochs)
