"""Prepare what a technique needs on a model and the command line does not name.

The datastore of `rest` is made of texts that no benchmark asks about: the training books, and for
a chat model GSM8K's training questions with their answers. It lies in the cache, and the result
names it. `triforce` gets a budget that is smaller than the context.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec import data, models
from tinyspec.bench.plan import ArmSpec
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import datastore
from tinyspec.training import corpus


class PreparedArm(NamedTuple):
    """Knobs that a technique needs, and what was built for them, in words."""

    knobs: Mapping[str, Any]
    built: str


def prepare_arm(spec: ArmSpec, model: Model) -> PreparedArm:
    """Return what this arm needs beside its own knobs. Nearly all need nothing."""
    wanted = PREPARE.get(spec.name)
    if wanted is None or wanted[0] in dict(spec.knobs):
        return PreparedArm({}, "")
    return wanted[1](model)


def read_datastore_texts(model: Model) -> tuple[list[str], str]:
    """Return the texts for a datastore, and words that say which. Raises TinyspecError if none."""
    found, names = list[str](), list[str]()
    with suppress(TinyspecError):
        books = [corpus.clean_book(book.text) for book in data.read_books("train")]
        found += books
        names.append(f"{len(books)} training books")
    if model.tokenizer.has_chat:
        with suppress(TinyspecError):
            sums = [f"{s.question}\n{s.answer}" for s in data.read_gsm8k("train")]
            found += sums
            names.append(f"{len(sums)} questions of GSM8K's training half with their answers")
    if not found:
        raise TinyspecError(
            "a datastore needs texts and none are at hand: run `tinyspec data fetch`, or name "
            "one: rest:datastore=STORE"
        )
    return found, ", ".join(names)


def prepare_datastore(model: Model) -> PreparedArm:
    """Return the datastore of the texts at hand. It is built unless the cache has it."""
    documents, what = read_datastore_texts(model)
    key = zlib.crc32("\n".join([model.tokenizer.fingerprint, *documents]).encode())
    path = models.models_folder().parent / "datastores" / f"{model.name}-{key:08x}.store"

    def ids() -> Iterator[NDArray[np.int32]]:
        for document in documents:
            yield np.array(model.tokenizer.encode(document), np.int32)

    if not path.exists():
        datastore.write_datastore(path, ids(), model.tokenizer.fingerprint, model.config.vocab_size)
    size = len(datastore.open_datastore(path).tokens)
    return PreparedArm(
        {"datastore": str(path)}, f"a datastore of {size:,} tokens, 8 bytes each: {what}"
    )


def prepare_retrieval_budget(model: Model) -> PreparedArm:
    """Return a budget below the context: the paper's own holds all of a short context."""
    budget = max(model.config.max_positions // SHARE // CHUNK, 1) * CHUNK
    return PreparedArm(
        {"budget": budget}, f"a retrieval budget of {budget} tokens, a sixteenth of the context"
    )


SHARE = 16  # the budget is a sixteenth of the context
CHUNK = 8  # tokens of a chunk; a budget is a whole number of chunks
PREPARE: dict[str, tuple[str, Callable[[Model], PreparedArm]]] = {
    "rest": ("datastore", prepare_datastore),
    "triforce": ("budget", prepare_retrieval_budget),
}
"""For a technique: the knob whose default does nothing on this model, and what gives it a value."""
