"""Parameters that a model has beside those of its base: what PEFT has added, trained now or in an earlier stage.

PEFT is detected by its attributes, and not imported. A layer around one of the base has ``adapter_layer_names``, and that
one as ``base_layer`` or ``original_module``. A model has ``peft_config``, parameters that its layers share under names with
its ``prefix``, and prompts in its ``prompt_encoder``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_OF_BASE = ("base_layer", "original_module")


def added_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of *module* that its base does not have, by name."""
    added: set[int] = set()
    for member in module.modules():
        if getattr(member, "adapter_layer_names", ()):
            base = {id(one) for name in _OF_BASE if hasattr(member, name) for one in getattr(member, name).parameters()}
            added.update({id(one) for one in member.parameters()} - base)
        if hasattr(member, "peft_config"):
            prefix = getattr(member, "prefix", None)
            added.update(
                id(one)
                for name, one in member.named_parameters()
                if name.startswith("prompt_encoder.") or (prefix and prefix in name)
            )
    return ((name, one) for name, one in module.named_parameters() if id(one) in added)
