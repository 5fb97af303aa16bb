"""torchtitan's own program, on the CPU: ``python -m tests.frameworks.titan.train --module tests.frameworks.titan …``."""

from __future__ import annotations

from importlib import import_module

import tests.frameworks.titan.on_cpu  # noqa: F401  before torchtitan

if __name__ == "__main__":
    import_module("torchtitan.train").main()
