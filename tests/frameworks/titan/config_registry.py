"""A llama of two small layers, as torchtitan's command line finds it: ``--module tests.frameworks.titan --config tiny``.

Its tokenizer lies in the folder ``assets``, where `make_tokenizer` writes it; its text is made in memory.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import tests.frameworks.titan.on_cpu  # noqa: F401  before torchtitan

datasets: Any = import_module("datasets")
tokenizers: Any = import_module("tokenizers")
checkpointer: Any = import_module("torchtitan.components.checkpointer")
loss: Any = import_module("torchtitan.components.loss")
metrics: Any = import_module("torchtitan.components.metrics")
optimizer: Any = import_module("torchtitan.components.optimizer")
config: Any = import_module("torchtitan.config")
configs: Any = import_module("torchtitan.config.configs")
text: Any = import_module("torchtitan.hf_datasets")
text_datasets: Any = import_module("torchtitan.hf_datasets.text_datasets")
llama3: Any = import_module("torchtitan.models.llama3")
common: Any = import_module("torchtitan.models.common")
model_spec: Any = import_module("torchtitan.protocols.model_spec")
trainer: Any = import_module("torchtitan.trainer")
ours: Any = import_module("aiockpt.integrations.torchtitan")

WIDTH, VOCABULARY = 32, 64
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]


class DroppedLoss(loss.CrossEntropyLoss):  # type: ignore[misc]  # Any, where torchtitan is not installed
    """torchtitan's loss of logits that are dropped at random, so that training draws random numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(loss.CrossEntropyLoss.Config):  # type: ignore[misc]  # as above
        """As its parent's."""

    def __call__(self, pred: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().__call__(torch.nn.functional.dropout(pred, 0.1), *args, **options)


def titans() -> Any:
    """Return a run with torchtitan's own manager."""
    made = make_tokenizer(Path("assets"))
    return trainer.Trainer.Config(
        hf_assets_path=str(made),
        model_spec=small_llama(),
        loss=DroppedLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=optimizer.default_adamw(lr=1e-2, fused=False),
        lr_scheduler=optimizer.LRSchedulersContainer.Config(warmup_steps=2, total_steps=20, decay_ratio=0.5),
        training=config.TrainingConfig(
            local_batch_size=2, seq_len=16, steps=8, disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        dataloader=text_datasets.HuggingFaceTextDataLoader.Config(dataset="words"),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        parallelism=config.ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=checkpointer.CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        compile=config.CompileConfig(enable=False),
        activation_checkpoint=None,
        debug=configs.DebugConfig(seed=7, enable_structured_logging=False),
    )


def tiny() -> Any:
    """Return the same run with ours."""
    run = titans()
    run.checkpoint = ours.AiockptManager.Config(enable=True, interval=2, last_save_model_only=False)
    return run


class NamedReader(text_datasets.HuggingFaceTextDataLoader):  # type: ignore[misc]  # as above
    """A loader whose state has something of its own on each rank, also on those that read alike."""

    @dataclass(kw_only=True, slots=True)
    class Config(text_datasets.HuggingFaceTextDataLoader.Config):  # type: ignore[misc]  # as above
        """As its parent's."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rank": torch.distributed.get_rank()}


def readers_that_differ() -> Any:
    """Return the same run with ours, and such a loader."""
    run = tiny()
    run.dataloader = NamedReader.Config(dataset="words")
    return run


def small_llama() -> Any:
    """Return a model with fused projections, as torchtitan's own are."""
    model = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=common.RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=common.Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2,
            dim=WIDTH,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=64,
            attn_backend="flex",
            rope=common.ComplexRoPE.Config(dim=WIDTH // 4, max_seq_len=64, theta=10000),
        ),
    )
    return model_spec.ModelSpec(
        name="llama3",
        flavor="tiny",
        model=model,
        parallelize_fn=llama3.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=llama3.Llama3StateDictAdapter,
    )


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of words, which each rank may do."""
    folder.mkdir(exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(["<s>", "</s>", "[UNK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    for name, content in {"tokenizer.json": made.to_str(), "tokenizer_config.json": special}.items():
        new = folder / f"{name}.{os.getpid()}"  # another rank may be reading what is there
        new.write_text(content)
        new.replace(folder / name)
    return folder


def read_words(path: str) -> Any:
    """Return 24 lines of 5 to 13 words."""
    lines = [[WORDS[(line * 7 + at * at) % len(WORDS)] for at in range(5 + line % 9)] for line in range(24)]
    return datasets.Dataset.from_list([{"text": " ".join(words)} for words in lines])


text_datasets.DATASETS["words"] = text.DatasetConfig(
    path="", loader=read_words, sample_processor=lambda sample: sample["text"]
)
