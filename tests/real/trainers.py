"""Trainers as scripts in public make them, rebuilt small: each function returns one that saves into a folder.

What differs from a plain Trainer is in them: adapters of two stages, losses with parameters, data that a library prepares,
an engine of DeepSpeed inside.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

transformers: Any = import_module("transformers")

SAMPLES, BATCH, EPOCHS = 16, 2, 2
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(28))]
Settings = dict[str, Any]


def settings_of(folder: Path, accumulation: int, **more: Any) -> Settings:
    """Return what all of them are trained with."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": EPOCHS,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "seed": 3,
        **more,
    }


def tokenizer() -> Any:
    """Return a tokenizer of words that need no file."""
    tokenizers: Any = import_module("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def seed_of(folder: Path) -> int:
    """Return another seed for a run that goes on: what is not loaded differs then."""
    return 7 if folder.exists() else 1


def llama(seed: int = 0) -> Any:
    """Return a language model of one layer."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, vocab_size=len(WORDS), pad_token_id=0, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def sentence(seed: int, length: int = 6) -> str:
    numbers = torch.randint(0, 28, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{number}" for number in numbers)


def rows(make: Callable[[int], dict[str, Any]]) -> Any:
    """Return a dataset of one row for each number."""
    return import_module("datasets").Dataset.from_list([make(number) for number in range(SAMPLES)])


def tokens(number: int) -> dict[str, Any]:
    found = tokenizer()(sentence(number))["input_ids"]
    return {"input_ids": found, "labels": found}


def plain(folder: Path, accumulation: int, **more: Any) -> Any:
    """Rows of several lengths; what each batch had is in the ``trained`` of the Trainer."""

    def short(number: int) -> dict[str, Any]:
        found = tokenizer()(sentence(number, 3 + number % 4))["input_ids"]
        return {"input_ids": found, "labels": found}

    model = llama()
    trained: list[tuple[int, ...]] = []

    def note(module: Any, args: Any, named: dict[str, Any]) -> None:
        trained.extend(tuple(row[row > 0].tolist()) for row in named["input_ids"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    arguments = transformers.TrainingArguments(**settings_of(folder, accumulation, **more))
    collator = transformers.DataCollatorForSeq2Seq(tokenizer())
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(short), data_collator=collator)
    trainer.trained = trained
    return trainer


def peft(folder: Path, accumulation: int, **more: Any) -> Any:
    """Two adapters: one of an earlier stage, one that is trained, on a base whose vocabulary has grown."""
    library: Any = import_module("peft")
    base = folder.parent / "base"
    if not base.exists():
        llama().save_pretrained(base)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(seed_of(folder))
    model.resize_token_embeddings(40)
    config = {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.1, "init_lora_weights": False}
    model = library.get_peft_model(model, library.LoraConfig(**config), adapter_name="first")
    model.add_adapter("task", library.LoraConfig(**config))
    model.set_adapter("task")
    arguments = transformers.TrainingArguments(**settings_of(folder, accumulation, **more))
    return transformers.Trainer(model, arguments, train_dataset=rows(tokens))


def sft(folder: Path, accumulation: int, **more: Any) -> Any:
    """TRL's supervised tuning, packed."""
    trl: Any = import_module("trl")
    arguments = trl.SFTConfig(**settings_of(folder, accumulation, bf16=False, gradient_checkpointing=False, **more))
    data = rows(lambda number: {"text": sentence(number)})
    return trl.SFTTrainer(llama(), arguments, train_dataset=data, processing_class=tokenizer())


def dpo(folder: Path, accumulation: int, **more: Any) -> Any:
    """TRL's tuning by preferences."""
    trl: Any = import_module("trl")
    arguments = trl.DPOConfig(**settings_of(folder, accumulation, bf16=False, gradient_checkpointing=False, **more))
    data = rows(
        lambda number: {"prompt": sentence(number), "chosen": sentence(number + 50), "rejected": sentence(number + 90)}
    )
    return trl.DPOTrainer(llama(), ref_model=llama(), args=arguments, train_dataset=data, processing_class=tokenizer())


def grpo(folder: Path, accumulation: int, **more: Any) -> Any:
    """TRL's tuning by rewards."""
    trl: Any = import_module("trl")
    generations = {"num_generations": 2, "max_completion_length": 4}
    arguments = trl.GRPOConfig(
        **settings_of(folder, accumulation, bf16=False, gradient_checkpointing=False, **generations, **more)
    )

    def reward(completions: list[str], **named: Any) -> list[float]:
        return [float(one.count("w1")) for one in completions]

    data = rows(lambda number: {"prompt": sentence(number)})
    return trl.GRPOTrainer(llama(), reward, args=arguments, train_dataset=data, processing_class=tokenizer())


def sentence_transformer(folder: Path, accumulation: int, **more: Any) -> Any:
    """A loss with parameters of its own, which are in no module that the Trainer has."""
    library: Any = import_module("sentence_transformers")
    losses: Any = import_module("sentence_transformers.sentence_transformer.losses")
    base = folder.parent / "encoder"
    if not base.exists():
        torch.manual_seed(0)
        config = transformers.BertConfig(**SIZES, vocab_size=len(WORDS), max_position_embeddings=32)
        transformers.BertModel(config).save_pretrained(base)
        tokenizer().save_pretrained(base)
    model = library.SentenceTransformer(str(base), device="cpu")
    torch.manual_seed(seed_of(folder))
    loss = losses.SoftmaxLoss(model, model.get_sentence_embedding_dimension(), num_labels=3)
    arguments = library.SentenceTransformerTrainingArguments(**settings_of(folder, accumulation, **more))
    data = rows(lambda number: {"one": sentence(number), "other": sentence(number + 50), "label": number % 3})
    return library.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss)


