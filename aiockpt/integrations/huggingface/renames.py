"""Names that older versions of transformers gave the weights of a model, from its own table of old names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


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
