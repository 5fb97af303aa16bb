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
from aiockpt.tools.cli.commands import cleanup, look, move, operate, prove, try_out  # noqa: F401  importing registers them
from aiockpt.tools.cli.commands.common import DAMAGED, STORAGE_FAILED, WRONG_CALL, app

__all__ = ["app", "main"]


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn our errors into one clear message and an exit code; bugs keep their traceback."""
    try:
        yield
    except (UsageError, StepNotFoundError) as error:
        _fail(error, WRONG_CALL)
    except StorageError as error:
        _fail(error, STORAGE_FAILED)
    except CheckpointError as error:
        _fail(error, DAMAGED)
    except OSError as error:
        _fail(error, STORAGE_FAILED)


def _fail(error: Exception, status: int) -> None:
    show.problem(str(error))
    sys.exit(status)


def main() -> None:
    """Run the command line."""
    for library in ("botocore", "aiobotocore"):  # they print tracebacks of what they raise as well
        logging.getLogger(library).addHandler(logging.NullHandler())
    with _told_plainly():
        app()


if __name__ == "__main__":
    main()
