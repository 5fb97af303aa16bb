"""What each command prints, and its exit status, on whole, damaged, unfinished and empty checkpoints.

A scene changes a run with the steps 100, 200 (verified) and 300, and yields command lines, in which ROOT is the run and TMP
the folder that it is in. The output is compared with ``transcripts/<scene>.txt``; ``ACCEPT=1`` in the environment writes it.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import aiockpt
from aiockpt.format.manifest import decode_manifest, decode_receipt, encode_manifest, encode_receipt
from aiockpt.tools.cli import show
from tests.cli.small_checkpoints import (
    Command,
    begin_attempt,
    data_file,
    flip,
    make_older,
    manifest,
    save,
    save_partly,
    uncommit,
)

FOLDER = Path(__file__).parent / "transcripts"
_CHANGING = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "<date>"),
    (r"\d+ (second|minute)s? ago", "<age>"),
    (r"[\d.]+ s \([\d.]+ \w+/s\)", "<time>"),
    (r"\ba-(?!00112233aabb)[0-9a-f]{12}", "a-<attempt>"),
    (r"xxh3_128:[0-9a-f]{32}", "<sum>"),
    (r'"(created_ns|changed_ns|run|attempt|seconds)": [^,\n]+', r'"\1": "…"'),
    (r"process \d+ on \S+", "process <pid>"),
]


def whole(root: Path) -> Iterator[str]:
    yield "ls ROOT"
    yield "ls ROOT --json"
    yield "inspect ROOT"
    yield "inspect ROOT step-00000200 --depth 1"
    yield "inspect ROOT 200 --json"
    yield "verify ROOT 100"
    yield "verify ROOT --all"
    yield "diff ROOT 100 step-00000100"
    yield "diff ROOT 100 300"
    yield "diff ROOT 100 300 --json"
    yield "commit ROOT"


def wrong_calls(root: Path) -> Iterator[str]:
    (root.parent / "file").touch()
    (root.parent / "notes").mkdir()
    for command in ("ls", "inspect", "verify", "prune", "commit", "gc", "doctor"):
        yield f"{command} TMP/missing"
    yield "ls TMP/file"
    yield "ls memory://x"
    yield "ls s3:/bucket"
    yield "inspect ROOT/step-00000200"
    yield "ls TMP"
    yield "inspect ROOT 7"
    yield "verify ROOT 7"
    yield "diff ROOT 100 7"
    yield "inspect ROOT 100 --rank 4"
    yield "verify ROOT 100 --all"
    yield "cp ROOT TMP/to 100 --all"
    yield "rm ROOT"
    yield "rm ROOT 100 --all"
    yield "rm ROOT 7 --yes"
    yield "rm ROOT --all"
    yield "prune ROOT --every 2"
    yield "prune ROOT --best loss"
    yield "prune ROOT --last 1 --best accuracy --yes"
    yield "prune ROOT --last 1 --yes --dry-run"
    yield "prune ROOT --newer-than soon"
    yield "gc TMP --keep 0"
    yield "gc TMP --all"
    yield "gc TMP --older-than soon"
    yield "demo --elastic --async"
    yield "demo --elastic --lazy"
    yield "demo --elastic --keep 2"
    yield "plan"
    yield "plan --parameters many"
    yield "convert ROOT TMP/to --max-shard-size many"
    yield "convert ROOT TMP/to --to zip"
    yield "convert ROOT TMP/to --tie a=b"
    yield "convert TMP/notes TMP/to"
    assert sorted(path.name for path in root.parent.iterdir()) == ["file", "notes", root.name]
    assert sorted(path.name for path in root.glob("step-*")) == [f"step-00000{step}00" for step in (1, 2, 3)]


def empty(root: Path) -> Iterator[str]:
    shutil.rmtree(root)
    root.mkdir()
    for command in ("ls", "inspect", "verify", "verify --all", "commit", "prune", "gc", "rm --all --yes"):
        name, _, rest = command.partition(" ")
        yield f"{name} ROOT {rest}".strip()


def branches(root: Path) -> Iterator[str]:
    save(root, [250], load=200)
    begin_attempt(root, 400)
    yield "ls ROOT"
    yield "prune ROOT --last 1"
    save(root, [400, 500], load=100)
    shutil.rmtree(root / "step-00000100")
    yield "ls ROOT"


def resumed_and_pruned(root: Path) -> Iterator[str]:
    save(root, [400, 500], load=300)
    shutil.rmtree(root / "step-00000300")
    yield "ls ROOT"


def unfinished(root: Path) -> Iterator[str]:
    uncommit(root, 300)
    begin_attempt(root, 400)
    yield "ls ROOT"
    yield "ls ROOT --json"
    yield "inspect ROOT"
    yield "commit ROOT"
    yield "commit ROOT"
    yield "verify ROOT 300"
    yield "prune ROOT --yes"
    yield "prune ROOT --grace-hours 0 --yes"
    yield "ls ROOT"


def damaged(root: Path) -> Iterator[str]:
    flip(manifest(root, 200), -100)
    flip(data_file(root, 300), -1)
    yield "ls ROOT"
    yield "inspect ROOT 200"
    yield "verify ROOT"
    yield "verify ROOT 200"
    yield "verify ROOT --all --json"
    yield "prune ROOT --last 1"
    yield "cp ROOT TMP/to 300"
    yield "ls TMP/to"
    flip(manifest(root, 300), -100)
    yield "inspect ROOT"
    flip(manifest(root, 100), -100)
    yield "inspect ROOT"


def torn_manifest(root: Path) -> Iterator[str]:
    torn = manifest(root, 300)
    torn.write_bytes(torn.read_bytes()[:100])
    yield "ls ROOT"
    torn.unlink()
    yield "commit ROOT"


def newest_generation_is_damaged(root: Path) -> Iterator[str]:
    (root / "step-00000300" / "MANIFEST-2.json").write_bytes(manifest(root, 300).read_bytes())  # says generation 1
    yield "ls ROOT"


def older_generation_is_no_newer_step(root: Path) -> Iterator[str]:
    """The newest generation is damaged behind its head; the one before it keeps its own place in the order."""
    before = root.parent / "before"
    shutil.copytree(root / "step-00000100", before)
    save(root, [100])
    shutil.copytree(before, root / "step-00000100", dirs_exist_ok=True)
    newer = root / "step-00000100" / "MANIFEST-2.json"
    flip(newer, newer.stat().st_size - 50)
    yield "inspect ROOT"


def votes(root: Path) -> Iterator[str]:
    won = decode_manifest(manifest(root, 300).read_bytes())
    manifest(root, 300).write_bytes(encode_manifest(msgspec.structs.replace(won, attempt="ffffffffffff")))
    yield "ls ROOT"
    uncommit(root, 300)
    overtaking = encode_manifest(msgspec.structs.replace(won, attempt="ffffffffffff", generation=2))
    (root / "step-00000300" / "MANIFEST-2.json").write_bytes(overtaking)
    yield "ls ROOT"
    yield "commit ROOT"
    receipt = next((root / "step-00000200").glob("a-*/r/*"))
    voted = decode_receipt(receipt.read_bytes(), "receipt")
    receipt.write_bytes(encode_receipt(msgspec.structs.replace(voted, world_size=3)))
    uncommit(root, 200)
    yield "ls ROOT"


def weights_alone(root: Path) -> Iterator[str]:
    with aiockpt.Checkpointer(root.parent / "thin") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": torch.nn.Linear(3, 2), "more": torch.ones(5)}).result()
    yield "prune TMP/thin --optimizer 1"
    yield "prune TMP/thin --optimizer 1 --yes"
    yield "ls TMP/thin"


def prune(root: Path) -> Iterator[str]:
    yield "prune ROOT"
    yield "prune ROOT --last 1"
    yield "prune ROOT --last 1 --dry-run"
    yield "prune ROOT --last 1 --best loss --mode max"
    save(root, [400, 500], load=200)
    yield "prune ROOT --last 2 --every 100 --best loss"
    yield "prune ROOT --last 1 --json"
    yield "prune ROOT --last 1 --yes"
    yield "ls ROOT"


def prune_cannot_delete(root: Path) -> Iterator[str]:
    (record,) = root.glob("step-00000100/a-*/DECISION.json")
    (root / "step-00000100" / "MANIFEST-1.json").unlink()
    record.write_text("{}")
    next(root.glob("step-00000100/a-*/r/r00000.json")).unlink()
    yield "prune ROOT --last 3 --grace-hours 0"
    yield "prune ROOT --last 3 --grace-hours 0 --yes"


def prune_by_age(root: Path) -> Iterator[str]:
    for step, days in ((100, 30), (200, 9), (300, 8)):
        make_older(root / f"step-{step:08d}", days)
    yield "prune ROOT --newer-than 7d"
    yield "prune ROOT --newer-than 20d --every 100"
    yield "prune ROOT --newer-than 7d --yes"


def copies(root: Path) -> Iterator[str]:
    yield "cp ROOT TMP/to"
    yield "cp ROOT TMP/to"
    yield "cp --all --json ROOT TMP/all"
    yield "ls TMP/all"
    yield "verify --all TMP/all"
    yield "cp TMP/none TMP/to"


def left_out(root: Path) -> Iterator[str]:
    save_partly(root.parent / "partly")
    for command in ("inspect", "verify"):
        yield f"{command} TMP/partly 1"
        yield f"{command} TMP/partly 2"
    yield "inspect TMP/partly 2 --json"
    yield "cp TMP/partly TMP/copy 3"
    yield "inspect TMP/copy"
    yield "diff TMP/partly 1 2"
    yield "diff TMP/partly 1 2 --json"
    yield "diff TMP/partly 2 3"
    yield "convert TMP/partly TMP/hf --step 2"


def removal(root: Path) -> Iterator[str]:
    yield "rm ROOT 200 --yes"
    yield "rm ROOT 100 --yes --json"
    begin_attempt(root, 400)
    (root / ".clock-00aa").write_bytes(b"")
    (root / "notes.txt").write_text("mine")
    (root / "tensorboard").mkdir()
    yield "rm ROOT --all --yes"
    yield "rm ROOT --all --yes"
    assert sorted(path.name for path in root.iterdir()) == ["notes.txt", "tensorboard"]


def dead_runs(root: Path) -> Iterator[str]:
    make_older(root, 40)
    save(root.parent / "young", [1, 2])
    make_older(root.parent / "young", 2)
    shutil.copytree(root, root.parent / "team" / "b c" / "d", copy_function=shutil.copy2)
    make_older(root.parent / "team", 90)
    yield "gc TMP"
    yield "gc TMP --older-than 60d --keep 2 --yes"
    yield "gc TMP --yes"
    yield "gc TMP --yes"
    yield "gc TMP --keep 0 --all"
    (root / "log.txt").write_text("mine")
    make_older(root, 40)
    yield "gc TMP --keep 0 --all --yes"
    yield "gc TMP"
    assert [path.name for path in root.iterdir()] == ["log.txt"]


def converted(root: Path) -> Iterator[str]:
    with aiockpt.Checkpointer(root.parent / "models") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": torch.nn.Linear(30, 20)}).result()
    yield "convert TMP/models TMP/out --dry-run"
    yield "convert TMP/models TMP/out"
    yield "convert TMP/models TMP/out"
    yield "convert TMP/models TMP/out --force"
    yield "convert TMP/models TMP/linked --link"
    yield "convert TMP/out TMP/back"
    yield "convert TMP/out TMP/back --step 40 --json"
    yield "convert TMP/models TMP/dcp --to dcp --step 1"
    yield "convert TMP/dcp TMP/again"


SCENES: list[Callable[[Path], Iterator[str]]] = [
    whole, wrong_calls, empty, branches, resumed_and_pruned, unfinished, damaged, torn_manifest,
    newest_generation_is_damaged, older_generation_is_no_newer_step, votes, weights_alone, prune, prune_cannot_delete,
    prune_by_age, copies, left_out, removal, dead_runs, converted,
]  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_the_output_of_a_scene_is_as_recorded(
    aiockpt_command: Command, root: Path, scene: Callable[[Path], Iterator[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show.out, "width", 1000)  # whatever the path of the test's folder is, nothing is folded
    printed = []
    for line in scene(root):
        words = [word.replace("ROOT", str(root)).replace("TMP", str(root.parent)) for word in line.split()]
        done = aiockpt_command(*words)
        output = done.out + "".join(f"! {text}\n" for text in done.err.splitlines())
        output = output.replace(str(root), "ROOT").replace(str(root.parent), "TMP")
        for changing, fixed in _CHANGING:
            output = re.sub(changing, fixed, output)
        if words[0] == "gc":  # its columns are as wide as the path of the test's folder
            output = re.sub(" {2,}", "  ", output)
        output = "".join(f"{text.rstrip()}\n" for text in output.splitlines())
        printed.append(f"$ aiockpt {line}\n{output}[{done.status}]\n")
    found, file = "\n".join(printed), FOLDER / f"{scene.__name__}.txt"
    if os.environ.get("ACCEPT"):
        file.write_text(found)
    assert found == file.read_text()
