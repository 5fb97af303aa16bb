"""The loader of the demo goes on exactly where it was."""

from itertools import islice

import torch

from aiockpt.tools.examples.gpt import Batches, library_text

TEXT = torch.arange(200, dtype=torch.uint8)


def make_batches() -> Batches:
    return Batches(TEXT, window=8, batch=4)


def test_the_text_is_python_source_and_the_same_each_time() -> None:
    text = library_text()
    assert b"import" in bytes(text[:100_000].tolist())
    assert torch.equal(text, library_text())


def test_targets_are_the_inputs_one_byte_later() -> None:
    inputs, targets = next(make_batches())
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(targets, inputs + 1)  # the text counts up


def test_an_epoch_reads_each_window_once_and_the_next_one_in_another_order() -> None:
    firsts = [inputs[:, 0] for inputs, _ in islice(make_batches(), 12)]
    epochs = [torch.cat(firsts[:6]), torch.cat(firsts[6:])]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 24
    assert not torch.equal(epochs[0], epochs[1])


def test_a_restored_loader_goes_on_with_the_very_next_batch_in_any_epoch() -> None:
    for taken in (0, 1, 5, 6, 7, 13):
        original, restored = make_batches(), make_batches()
        for _ in range(taken):
            next(original)
        restored.load_state_dict(original.state_dict())
        for _ in range(8):
            assert torch.equal(next(original)[0], next(restored)[0])