def zero_settings(stage: int) -> dict[str, Any]:
    """Return the configuration of an engine of DeepSpeed."""
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {
        **dict.fromkeys(sizes, "auto"),
        # An engine is never freed, with us or without: 2 GB each by default, so that at last no fork would succeed.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
        "zero_allow_untested_optimizer": True,
    }


def be_one_rank() -> None:
    """Make the process the only rank of a job, which an engine of DeepSpeed wants."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **address})
    # Its op for shared memory would be compiled.
    communication: Any = import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None


def zero(stage: int) -> Callable[..., Any]:
    """Return what makes a Trainer with an engine of DeepSpeed in it."""

    def make(folder: Path, accumulation: int, **more: Any) -> Any:
        be_one_rank()
        settings = settings_of(folder, accumulation, deepspeed=zero_settings(stage) if stage else None, **more)
        arguments = transformers.TrainingArguments(**settings)
        return transformers.Trainer(llama(), arguments, train_dataset=rows(tokens))

    return make


SCRIPTS: dict[str, Callable[..., Any]] = {
    "peft": peft,
    "sft": sft,
    "dpo": dpo,
    "grpo": grpo,
    "sentence-transformers": sentence_transformer,
    "zero-1": zero(1),
    "zero-2": zero(2),
    "zero-3": zero(3),
}


def result(trainer: Any) -> dict[str, torch.Tensor]:
    """Return all that was trained, and the losses on the way."""
    if getattr(trainer, "is_deepspeed_enabled", False) and trainer.deepspeed.zero_optimization_stage() == 3:
        found = trainer.deepspeed._zero3_consolidated_16bit_state_dict()
    else:
        found = trainer.model.state_dict()
    if isinstance(loss := getattr(trainer, "loss", None), torch.nn.Module):
        found = {**found, **{f"loss.{name}": one for name, one in loss.state_dict().items()}}
    told = {f"loss at {one['step']}": torch.tensor(one["loss"]) for one in trainer.state.log_history if "loss" in one}
    return {name: one.detach().clone() for name, one in found.items()} | told
