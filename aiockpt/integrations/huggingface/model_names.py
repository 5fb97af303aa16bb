"""Names of the weights of a model: those from older versions of transformers, and those of weights that PEFT adds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from aiockpt.adapters.selection import Trainable
from aiockpt.units import size

logger = logging.getLogger("aiockpt")


def renames(model: Any, key: str = "model") -> Callable[[str], str]:
    """Return the ``rename=`` for ``Checkpointer.load`` with which a run resumes after an upgrade of transformers.

    Only names change. Where the new version stores several weights as one (the experts of some mixtures), an old name has
    no new one, and the load reports the missing weights.

    Args:
        model: as in the state; without names of older versions, as for a model of PEFT, nothing is renamed.
        key: the key of the model in the state.
    """
    library: Any = import_module("transformers")
    if not isinstance(model, library.PreTrainedModel):
        return lambda name: name
    loading: Any = import_module("transformers.core_model_loading")
    table: Any = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    rules = [rule for rule in table if isinstance(rule, loading.WeightRenaming)]
    prefix = f"{key}."

    def new_name(name: str) -> str:
        if not name.startswith(prefix):
            return name
        return prefix + str(loading.apply_renamings(name.removeprefix(prefix), rules))

    return new_name


def rule_of(model: Any) -> Trainable | None:
    """Return the rule that leaves out weights loaded from the base: frozen, and neither of an adapter nor resized.

    None where no base is known (without a name, or not on this machine): the weights are nowhere else. That is logged.
    """
    bases = list(_bases(model))
    if bases:
        return Trainable(added=True, besides=tuple(_resized(model, bases)))
    names = {str(getattr(peft, "base_model_name_or_path", None) or "") for peft in model.peft_config.values()}
    where = " or ".join(f"{name!r} is not on this machine" for name in sorted(names) if name)
    logger.warning(
        "no base is known for this model of PEFT (%s): its frozen weights are saved, too, %s in each step; "
        "attach(trainer, only=aiockpt.trainable()) leaves them out",
        where or "it has no base_model_name_or_path",
        size(sum(one.nbytes for one in model.parameters() if not one.requires_grad)),
    )
    return None


def _resized(model: Any, bases: Iterable[Any]) -> Iterator[str]:
    """Yield the names of embeddings whose rows differ from those of the base: they are stored nowhere else."""
    layers = [
        getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, name)
    ]
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    if any(getattr(base, "vocab_size", words) != words for base in bases):
        kept = {id(one) for layer in layers if layer is not None for one in layer.parameters()}
        for name, one in model.named_parameters(remove_duplicate=False):
            if id(one) in kept:
                yield f"model.{name}"


def _bases(model: Any) -> Iterator[Any]:
    """Yield the configuration of each base that is on this machine; a path, where the model has no configuration."""
    config: Any = getattr(model, "config", None)
    for peft in model.peft_config.values():
        base = getattr(peft, "base_model_name_or_path", None)
        if not base:
            continue
        if not hasattr(config, "from_pretrained"):
            yield from (path for path in [Path(base)] if path.exists())
            continue
        try:
            yield type(config).from_pretrained(base, local_files_only=True)
        except (OSError, ValueError):
            continue  # neither a folder nor in the cache
