"""The command line in this process, for the tests of the launcher."""

from tests.cli.conftest import aiockpt_command

__all__ = ["aiockpt_command"]
