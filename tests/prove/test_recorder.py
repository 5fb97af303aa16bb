"""The point at which a start of a proof kills itself, as its recorder says."""

from pathlib import Path

import pytest
import torch

from aiockpt.errors import StorageError
from aiockpt.prove.assignment import Kill, ProofJob
from aiockpt.prove.digests import digest
from aiockpt.prove.recorder import FileWriter, Recorder
from aiockpt.prove.records import AnyRecord, Died, Stepped
from aiockpt.prove.starts import read_start_ranks
from aiockpt.prove.training import Training


async def wait(seconds: float) -> None:
    pytest.fail(f"there is a checkpoint, and the kill waits {seconds} s for one")


def test_of_several_processes_of_a_rank_the_one_that_began_first_counts_whenever_it_ended(tmp_path: Path) -> None:
    first, second = FileWriter(tmp_path, 0), FileWriter(tmp_path, 0)
    second(Died(where="of an evaluation that the script starts"))
    first(Died(where="of the script"))
    assert read_start_ranks(tmp_path) == {0: [Died(where="of the script")]}


def test_gradients_of_a_step_with_a_closure_are_those_that_the_closure_has_computed() -> None:
    records: list[AnyRecord] = []
    training = Training(Recorder(ProofJob(folder="", place=""), records.append, 0, 1, lambda: None))
    try:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 2)).sum()
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
    finally:
        training.close()
    (step,) = (record for record in records if isinstance(record, Stepped))
    assert step.gradients == {"g0.p0": digest(torch.full((1, 2), 3.0))}


async def test_what_a_load_finishes_of_a_dead_start_is_in_no_save_of_this_one() -> None:
    records: list[AnyRecord] = []
    killed: list[bool] = []
    job = ProofJob(folder="", place="", kill=Kill(kind="save", label=4, call=1))
    recorder = Recorder(job, records.append, 0, 1, lambda: killed.append(True))
    for _ in range(3):
        await recorder.storage_call(4, wait)  # the load commits step 4, for which all had voted
    recorder.loaded(2)  # an older one was asked for

    recorder.reach(4, saving=True)
    await recorder.storage_call(2, wait)  # retention
    await recorder.storage_call(4, wait)
    assert not killed
    with pytest.raises(StorageError, match="killed"):
        await recorder.storage_call(4, wait)
    assert killed == [True]
    assert [record.where for record in records if isinstance(record, Died)] == [
        "in the save of step 4, before its storage call 2"
    ]
