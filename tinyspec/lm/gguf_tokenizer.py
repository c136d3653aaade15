"""A tokenizer from a .gguf file's metadata: tokens, merges or scores, token types, and the name of
a splitting rule.

Byte-level BPE (`tokenizer.ggml.model` gpt2) needs to know how a text is split before merging, and
the file says so only by a name (`tokenizer.ggml.pre`). Converters that know no name write
"default", and readers that know no name fall back to GPT-2's rule; SmolLM2 read that way merges
nothing wrong in words, but sees "a 7" as an unheard-of token. So a vocabulary in which no token
holds two characters of which one is a digit is read as one that splits digits one by one.
"""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # tokenizer.ggml.token_type; 1 is an ordinary token, 6 a byte
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REGEX = {"llama-bpe": _CASELESS + r"\p{N}{1,3}" + _TAIL, "qwen2": _CASELESS + r"\p{N}" + _TAIL}
_GPT2 = ("gpt-2", "gpt2")
_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # digits one by one, then GPT-2's rule
_SILENT = ("default", None)


def rebuild(metadata: dict[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer, or None where the file has none. Raises TinyspecError for a kind or a rule not
    known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab"):
        return None
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not tokens:
        raise TinyspecError(
            f"{source}: tokenizer.ggml.tokens is missing; take the safetensors folder"
        )
    types = types or [1] * len(tokens)
    if len(types) != len(tokens):
        raise TinyspecError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, types, source)
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, source)
    else:
        raise TinyspecError(f"{source}: tokenizer.ggml.model is {kind!r}; known: gpt2, llama")
    named = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in named if k == _CONTROL]
    )
    backend.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, k in named if k == _USER]
    )
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(id, int) and id < len(tokens):
            config[f"{name}_token"] = tokens[id]
    config["clean_up_tokenization_spaces"] = False
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, config, template if isinstance(template, str) else None)


def _byte_level(
    metadata: dict[str, Any], tokens: list[str], types: list[int], source: str
) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocab = {token: id for id, token in enumerate(tokens)}
    try:
        backend = Backend(models.BPE(vocab, merges))
    except Exception as error:  # the library's own: a merge of, or into, a token that is not there
        raise TinyspecError(
            f"{source}: tokenizer.ggml.merges do not fit the tokens ({error})"
        ) from error
    ordinary = [token for token, kind in zip(tokens, types, strict=True) if kind == 1]
    backend.pre_tokenizer = _splitting(metadata.get("tokenizer.ggml.pre"), ordinary, source)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitting(name: str | None, ordinary: list[str], source: str) -> pre_tokenizers.PreTokenizer:
    if name in _REGEX:
        split = pre_tokenizers.Split(Regex(_REGEX[name]), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if name not in _GPT2 + _DIGITS + _SILENT:
        known = ", ".join([*_GPT2[:1], *_DIGITS, *_REGEX, "default"])
        raise TinyspecError(
            f"{source}: tokenizer.ggml.pre is {name!r}; known: {known}; take the safetensors folder"
        )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alone = not any(len(token) > 1 and any(c in "0123456789" for c in token) for token in ordinary)
    if name in _DIGITS or (name in _SILENT and alone):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], source: str) -> Backend:
    """SentencePiece's BPE joins the pair whose union has the best score: so its merges, in the
    order of scores.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TinyspecError(
            f"{source}: tokenizer.ggml.scores is missing or of another length than the tokens"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [
            (token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in vocab and token[i:] in vocab
        ]
        ranked += [(-score, vocab[left], vocab[right], (left, right)) for left, right in pairs]
    merges = [pair for *_, pair in sorted(ranked)]
    unk = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Backend(
        models.BPE(vocab, merges, unk_token=tokens[unk], fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces, strip = [normalizers.Prepend("▁"), *spaces], [decoders.Strip(" ", 1, 0)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend
