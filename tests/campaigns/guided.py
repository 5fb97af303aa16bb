"""One session of atheris on one decoder: `python -m tests.campaigns.guided TARGET [options of libFuzzer] [CORPUS]`.

It ends its process, with an error when an input broke the decoder, and leaves that input; give its path as the only
option to see it again.
"""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore] # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["aiockpt"]):
    from tests.campaigns.decoder_targets import TARGETS


def main() -> None:
    """Fuzz the decoder that the first argument names."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *options], lambda data: target.decode(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
