"""The model of the demo."""

import torch

from aiockpt.tools.examples.gpt import DEFAULT_SIZE, GPT, GPTSize, build, train_step

TINY = GPTSize(layers=1, width=16, heads=2, context=8, batch=2, dropout=0.5)


def test_the_default_model_has_a_few_million_parameters() -> None:
    assert 3e6 < sum(parameter.numel() for parameter in GPT(DEFAULT_SIZE).parameters()) < 4e6


def test_a_prediction_does_not_see_the_bytes_it_predicts() -> None:
    model = GPT(TINY).eval()
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] ^= 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_output_layer_shares_the_memory_of_the_embedding() -> None:
    model = GPT(TINY)
    assert model.head.weight is model.embed.weight


def test_the_same_run_has_the_same_losses_and_they_depend_on_the_random_state() -> None:
    def losses(disturb: bool) -> list[float]:
        parts = build(TINY, steps=3)
        taken = [train_step(*parts)]
        if disturb:
            torch.rand(1)  # dropout draws from the same generator
        return [*taken, train_step(*parts), train_step(*parts)]

    assert losses(disturb=False) == losses(disturb=False)
    assert losses(disturb=False) != losses(disturb=True)
