"""The command line, run in this process on small checkpoints."""

import shutil
from pathlib import Path

import pytest

from aiockpt.tools.cli.main import main
from tests.cli.small_checkpoints import Command, Outcome, save
from tests.small_run import small_checkpointer


@pytest.fixture
def aiockpt_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs ``aiockpt`` with arguments."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["aiockpt", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with the steps 100, 200 and 300 of one run, the second verified. Nobody changes it."""
    root = tmp_path_factory.mktemp("cli") / "run"
    save(root, [100, 200, 300])
    with small_checkpointer(root) as ckpt:
        ckpt.verify(200).result()
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """Return a copy of *made* that may be changed."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"
