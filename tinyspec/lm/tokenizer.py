"""Convert text to token ids and back, with Hugging Face's `tokenizers`.

No character of a text is lost on the way.
"""

import codecs
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, Self

import tokenizers

from tinyspec.errors import TinyspecError
from tinyspec.lm.chat_template import Message, render_chat

ENCODING = threading.Lock()  # a backend has one switch for special tokens, and threads share it
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokeniser(Protocol):
    """Decode ids as they arrive: `push` returns the new text, `flush` the rest.

    After `flush` a new text begins. A half character becomes U+FFFD, as in `decode`.
    """

    def push(self, ids: Iterable[int]) -> str: ...

    def flush(self) -> str: ...


class ByteStream:
    """The stream of byte-level BPE: each token is a few bytes, and a text is UTF-8.

    >>> stream = ByteStream({0: b"caf", 1: b"\\xc3", 2: b"\\xa9"}.__getitem__)
    >>> [stream.push([0, 1]), stream.push([2]), stream.flush()]
    ['caf', 'é', '']
    """

    def __init__(self, to_bytes: Callable[[int], bytes]) -> None:
        self._to_bytes = to_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._to_bytes, ids)))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class WindowStream:
    """The stream of every other decoder: decode a window with and without the new ids.

    The difference is the new text. A decoder treats the first token of a text differently, so the
    window always begins with tokens whose text was returned before. Nothing is returned while the
    end may still change: after a byte token (a run of them that is not UTF-8 becomes U+FFFD as a
    whole), and after a half character. A push costs a few tokens, not the whole text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], token: Callable[[int], str | None]
    ) -> None:
        self._decode, self._token = decode, token
        self._shown: list[int] = []  # tokens whose text was returned; they decode to something
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        self._held.extend(i for i in ids if self._token(i) is not None)
        if not self._held or _BYTE_TOKEN.fullmatch(self._token(self._held[-1]) or ""):
            return ""
        text = self._decode(self._shown + self._held)
        return "" if text.endswith("\ufffd") else self._emit(text)

    def flush(self) -> str:
        text = self._emit(self._decode(self._shown + self._held))
        self._shown = []
        return text

    def _emit(self, text: str) -> str:
        new = text[len(self._decode(self._shown)) :]
        # Tokens that decode to nothing alone ("▁" at the start of a text) cannot begin the window.
        self._shown = self._held if self._decode(self._held) else self._shown + self._held
        self._held = []
        return new


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in GPT-2's byte alphabet.

    A byte that prints stands for itself; the others have characters from U+0100 on.

    >>> _byte_alphabet()["Ġ"], _byte_alphabet()["A"]
    (32, 65)
    """
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


PROBE = "Aé 1 中\n\U0001f600"  # letters, a digit, spaces, and characters of two to four bytes
_stderr = threading.Lock()


