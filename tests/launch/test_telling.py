"""Which rank the others wait for, as people are told."""

import pytest

from aiockpt.launch.detector import StackSample
from aiockpt.launch.telling import find_behind, name_status
from aiockpt.runtime.progress import ProgressRecord
from tests.launch.virtual_run import COLLECTIVE

IN_COLLECTIVE = StackSample(place=COLLECTIVE)
IN_BACKWARD = StackSample(place=("_engine_run_backward (/x/torch/autograd/graph.py:9)",))
IN_SAVE = StackSample(place=("wait (/x/threading.py:9)",), waits_for="aiockpt")
IN_LOADER = StackSample(place=("read (data.py:7)",))
ELSEWHERE = StackSample(place=("evaluate (train.py:7)",))


@pytest.mark.parametrize(
    ("steps", "samples", "behind"),
    [
        ((5, 4, 5), (ELSEWHERE, IN_COLLECTIVE, ELSEWHERE), (1,)),
        ((5, 5, 5), (IN_COLLECTIVE, IN_LOADER, IN_BACKWARD), (1,)),
        ((5, 5), (IN_SAVE, IN_LOADER), (1,)),
        ((5, 5, 5), (IN_LOADER, ELSEWHERE, ELSEWHERE), (0,)),
        ((5, 5), (IN_LOADER, ELSEWHERE), ()),
        ((5, 5), (IN_COLLECTIVE, IN_COLLECTIVE), ()),
    ],
)
def test_the_rank_that_others_wait_for_is_named(
    steps: tuple[int, ...], samples: tuple[StackSample, ...], behind: tuple[int, ...]
) -> None:
    records = {rank: ProgressRecord(pid=1, thread=1, step=step) for rank, step in enumerate(steps)}
    assert find_behind(records, dict(enumerate(samples))) == behind


def test_an_exit_is_told_in_words() -> None:
    assert [name_status(status) for status in (3, -9, -999)] == ["exit status 3", "signal SIGKILL", "signal 999"]
