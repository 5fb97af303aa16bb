"""Every block of code in docs/ runs as it stands, page by page, in an empty folder.

What a page takes for granted (a model, ``train()``, a run that was saved before) is made here. The blocks of one page share
their names, as the reader does. The README has a test of its own (`tests.test_readme`).
"""

import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch.utils.data import TensorDataset

import aiockpt
from aiockpt.prove import Proof, certify
from aiockpt.tools.cli.main import app
from tests.docs.pages import ROOT, blocks, pages
from tests.docs.running import command_lines, run_block, run_command
from tests.run_python import run_python

DOCS = ROOT / "docs"
Scope = dict[str, Any]


def make_scope() -> Scope:
    """Return what a reader has: a model, its optimizer, and a function that trains."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(batch: Any = None) -> float:
        inputs = torch.randn(4, 16) if batch is None else batch[0]
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    train()
    state = {"model": model, "optimizer": optimizer, "epoch": 1}
    return {"aiockpt": aiockpt, "torch": torch, "model": model, "optimizer": optimizer, "state": state, "train": train}


def with_a_run() -> Scope:
    """Return the same, with steps 20 to 40 of a run in runs/7."""
    scope = make_scope()
    with aiockpt.Checkpointer("runs/7") as ckpt:
        for step in (20, 30, 40):
            ckpt.save(step, scope["state"], metrics={"loss": scope["train"]()}).result()
    with aiockpt.Checkpointer("runs/8") as ckpt:
        ckpt.save(3, {"net": torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2)})}).result()
    renamed = {"net": torch.nn.ModuleDict({"backbone": torch.nn.Linear(2, 2)})}
    return scope | {
        "net": torch.nn.Linear(16, 1),
        "data": TensorDataset(torch.randn(200, 16)),
        "renamed": renamed,
    }


def with_adapters() -> Scope:
    """Return a model with a frozen base, and an open checkpointer."""
    scope = make_scope()
    model = torch.nn.Module()
    model.base, model.adapter = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 4)
    model.adapter.register_buffer("cache", torch.zeros(2))
    optimizer = torch.optim.AdamW(model.adapter.parameters())
    return scope | {
        "model": model,
        "optimizer": optimizer,
        "ema": torch.ones(3),
        "step": 0,
        "url": "runs/lora",
        "ckpt": aiockpt.Checkpointer("runs/states"),
    }


def in_the_loop() -> Scope:
    scope = make_scope()
    loss = scope["model"](torch.randn(4, 16)).square().mean()
    return scope | {"loss": loss, "step": 1, "ckpt": aiockpt.Checkpointer("runs/lazy"), "url": "runs/thin"}


PREPARED: dict[str, Callable[[], Scope]] = {
    "index.md": make_scope,
    "migrating.md": make_scope,
    "guide/load.md": with_a_run,
    "guide/epochs.md": make_scope,
    "guide/rewind.md": make_scope,
    "guide/optimizers.md": with_a_run,
    "guide/commandline.md": with_a_run,
    "guide/states.md": with_adapters,
    "guide/lazy.md": in_the_loop,
    "guide/storage.md": in_the_loop,
    "guide/watch.md": in_the_loop,
    "guide/operations.md": with_a_run,
    "guide/sizing.md": make_scope,
}
"""What each page takes for granted."""
ELSEWHERE = {
    "architecture.md",
    "guide/notebooks.md",
    "guide/save.md",
    "guide/ranks.md",
    "guide/prove.md",
    "guide/tiers.md",
    "guide/recovery.md",
    "guide/launcher.md",
    "guide/publish.md",
}
"""Pages whose blocks have a test of their own: below, in `tests.docs.test_real_places`, `tests.test_notebooks`,
`tests.launch.test_run`, `tests.publish.test_guide` or `tests.adapters.test_tensor_kinds`."""


def python_of(page: str) -> list[str]:
    return blocks((DOCS / page).read_text(), "python")


def test_no_page_with_code_is_forgotten() -> None:
    with_code = {str(path.relative_to(DOCS)) for path in pages()[1:] if blocks(path.read_text(), "python")}
    of_frameworks = {page for page in with_code if page.startswith("frameworks/")}
    assert with_code - of_frameworks == PREPARED.keys() | ELSEWHERE
    for page in of_frameworks:  # run where the framework is: tests/frameworks/run NAME
        test = DOCS.parent / "tests" / "frameworks" / f"test_{Path(page).stem}.py"
        assert f'run_page("{page}"' in test.read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("page", PREPARED)
def test_the_python_of_a_page_runs_as_it_stands(page: str, folder: Path) -> None:
    before = threading.enumerate()  # an earlier test may have dropped a checkpointer that has not ended yet
    scope = PREPARED[page]()
    seen = list(scope.values())  # a block may give a name to another checkpointer
    try:
        for block in python_of(page):
            run_block(block, scope, page)
            seen += scope.values()
    finally:
        for value in [*seen, *scope.values()]:
            if isinstance(value, aiockpt.Checkpointer):
                value.close()
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("aiockpt-loop")]
    assert not [thread for thread in ours if thread not in before]


@pytest.mark.parametrize("seed", range(4))
def test_the_program_with_work_at_the_end_of_an_epoch_is_certified(seed: int, folder: Path) -> None:
    program = compile(python_of("guide/epochs.md")[0], "epochs.md", "exec")
    certify(lambda: exec(program, {}), Proof(kills=4, seed=seed)).check()


def test_the_program_with_work_at_the_end_of_an_epoch_resumes_at_its_last_batch(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (program, *_) = python_of("guide/epochs.md")
    scopes: list[Scope] = [{"stop": stop} for stop in (None, 9, None)]
    straight, killed, resumed = scopes
    for scope, place in ((straight, "straight"), (killed, "killed"), (resumed, "killed")):
        code = program.replace("runs/14", place).replace(
            "            step += 1\n", "            if step == stop: raise KeyboardInterrupt\n            step += 1\n"
        )
        with suppress(KeyboardInterrupt):
            exec(code, scope)
    assert "the first loop is empty" in caplog.text
    assert killed["loader"].epoch == 0
    assert resumed["progress"] == straight["progress"]
    assert resumed["scheduler"].state_dict() == straight["scheduler"].state_dict()
    assert all(map(torch.equal, resumed["model"].parameters(), straight["model"].parameters()))


def test_what_the_pages_promise_of_their_runs_is_there(folder: Path) -> None:
    scope = make_scope()
    for block in python_of("guide/save.md"):
        run_block(block, scope)
    steps = {run: sorted(int(path.name[5:]) for path in (folder / "runs").glob(f"{run}/step-*")) for run in (7, 8, 10)}
    assert steps == {7: [0, 10, 20, 40, 50], 8: [10, 20, 29], 10: [17, 18, 19]}


def test_the_fragments_of_the_guide_to_ranks_run_on_one_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    scope = make_scope()
    scope |= {"train_one_step": scope["train"], "steps": 101}
    meeting, *_, shards, own, _ = python_of("guide/ranks.md")
    parts = {
        "first_rows": torch.ones(500, 64),
        "other_rows": torch.ones(500, 64),
        "my_slice": torch.ones(768 * 768),
        "start": 0,
    }
    try:
        run_block(meeting.replace("/shared", str(folder)), scope)
        with aiockpt.Checkpointer("shards") as ckpt:
            run_block(shards, by_hand := scope | parts)
            ckpt.save(1, by_hand["state"]).result()
        run_block(own, scope)
        with aiockpt.Checkpointer("own") as ckpt:
            ckpt.save(1, scope["state"]).result()
    finally:
        torch.distributed.destroy_process_group()
    assert sorted(path.name for path in (folder / "run-7").glob("step-*")) == ["step-00000000", "step-00000100"]


def test_the_whole_program_of_the_guide_to_ranks_runs_as_it_stands(folder: Path) -> None:
    (folder / "train.py").write_text(python_of("guide/ranks.md")[-1])
    run_under_torchrun(folder)
    assert sorted(step.name for step in (folder / "runs/10").glob("step-*"))[-1] == "step-00000039"


def run_under_torchrun(folder: Path) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    two = "--standalone", "--nproc-per-node", 2
    run_python("-m", "torch.distributed.run", *two, "train.py", cwd=folder, env=environment, timeout=150)


SCRIPT = """
import sys
import torch
import aiockpt

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class MyTrainer:
    def __init__(self, steps):
        torch.manual_seed(0)
        self.steps, self.model = steps, torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def fit(self):
        state = {"model": self.model, "optimizer": self.optimizer, "rng": aiockpt.RNG()}
        with aiockpt.Checkpointer("runs/proof", every=2) as ckpt:
            for step in range(ckpt.resume(state), self.steps):
                self.optimizer.zero_grad()
                self.model(torch.randn(3, 2)).square().sum().backward()
                self.optimizer.step()
                ckpt.step(step, state)


