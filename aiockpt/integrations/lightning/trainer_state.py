"""State of a ``Trainer`` beside model and optimizers: loops, callbacks, precision, the datamodule, and what hooks add.

It is the dict that Lightning saves, made and read by Lightning's own functions, without the tensors of model and
optimizers: those are saved directly, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.utils import prune

from aiockpt.adapters.leaves import LeafWriter
from aiockpt.errors import UnsupportedStateError, UsageError
from aiockpt.integrations.lightning.package import NAME, call, callbacks
from aiockpt.state.codecs import DEFAULT_CODECS
from aiockpt.state.tree import Encoder


def collect(trainer: Any) -> dict[str, Any]:
    """Return the dict to save, after calling the hooks ``on_save_checkpoint`` of callbacks and of the module."""
    module, datamodule, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
    weights = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": import_module(NAME).__version__,
        # A copy: a hook may add or remove weights in it, which `_is_same` notices below.
        "state_dict": dict(weights),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": call._call_callbacks_state_dict(trainer),
        type(precision).__qualname__: precision.state_dict(),
    }
    precision.on_save_checkpoint(checkpoint)
    for one in (module, datamodule):
        if one is not None and one.hparams:
            checkpoint[one.CHECKPOINT_HYPER_PARAMS_KEY] = hyper_parameters(one.hparams)
    if datamodule is not None:
        checkpoint[type(datamodule).__qualname__] = call._call_lightning_datamodule_hook(trainer, "state_dict")
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    if _is_same(checkpoint.get("state_dict"), weights):
        del checkpoint["state_dict"]
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # each rank saves its own position
    return checkpoint


class Restored(dict[str, Any]):
    """The dict that `collect` returned, with the weights, read when they are looked at, under ``"state_dict"``.

    Args:
        reads: returns the weights.

    Attributes:
        has_other_weights: whether the module's hook has changed them, so that its own are loaded.
    """

    def __init__(self, saved: dict[str, Any], reads: Callable[[], dict[str, Any]]) -> None:
        super().__init__(saved)
        self.has_other_weights = False
        self.reads = reads
        self._is_read = False
        self._given = self._weights()

    def note_changes(self) -> None:
        """Note whether the hook has changed the weights that it received."""
        self.has_other_weights = self._given != self._weights()

    def _weights(self) -> dict[str, tuple[int, int]]:
        """Return the identities of the weights, with torch's counters of their changes."""
        found: dict[str, Any] = dict.get(self, "state_dict") or {}
        return {name: (id(one), getattr(one, "_version", 0)) for name, one in found.items()}

    def _read(self) -> None:
        if not self._is_read and not super().__contains__("state_dict"):
            self["state_dict"] = self.reads()
            self._given = self._weights()
        self._is_read = True

    def __missing__(self, key: str) -> Any:
        if key not in ("optimizer_states", "lr_schedulers"):
            raise KeyError(key)
        raise UsageError(
            f"on_load_checkpoint: checkpoint[{key!r}] is loaded after this hook, into the objects: change these in "
            f"on_train_start, or begin them anew by checkpoint[{key!r}] = []"
        )

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (key == "state_dict" and not self._is_read)


def _read_first(name: str) -> Callable[..., Any]:
    """Return a method of a dict that reads the weights before they are looked at."""
    method = getattr(dict, name)

    def read_first(self: Restored, *args: Any) -> Any:
        if not args or args[0] == "state_dict":
            self._read()
        return method(self, *args)

    return read_first


for _name in ("get", "pop", "setdefault", "copy", "keys", "values", "items"):
    setattr(Restored, _name, _read_first(_name))
for _name in ("__getitem__", "__delitem__", "__iter__", "__len__"):
    setattr(Restored, _name, _read_first(_name))


def find_pruned(module: nn.Module) -> list[list[str]]:
    """Return the path of each submodule with a tensor that torch prunes, and the name of the tensor."""
    return [
        [path, hook._tensor_name]
        for path, inner in module.named_modules()
        for hook in inner._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]


