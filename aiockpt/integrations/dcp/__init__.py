"""torch.distributed.checkpoint (DCP) on this engine: hand it a `Writer` to save, a `Reader` to load.

    dcp.save(state_dict, storage_writer=Writer("/runs/7"))
    dcp.load(state_dict, storage_reader=Reader("/runs/7"))

Planners, de-duplication, ``async_save`` and all that is built on DCP stay as they are. docs/frameworks/dcp.md is the page
for users.
"""

from aiockpt.integrations.dcp.reader import Reader
from aiockpt.integrations.dcp.writer import Writer

__all__ = ["Reader", "Writer"]
