"""A framework that is added by the contract alone, as the page says: forty lines that pass the suite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks.proving import TORCHRUN
from tests.frameworks.toy import integration
from tests.frameworks.toy.framework import Trainer
from tests.frameworks.toy.integration import attach

CHECKOUT = Path(__file__).parents[2]


class TestToy(IntegrationSuite):
    PROGRAM = (sys.executable, "-m", "tests.frameworks.toy.train")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", "-m", "tests.frameworks.toy.train")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        trainer = Trainer(place)
        if other is not None:
            attach(trainer, other).close()
        with attach(trainer, place):
            trainer.resume(step)
            begun_at = trainer.done
            trainer.fit(until)
            trainer.end()
        return begun_at


def test_the_page_runs_and_has_these_forty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page("frameworks/add.md", {"Trainer": Trainer})
    source = Path(integration.__file__).read_text()
    code = source[source.index("def attach") :]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    assert code.strip() in (CHECKOUT / "docs" / "frameworks" / "add.md").read_text()