@contextmanager
def catch_panics() -> Iterator[None]:
    """Turn a panic of the `tokenizers` library into a ValueError.

    The library is written in Rust, where a failed assertion is a *panic*. In Python it is a
    BaseException, so that `except Exception` lets it pass.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(" ".join(str(error).split())) from error


@contextmanager
def _mute_panics() -> Iterator[None]:
    """Keep what Rust prints of a panic from standard error, by itself and with a backtrace."""
    with _stderr, ExitStack() as stack:
        with suppress(OSError):  # there is no standard error: nothing to keep clean
            kept = os.dup(2)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 2)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 2)
        yield


class Tokenizer:
    """A `tokenizers.Tokenizer` with its tokenizer_config.json and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # A tokenizer.json may have the truncation and padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = {
            key: value for key, value in (config or {}).items() if key != "chat_template"
        }
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a folder."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TinyspecError(
                f"{file}: missing; if the folder has another tokenizer (tokenizer.model, "
                "vocab.json), convert it with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            with _mute_panics(), catch_panics():
                backend = tokenizers.Tokenizer.from_file(str(file))
                _probe(backend)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise TinyspecError(
                f"{file}: not a tokenizer ({_shorten(error)}); fetch or save it again"
            ) from error
        config: dict[str, Any] = {}
        if (path_config := folder / "tokenizer_config.json").is_file():
            try:
                config = json.loads(path_config.read_text(encoding="utf-8"))
            except OSError as error:
                raise TinyspecError(f"{path_config}: cannot be read ({error})") from error
            except (ValueError, RecursionError) as error:
                raise TinyspecError(
                    f"{path_config}: not valid JSON ({error}); fetch or save it again"
                ) from error
            if not isinstance(config, dict):
                raise TinyspecError(
                    f"{path_config}: expected a JSON object, got {type(config).__name__}"
                )
        template = config.get("chat_template")
        if isinstance(template, list):  # several named templates: the default one is the chat
            named = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, dict)
            }
            template = named.get("default")
        if (path_template := folder / "chat_template.jinja").is_file():
            try:
                template = path_template.read_text(encoding="utf-8")
            except OSError as error:
                raise TinyspecError(f"{path_template}: cannot be read ({error})") from error
            except UnicodeDecodeError as error:
                raise TinyspecError(
                    f"{path_template}: not a text in UTF-8 ({error}); fetch or save it again"
                ) from error
        return cls(backend, config, template if isinstance(template, str) else None)

    def save(self, path: str | Path) -> None:
        """Write these three files into a folder; the chat template as chat_template.jinja."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"), pretty=False)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8"
        )
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, "utf-8")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text, without BOS or EOS.

        A special token that is spelled out in a text is ordinary text, unless `special`: nobody
        ends a turn by writing `<|im_end|>`.
        """
        try:
            with ENCODING, catch_panics():
                # The library means by this: encode special tokens as ordinary text.
                self.backend.encode_special_tokens = not special
                return list(self.backend.encode(text, add_special_tokens=False).ids)
        except (TypeError, UnicodeError) as error:
            raise TinyspecError(
                "this text is no valid Unicode: save it as UTF-8, and cut no character in half"
            ) from error
        except Exception as error:  # the vocabulary lacks a character and has no unk token
            raise TinyspecError(
                f"this text cannot be encoded with this vocabulary: {_shorten(error)}"
            ) from error

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, on all cores."""
        try:
            with ENCODING, catch_panics():
                self.backend.encode_special_tokens = True
                ran = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [list(one.ids) for one in ran]
        except Exception:  # one of them cannot be encoded: say which error it is
            return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of these ids.

        Ids beyond the vocabulary, which a padded embedding has, have no text.
        """
        try:
            with catch_panics():
                return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))
        except (OverflowError, TypeError) as error:
            raise TinyspecError(
                f"token ids are whole numbers from 0 to {self.vocab_size - 1}: {error}"
            ) from error
        except Exception as error:  # a decoder that fails on these tokens
            raise TinyspecError(
                f"these tokens cannot be decoded: {_shorten(error)}; fetch tokenizer.json again"
            ) from error

    def stream(self, skip_special: bool = True) -> Detokeniser:
        """Return an incremental `decode`: its pieces, joined, are the text of all ids.

        No piece has half a character.
        """
        skipped = self.special_ids if skip_special else frozenset[int]()

        def token(id: int) -> str | None:
            return None if id in skipped else self.backend.id_to_token(id)

        if isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel):
            return ByteStream(lambda id: self._token_bytes(token(id)))
        return WindowStream(lambda ids: self.decode(ids, skip_special=False), token)

    @staticmethod
    def _token_bytes(token: str | None) -> bytes:
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token stands for its own text
            return token.encode()

    def token_text(self, id: int) -> str:
        """Return a token for display, with its leading space; half a character is U+FFFD."""
        token = self.backend.id_to_token(id)
        if token is None:
            return f"<{id}>"
        if self._spells_bytes:
            return self._token_bytes(token).decode("utf-8", "replace")
        return token.replace("▁", " ")

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token adds to a text: half a character too, none if special."""
        token = self.backend.id_to_token(id)
        if token is None or id in self.special_ids:
            return b""
        if self._spells_bytes:
            return self._token_bytes(token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return self.token_text(id).encode()

    @cached_property
    def longest_token(self) -> int:
        """Return how many bytes of a text a token stands for, at most."""
        to_bytes = self._token_bytes if self._spells_bytes else str.encode
        return max(len(to_bytes(token)) for token in self.backend.get_vocab())

    @cached_property
    def _spells_bytes(self) -> bool:
        """Whether tokens are written in the byte alphabet, whatever else the decoder does."""
        if self.backend.decoder is None:
            return False
        kind = json.loads(self.backend.decoder.__getstate__())
        return any(part["type"] == "ByteLevel" for part in kind.get("decoders", [kind]))

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, by the template; its special tokens are parsed."""
        if self.chat_template is None:
            raise TinyspecError(
                "this model has no chat template; give it a plain text prompt, or use a chat model"
            )
        text = render_chat(
            self.chat_template, messages, add_generation_prompt, self._named_tokens()
        )
        return self.encode(text, special=True)

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def vocab_size(self) -> int:
        """Return the number of ids: the largest id of any token, plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of every id and its token, which tells one vocabulary from another."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        entries = sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
        return blake2b(json.dumps(entries).encode(), digest_size=16).hexdigest()

    def find_id(self, token: str) -> int | None:
        """Return the id of a token by its own text; None: there is none."""
        found: int | None = self.backend.token_to_id(token)
        return found

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer with further special tokens, on the next free ids."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.add_special_tokens(list(tokens))
        return Tokenizer(backend, self.config, self.chat_template)

    def same_vocabulary(self, other: "Tokenizer") -> bool:
        """Return whether every id is the same token in both, as a draft and its target need."""
        return self is other or self.fingerprint == other.fingerprint

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of control tokens, which `decode` leaves out unless asked."""
        return frozenset(
            id for id, token in self.backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def bos(self) -> int | None:
        """The id of tokenizer_config.json's `bos_token`, if it names one."""
        return self._id_of("bos_token")

    @property
    def eos(self) -> int | None:
        """The id of tokenizer_config.json's `eos_token`, if it names one."""
        return self._id_of("eos_token")

    def _named_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... as text; an entry is a text or a serialised AddedToken."""
        named = {key: value for key, value in self.config.items() if key.endswith("_token")}
        texts = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in named.items()
        }
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def _id_of(self, name: str) -> int | None:
        text = self._named_tokens().get(name)
        with suppress(UnicodeError):  # half a character: no token has it
            return None if text is None else self.backend.token_to_id(text)
        return None


def _probe(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode PROBE: some tokenizers can be read, and then panic at every text.

    That a vocabulary lacks its characters is no fault.
    """
    ids = list(range(min(backend.get_vocab_size(), 8)))
    with suppress(Exception):
        ids = backend.encode(PROBE, add_special_tokens=True).ids or ids
    with suppress(Exception):
        backend.decode(ids)


def _shorten(error: Exception) -> str:
    """Return what the library says, on one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
