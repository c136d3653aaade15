"""Keep many texts as one array of token ids with its suffix array, in memory or in a mapped file.

The file begins with a line that names its format. A JSON line follows (tokens, documents,
vocabulary, the tokenizer's fingerprint), then zeros up to HEADER bytes, the ids, and the suffix
array, each int32 [n] in little-endian order. The id -1 stands between two documents. The file is
mapped, not read: opening it takes the same time at any size.
"""

import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import retrieve, suffix_order
from tinyspec.errors import TinyspecError
from tinyspec.lm.tokenizer import Tokenizer

MAGIC = b"tinyspec datastore 1\n"
HEADER = 4096  # a page, so that both arrays are aligned
BORDER = -1  # between documents
PIECE = 1 << 16  # characters that are tokenized at once; a longer text is cut at the end of a line
BATCH = 64  # pieces, so that all cores have some

Tell = Callable[[str, int, int], None]
"""(task, done, total): report progress."""

HOW = "build one with `tinyspec data datastore STORE FILES... --model NAME`"


class Continuations(NamedTuple):
    """What followed the longest match.

    match    its length in tokens; 0: there is none
    tokens   [n] the nodes of a tree, the heaviest first, a parent before its children
    parents  [n] index of the parent; ROOT (-1) for a token right after the match
    weights  [n] after how many places the text goes on with the path to this node
    """

    match: int
    tokens: list[int]
    parents: list[int]
    weights: list[int]


class Datastore(NamedTuple):
    """Texts in which the end of another text can be looked up.

    tokens       [n] int32, BORDER between documents
    order        [n] int32, the suffix array: places sorted by the text that begins there
    fingerprint  of the tokenizer that made the ids; empty: the texts were given as ids
    vocabulary   one more than the largest id that the tokenizer has
    """

    tokens: NDArray[np.int32]
    order: NDArray[np.int32]
    fingerprint: str = ""
    vocabulary: int = 0
    path: Path | None = None

    def search(
        self, text: Sequence[int], shortest: int, longest: int, length: int, matches: int, most: int
    ) -> Continuations:
        """Return the `most` heaviest nodes of what followed the longest match."""
        end = text[-longest:]
        return Continuations(
            *retrieve(self.tokens, self.order, end, shortest, longest, length, matches, most)
        )

    def check(self, model: Any) -> None:
        """Raise TinyspecError if the ids are not this model's."""
        if self.fingerprint and getattr(model, "has_tokenizer", False):
            if model.tokenizer.fingerprint != self.fingerprint:
                raise TinyspecError(
                    f"{self.path} was built with another tokenizer than that of {model.name}: "
                    f"{HOW}, naming this model"
                )
        elif self.vocabulary > model.config.vocab_size:
            raise TinyspecError(
                f"{self.path} has ids up to {self.vocabulary - 1}, {model.name} a vocabulary of "
                f"{model.config.vocab_size}: {HOW}, naming this model"
            )


def index_texts(texts: Sequence[Sequence[int]]) -> Datastore:
    """Return a datastore in memory. Raises TinyspecError if a text is empty."""
    for number, text in enumerate(texts, 1):
        if not len(text):
            raise TinyspecError(
                f"reference {number} of {len(texts)} is empty: leave it out, or give a text with "
                "tokens"
            )
    tokens = _join_documents(texts)
    return Datastore(tokens, suffix_order(tokens))


