"""Text, ids and streams: decoding in pieces is decoding, and nothing but special tokens is lost."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + "
    "'\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
}


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE whose merges cut characters apart: é and € are split over tokens, two bytes of
    € are merged.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("â", "Ĥ"), ("o", "Ã"), ("1", "2")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    backend.add_tokens([AddedToken("<tool call> é", special=False, normalized=False)])
    return Tokenizer(backend, CONFIG, CHATML)


@cache
def sentencepiece() -> Tokenizer:
    """LLaMA-2's kind: metaspace, byte fallback, and the first space of a text dropped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "é",
        "\ufffd",
    ]
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("▁", "w"), ("▁", "▁")]
    vocab = {token: i for i, token in enumerate([*pieces, *(a + b for a, b in merges)])}
    backend = Backend(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def sequence_of_bytes() -> Tokenizer:
    """A byte-level decoder inside a sequence: the window stream must hold half characters back by
    itself.
    """
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(backend, CONFIG)


@cache
def words() -> Tokenizer:
    backend = Backend(
        models.WordPiece(
            {"[UNK]": 0, "he": 1, "##llo": 2, "wor": 3, "##ld": 4, ".": 5}, unk_token="[UNK]"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


KINDS = [byte_level, sentencepiece, sequence_of_bytes, words]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_stream_joined_is_whole_decode_for_any_ids_and_any_split(kind, data):
    tokenizer = kind()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    skip = data.draw(st.booleans())
    stream, shown = tokenizer.stream(skip), ""
    rest = ids
    while rest:
        n = data.draw(st.integers(1, 3))
        shown, rest = shown + stream.push(rest[:n]), rest[n:]
        assert tokenizer.decode(ids, skip).startswith(shown)
    assert shown + stream.flush() == tokenizer.decode(ids, skip)
    assert stream.push(ids) + stream.flush() == tokenizer.decode(
        ids, skip
    )  # a flushed stream starts afresh


@pytest.mark.parametrize("kind", [byte_level, sentencepiece, sequence_of_bytes])
@given(text=st.text(max_size=20))
def test_stream_of_a_text_never_shows_half_a_character(kind, text):
    tokenizer = kind()
    text = text.replace("\ufffd", "")
    ids, stream, shown = tokenizer.encode(text), tokenizer.stream(), ""
    for id in ids:
        shown += stream.push([id])
        assert "\ufffd" not in shown
    assert shown + stream.flush() == tokenizer.decode(ids) == text


@given(text=st.text(max_size=40))
def test_encode_then_decode_is_the_identity_even_for_spelled_special_tokens(text):
    tokenizer = byte_level()
    for spelled in (text, text + "<|im_end|>" + text):
        ids = tokenizer.encode(spelled)
        assert tokenizer.decode(ids) == spelled
        assert not tokenizer.special_ids & set(ids)


def test_special_tokens_are_parsed_only_on_request():
    tokenizer = byte_level()
    assert tokenizer.eos in tokenizer.encode("hello<|im_end|>", special=True)
    assert tokenizer.eos not in tokenizer.encode("hello<|im_end|>")
    assert tokenizer.decode(tokenizer.encode("hello<|im_end|>", special=True)) == "hello"
    assert (
        tokenizer.decode(tokenizer.encode("hello<|im_end|>", special=True), skip_special=False)
        == "hello<|im_end|>"
    )


def test_a_chat_is_the_template_rendered_with_its_special_tokens_parsed():
    tokenizer = byte_level()
    ids = tokenizer.chat([{"role": "user", "content": "hello é"}])
    assert (
        tokenizer.decode(ids, skip_special=False)
        == "<|im_start|>user\nhello é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tokenizer.bos
    assert ids.count(tokenizer.eos) == 1
    without = tokenizer.chat([{"role": "user", "content": "hello é"}], add_generation_prompt=False)
    assert ids[: len(without)] == without != ids


def render(template: str, content: str = "x") -> str:
    tokenizer = Tokenizer(byte_level().backend, CONFIG, template)
    return tokenizer.decode(
        tokenizer.chat([{"role": "user", "content": content}]), skip_special=False
    )


def test_a_template_has_the_helpers_that_transformers_gives_it():
    assert render("{{ messages | tojson }}", "<é>") == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert (
        render(
            "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration "
            "%}\n{% endfor %}"
        )
        == "x"
    )
    assert (
        render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )
    assert render("{{ bos_token }}{{ tools is none }}") == "<|im_start|>True"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
        ("{% for %}", "refuses"),
        ("{{ 1 / 0 }}", "fails"),
    ],
)
def test_a_template_that_fails_or_breaks_out_gets_one_line(template, says):
    with pytest.raises(TinyspecError, match=says) as error:
        render(template)
    assert "\n" not in str(error.value)


def test_bad_input_gets_one_line():
    tokenizer = byte_level()
    with pytest.raises(TinyspecError, match="no chat template"):
        sentencepiece().chat([{"role": "user", "content": "x"}])
    with pytest.raises(TinyspecError, match="chat message 1"):
        tokenizer.chat([{"role": "user", "content": "x"}, {"role": "user"}])
    with pytest.raises(TinyspecError, match="no valid Unicode: save it as UTF-8"):
        tokenizer.encode("\ud800")
    with pytest.raises(TinyspecError, match="whole numbers from 0 to"):
        tokenizer.decode([-1])
    with pytest.raises(TinyspecError, match="whole numbers"):
        tokenizer.decode(["a"])


def test_token_text_shows_spaces_and_special_tokens():
    tokenizer = byte_level()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hell w")] == ["hell", " w"]
    assert tokenizer.token_text(tokenizer.eos) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode("é")[0]) == "\ufffd"
    assert tokenizer.token_text(10**6) == "<1000000>"
    assert sentencepiece().token_text(sentencepiece().encode("w")[0]) == " w"


@pytest.mark.parametrize("kind", KINDS)
def test_save_and_read_back_is_the_same_tokenizer(kind, tmp_path: Path):
    tokenizer = kind()
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.encode("hello world") == tokenizer.encode("hello world")
    assert (again.bos, again.eos, again.chat_template) == (
        tokenizer.bos,
        tokenizer.eos,
        tokenizer.chat_template,
    )
    assert (again.special_ids, again.vocab_size) == (tokenizer.special_ids, tokenizer.vocab_size)


def test_two_vocabularies_are_the_same_if_every_id_is_the_same_token():
    assert byte_level().same_vocabulary(sequence_of_bytes())
    assert not byte_level().same_vocabulary(sentencepiece())


def test_a_vocabulary_is_read_once_however_often_it_is_compared(monkeypatch):
    one, other = byte_level(), sequence_of_bytes()
    assert one.same_vocabulary(other)
    monkeypatch.setattr(one, "backend", None)
    assert one.same_vocabulary(other) and other.same_vocabulary(one)


def test_a_fingerprint_tells_vocabularies_apart_as_their_tokens_do():
    assert byte_level().fingerprint == sequence_of_bytes().fingerprint
    assert byte_level().fingerprint != sentencepiece().fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_are_encoded_as_each_alone(kind):
    texts = ["", "the cat", "a <|im_end|> b", "the cat" * 50]
    assert kind().encode_all(texts) == [kind().encode(text) for text in texts]
    with pytest.raises(TinyspecError, match="no valid Unicode"):
        kind().encode_all(["fine", "\ud800"])


def test_truncation_and_padding_of_a_training_run_do_not_cut_a_text(tmp_path: Path):
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("zzzzz")) == 5


