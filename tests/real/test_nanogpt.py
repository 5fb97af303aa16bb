"""A script of nanoGPT's shape: as it is published its resume is another run, and `aiockpt prove` says in what."""

from __future__ import annotations

from functools import partial

import pytest

from aiockpt.prove import certify
from tests.real import nanogpt
from tests.real.small import prove_training

FORMS = pytest.mark.parametrize("form", ["dict", "objects"])


@FORMS
def test_as_published_the_resume_draws_other_random_numbers(form: str) -> None:
    found = certify(partial(nanogpt.main, form, rng=False, fetched=False))
    assert found.first is not None
    assert (found.verdict, found.first.row) == ("differs", "training: random torch"), found.explain()


@FORMS
def test_with_its_generators_it_still_leaves_out_the_batch_that_was_fetched(form: str) -> None:
    found = certify(partial(nanogpt.main, form, fetched=False))
    assert found.first is not None
    assert (found.verdict, found.first.row) == ("differs", "training: data"), found.explain()
    assert found.first.at == "at step 7"


@FORMS
def test_with_both_it_is_the_same_run(form: str) -> None:
    prove_training(partial(nanogpt.main, form))
