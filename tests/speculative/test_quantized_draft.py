"""Quantised drafts: the target in four bits drafts for itself."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tinyspec
from tests.lm.small import LLAMA, model
from tests.zoo import tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.digest import compute_digest
from tinyspec.laws.traps import quantized_draft as traps
from tinyspec.lm.quantised import quantise_matrix
from tinyspec.pairing import drafts_for
from tinyspec.speculative.drafting import quantized_draft as quantized
from tinyspec.technique import find_technique

CARD = find_technique("quantized_draft")


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap(trap: traps.Trap) -> None:
    assert trap.check(trap.real()).cases > 5


def test_the_copy_is_the_target_with_its_matrices_in_four_bits() -> None:
    target = tinyspec.load("storyteller")
    copied = quantized.copy_in_four_bits(target)
    for name, weight in target.weights.items():
        due = weight.bfloat16() if weight.ndim == 1 else quantise_matrix(weight, "Q4_0").expand()
        assert torch.equal(copied.weights[name].bfloat16(), due), name
    assert copied.name == "storyteller-q4" and copied.config == target.config


def test_a_matrix_whose_rows_cannot_be_grouped_stays_as_it_is() -> None:
    small = model(LLAMA)  # rows of 16 and 24
    copied = quantized.copy_in_four_bits(small)
    assert copied.dtype == small.dtype
    for name, weight in small.weights.items():
        assert torch.equal(copied.weights[name], weight), name


def test_the_copy_is_made_once_and_goes_with_its_model() -> None:
    target = model(LLAMA)
    (copied,) = drafts_for(target, CARD, None)
    assert drafts_for(target, CARD, None) == [copied]
    lives = weakref.ref(copied)
    del target, copied
    gc.collect()
    assert lives() is None


def test_other_methods_draft_with_the_copy_by_its_name() -> None:
    target = model(LLAMA)
    (copied,) = drafts_for(target, CARD, None)
    for name in ("speculative_decoding", "auto"):
        assert drafts_for(target, find_technique(name), "quantized_draft") == [copied], name
    with pytest.raises(TinyspecError):
        drafts_for(target, find_technique("auto"), "llma")  # a method that makes no draft


def test_auto_with_the_copy_writes_what_plain_decoding_writes() -> None:
    target = tinyspec.load("storyteller")
    options = {"max_new_tokens": 40, "temperature": 0.0}
    done = tinyspec.generate(target, "Once", method="auto", draft="quantized_draft", **options)
    plain = tinyspec.generate(target, "Once", method="autoregressive", **options)
    assert done.text == plain.text


def test_a_draft_that_is_given_is_used() -> None:
    target, other = model(LLAMA), model(LLAMA, 1)
    assert drafts_for(target, CARD, other) == [other]


def test_threads_get_one_copy() -> None:
    target = model(LLAMA)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: drafts_for(target, CARD, None)[0], range(4)))
    assert len({id(one) for one in found}) == 1


def test_the_copy_is_no_state_of_a_decoder() -> None:
    """Decoders reach the registry. What a method made for other models is not in their digests."""
    before = compute_digest(CARD)
    target = model(LLAMA)
    drafts_for(target, CARD, None)
    assert compute_digest(CARD) == before


def test_numbers_beyond_float16_are_not_quantised() -> None:
    weight = torch.full((2, 32), 1e9)
    assert quantized.quantise_weights({"a.weight": weight, "b.weight": weight / 1e9}).keys() == {
        "b.weight"
    }


def test_the_text_is_plain_decodings_and_most_drafts_are_accepted() -> None:
    prompt = "The old sailor said"
    out = tinyspec.generate("storyteller", prompt, method="quantized_draft", max_new_tokens=60)
    assert out.text == tinyspec.generate("storyteller", prompt, max_new_tokens=60).text
    assert out.stats.accepted > 0.7 * out.stats.drafted > 0


def test_any_model_has_one(tmp_path: object) -> None:
    zoo = tiny_zoo(tmp_path)  # type: ignore[arg-type]
    out = tinyspec.generate(zoo.big, "the cat", method="quantized_draft", max_new_tokens=8)
    assert out.tokens == tinyspec.generate(zoo.big, "the cat", max_new_tokens=8).tokens
