"""The state in the golden checkpoint of the optional fields: axes, left out, thinned, long numbers, a composite.

Run as a program it writes that checkpoint with the version that is installed: once for each release, never again.
"""

import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

import aiockpt

LEFT_OUT = "base"
NUMBERS = 1024


def fields_state() -> dict[str, Any]:
    """Return the state; the same on every call, on every machine."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()).view(parameter.shape) + number) / 8)
            parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()
    scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        LEFT_OUT: {"weight": torch.arange(6.0).view(2, 3)},
        "strided": {
            "transposed": torch.arange(6.0).view(2, 3).t(),
            "channels last": torch.arange(48.0).view(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        },
        "quantized": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.qint8),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.tensor([1.5, 2.5]), (4,), check_invariants=True
        ).coalesce(),
        "values": {
            "losses": [number / 4 for number in range(NUMBERS)],
            "seen": set(range(NUMBERS)),
            "window": deque(range(3), maxlen=4),
            "counts": Counter(a=2),
            "grouped": defaultdict(list, a=[1]),
            "ordered": OrderedDict([("b", 1), ("a", 2)]),
            "long bytes": bytes(range(256)) * 300,
            "array": array("h", [1, -2]),
            "range": range(1, 9, 2),
            "array of text": np.array(["a", "bc"]),
            "$": "a key",
        },
    }


if __name__ == "__main__":
    place = Path(__file__).parent / "fields" / f"v{aiockpt.__version__}"
    rules = aiockpt.Retention(optimizer=1)
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=aiockpt.IO(block_bytes=4096)), retention=rules) as ckpt:
        for step in (6, 7):
            sys.stdout.write(f"{ckpt.save(step, fields_state(), exclude=LEFT_OUT, user={'by': 'hand'}).result()}\n")
        ckpt.verify(7).result()
        sys.stdout.write(f"{ckpt.prune().result()}\n")
