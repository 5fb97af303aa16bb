"""A real engine, vLLM on a CPU, reloads the folder of a receiver, and computes what the trainer's weights compute."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.small_run import small_checkpointer

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
UNUSED = ("torchvision", "torchaudio", "torchcodec")
TOKENS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(5)).tolist()
TOLERANCE = 1e-4
"""Of the logarithm of a probability. Both compute in fp32, and add in another order: 5e-7 was seen; a step changes 0.9."""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set what vLLM reads while it is imported, which is in the tests: it warns a lot."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    # The engine is of text alone; and where torch is the one for CPUs, these may be made for another one.
    for name in UNUSED:
        monkeypatch.setitem(sys.modules, name, None)
    # It looks at an architecture in a process of its own, and keeps what it saw: without this only a second run passes.
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({UNUSED})\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "cache"))


def make_model() -> Any:
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).float()


def train(model: Any) -> None:
    """Train one step, after which each prompt is a little more probable."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.tensor(TOKENS)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.zero_grad()


def by_trainer(model: Any) -> torch.Tensor:
    """Return the logarithm of the probability of each token but the first: (prompts, tokens - 1)."""
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def by_engine(engine: Any) -> torch.Tensor:
    """Return the same by vLLM."""
    asked = import_module("vllm").SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": tokens} for tokens in TOKENS], asked, use_tqdm=False)
    return torch.tensor(
        [
            [found[token].logprob for token, found in zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)]
            for tokens, answer in zip(TOKENS, answers, strict=True)
        ]
    )


def test_the_engine_computes_what_the_trainer_does_before_and_after_versions(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "like")
    options = aiockpt.Publish(tmp_path / "pub", like=tmp_path / "like")
    kinds = []
    with small_checkpointer(tmp_path / "run") as ckpt:

        def publish(step: int) -> None:
            ckpt.save(step, {"model": model}).result()
            kinds.append(ckpt.publish(step, options).result().kind)

        publish(0)
        with aiockpt.receive(tmp_path / "pub", tmp_path / "got", every_s=0.05) as receiver:
            versions = iter(receiver)
            folder = str(next(versions).folder)
            engine = import_module("vllm").LLM(
                folder,
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="float32",
                max_model_len=64,
                max_num_seqs=4,
                enable_prefix_caching=False,
            )
            found = by_engine(engine)
            assert (found - by_trainer(model)).abs().max() < TOLERANCE
            for step in (1, 2):
                train(model)
                wanted = by_trainer(model)
                assert (found - wanted).abs().max() > 100 * TOLERANCE, "the step would not be seen"
                publish(step)
                version = next(versions)
                assert (version.version, str(version.folder)) == (step, folder)
                engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                found = by_engine(engine)
                assert (found - wanted).abs().max() < TOLERANCE, f"version {step} computes something else"
    assert kinds[0] == "full"
