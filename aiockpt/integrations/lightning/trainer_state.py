"""What a ``Trainer`` knows beside model and optimizers: loops, callbacks, precision, the datamodule, and what hooks add.

It is the dict that Lightning saves, made and read by Lightning's own functions, without the tensors of model and
optimizers: those are saved from where they are, shard by shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from aiockpt.integrations.lightning.package import NAME, call

_PLAIN = (bool, int, float, str, bytes, type(None))


def collect(trainer: Any) -> dict[str, Any]:
    """Return what is to be saved; the hooks ``on_save_checkpoint`` of callbacks and of the module have been called."""
    module, datamodule, precision = trainer.lightning_module, trainer.datamodule, trainer.precision_plugin
    weights = module.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": import_module(NAME).__version__,
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


def restore(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Give all but the model and the optimizers, which are filled already, what `collect` returned; call the hooks."""
    module, connector = trainer.lightning_module, trainer._checkpoint_connector
    checkpoint.setdefault("state_dict", dict(module.state_dict()))
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    given = dict(checkpoint["state_dict"])
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    if not _is_same(checkpoint["state_dict"], given):  # the hook has a say in the weights
        trainer.strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_loops()
    connector._loaded_checkpoint = {}


def _is_same(one: Any, other: Mapping[str, Any]) -> bool:
    """Return whether two dicts have the same tensors, not only equal ones, under the same names."""
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
    """Return the hyper-parameters that are numbers, text, or lists and dicts of them; others say what they were."""
    return {str(name): value if _is_plain(value) else repr(value) for name, value in dict(hparams).items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(key) is str and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return type(value) in _PLAIN
