"""Names of the weights of a model: those from older versions of transformers, and those of weights that PEFT adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from aiockpt.adapters.selection import Trainable


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


def rule_of(model: Any) -> Trainable:
    """Return the rule that leaves out weights loaded from the base: frozen, and neither of an adapter nor resized."""
    return Trainable(added=True, besides=tuple(_resized(model)))


def _resized(model: Any) -> Iterator[str]:
    """Yield the names of embeddings whose rows differ from those of the base: they are stored nowhere else."""
    layers = [
        getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, name)
    ]
    if _has_other_words(model):
        kept = {id(one) for layer in layers if layer is not None for one in layer.parameters()}
        for name, one in model.named_parameters(remove_duplicate=False):
            if id(one) in kept:
                yield f"model.{name}"


def _has_other_words(model: Any) -> bool:
    """Return whether the size of the vocabulary differs from the base, if that configuration is on this machine."""
    config: Any = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    for peft in model.peft_config.values():
        base = getattr(peft, "base_model_name_or_path", None)
        if size is None or not base:
            continue
        try:
            if type(config).from_pretrained(base, local_files_only=True).vocab_size != size:
                return True
        except (OSError, ValueError):
            continue  # neither a folder nor in the cache: whether it was resized is unknown
    return False
