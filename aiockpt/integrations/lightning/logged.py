"""Values logged in an epoch so far: sums behind the means of ``self.log(…, on_epoch=True)``, and metrics of torchmetrics.

Lightning does not save them: after a resume, the means of the epoch would be those of its rest alone. Early stopping,
schedulers and the choice of the best checkpoint depend on them.
"""

from __future__ import annotations

from typing import Any

import torch

from aiockpt.integrations.lightning.package import result

_FLAGS = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "dataloader_idx",
    "metric_attribute",
)  # fmt: skip


def collect(trainer: Any) -> dict[str, Any]:
    """Return the values logged so far on this rank."""
    results, connector = trainer.fit_loop.epoch_loop._results, trainer._logger_connector
    return {
        "is_first_batch": connector._first_loop_iter,
        "last_hook": connector._current_fx,
        "callback_metrics": {name: _copy(value) for name, value in trainer.callback_metrics.items()},
        "results": {key: _of_result(one) for key, one in results.items() if not one.has_reset},
        "metrics": {name: _of_metric(one) for name, one in _metrics(trainer.lightning_module)},
    }


def restore(trainer: Any, saved: dict[str, Any]) -> None:
    """Continue from the values that `collect` returned."""
    device, connector = trainer.strategy.root_device, trainer._logger_connector
    connector._first_loop_iter, connector._current_fx = saved["is_first_batch"], saved["last_hook"]
    kept = {name: value.to(device) for name, value in saved["callback_metrics"].items()}
    connector._callback_metrics.update(kept)
    metrics = dict(_metrics(trainer.lightning_module))
    for name, state in saved["metrics"].items():
        if name in metrics:
            _fill(metrics[name], state, device)
    results = trainer.fit_loop.epoch_loop._results
    for key, one in saved["results"].items():
        attribute = one["flags"]["metric_attribute"]
        if one["state"] is not None or attribute in metrics:
            made = results[key] = result._ResultMetric(_meta(trainer, one), one["state"] is not None)
            made.to(device)
            if one["state"] is None:
                made.value = metrics[attribute]
            else:
                _fill(made, one["state"], device)


def _of_result(one: Any) -> dict[str, Any]:
    meta, sync = one.meta, one.meta.sync
    return {
        "flags": {name: getattr(meta, name) for name in _FLAGS},
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only, "op": sync.op},
        "state": _of_metric(one) if one.is_tensor else None,
    }


def _meta(trainer: Any, one: dict[str, Any]) -> Any:
    """Return the metadata of a logged value, as ``self.log`` makes it from its arguments."""
    meta = result._Metadata(**one["flags"], reduce_fx=one["reduce_fx"])
    meta.sync = result._Sync(
        _should=one["sync"]["should"],
        fn=trainer.strategy.reduce,
        rank_zero_only=one["sync"]["rank_zero_only"],
        _op=one["sync"]["op"],
    )
    return meta


def _metrics(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in module.named_modules() if isinstance(one, result.Metric)]


def _of_metric(metric: Any) -> dict[str, Any]:
    """Return the state of a metric, which is only in a ``state_dict()`` if it is made persistent."""
    return {
        "count": metric._update_count,
        "state": {
            name: {str(place): _copy(one) for place, one in enumerate(value)}
            if isinstance(value, list)
            else _copy(value)
            for name, value in ((name, getattr(metric, name)) for name in metric._defaults)
        },
    }


def _fill(metric: Any, saved: dict[str, Any], device: Any) -> None:
    for name, value in saved["state"].items():
        is_list = isinstance(metric._defaults[name], list)
        setattr(metric, name, [one.to(device) for one in value.values()] if is_list else value.to(device))
    metric._update_count = saved["count"]
    metric._computed = None
    if hasattr(metric, "has_reset"):
        metric.has_reset = False


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
