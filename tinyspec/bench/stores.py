"""Prepare what a technique needs on a model and the command line does not name.

The datastore of `rest` is made of texts that no benchmark asks about: the training books, and for
a chat model GSM8K's training questions with their answers. It lies in the cache, and the result
names it. `triforce` gets a budget that is smaller than the context. The acceptance vector of
`sequoia` is measured on such texts before anything is timed, as in the paper.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec import data, models
from tinyspec.bench.plan import ArmSpec, BenchSettings
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft, drafts_for
from tinyspec.speculative.drafting import datastore
from tinyspec.speculative.drafting.sequoia import estimate_acceptance
from tinyspec.technique import find_technique
from tinyspec.training import corpus


class PreparedArm(NamedTuple):
    """Knobs that a technique needs, and what was built for them, in words."""

    knobs: Mapping[str, Any]
    built: str


def prepare_arm(
    spec: ArmSpec, model: Model, draft: Draft = None, settings: BenchSettings | None = None
) -> PreparedArm:
    """Return what this arm needs beside its own knobs. Nearly all need nothing."""
    wanted = PREPARE.get(spec.name)
    if wanted is None or wanted[0] in dict(spec.knobs):
        return PreparedArm({}, "")
    return wanted[1](model, draft, settings or BenchSettings())


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


def prepare_datastore(model: Model, *_: Any) -> PreparedArm:
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


def prepare_retrieval_budget(model: Model, *_: Any) -> PreparedArm:
    """Return a budget below the context: the paper's own holds all of a short context."""
    budget = max(model.config.max_positions // BUDGET_DIVISOR // CHUNK_TOKENS, 1) * CHUNK_TOKENS
    return PreparedArm(
        {"budget": budget}, f"a retrieval budget of {budget} tokens, a sixteenth of the context"
    )


def prepare_acceptance(model: Model, draft: Draft, settings: BenchSettings) -> PreparedArm:
    """Return Sequoia's acceptance vector, measured once for each pair of models and sampling."""
    card = find_technique("sequoia")
    small = drafts_for(model, card, draft)[0]
    sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p)
    key = (id(model), id(small), sampling.temperature, sampling.top_p)
    if key not in _MEASURED:
        texts, what = read_datastore_texts(model)
        chosen = texts[:: max(1, len(texts) // CALIBRATION_TEXTS)][:CALIBRATION_TEXTS]
        encode, most = model.tokenizer.encode, CALIBRATION_TOKENS
        written = [
            continue_text(model, encode(text[:CALIBRATION_LETTERS])[:most], most, sampling, n)
            for n, text in enumerate(chosen)
        ]
        ranks = next(knob.default for knob in card.knobs if knob.name == "ranks")
        shares = estimate_acceptance(model, small, written, sampling, ranks, Seeded(0))
        vector = ",".join(f"{share:g}" for share in shares)
        built = f"an acceptance vector, measured on {len(chosen)} texts out of {what}: {vector}"
        _MEASURED[key] = (model, small, PreparedArm({"accepts": vector}, built))
    return _MEASURED[key][-1]


def continue_text(
    model: Model, opening: Sequence[int], tokens: int, sampling: SamplingParams, seed: int
) -> list[int]:
    """Return an opening with the tokens that plain decoding adds."""
    running = start_generation(
        model,
        list(opening),
        max_new_tokens=tokens,
        temperature=float(sampling.temperature),
        top_p=None if sampling.top_p is None else float(sampling.top_p),
        seed=seed,
    )
    list(running)
    return list(running.decoder.context)


CALIBRATION_TEXTS = 20  # texts on which an acceptance vector is measured
CALIBRATION_TOKENS = 64  # tokens of each that are given, and as many that the target adds
CALIBRATION_LETTERS = 2000  # characters of each text that are read, far more than these tokens have
_MEASURED: dict[tuple[Any, ...], tuple[Model, Model, PreparedArm]] = {}
"""The vectors of this process; the models are kept, so no other one gets their id."""
BUDGET_DIVISOR = 16  # the budget is a sixteenth of the context
CHUNK_TOKENS = 8  # tokens of a chunk; a budget is a whole number of chunks
PREPARE: dict[str, tuple[str, Callable[[Model, Draft, BenchSettings], PreparedArm]]] = {
    "rest": ("datastore", prepare_datastore),
    "sequoia": ("accepts", prepare_acceptance),
    "triforce": ("budget", prepare_retrieval_budget),
}
"""For a technique: the knob whose default does nothing on this model, and what gives it a value."""
