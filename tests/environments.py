"""Virtual environments for tests of things that are too heavy for everyone's, a folder of .bench each.

An environment has torch as constraints.txt pins it (TORCH_INDEX names where from, as for make), aiockpt, pytest, and what
a requirements file lists. One that is there is used again: remove its folder to build it anew. ENVIRONMENTS names another
folder for them, which several checkouts can share.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]


def build(
    kind: str,
    name: str,
    requirements: Path,
    *,
    python: str = sys.executable,
    torch: str | None = None,
    tools: Sequence[str] = TOOLS,
) -> Path:
    """Return the interpreter of the environment of *name*, made when it is not there.

    Args:
        python: of which interpreter it is an environment.
        torch: its version; None takes the pinned one.
        tools: what is installed beside aiockpt and *requirements*.
    """
    folder = Path(os.environ.get("ENVIRONMENTS", CHECKOUT / ".bench")) / kind / name
    made = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return made
    print(f"building {folder}", flush=True)
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pins = (CHECKOUT / "constraints.txt").read_text()
    wanted = requirements.read_text() if requirements.exists() else ""
    for name in re.findall(
        r"(?m)^[\w.-]+", wanted
    ):  # what it lists is its own affair: an engine may need an older numpy
        pins = re.sub(rf"(?m)^{re.escape(name)}==.*\n", "", pins)
    (folder / "pins.txt").write_text(pins if torch is None else re.sub(r"(?m)^torch==.*$", f"torch=={torch}", pins))
    pip = [str(made), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pinned = ["--constraint", str(folder / "pins.txt")]
    index = os.environ.get("TORCH_INDEX")
    # Torch first and alone: its index must not answer for anything else.
    subprocess.run([*pip, *pinned, *(["--index-url", index] if index else []), "torch"], check=True)
    subprocess.run([*pip, *pinned, "--editable", str(CHECKOUT), *tools], check=True)
    if requirements.exists():
        subprocess.run([*pip, *pinned, "--requirement", str(requirements)], check=True)
    (folder / ".ready").touch()
    return made
