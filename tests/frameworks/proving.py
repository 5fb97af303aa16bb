"""Programs of every suite: run alone, on several ranks, or killed and resumed by `aiockpt prove`; and what is compared."""

from __future__ import annotations

import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import torch

import aiockpt

CHECKOUT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
"""What runs a program on several ranks, up to their number."""
_AIOCKPT = [sys.executable, "-m", "aiockpt.tools.cli.main"]
"""The command line of this checkout, wherever the environment's own script leads."""
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of a program of its own: without those that make this process a rank."""
    here = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    return here | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(more or {})}


def output_of(*command: str, check: bool = True, more: Mapping[str, str] | None = None) -> str:
    """Run a program, and return what it has printed; it ends well, unless *check* is False."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment(more), check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout + done.stderr


def prove(*command: str, kills: int = 2, seed: int = 1) -> str:
    """Have a program killed and resumed; return the certificate, JSON that names all that was compared."""
    options = [f"--kills={kills}", f"--seed={seed}", "--json=proof.json"]
    out = output_of(*_AIOCKPT, "prove", *options, "--", *command)
    assert f"certified: killed {'once' if kills == 1 else 'twice'}" in out
    return Path("proof.json").read_text()


def steps_in(place: Path | str) -> list[int]:
    """Return the steps of a place, the oldest first."""
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        return sorted(info.step for info in ckpt.steps().result())


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare tensors by name, bit by bit."""
    assert found.keys() == expected.keys()
    assert expected
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def digest_of(name: str) -> str:
    """Return the digest of the source of ``module`` or ``module:name.in.it``."""
    module, _, inner = name.partition(":")
    found = import_module(module)
    source = inspect.getsource(attrgetter(inner)(found) if inner else found)
    return hashlib.sha256(source.encode()).hexdigest()[:16]
