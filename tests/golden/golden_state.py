"""The state in the golden checkpoints: every dtype, every kind of value, ties, a model with its optimizer.

Run as a program it writes the golden checkpoint of the version that is installed: once for each release, never again.
"""

import datetime
import decimal
import sys
import uuid
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiockpt

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.complex32),
]


def golden_state() -> dict[str, Any]:
    """Return the state; the same on every call, on every machine."""
    raw = torch.arange(24 * 16, dtype=torch.int32).to(torch.uint8)
    tensors = {}
    for dtype in DTYPES:
        size = torch.empty((), dtype=dtype).element_size()
        flat = raw[: 24 * size] % 2 if dtype == torch.bool else raw[: 24 * size]
        tensors[str(dtype).removeprefix("torch.")] = flat.clone().view(dtype).view(4, 6)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    model.append(torch.nn.Linear(3, 5))
    model[3].weight = model[0].weight  # tied
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).view(parameter.shape) + number) / 64)
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "dtypes": tensors,
        "shapes": {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "column": torch.arange(12).view(3, 4)[:, 1]},
        "values": {
            "plain": [None, True, 3, -(2**70), 0.1, float("inf"), "text", b"\x00\xff"],
            "tuple": (1, (2,)),
            "keys": {1: "one", (2, 3): "pair"},
            "ordered": OrderedDict(b=1, a=2),
            "sets": [{1, 2}, frozenset({3}), deque([4], maxlen=5)],
            "numbers": [1 + 2j, decimal.Decimal("1.10"), np.float32(0.5), np.arange(3)],
            "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2])],
            "others": [uuid.UUID(int=5), datetime.datetime(2026, 1, 2, 3, 4), Path("a/b")],
        },
    }


if __name__ == "__main__":
    with aiockpt.Checkpointer(
        Path(__file__).parent / f"v{aiockpt.__version__}", limits=aiockpt.Limits(io=aiockpt.IO(block_bytes=4096))
    ) as ckpt:
        sys.stdout.write(f"{ckpt.save(7, golden_state(), metrics={'loss': 0.25}).result()}\n")
