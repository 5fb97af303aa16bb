"""Virtual environments for tests of things that are too heavy for everyone's, a folder of .bench each.

An environment has torch as constraints.txt pins it (TORCH_INDEX names where from, as for make), aiockpt, pytest, and what
a requirements file lists. One that is there is used again: remove its folder to build it anew. ENVIRONMENTS names another
folder for them, which several checkouts can share.
"""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]


def build(kind: str, name: str, requirements: Path) -> Path:
    """Return the interpreter of the environment of *name*, made when it is not there."""
    folder = Path(os.environ.get("ENVIRONMENTS", CHECKOUT / ".bench")) / kind / name
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    print(f"building {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pinned = ["--constraint", str(CHECKOUT / "constraints.txt")]
    index = os.environ.get("TORCH_INDEX")
    # Torch first and alone: its index must not answer for anything else.
    subprocess.run([*pip, *pinned, *(["--index-url", index] if index else []), "torch"], check=True)
    subprocess.run([*pip, *pinned, "--editable", str(CHECKOUT), *TOOLS], check=True)
    if requirements.exists():
        subprocess.run([*pip, *pinned, "--requirement", str(requirements)], check=True)
    (folder / ".ready").touch()
    return python
