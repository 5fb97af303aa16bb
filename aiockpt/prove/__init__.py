"""Proof that a resumed run is the same run: the engine of `aiockpt prove`, as functions.

- `certify`: prove a training function of this process, or a command, and return its `Certificate`.
- `record`: add a value of your own to the comparison; does nothing outside a proof.

Importing this has no effect; docs/guide/prove.md is the page for users.
"""

from typing import TYPE_CHECKING

from aiockpt.prove.session import record

if TYPE_CHECKING:
    from aiockpt.prove.certificate import Certificate
    from aiockpt.prove.proof import certify
    from aiockpt.prove.starts import Proof

__all__ = ["Certificate", "Proof", "certify", "record"]


def __getattr__(name: str) -> object:
    if name in ("certify", "Proof"):
        from aiockpt.prove import proof

        return getattr(proof, name)
    if name == "Certificate":
        from aiockpt.prove.certificate import Certificate

        return Certificate
    raise AttributeError(f"module 'aiockpt.prove' has no attribute {name!r}")
