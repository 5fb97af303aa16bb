"""Models of transformers, tied and untied, and its schedules: each resumes as the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from tests.real.small import Run, prove

transformers: Any = pytest.importorskip("transformers")

WORDS, LENGTH, BATCH = 32, 8, 2
TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
FEW_KEYS = {**TEXT, **SMALL, "num_key_value_heads": 1}
BOTH_SIDES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
}
Inputs = Mapping[str, torch.Tensor]


def words(source: torch.Generator) -> Inputs:
    found = torch.randint(3, WORDS, (BATCH, LENGTH), generator=source)
    return {"input_ids": found, "labels": found}


def sound(source: torch.Generator) -> Inputs:
    return {"input_features": torch.randn(BATCH, 4, 16, generator=source), "labels": words(source)["labels"]}


def picture(source: torch.Generator) -> Inputs:
    labels = torch.randint(0, 2, (BATCH,), generator=source)
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=source), "labels": labels}


FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[torch.Generator], Inputs]]] = {
    "GPT2": (
        "GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}, words,
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {**FEW_KEYS, "attention_dropout": 0.1}, words),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**FEW_KEYS, "head_dim": 8}, words),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**FEW_KEYS, "head_dim": 8}, words),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**FEW_KEYS, "num_local_experts": 2}, words),
    "BERT": ("BertForMaskedLM", "BertConfig", {**TEXT, **SMALL}, words),
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        {**TEXT, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}, words,
    ),
    "BART": (
        "BartForConditionalGeneration", "BartConfig",
        {**TEXT, **BOTH_SIDES, "max_position_embeddings": 16, "decoder_start_token_id": 0}, words,
    ),
    "Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {
            **TEXT, **BOTH_SIDES, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16,
            "decoder_start_token_id": 1, "dropout": 0.1,
        }, sound,
    ),
    "Mamba": (
        "MambaForCausalLM", "MambaConfig", {**TEXT, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}, words,
    ),
    "ViT": (
        "ViTForImageClassification", "ViTConfig", {**SMALL, "image_size": 8, "patch_size": 4, "hidden_dropout_prob": 0.1},
        picture,
    ),
    "ResNet": (
        "ResNetForImageClassification", "ResNetConfig", {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]},
        picture,
    ),
}  # fmt: skip
"""Family → model, configuration, its values, and what it is trained on."""

NOTHING_TO_TIE = ("ViT", "ResNet")
Make = Callable[[torch.optim.Optimizer], Any]


def model_of(family: str, *, tied: bool) -> torch.nn.Module:
    model, config, values, _ = FAMILIES[family]
    torch.manual_seed(1)
    made = getattr(transformers, config)(**values, tie_word_embeddings=tied)
    # Some, such as T5's, do not listen when they are made.
    made.tie_word_embeddings = tied
    found: torch.nn.Module = getattr(transformers, model)(made)
    return found.train()


def trained(
    model: torch.nn.Module, optimizer: Any, scheduler: Any, inputs: Callable[[torch.Generator], Inputs], number: int
) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(**inputs(torch.Generator().manual_seed(number))).loss
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


def run_of(family: str, *, tied: bool, schedule: Make | None = None) -> Run:
    model = model_of(family, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = (schedule or (lambda it: transformers.get_linear_schedule_with_warmup(it, 3, 10)))(optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Run(state, partial(trained, model, optimizer, scheduler, FAMILIES[family][3]))


BOTH = [(family, tied) for family in FAMILIES for tied in (True, False) if not tied or family not in NOTHING_TO_TIE]


@pytest.mark.parametrize(("family", "tied"), BOTH, ids=[f"{one}-{'tied' if tied else 'untied'}" for one, tied in BOTH])
def test_each_family_is_certified(family: str, tied: bool) -> None:
    model: Any = model_of(family, tied=tied)
    if family not in NOTHING_TO_TIE:
        shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert shared == tied, "the family is not what the test is about"
    prove(lambda: run_of(family, tied=tied), steps=6)


SCHEDULES: dict[str, Make] = {
    "constant": lambda it: transformers.get_constant_schedule_with_warmup(it, 4),
    "cosine": lambda it: transformers.get_cosine_schedule_with_warmup(it, 2, 10),
    "restarts": lambda it: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(it, 2, 10, num_cycles=2),
    "polynomial": lambda it: transformers.get_polynomial_decay_schedule_with_warmup(it, 2, 10),
    "inverse square root": lambda it: transformers.get_inverse_sqrt_schedule(it, 2),
    "warm, stable, decay": lambda it: transformers.get_wsd_schedule(
        it, num_warmup_steps=2, num_decay_steps=3, num_training_steps=10
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_schedule_is_certified(name: str) -> None:
    found = prove(lambda: run_of("GPT2", tied=True, schedule=SCHEDULES[name]))
    assert {row.row: row.outcome for row in found.rows}["scheduler"] == "equal"


def _with_adafactor(settings: Mapping[str, Any]) -> Run:
    model = model_of("T5", tied=True)
    optimizer = transformers.Adafactor(model.parameters(), **settings)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if settings:
        state["scheduler"] = transformers.get_constant_schedule_with_warmup(optimizer, 2)
    return Run(state, partial(trained, model, optimizer, state.get("scheduler"), words))


@pytest.mark.parametrize(
    "settings",
    [{}, {"lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.9}],
    ids=["its own rate", "a rate given"],
)
def test_its_adafactor_is_certified(settings: Mapping[str, Any]) -> None:
    prove(lambda: _with_adafactor(settings))
