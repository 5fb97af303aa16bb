"""A type that several threads decode at once, for the first time; the process stays alive."""

import ast
import textwrap
from pathlib import Path

import aiockpt
from aiockpt.format.document import described
from tests.run_python import run_python

PACKAGE = Path(aiockpt.__file__).parent
PROGRAM = """
    import sys, threading
    import msgspec
    from aiockpt.format.document import parse

    sys.setswitchinterval(1e-6)
    body = msgspec.json.encode({"x": 1, "y": [{"a": 1}], "z": {"k": {"a": 1}}})
    for number in range(1000):
        inner = msgspec.defstruct(f"Inner{number}", [("a", int)])
        kind = msgspec.defstruct(f"Outer{number}", [("x", int), ("y", list[inner]), ("z", dict[str, inner])])
        barrier = threading.Barrier(4)
        found = []

        def decode():
            barrier.wait()
            found.append(parse(body, kind, "it").y[0].a)

        threads = [threading.Thread(target=decode) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1] * 4
"""


def test_many_threads_may_decode_a_type_for_the_first_time() -> None:
    run_python("-c", textwrap.dedent(PROGRAM))


def test_every_type_of_ours_is_described_before_it_is_decoded() -> None:
    missing = []
    for path in sorted(path for path in PACKAGE.rglob("*.py") if "examples" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("msgspec."):
                continue
            name = ast.unparse(node.func).rsplit(".", 1)[1]
            kinds = [word.value for word in node.keywords if word.arg == "type"]
            kinds += node.args[1:2] if name == "convert" else node.args[:1] if name == "Decoder" else []
            if name in ("decode", "convert", "Decoder"):
                missing += [f"{path.name}: {ast.unparse(kind)}" for kind in kinds if not _is_described(kind)]
    assert missing == ["document.py: kind"]


def _is_described(kind: ast.expr) -> bool:
    names = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
    return "described" in names or names <= {"int", "str", "list", "tuple", "dict", "Any", "Raw", "_Size"}


def test_a_lock_that_a_fork_copied_is_not_waited_for() -> None:
    from aiockpt.format import document

    with document._describing:
        assert described(tuple[int, int, int]) is not None
    assert not document._describing.locked()
