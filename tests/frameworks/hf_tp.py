"""A model of Hugging Face, cut by its own plan for tensor parallelism: saved on two ranks, loaded whole and cut.

torchrun --nproc-per-node 2 hf_tp.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import aiockpt

SIZES = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}


def whole(seed: int) -> Any:
    """Return a model that is not cut."""
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, vocab_size=32, tie_word_embeddings=False))


def main(folder: Path) -> None:
    """Save what is cut, and load it."""
    dist.init_process_group("gloo")
    expected = whole(1)
    if dist.get_rank() == 0:
        expected.save_pretrained(folder / "pretrained")
    dist.barrier()
    cut = AutoModelForCausalLM.from_pretrained(folder / "pretrained", tp_plan="auto", dtype=torch.float32)
    spread = [name for name, value in cut.named_parameters() if hasattr(value, "placements")]
    assert spread, "nothing was cut"
    with aiockpt.Checkpointer(folder / "run") as ckpt:
        ckpt.save(1, {"model": cut}).result()
    if dist.get_rank() == 0:
        found = whole(2)
        with aiockpt.Checkpointer(folder / "run", ranks=aiockpt.Ranks()) as ckpt:
            ckpt.load({"model": found}).result()
            for name, value in expected.state_dict().items():
                assert torch.equal(found.state_dict()[name], value), name
            ckpt.save(2, {"model": expected}).result()
    dist.barrier()
    with torch.no_grad():
        for value in cut.parameters():
            value.zero_()
    with aiockpt.Checkpointer(folder / "run") as ckpt:
        ckpt.load({"model": cut}, 2).result()
    tokens = torch.arange(8)[None]
    assert torch.allclose(cut(tokens).logits, expected(tokens).logits, atol=1e-5)
    if dist.get_rank() == 0:
        print(f"{len(spread)} parameters were cut")  # noqa: T201  the test reads it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
