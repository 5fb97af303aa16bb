"""A training program with its loader in the state, resumed with the next batch. Through the whole engine."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import aiockpt
from tests.small_run import small_checkpointer


def make_loader(length: int = 23) -> aiockpt.Loader[list[torch.Tensor]]:
    data = torch.utils.data.TensorDataset(torch.arange(length))
    sampler = aiockpt.ShardedSampler(length, batch_size=4, seed=3)
    return aiockpt.Loader(DataLoader(data, batch_sampler=sampler))


def test_a_run_resumes_with_the_next_batch(tmp_path: Path) -> None:
    loader = make_loader()
    with small_checkpointer(tmp_path) as ckpt:
        expected = []
        for step, (batch,) in enumerate(loader):
            if step > 2:
                expected.append(batch.tolist())
            ckpt.save(step, {"loader": loader, "nested": {"step": step}})
    again = make_loader()
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.load({"loader": again, "nested": {"step": 0}}, step=2).result()
    assert [batch.tolist() for (batch,) in again] == expected


def test_a_loader_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(0, {"x": 1}).result()
        with pytest.raises(aiockpt.StateMismatchError, match="loader: in the state but not in the checkpoint"):
            ckpt.load({"x": 1, "loader": make_loader()}).result()
