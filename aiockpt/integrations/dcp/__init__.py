"""torch.distributed.checkpoint (DCP) on this engine: `AiockptWriter` saves, `AiockptReader` loads.

    dcp.save(state_dict, storage_writer=AiockptWriter("/runs/7"))
    dcp.load(state_dict, storage_reader=AiockptReader("/runs/7"))

Planners, de-duplication, ``async_save`` and everything built on DCP stay as they are. docs/frameworks/dcp.md is the page
for users.
"""

from aiockpt.integrations.dcp.reader import AiockptReader
from aiockpt.integrations.dcp.writer import AiockptWriter

__all__ = ["AiockptReader", "AiockptWriter"]