def begin_pruning(module: nn.Module, pruned: list[list[str]]) -> None:
    """Give pruned tensors the names that they were saved under: ``weight_orig`` and ``weight_mask``, a mask of ones."""
    begun = find_pruned(module)
    for path, name in pruned:
        if [path, name] not in begun:
            inner = module.get_submodule(path)
            order = [f"{name}_orig" if one == name else one for one in inner._parameters]
            prune.identity(inner, name)  # type: ignore[no-untyped-call]
            # Optimizers are made of the parameters in the order of a model that is not pruned yet.
            inner._parameters = {one: inner._parameters[one] for one in order}


def restore_first(trainer: Any, checkpoint: Restored) -> bool:
    """Pass the result of `collect` to the hooks, the datamodule and the callbacks, in Lightning's order.

    Returns:
        Whether the module has its weights: hooks of callbacks may look at them, and change them.
    """
    connector, module = trainer._checkpoint_connector, trainer.lightning_module
    connector._loaded_checkpoint = checkpoint
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    checkpoint.note_changes()
    looks = any(
        getattr(one.on_load_checkpoint, "__func__", None) is not callbacks.Callback.on_load_checkpoint
        for one in trainer.callbacks
    )
    # Strategies that shard have loaded them before the hooks, and take no change.
    is_loaded = trainer.strategy.restore_checkpoint_after_setup
    if not is_loaded and (looks or checkpoint.has_other_weights):
        weights = checkpoint["state_dict"] if checkpoint.has_other_weights else checkpoint.reads()
        trainer.strategy.load_model_state_dict({"state_dict": weights}, strict=module.strict_loading)
        is_loaded = True
    connector.restore_datamodule()
    connector.restore_callbacks()
    # `AsyncCheckpoint._resumes` takes a dict that is left here for a checkpoint of Lightning's own.
    connector._loaded_checkpoint = {}
    return bool(is_loaded)


def restore_loops(trainer: Any, checkpoint: Restored) -> None:
    """Pass the precision plug-in and the loops their part, after the callbacks have begun the fit."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_precision_plugin_state()
    connector.restore_loops()
    connector._loaded_checkpoint = {}


def restore_replaced(trainer: Any, checkpoint: Restored) -> None:
    """Load what a hook has put in the place of the states of optimizers and schedulers, by Lightning's own way."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    if "optimizer_states" in checkpoint and trainer.strategy.lightning_restore_optimizer:
        connector.restore_optimizers()
    if "lr_schedulers" in checkpoint:
        connector.restore_lr_schedulers()
    connector._loaded_checkpoint = {}


def prepare_callbacks(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore callbacks that change optimizers, which Lightning does only at the next epoch."""
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.BaseFinetuning) and "frozen" in saved:
            frozen = set(saved["frozen"])
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in frozen)
        elif isinstance(callback, callbacks.StochasticWeightAveraging) and callback._scheduler_state is not None:
            latest, callback._latest_update_epoch = callback._latest_update_epoch, trainer.current_epoch
            if trainer.current_epoch <= callback.swa_end:
                callback.on_train_epoch_start(trainer, trainer.lightning_module)  # makes its schedule, averages nothing
            callback._latest_update_epoch = latest


def _is_same(one: Any, other: Mapping[str, Any]) -> bool:
    """Return whether two dicts have the identical tensors, not only equal ones, under the same names."""
    return (
        isinstance(one, Mapping)
        and one.keys() == other.keys()
        and all(_is_same_tensor(one[name], other[name]) for name in one)
    )


def _is_same_tensor(one: Any, other: Any) -> bool:
    if one is other:
        return True
    address = getattr(one, "data_ptr", None)
    return bool(
        address is not None
        and type(one) is type(other)
        and address() == other.data_ptr()
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def restore_accumulation(trainer: Any) -> None:
    """Accumulate as in this epoch, whose beginning a callback has no more; it refuses another value when a fit begins."""
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def hyper_parameters(value: Any) -> Any:
    """Return hyper-parameters to save: what needs pickle (a class, a function, an enum, a module) as text."""
    if isinstance(value, Mapping):
        return {str(name): hyper_parameters(one) for name, one in dict(value).items()}
    if type(value) in (list, tuple):
        return type(value)(map(hyper_parameters, value))
    try:
        Encoder(DEFAULT_CODECS, LeafWriter(lambda place, tensor: "")).encode(value, ())
    except UnsupportedStateError:
        return repr(value)
    return value
