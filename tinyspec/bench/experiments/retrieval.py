"""`tinyspec bench retrieval`: what it costs to look a draft up and to add a token, by the size of
what is known.

Four ways to retrieve, each as its technique calls it, the Python call included: the n-gram index of
`llma`, the trie of `lookahead_trie`, the two trees of `suffix_decoding`, the datastore of `rest`
(which is built, not appended to). The text is made up from a seed: phrases of two to eleven words
that return by Zipf's law, their words drawn by it too, so that it repeats itself as text does;
nobody's index has seen the text that is asked for. Every question is asked once, so no answer is
warm. The machine's memory decides how large an index can be: 10 million tokens took up to about 5
GB.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import COMPILED, Forest, NgramIndex
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress, stamp_result
from tinyspec.bench.settings import RetrievalSettings
from tinyspec.speculative.drafting.datastore import Datastore, index_texts
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import find_technique

VOCABULARY, PHRASES = 49_152, 20_000
APPENDED, ASKED, LONGEST = 500, 400, 40  # tokens and questions in a round; tokens of a question
CHUNK = 100_000


class LookupIndex(Protocol):
    """Something that drafts are looked up in."""

    def build(self, tokens: NDArray[np.int32]) -> None: ...
    def append(self, token: int) -> None: ...
    def ask(self, context: Sequence[int]) -> int:
        """How many guesses there are behind this text."""
        ...

    def bytes(self) -> int | None:
        """What it holds, as it says itself; None: the process is asked."""
        ...


def make_zipf_text(n: int, seed: int = 0) -> NDArray[np.int32]:
    """n ids: phrases that return by Zipf's law, of words drawn by Zipf's law.

    >>> make_zipf_text(1000).shape, bool((make_zipf_text(1000) == make_zipf_text(2000)[:1000]).all())
    ((1000,), True)
    """
    rng = np.random.default_rng(seed)
    phrases = [rng.zipf(1.3, size=rng.integers(2, 12)) % VOCABULARY for _ in range(PHRASES)]
    pieces, size = list[Any](), 0
    while size < n:
        for rank in rng.zipf(1.2, size=1024) % PHRASES:
            pieces.append(phrases[rank])
            size += len(phrases[rank])
    return np.concatenate(pieces)[:n].astype(np.int32)


class NgramLookup:
    """As llma asks: sixteen tokens behind the longest match of up to eight."""

    def __init__(self) -> None:
        self.index = NgramIndex(8)

    def build(self, tokens: NDArray[np.int32]) -> None:
        for at in range(0, len(tokens), CHUNK):
            self.index.append(0, tokens[at : at + CHUNK].tolist())

    def append(self, token: int) -> None:
        self.index.append(0, (token,))

    def ask(self, context: Sequence[int]) -> int:
        return len(self.index.lookup(context[-8:], 16))

    def bytes(self) -> int | None:
        return None


class ForestLookup:
    """A forest with everything in the tree of outputs, and a tree of the request's own that is
    empty.
    """

    def __init__(self, depth: int):
        self.forest = Forest(depth, 1 << 30)
        self.text = self.forest.open(OUTPUTS)

    def build(self, tokens: NDArray[np.int32]) -> None:
        for at in range(0, len(tokens), CHUNK):
            self.forest.append(self.text, tokens[at : at + CHUNK].tolist())

    def append(self, token: int) -> None:
        self.forest.append(self.text, (token,))

    def bytes(self) -> int | None:
        return self.forest.bytes


class TrieLookup(ForestLookup):
    """As lookahead_trie asks."""

    def __init__(self) -> None:
        knobs = find_technique("lookahead_trie").settings({})
        self.nodes, self.branch = knobs["decoding_length"], knobs["branch_length"]
        super().__init__(self.branch + 1)
        self.plan = [(OUTPUTS, self.nodes // 2), (1, self.nodes), (OUTPUTS, self.nodes)]

    def ask(self, context: Sequence[int]) -> int:
        return len(
            self.forest.gather(
                self.plan, context[-self.branch :], self.branch, self.branch, self.branch
            )[0]
        )


class SuffixLookup(ForestLookup):
    """As suffix_decoding asks."""

    def __init__(self) -> None:
        self.knobs = find_technique("suffix_decoding").settings({})
        super().__init__(self.knobs["depth"])

    def ask(self, context: Sequence[int]) -> int:
        alpha, most, floor = (self.knobs[name] for name in ("alpha", "most", "floor"))
        return len(
            self.forest.best((1, OUTPUTS), context[-self.forest.depth :], alpha, most, most, floor)[
                0
            ]
        )


class DatastoreLookup:
    """As rest asks."""

    store: Datastore

    def __init__(self) -> None:
        knobs = find_technique("rest").settings({})
        self.shortest = knobs["shortest"]
        self.knobs = [knobs[name] for name in ("longest", "length", "matches", "nodes")]

    def build(self, tokens: NDArray[np.int32]) -> None:
        self.store = index_texts([tokens.tolist()])

    def append(self, token: int) -> None:
        raise NotImplementedError("a datastore is built once")

    def ask(self, context: Sequence[int]) -> int:
        return len(self.store.search(context, self.shortest, *self.knobs).tokens)

    def bytes(self) -> int | None:
        return self.store.tokens.nbytes + self.store.order.nbytes


ARMS: dict[str, Callable[[], LookupIndex]] = {
    "llma": NgramLookup,
    "lookahead_trie": TrieLookup,
    "suffix_decoding": SuffixLookup,
    "rest": DatastoreLookup,
}


def read_resident_bytes() -> int | None:
    """Bytes of this process in memory; None where the system does not say."""
    pages = Path("/proc/self/statm")
    return (
        int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else None
    )


def time_index(
    arm: str, size: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """One index of so many tokens: seconds of building, of every round's questions and appended
    tokens; bytes.
    """
    whole = make_zipf_text(size + rounds * (APPENDED + ASKED + LONGEST))
    known, ahead = whole[:size], whole[size:].tolist()
    gc.collect()
    before, index = read_resident_bytes(), ARMS[arm]()
    begun = time.perf_counter()
    index.build(known)
    built = time.perf_counter() - begun
    gc.collect()
    after = read_resident_bytes()
    found: dict[str, Any] = {"build": built, "ask": [], "guesses": [], "append": []}
    found["bytes"] = index.bytes() or (None if before is None or after is None else after - before)
    for number in range(rounds):
        part = ahead[number * (APPENDED + ASKED + LONGEST) :]
        questions = [part[at : at + LONGEST] for at in range(ASKED)]
        begun = time.perf_counter()
        guesses = [index.ask(question) for question in questions]
        found["ask"].append(time.perf_counter() - begun)
        found["guesses"].append(sum(guesses))
        if arm != "rest":
            begun = time.perf_counter()
            for token in part[ASKED + LONGEST : ASKED + LONGEST + APPENDED]:
                index.append(token)
            found["append"].append(time.perf_counter() - begun)
        tick()
    return found


def summarize_lookups(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """What a sample says of one call, one guess and one token."""
    calls = [seconds / ASKED for seconds in sample["ask"]]
    each = [
        seconds / max(n, 1) for seconds, n in zip(sample["ask"], sample["guesses"], strict=True)
    ]
    told = {
        "us_per_call": 1e6 * median(calls),
        "us_per_guess": 1e6 * median(each),
        "guesses_per_call": sum(sample["guesses"]) / (ASKED * len(calls)),
        "build_seconds": sample["build"],
    }
    if sample["append"]:
        told["us_per_append"] = 1e6 * median(sample["append"]) / APPENDED
    if sample["bytes"] is not None:
        told["bytes_per_token"] = max(sample["bytes"], 0) / size
    return {name: round(value, 3) for name, value in told.items()}


def measure_retrieval(given: RetrievalSettings, quiet: bool = False) -> dict[str, Any]:
    """Measure every arm at every size; one index at a time is in memory."""
    sizes, arms, rounds = given.sizes, given.arms, given.rounds
    samples: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    with show_progress("look-ups", len(sizes) * len(arms) * rounds, quiet) as tick:
        for size in sorted(sizes):
            for arm in arms:
                samples[arm][str(size)] = time_index(arm, size, rounds, tick)
    table = {
        arm: {size: summarize_lookups(one, int(size)) for size, one in taken.items()}
        for arm, taken in samples.items()
    }
    largest, smallest = str(max(sizes)), str(min(sizes))
    return stamp_result(
        {
            "compiled": COMPILED,
            "vocabulary": VOCABULARY,
            "samples": samples,
            "figures": table,
            "growth": {
                arm: round(of[largest]["us_per_call"] / of[smallest]["us_per_call"], 3)
                for arm, of in table.items()
            },
        }
    )


EXPERIMENT = Experiment(measure_retrieval)
