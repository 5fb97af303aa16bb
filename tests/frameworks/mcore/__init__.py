"""Megatron-core's own model and optimizers on the CPU, for test_megatron.py."""

import tests.frameworks.mcore.on_cpu  # noqa: F401  before anything of Megatron
