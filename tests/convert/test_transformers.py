"""The library that the folders are for: it loads them, and its own folders load here. A real, tiny model."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from aiockpt.convert import from_hugging_face, to_hugging_face
from tests.convert.small_models import DEADLINE_S, all_same
from tests.small_run import small_checkpointer

pytest.importorskip("transformers", reason="pip install transformers")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


def make_model(tied: bool, seed: int = 0) -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64
    )
    return transformers.LlamaForCausalLM(config).eval()


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(10).view(1, 10)).logits
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [10_000, 10**9])
def test_from_pretrained_loads_what_was_converted_and_answers_the_same(
    tmp_path: Path, tied: bool, max_shard_bytes: int
) -> None:
    model = make_model(tied)
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(5, {"model": model, "epoch": 1}).result(DEADLINE_S)
        model.config.save_pretrained(tmp_path / "out")
        done = to_hugging_face(ckpt, tmp_path / "out", max_shard_bytes=max_shard_bytes).result(DEADLINE_S)
    assert (len(done.files) > 1) == (max_shard_bytes == 10_000)
    assert done.ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    found, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(outputs(found.eval()), outputs(model))
    assert all_same(found.state_dict(), model.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_what_save_pretrained_wrote_becomes_a_step_bit_by_bit(tmp_path: Path, tied: bool) -> None:
    model = make_model(tied)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    ties = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    other = make_model(tied, seed=1)
    with small_checkpointer(tmp_path / "run") as ckpt:
        done = from_hugging_face(ckpt, tmp_path / "in", step=3, ties=ties).result(DEADLINE_S)
        loaded = ckpt.load({"model": other}).result(DEADLINE_S)
    assert len(done.files) > 1
    assert loaded is not None
    assert loaded.step == 3
    assert all_same(other.state_dict(), model.state_dict())
    assert torch.equal(outputs(other), outputs(model))


def test_a_model_in_bfloat16_is_the_one_that_torch_would_make(tmp_path: Path) -> None:
    model = make_model(tied=True)
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(5, {"model": model}).result(DEADLINE_S)
        model.config.save_pretrained(tmp_path / "out")
        to_hugging_face(ckpt, tmp_path / "out", dtype=torch.bfloat16).result(DEADLINE_S)
    found = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all_same(found.state_dict(), model.to(torch.bfloat16).state_dict())
