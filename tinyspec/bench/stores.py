"""What a technique needs to be itself on a model, where the command line does not name it: the
datastore of `rest`.

It is made of the texts at hand that no benchmark asks about (the training books, and for a chat
model GSM8K's training questions with their answers), lies in the cache, and is named in the result.
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
    """What this arm needs beside its own knobs; nothing, for nearly all."""
    wanted = PREPARE.get(spec.name)
    return (
        PreparedArm({}, "") if wanted is None or wanted[0] in dict(spec.knobs) else wanted[1](model)
    )


def read_datastore_texts(model: Model) -> tuple[list[str], str]:
    """Texts at hand in the model's manner, and what they are. TinyspecError where there are
    none.
    """
    found, names = list[str](), list[str]()
    with suppress(TinyspecError):
        books = [corpus.clean_book(book.text) for book in data.read_books("train")]
        found, names = [*found, *books], [*names, f"{len(books)} training books"]
    if model.tokenizer.has_chat:
        with suppress(TinyspecError):
            sums = [f"{s.question}\n{s.answer}" for s in data.read_gsm8k("train")]
            found, names = (
                [*found, *sums],
                [*names, f"{len(sums)} questions of GSM8K's training half with their answers"],
            )
    if not found:
        raise TinyspecError("a datastore needs texts and none are at hand: run `tinyspec data fetch`, or name one: "
                            "rest:datastore=STORE")  # fmt: skip
    return found, ", ".join(names)


def prepare_datastore(model: Model) -> PreparedArm:
    """The datastore of the texts at hand, built where it is not in the cache yet."""
    documents, what = read_datastore_texts(model)
    key = zlib.crc32("\n".join([model.tokenizer.fingerprint, *documents]).encode())
    path = models.models_folder().parent / "datastores" / f"{model.name}-{key:08x}.store"

    def ids() -> Iterator[NDArray[np.int32]]:
        for document in documents:
            yield np.array(model.tokenizer.encode(document), np.int32)

    if not path.exists():
        datastore.write_datastore(path, ids(), model.tokenizer.fingerprint, model.config.vocab_size)
    return PreparedArm(
        {"datastore": str(path)},
        f"a datastore of {len(datastore.open_datastore(path).tokens):,} tokens, 8 bytes each: {what}",
    )


def prepare_retrieval_budget(model: Model) -> PreparedArm:
    """A budget that retrieves: the paper's holds all of a short context."""
    budget = max(model.config.max_positions // SHARE // CHUNK, 1) * CHUNK
    return PreparedArm(
        {"budget": budget}, f"a retrieval budget of {budget} tokens, a sixteenth of the context"
    )


SHARE, CHUNK = 16, 8
PREPARE: dict[str, tuple[str, Callable[[Model], PreparedArm]]] = {
    "rest": ("datastore", prepare_datastore),
    "triforce": ("budget", prepare_retrieval_budget),
}
"""By technique: the knob whose default does nothing on this model, and who gives it a value."""
