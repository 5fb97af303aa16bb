"""The plain path, without what only other uses need."""

from pathlib import Path

import pytest

from tests.journey import ACTS, watch


@pytest.mark.parametrize("act", ACTS)
def test_a_save_and_a_load_of_one_process_into_one_place_pass_no_function_of_a_wing(act: str, tmp_path: Path) -> None:
    passed = watch(str(tmp_path), ACTS[act])
    assert {file.partition("/")[0] for file in passed.functions} >= {
        "session",
        "engine",
        "pipeline",
        "backends",
    }
    assert passed.wing_modules == []
