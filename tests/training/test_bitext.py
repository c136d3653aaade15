"""Sentences become ids with one vocabulary for both languages, and batches of like lengths."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training.bitext import (
    BOS,
    EOS,
    MASK,
    PAD,
    SPECIAL,
    SentencePair,
    encode_pairs,
    filter_pairs,
    group_by_length,
    make_batch_sampler,
    train_joint_tokenizer,
)

TEXTS = [
    ("A dog runs.", "Ein Hund rennt."),
    ("A dog sleeps.", "Ein Hund schläft."),
    ("Dogs run.", "Hunde rennen."),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_joint_tokenizer((side for pair in TEXTS * 5 for side in pair), 320, folder)


def test_the_first_ids_are_pad_bos_eos_and_mask(tokenizer: Tokenizer) -> None:
    assert (
        [tokenizer.backend.token_to_id(token) for token in SPECIAL]
        == [PAD, BOS, EOS, MASK]
        == [0, 1, 2, 3]
    )
    assert (tokenizer.bos, tokenizer.eos) == (BOS, EOS)
    assert tokenizer.special_ids == {PAD, BOS, EOS, MASK}


def test_a_word_is_the_same_token_at_the_beginning_and_inside(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hund")[0] == tokenizer.encode("Ein Hund")[-1]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back_in_composed_unicode_with_single_spaces(
    tokenizer: Tokenizer, text: str
) -> None:
    clean = tokenizer.backend.normalizer.normalize_str(text)
    assert tokenizer.decode(tokenizer.encode(text)) == clean
    assert tokenizer.decode(tokenizer.encode(" Ein\xa0 Ma\u0308nnchen \n")) == "Ein Männchen"


def test_a_token_is_shown_as_text(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(id) for id in tokenizer.encode("Ein Hund")] == [" Ein", " Hund"]


def test_what_is_written_in_a_text_is_no_special_token(tokenizer: Tokenizer) -> None:
    assert not {PAD, BOS, EOS, MASK} & set(tokenizer.encode("<mask> </s>"))


def test_pairs_that_are_empty_or_long_are_not_trained_on(tokenizer: Tokenizer) -> None:
    pairs = encode_pairs(tokenizer, [*TEXTS, ("", "Hund"), ("Dog", "Hund " * 50)])
    assert len(pairs) == 5
    assert filter_pairs(pairs, 20) == pairs[:3]
    assert encode_pairs(tokenizer, []) == []


def library(many: int) -> list[SentencePair]:
    chance = random.Random(0)
    return [
        SentencePair([5] * chance.randint(1, 30), [6] * chance.randint(1, 30)) for _ in range(many)
    ]


def test_buckets_hold_every_pair_once_and_as_many_places_as_asked() -> None:
    pairs = library(200)
    groups = group_by_length(pairs, 100)
    assert sorted(i for group in groups for i in group) == list(range(200))
    for group in groups:
        assert len(group) * max(len(side) for i in group for side in pairs[i]) <= 100
    assert group_by_length(library(1), 1) == [
        [0]
    ]  # a pair that is too long for a batch is one alone


def test_every_pair_is_drawn_as_often_as_any_other_and_a_batch_depends_on_its_generator_alone() -> (
    None
):
    pairs = library(120)
    draw = make_batch_sampler(pairs, 120)
    seen: Counter[int] = Counter()
    for seed in range(3000):
        batch = draw(torch.Generator().manual_seed(seed))
        assert len(set(batch)) == len(batch)
        assert len(batch) * max(len(side) for i in batch for side in pairs[i]) <= 120
        seen.update(batch)
    mean = sum(seen.values()) / len(pairs)
    assert max(abs(seen[i] - mean) for i in range(len(pairs))) < 6 * mean**0.5
    assert draw(torch.Generator().manual_seed(7)) == make_batch_sampler(pairs, 120)(
        torch.Generator().manual_seed(7)
    )
    with pytest.raises(TinyspecError, match="no pairs to train on"):
        make_batch_sampler([], 100)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_batch_is_drawn_with_the_generator_of_any_device() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    assert set(make_batch_sampler(library(120), 120)(generator)) < set(range(120))


def test_the_vocabulary_is_saved_beside_a_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).same_vocabulary(tokenizer)
