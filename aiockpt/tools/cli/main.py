"""The command ``aiockpt``: the commands of `aiockpt.tools.cli.commands`, and the handling of their errors.

Each has ``--json`` for programs and colour for people.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aiockpt.errors import CheckpointError, StepNotFoundError, StorageError, UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands import cleanup, look, move, operate, publishing, run, try_out  # noqa: F401  registers them
from aiockpt.tools.cli.commands.app import DAMAGED, STORAGE_FAILED, WRONG_CALL, app

__all__ = ["app", "main"]


@contextmanager
def _errors_reported() -> Iterator[None]:
    """Turn our errors into one message and an exit status; bugs keep their traceback."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        show.problem(str(error))
        if isinstance(error, UsageError | StepNotFoundError):
            sys.exit(WRONG_CALL)
        damaged = isinstance(error, CheckpointError) and not isinstance(error, StorageError)
        sys.exit(DAMAGED if damaged else STORAGE_FAILED)


def main() -> None:
    """Run the command line."""
    for library in ("botocore", "aiobotocore"):  # they also log tracebacks of the errors that they raise
        logging.getLogger(library).addHandler(logging.NullHandler())
    with _errors_reported():
        app()


if __name__ == "__main__":
    main()