def _join_documents(texts: Iterable[Sequence[int] | NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return all texts in one array, with BORDER between them."""
    rows: list[NDArray[np.int32]] = []
    for text in texts:
        rows += [np.asarray(text, np.int32), np.array([BORDER], np.int32)]
    return np.concatenate(rows[:-1]) if rows else np.zeros(0, np.int32)


# ------------------------------ the file


def write_datastore(
    path: str | Path,
    documents: Iterable[Sequence[int] | NDArray[np.int32]],
    fingerprint: str = "",
    vocabulary: int = 0,
    tell: Tell | None = None,
) -> int:
    """Index documents and write them to a file, which appears when it is complete.

    Returns the number of tokens.
    """
    path, tokens = Path(path), _join_documents(document for document in documents if len(document))
    if not len(tokens):
        raise TinyspecError("these texts have no tokens: give files with text in them")
    order = suffix_order(tokens, tell and (lambda depth: tell("sorting places", depth, 32)))
    largest = max(vocabulary, int(tokens.max()) + 1)
    about = {
        "tokens": len(tokens),
        "documents": int((tokens == BORDER).sum()) + 1,
        "vocabulary": largest,
        "tokenizer": fingerprint,
    }
    head = MAGIC + json.dumps(about).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(head.ljust(HEADER, b"\0"))
            for column in (tokens, order):
                column.astype("<i4", copy=False).tofile(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return len(tokens)


def open_datastore(path: str | Path) -> Datastore:
    """Return the datastore of a file. Raises TinyspecError if it is missing or damaged."""
    path = Path(path)
    if not path.is_file():
        raise TinyspecError(f"{path}: there is no datastore here; {HOW}")
    with open(path, "rb") as file:
        head = file.read(HEADER)
    if not head.startswith(MAGIC):
        raise TinyspecError(f"{path} is not a datastore of this version: {HOW}")
    try:
        about = json.loads(head[len(MAGIC) :].split(b"\n", 1)[0])
        n, fingerprint, vocabulary = (
            int(about["tokens"]),
            str(about["tokenizer"]),
            int(about["vocabulary"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise TinyspecError(f"{path}: a damaged datastore ({error}); {HOW}") from error
    stat = path.stat()
    if n < 1 or stat.st_size != HEADER + 8 * n:
        raise TinyspecError(
            f"{path}: a damaged datastore ({stat.st_size} bytes for {n} tokens); {HOW}"
        )
    tokens, order = _map_file(path.absolute(), n, stat.st_dev, stat.st_ino)
    return Datastore(tokens, order, fingerprint, vocabulary, path)


@lru_cache(maxsize=8)
def _map_file(
    path: Path, n: int, device: int, inode: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return both arrays of a file, mapped once for all requests.

    A new mapping has a page fault at the first access to each page, so an old one is used again. It
    is never out of date: a change of the file is visible, and another file in its place has another
    inode.
    """
    columns = np.memmap(path, "<i4", "r", HEADER, (2, n))
    tokens, order = map(np.asarray, columns)  # plain views, because slicing a memmap takes longer
    return tokens, order


# ------------------------------ from texts


def build_datastore(
    out: str | Path,
    files: Sequence[str | Path],
    tokenizer: Tokenizer,
    field: str = "text",
    tell: Tell | None = None,
) -> int:
    """Tokenize files and write their datastore. Return its number of tokens.

    files  .jsonl, in which the `field` of each line is a document, or texts, each a document; both
           may be compressed (.gz, .xz)
    """
    texts = read_pieces([Path(file) for file in files], field, tell)
    return write_datastore(
        out,
        _tokenize_documents(texts, tokenizer),
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tell,
    )


def _tokenize_documents(
    texts: Iterator[tuple[bool, str]], tokenizer: Tokenizer
) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of each document. Many pieces are tokenized at once."""
    rows: list[NDArray[np.int32]] = []  # of the document that is being read
    waiting: list[tuple[bool, str]] = []
    while True:
        piece = next(texts, None)
        waiting += [] if piece is None else [piece]
        if waiting and (piece is None or len(waiting) == BATCH):
            for (fresh, _), ids in zip(
                waiting, tokenizer.encode_all([text for _, text in waiting]), strict=True
            ):
                if fresh and rows:
                    yield np.concatenate(rows)
                    rows = []
                rows.append(np.array(ids, np.int32))
            waiting = []
        if piece is None:
            if rows:
                yield np.concatenate(rows)
            return


def read_pieces(
    files: Sequence[Path], field: str, tell: Tell | None = None
) -> Iterator[tuple[bool, str]]:
    """Yield documents in pieces: (whether a document begins here, text)."""
    sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
    for number, file in enumerate(files):
        for fresh, text, at in _read(file, field):
            yield fresh, text
            if tell is not None:
                tell("reading texts", sum(sizes[:number]) + at, sum(sizes))


def _read(file: Path, field: str) -> Iterator[tuple[bool, str, int]]:
    """Yield the pieces of a file: (whether a document begins here, text, bytes read so far)."""
    kinds: dict[str, Any] = {".gz": gzip.GzipFile, ".xz": lzma.LZMAFile}
    try:
        with open(file, "rb") as raw:
            kind = kinds.get(file.suffix)
            packed = (
                raw if kind is None else kind(fileobj=raw) if kind is gzip.GzipFile else kind(raw)
            )
            lines = io.TextIOWrapper(packed, encoding="utf-8")
            if ".jsonl" in file.suffixes:
                for number, line in enumerate(lines, 1):
                    for begun, text in enumerate(
                        _cut([_field(line, field, f"{file}, line {number}")])
                    ):
                        yield not begun, text, raw.tell()
            else:
                for begun, text in enumerate(_cut(lines)):
                    yield not begun, text, raw.tell()
    except FileNotFoundError as error:
        raise TinyspecError(f"{file}: no such file") from error
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TinyspecError(
            f"{file}: not a text in UTF-8 ({error}); leave it out, or convert it"
        ) from error


def _field(line: str, field: str, place: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise TinyspecError(
            f"{place}: no JSON object with the field '{field}'; --field names another one"
        ) from error
    if not isinstance(text, str):
        raise TinyspecError(
            f"{place}: the field '{field}' holds no text; --field names another one"
        )
    return text


def _cut(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, joined to pieces of at least PIECE characters; a longer line is cut."""
    text, size = list[str](), 0
    for line in lines:
        for at in range(0, len(line), PIECE):
            part = line[at : at + PIECE]
            text.append(part)
            size += len(part)
            if size >= PIECE:
                yield "".join(text)
                text, size = [], 0
    if text:
        yield "".join(text)
