"""A script as users of Hugging Face's Trainer write it, with the two lines that switch it.

python hf_script.py FOLDER [KIND] [NAME=VALUE …]     more TrainingArguments
"""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from aiockpt.integrations.huggingface import attach


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that look like nothing."""

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make(folder: str, kind: str = "plain", **settings: Any) -> Trainer:
    """Return a Trainer of a small model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, attention_dropout=0.1))
    if kind == "lora":
        from peft import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
            LoraConfig,
            get_peft_model,
        )

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    arguments = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "save_steps": 3,
        "logging_steps": 1,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "seed": 3,
        **settings,
    }
    return Trainer(model, TrainingArguments(folder, **arguments), train_dataset=Tokens(), eval_dataset=Tokens())


if __name__ == "__main__":
    words = sys.argv[2:]
    kind = words[0] if words and "=" not in words[0] else "plain"
    trainer = make(
        sys.argv[1], kind, **{k: ast.literal_eval(v) for k, _, v in (w.partition("=") for w in words if "=" in w)}
    )
    attach(trainer, resume=True)
    trainer.train()
