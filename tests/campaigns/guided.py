"""One session of atheris on one decoder: `python -m tests.campaigns.guided TARGET [options of libFuzzer] [CORPUS]`.

It ends its process, with an error when an input broke the decoder, and leaves that input; give its path as the only
option to see it again.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from typing import Any

atheris: Any = import_module("atheris")  # untyped, and not installed where nobody fuzzes

with atheris.instrument_imports(include=["aiockpt"]):
    from tests.campaigns.decoder_targets import TARGETS
    from tests.campaigns.mutations import change_bytes, change_document


def main() -> None:
    """Fuzz the decoder that the first argument names."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]

    def look(data: bytes) -> None:
        target.decode(data)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        """Change values of a document as often as bytes: few changes of bytes leave JSON that is parsed at all."""
        dice = random.Random(seed)
        if dice.random() < 0.5:
            return bytes(atheris.Mutate(data, max_bytes))
        try:
            return change_document(data, dice)[:max_bytes]
        except (ValueError, RecursionError):
            return change_bytes(data, dice)[:max_bytes]

    atheris.Setup([sys.argv[0], *options], look, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
