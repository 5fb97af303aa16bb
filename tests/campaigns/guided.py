"""One session of atheris on one decoder: `python -m tests.campaigns.guided TARGET [options of libFuzzer] [CORPUS]`.

It ends its process, with an error when an input broke the decoder, and leaves that input; give its path as the only
option to see it again.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

atheris: Any = import_module("atheris")  # untyped, and not installed where nobody fuzzes

with atheris.instrument_imports(include=["aiockpt"]):
    from tests.campaigns.decoder_targets import TARGETS


def main() -> None:
    """Fuzz the decoder that the first argument names."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]

    def look(data: bytes) -> None:
        target.decode(data)

    atheris.Setup([sys.argv[0], *options], look)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