def test_the_template_may_stand_in_the_config_alone_or_among_named_ones(tmp_path: Path):
    byte_level().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for template in (
        "{{ 1 }}",
        [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ 1 }}"}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert Tokenizer.from_folder(tmp_path).chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", "{", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "\xff", "tokenizer_config.json: not valid JSON"),
        ("chat_template.jinja", "\xff{{ 1 }}", "chat_template.jinja: not a text in UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file, content, says):
    byte_level().save(tmp_path)
    (tmp_path / file).write_text(content, encoding="latin-1")
    with pytest.raises(TinyspecError, match=says):
        Tokenizer.from_folder(tmp_path)


PANICS = {
    "a charsmap that is no charsmap": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "a charsmap that is missing": {"type": "Precompiled", "precompiled_charsmap": None},
    "a charsmap that points outside": {"type": "Precompiled",
    "precompiled_charsmap": "CAAAAP//////////"},
    "an empty text": {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    "an empty expression": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"},
    "an optional expression": {"type": "Replace", "pattern": {"Regex": "q?"}, "content": "x"},
}  # fmt: skip
"""Normalizers at which the library panics: with an exception that is no Exception."""


@pytest.mark.parametrize("normalizer", PANICS.values(), ids=PANICS)
def test_a_tokenizer_that_panics_is_an_error_of_one_line(tmp_path: Path, capfd, normalizer):
    byte_level().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))
    with pytest.raises(
        TinyspecError, match=r"tokenizer.json: not a tokenizer .*fetch or save"
    ) as e:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(e.value)
    assert capfd.readouterr().err == ""


def test_a_panic_at_one_text_is_an_error_of_that_text(tmp_path: Path):
    """The expression `(a+)+$` takes exponential time at `aa...ab`, so the library panics."""
    byte_level().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    slow = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": slow}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    text = "a" * 40 + "b"
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_all(["fine", text])):
        with pytest.raises(TinyspecError, match="this text cannot be encoded") as error:
            encode(text)
        assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_json_says_how_to_convert(tmp_path: Path):
    with pytest.raises(TinyspecError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch, file):
    byte_level().save(tmp_path)
    (tmp_path / file).touch()
    read = Path.read_text

    def refuse(path: Path, *args: Any, **options: Any) -> str:
        if path.name == file:
            raise PermissionError("not for you")
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(TinyspecError, match=rf"{file}: cannot be read \(not for you\)"):
        Tokenizer.from_folder(tmp_path)
