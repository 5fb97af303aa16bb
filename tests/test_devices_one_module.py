"""The one module with everything that a device is told of streams, events and pinned memory."""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "aiockpt"
STREAMS = re.compile(
    r"torch\.(cuda|accelerator|Stream|Event)\b"
    r"|(?:from|import) torch\.cuda|\.pin_memory\(|non_blocking=True|record_stream|wait_(?:event|stream)\b|cudaHost"
)
ALLOWED = {
    "runtime/cuda.py": "the module",
    "runtime/accelerator.py": "says what it is for",
    "pipeline/device_copy.py": "the copies themselves, inside a side stream",
    "adapters/rng.py": "the generators' states",
    "adapters/value_requests.py": "where a new tensor is made",
    "session/rewind/alarm.py": "the copy of a metric, in the order of the device's own work",
    "launch/node_check.py": "measures the devices of a node, before a run",
    "launch/joint_check.py": "the same, of all nodes together",
}


def test_only_the_module_talks_to_devices() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if STREAMS.search(path.read_text()) and "testing" not in path.parts
    }
    assert found <= ALLOWED.keys()


def test_copies_beside_the_program_are_made_in_lanes_only() -> None:
    text = (PACKAGE / "pipeline" / "device_copy.py").read_text()
    assert not re.search(r"torch\.cuda|torch\.accelerator", text)
    assert text.count("non_blocking=True") == 1
