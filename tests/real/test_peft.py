"""Adapters of PEFT on a frozen model: all of it, or with only=aiockpt.trainable() the adapters alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.prove import Certificate
from tests.real.small import prove_training

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what these packages say of each other proves nothing
WORDS = 32
ATTENTION = ["q_proj", "v_proj"]
BOTH_ENDS = ["q_proj", "o_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ATTENTION}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "lora_dropout": 0.1, "target_modules": ATTENTION}),
    "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True, "target_modules": ATTENTION}),
    "PiSSA": ("LoraConfig", {"r": 2, "init_lora_weights": "pissa", "target_modules": BOTH_ENDS}),
    "OLoRA": ("LoraConfig", {"r": 2, "init_lora_weights": "olora", "target_modules": BOTH_ENDS}),
    "LoRA with a head": ("LoraConfig", {"r": 2, "target_modules": ATTENTION, "modules_to_save": ["lm_head"]}),
    "LoRA of embeddings": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA of some words": ("LoraConfig", {"r": 2, "target_modules": ATTENTION, "trainable_token_indices": [3, 5]}),
    "IA3": ("IA3Config", {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": ATTENTION}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": ATTENTION}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": BOTH_ENDS}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": BOTH_ENDS}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": BOTH_ENDS}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 4, "target_modules": BOTH_ENDS}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, "target_modules": ATTENTION}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": BOTH_ENDS}),
    "MiSS": ("MissConfig", {"r": 2, "target_modules": BOTH_ENDS}),
    "RandLoRA": ("RandLoraConfig", {"r": 2, "target_modules": BOTH_ENDS}),
    "RoAd": ("RoadConfig", {"variant": "road_1", "group_size": 4, "target_modules": BOTH_ENDS}),
    "C3A": ("C3AConfig", {"block_size": 4, "target_modules": BOTH_ENDS}),
    "DeLoRA": ("DeloraConfig", {"r": 2, "target_modules": BOTH_ENDS}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "some words": ("TrainableTokensConfig", {"token_indices": [3, 5]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
}  # fmt: skip
"""Kind of adapter → configuration and its values."""


def model_with(kind: str) -> Any:
    config, values = KINDS[kind]
    torch.manual_seed(1)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return peft.get_peft_model(base, getattr(peft, config)(task_type="CAUSAL_LM", **values)).train()


def train(kind: str, *, alone: bool, steps: int = 6) -> None:
    model = model_with(kind)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.02)
    state = {"model": model, "optimizer": optimizer, "rng": aiockpt.RNG()}
    torch.manual_seed(2)
    chosen: dict[str, Any] = {"only": aiockpt.trainable()} if alone else {}
    with aiockpt.Checkpointer("run", every=2) as ckpt:
        for step in range(ckpt.resume(state), steps):
            words = torch.randint(3, WORDS, (2, 6), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            ckpt.step(step, state, metrics={"loss": loss.item()}, **chosen)


def proved(kind: str, *, alone: bool) -> Certificate:
    return prove_training(partial(train, kind, alone=alone))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_certified(kind: str) -> None:
    proved(kind, alone=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapters_alone_are_certified(kind: str) -> None:
    proved(kind, alone=True)
