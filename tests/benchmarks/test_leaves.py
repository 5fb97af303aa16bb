"""The cost of a tensor in a load is measured, and printed for each kind of state."""

import pytest

from benchmarks import leaves


def test_a_line_for_each_kind_of_state(capsys: pytest.CaptureFixture[str]) -> None:
    leaves.main(1 << 20, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["module", "module and its AdamW", "bare tensors"]
    assert all(line.count("µs a tensor") == 2 for line in lines)
