"""Which names are weights, where their bytes come from, and what is refused; without a file."""

from typing import Any

import msgspec
import pytest

from aiockpt.errors import ManifestError, UsageError
from aiockpt.format.document import ALGORITHM
from aiockpt.format.manifest import FileEntry, Manifest, Piece, TensorEntry
from aiockpt.format.validate import check_manifest
from aiockpt.planning.weights import WeightsPlan, has_weights_only, plan_weights, thin_manifest, weights_attempt
from aiockpt.planning.write_plan import WEIGHTS

ATTEMPT, BLOCK = "0123456789ab", 4096


def entry(rank: int) -> FileEntry:
    path = f"a-{ATTEMPT}/d/r{rank:05d}-0000.safetensors"
    return FileEntry.of(path, size=3 * BLOCK, rank=rank, algo=ALGORITHM, block=BLOCK, sums=bytes(24))


def whole(tree: Any = None, alias: dict[str, str] | None = None) -> Manifest:
    """Two ranks: each has half of the rows of a weight and of its moment."""
    rows = [Piece(rank, 4096, 4136, (rank, 0), (1, 10)) for rank in range(2)]
    moments = [Piece(rank, 4136, 4176, (rank, 0), (1, 10)) for rank in range(2)]
    return Manifest(
        writer="test",
        id="step-00000001",
        step=1,
        generation=3,
        sequence=5,
        run="c0ffee00c0de",
        parent=None,
        attempt=ATTEMPT,
        write_id="w",
        created_ns=7,
        world_size=2,
        files=(entry(0), entry(1)),
        tensors={
            "model.w": TensorEntry("F32", (2, 10), tuple(rows)),
            "modelled": TensorEntry("F32", (2, 10), tuple(moments)),
        },
        alias=alias or {},
        state={"global": {"model": {"$": "module"}} if tree is None else tree, "per_rank": {"0": {"r": 1}}},
        metrics={"loss": 0.5},
        user={"by": "me"},
    )


def plan(manifest: Manifest) -> WeightsPlan:
    return plan_weights(manifest, window_bytes=2 * BLOCK, file_bytes=1 << 20)


def finished(manifest: Manifest) -> Manifest:
    planned = plan(manifest)
    made = [
        FileEntry.of(
            file.entry.p,
            size=file.entry.size,
            rank=file.entry.rank,
            algo=ALGORITHM,
            block=BLOCK,
            sums=bytes(8 * -(-file.entry.size // BLOCK)),
        )
        for file in planned.files
    ]
    return planned.manifest(made, 1, "x")


def test_each_rank_makes_a_file_of_the_weights_that_it_wrote() -> None:
    planned = plan(whole())
    assert [file.entry.rank for file in planned.files] == [0, 1]
    for rank, file in enumerate(planned.files):
        assert file.entry.p == f"a-{weights_attempt(ATTEMPT)}/d/r{rank:05d}-0000.safetensors"
        ((source, (landing,)),) = file.landings(file.plan.windows[0]).items()
        assert (source, landing.start, landing.end) == (rank, 4096, 4136)
    assert plan(whole()) == planned


def test_its_manifest_is_a_whole_one_of_another_attempt_and_says_what_it_is() -> None:
    manifest = finished(whole())
    check_manifest(manifest, "step-00000001", 1)
    assert set(manifest.tensors) == {"model.w"}
    assert manifest.state == {"global": {"model": {"$": "module"}}, "per_rank": {}, "content": "weights"}
    assert (manifest.sequence, manifest.run, manifest.metrics, manifest.user) == (
        5,
        "c0ffee00c0de",
        {"loss": 0.5},
        {"by": "me"},
    )
    assert has_weights_only(manifest)
    with pytest.raises(UsageError, match="is weights alone itself"):
        plan(manifest)


def test_what_a_module_shares_is_stored_under_its_own_name() -> None:
    manifest = finished(whole(alias={"model.tied": "modelled", "model.again": "modelled", "bare": "model.w"}))
    assert set(manifest.tensors) == {"model.w", "model.tied"}
    assert manifest.alias == {"model.again": "model.tied"}


def test_a_state_without_modules_has_no_weights() -> None:
    with pytest.raises(UsageError, match="has no module"):
        plan(whole(tree={"model": {"w": {"$": "tensor", "name": "model.w"}}}))


@pytest.mark.parametrize("items", [5, [5], [["a"]], [[[], {"$": "module"}]], [[1.5, {"$": "module"}]], None])
def test_a_damaged_tree_is_refused_by_name(items: Any) -> None:
    with pytest.raises(ManifestError, match="step-00000001: its tree of values is damaged"):
        plan(whole(tree={"$": "dict", "items": items}))


def test_a_mark_of_another_kind_means_nothing() -> None:
    odd = msgspec.structs.replace(whole(), state={"content": ["weights"]})
    assert not has_weights_only(odd)


def test_files_that_hold_weights_and_other_things_are_kept_as_they_are() -> None:
    """The weights are in two files, and only one of them is said to hold weights."""
    first, second = whole().files
    mixed = msgspec.structs.replace(whole(), files=(msgspec.structs.replace(first, kind=WEIGHTS), second))
    with pytest.raises(UsageError, match="files hold weights and other things together"):
        thin_manifest(mixed, 4, "w")
