"""State of a ``Trainer`` beside model and optimizers: loops, callbacks, precision, the datamodule, and what hooks add.

It is the dict that Lightning saves, made and read by Lightning's own functions, without the tensors of model and
optimizers: those are saved directly, shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from aiockpt.integrations.lightning.package import NAME, BaseFinetuning, StochasticWeightAveraging, call

_PLAIN = (bool, int, float, str, bytes, type(None))


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
            checkpoint[one.CHECKPOINT_HYPER_PARAMS_KEY] = _plain_part(one.hparams)
    if datamodule is not None:
        checkpoint[type(datamodule).__qualname__] = call._call_lightning_datamodule_hook(trainer, "state_dict")
    call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
    if _is_same(checkpoint.get("state_dict"), weights):
        del checkpoint["state_dict"]
    checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)  # each rank saves its own position
    return checkpoint


class Restored(dict[str, Any]):
    """The dict that `collect` returned, with the weights, read on access, under ``checkpoint["state_dict"]``.

    Args:
        reads: returns the weights.

    Attributes:
        has_other_weights: whether the module's hook has changed them, so that its own are loaded.
    """

    def __init__(self, saved: dict[str, Any], reads: Callable[[], dict[str, Any]]) -> None:
        super().__init__(saved)
        self.has_other_weights = False
        self._reads = reads
        self._given = self._weights()

    def note_changes(self) -> None:
        """Note whether the hook has changed the weights that it received."""
        self.has_other_weights = self._given != self._weights()

    def _weights(self) -> dict[str, tuple[int, int]]:
        """Return the identities of the weights, with torch's counters of their changes."""
        found: dict[str, Any] = dict.get(self, "state_dict") or {}
        return {name: (id(one), getattr(one, "_version", 0)) for name, one in found.items()}

    def _read(self, key: object) -> None:
        if key == "state_dict" and not super().__contains__(key):
            self["state_dict"] = self._reads()
            self._given = self._weights()

    def __getitem__(self, key: str) -> Any:
        self._read(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of *key*."""
        self._read(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        return key == "state_dict" or super().__contains__(key)


def restore_first(trainer: Any, checkpoint: Restored) -> None:
    """Pass the result of `collect` to the hooks, the datamodule and the callbacks, in Lightning's order."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    checkpoint.note_changes()
    connector.restore_datamodule()
    connector.restore_callbacks()
    # `AsyncCheckpoint._resumes` takes a dict that is left here for a checkpoint of Lightning's own.
    connector._loaded_checkpoint = {}


def restore_loops(trainer: Any, checkpoint: Restored) -> None:
    """Pass the precision plug-in and the loops their part, after the callbacks have begun the fit."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_precision_plugin_state()
    connector.restore_loops()
    connector._loaded_checkpoint = {}


def prepare_callbacks(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore callbacks that change optimizers, which Lightning does only at the next epoch."""
    for callback in trainer.callbacks:
        if isinstance(callback, BaseFinetuning) and "frozen" in saved:
            frozen = set(saved["frozen"])
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in frozen)
        elif isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
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


def _plain_part(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters that are numbers, text, or lists and dicts of them; others as text."""
    return {str(name): value if _is_plain(value) else repr(value) for name, value in dict(hparams).items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return type(value) in _PLAIN
