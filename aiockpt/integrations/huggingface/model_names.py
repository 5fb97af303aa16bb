"""Names of the weights of a model: those that older versions of transformers gave them, and those that PEFT adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from aiockpt.adapters.selection import Trainable


def renames(model: Any, key: str = "model") -> Callable[[str], str]:
    """Return what ``Checkpointer.load(state, rename=…)`` needs, so that a run goes on after an upgrade of transformers.

    Only names are renamed. Where the new version stores several weights as one (the experts of some mixtures), there is no
    new name for an old one, and the load says what is missing.

    Args:
        model: as it is in the state; without names of older versions, as a model of PEFT has none, nothing is renamed.
        key: where in the state it is.
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
    """Return the rule that leaves out what is loaded from the base anyway: frozen, and neither an adapter nor resized."""
    return Trainable(added=True, besides=tuple(_resized(model)))


def _resized(model: Any) -> Iterator[str]:
    """Yield the names of embeddings that have other rows than those of the base: those are in no other place."""
    layers = [
        getattr(model, name)() for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(model, name)
    ]
    if _has_other_words(model):
        kept = {id(one) for layer in layers if layer is not None for one in layer.parameters()}
        for name, one in model.named_parameters(remove_duplicate=False):
            if id(one) in kept:
                yield f"model.{name}"


def _has_other_words(model: Any) -> bool:
    """Return whether the vocabulary has another size than that of the base, whose configuration is on this machine."""
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
            continue  # neither a folder nor in the cache: nothing says that it was resized
    return False