if __name__ == "__main__":
    MyTrainer(int(sys.argv[2])).fit()
"""


@pytest.fixture
def proofs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scope:
    """Return what the guide to proofs defines, beside a script that trains."""
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    scope: Scope = {"__name__": "train"}
    exec(SCRIPT, scope)
    (block,) = python_of("guide/prove.md")
    run_block(block, scope)
    assert [name for name in scope if name.startswith("test_")] == [
        "test_my_training_resumes",
        "test_my_trainer_resumes",
    ]
    return scope


def test_the_proof_of_a_function_in_the_guide_certifies(proofs: Scope) -> None:
    proofs["test_my_trainer_resumes"]()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_proof_of_a_script_in_the_guide_certifies(proofs: Scope) -> None:
    proofs["test_my_training_resumes"]()


def test_the_commands_of_the_guide_run_as_they_stand(folder: Path) -> None:
    with_a_run()
    for block in blocks((DOCS / "guide/commandline.md").read_text(), "sh"):
        for words in command_lines(block):
            run_command(words, expected_status=1 if words[1] == "diff" else 0)
    assert (folder / "runs/copy/step-00000040/MANIFEST-1.json").exists()
    assert (folder / "models/mine/model.safetensors").exists()
    assert not (folder / "runs/7/step-00000030").exists()


def shell_lines() -> list[tuple[str, list[str]]]:
    return [
        (str(page.relative_to(ROOT)), words)
        for page in [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
        if page.exists()
        for block in blocks(page.read_text(), "sh")
        for words in command_lines(block)
    ]


def test_every_command_on_a_page_exists_with_its_options() -> None:
    group: Any = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = set()
    for page, words in shell_lines():
        known.add(words[0])
        if words[0] == "aiockpt":
            group.commands[words[1]].make_context(words[1], words[2:])
        elif words[0] == "make":
            assert words[1] in targets, f"{page}: {' '.join(words)}"
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), f"{page}: {' '.join(words)}"
        else:
            assert words[0] in ("git", "pip", "cd"), f"{page}: what is {' '.join(words)}?"
    assert {"aiockpt", "make"} <= known


def test_every_module_that_a_page_says_to_run_is_there() -> None:
    named = {
        name
        for page in pages()
        for name in re.findall(r"python -m ((?:aiockpt|benchmarks|tests)[\w.]*\w)", page.read_text())
    }
    assert {name for name in named if importlib.util.find_spec(name) is None} == set()
    assert named


def test_the_table_of_the_guide_lists_every_command() -> None:
    group: Any = typer.main.get_command(app)
    listed = re.findall(r"^\| `(\w+)[^|]*` \|", (DOCS / "guide/commandline.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(group.commands)


def test_json_on_a_page_is_json() -> None:
    found = [block for page in pages() for block in blocks(page.read_text(), "json")]
    assert found
    for block in found:
        json.loads(f"{{{block}}}")
