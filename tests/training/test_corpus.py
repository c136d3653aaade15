"""Cleaning, tokens, and two figures: bits per byte has a closed form for uniform models."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.training import corpus
from tinyspec.training.corpus import Document

TEXTS = [
    "The rain fell. The rain fell again, and the river rose.\n\nThen it stopped.",
    "Once upon a time there was rain.",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return corpus.train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("tokenizer"))


def test_the_title_block_goes_and_the_text_stays() -> None:
    header = "# Title: T\n\n## Author: A\n\n## Year: 1900\n\n-------\n"
    assert (
        corpus.clean_book(header + '"Go!"\r\n\r\n## Part II \r\n\r\nhe said. \r\n')
        == '"Go!"\n\n## Part II\n\nhe said.'
    )


@given(st.text(alphabet=st.sampled_from("ab#- \t\r\n:"), max_size=60))
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = corpus.clean_book("# Title: T\n\n-------\n" + text)
    assert "\r" not in once
    assert corpus.clean_book("-------\n" + once) == once


def test_a_rule_in_the_middle_of_a_book_is_text() -> None:
    assert corpus.clean_book("one\n\n-------\ntwo") == "one\n\n-------\ntwo"


@given(
    st.text(max_size=40).filter(
        lambda t: "\r\n" not in t and not any("\ud800" <= c <= "\udfff" for c in t)
    )
)
def test_any_text_can_be_encoded_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_knows_the_end_and_no_carriage_returns(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert tokenizer.eos == 0
    assert tokenizer.bos is None
    assert tokenizer.encode("a\r\nb") == tokenizer.encode("a\nb")
    tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_training_the_tokenizer_twice_gives_the_same_one(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    again = corpus.train_tokenizer(TEXTS, 300, tmp_path)
    assert again.backend.to_str() == tokenizer.backend.to_str()


def test_packing_puts_an_end_around_every_text(tokenizer: Tokenizer) -> None:
    row = corpus.pack_texts(tokenizer, TEXTS, 0).tolist()
    assert row == [0, *tokenizer.encode(TEXTS[0]), 0, *tokenizer.encode(TEXTS[1]), 0]


def test_crops_are_consecutive_tokens_and_depend_on_the_generator_alone() -> None:
    row = torch.arange(100)
    draw = corpus.make_crop_sampler(row, batch=5, context=8)
    inputs, targets = draw(torch.Generator().manual_seed(3))
    assert inputs.shape == targets.shape == (5, 8)
    assert (targets == inputs + 1).all()
    assert (inputs.diff() == 1).all()
    assert (draw(torch.Generator().manual_seed(3))[0] == inputs).all()
    starts = {
        int(r[0]) for seed in range(300) for r in draw(torch.Generator().manual_seed(seed))[0]
    }
    assert starts == set(range(92)), "every place of the text can be drawn, its ends too"


@given(st.lists(st.integers(2, 60), min_size=1, max_size=4), st.integers(2, 12), st.data())
def test_every_token_but_the_first_is_scored_once_with_enough_context(
    lengths: list[int], context: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context))
    first, documents = 0, []
    for length in lengths:  # every token of all documents is a different number
        documents.append(Document(list(range(first, first + length)), length))
        first += length
    seen: list[int] = []
    starts = {d.tokens[0] for d in documents}
    for inputs, targets, scored in corpus.slide_windows(documents, context, stride, batch=3):
        for row, answer, mask in zip(
            inputs.tolist(), targets.tolist(), scored.tolist(), strict=True
        ):
            for i, (token, counts) in enumerate(zip(answer, mask, strict=True)):
                if counts:
                    seen.append(token)
                    assert row[i] == token - 1
                    assert row[0] in starts or i >= context - stride
    assert sorted(seen) == sorted(t for d in documents for t in d.tokens[1:])


def test_a_uniform_distribution_costs_log2_of_the_vocabulary_per_token(
    tokenizer: Tokenizer,
) -> None:
    documents = [corpus.encode_document(tokenizer, text, 0) for text in TEXTS]
    tokens = sum(len(d.tokens) - 1 for d in documents)
    size = sum(len(text.encode()) for text in TEXTS)
    bits = corpus.bits_per_byte(
        lambda ids: torch.zeros(*ids.shape, 300), documents, context=8, stride=3
    )
    assert bits == pytest.approx(tokens * math.log2(300) / size, rel=1e-6)


def test_a_document_can_be_cut_and_counts_bytes_not_characters(tokenizer: Tokenizer) -> None:
    cut = corpus.encode_document(tokenizer, "\u00e9t\u00e9 encore", 0, characters=3)
    assert cut.bytes == 5
    assert tokenizer.decode(cut.tokens) == "\u00e9t\u00e9"


def test_acceptance_is_the_overlap_of_the_distributions() -> None:
    documents = [Document([0, 1, 1, 0, 1], 4)]
    rows = {"p": torch.tensor([0.75, 0.25]).log(), "q": torch.tensor([0.25, 0.75]).log()}

    def logits_of(name: str) -> corpus.LogitsFn:
        return lambda ids: rows[name].expand(*ids.shape, 2)

    assert corpus.measure_acceptance(
        logits_of("p"), logits_of("p"), documents, 4, 2
    ) == pytest.approx(1.0)
    assert corpus.measure_acceptance(
        logits_of("p"), logits_of("q"), documents, 4, 2
    ) == pytest.approx(0.5)
