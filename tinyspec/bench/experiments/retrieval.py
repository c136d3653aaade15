"""`tinyspec bench retrieval`: measure the cost of a draft lookup, and of a token that is added.

Four indexes are called as their techniques call them, the Python call included: the n-gram index of
`llma`, the trie of `lookahead_trie`, the two trees of `suffix_decoding`, and the datastore of
`rest` (which is built, and never extended). The text is made from a seed: phrases of two to eleven
words, and the words in them, are drawn by Zipf's law, so that it repeats itself as text does. No
index has seen the text that is looked up, and every question is asked once, so that no cache helps.
The memory of the machine limits the size of an index: 10 million tokens took up to 2 GB.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyspec._core import COMPILED, Forest, NgramIndex
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import show_progress_bar, stamp_result
from tinyspec.bench.settings import RetrievalSettings
from tinyspec.speculative.drafting.datastore import index_texts
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import find_technique

VOCABULARY, PHRASES = 49_152, 20_000
APPENDED, ASKED, LONGEST = 500, 400, 40  # tokens and questions in a round; tokens of a question
APPENDED_TOKENS = 100_000  # tokens that are added together


class LookupIndex(NamedTuple):
    """An index in which drafts are looked up.

    ask     looks up drafts of a text, and returns how many tokens were found
    append  adds a token; None: the index is built once
    size    bytes; None: it does not know
    """

    ask: Callable[[Sequence[int]], int]
    append: Callable[[int], object] | None = None
    size: int | None = None


def make_zipf_text(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Return n ids: phrases that are drawn by Zipf's law, of words that are drawn by it too.

    >>> short, long = make_zipf_text(1000), make_zipf_text(2000)
    >>> short.shape, bool((short == long[:1000]).all())
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


def append_all(append: Callable[[Sequence[int]], object], tokens: NDArray[np.int32]) -> None:
    """Add tokens to an index, many at a time."""
    for at in range(0, len(tokens), APPENDED_TOKENS):
        append(tokens[at : at + APPENDED_TOKENS].tolist())


def build_ngram_index(known: NDArray[np.int32]) -> LookupIndex:
    """Build the index of llma: it finds 16 tokens after the longest match of up to 8."""
    index = NgramIndex(8)
    append_all(lambda tokens: index.append(0, tokens), known)
    return LookupIndex(
        lambda context: len(index.lookup(context[-8:], 16)),
        lambda token: index.append(0, (token,)),
    )


def build_trie(known: NDArray[np.int32]) -> LookupIndex:
    """Build the index of lookahead_trie."""
    knobs = find_technique("lookahead_trie").settings({})
    nodes, branch = knobs["decoding_length"], knobs["branch_length"]
    forest, text = build_forest(branch + 1, known)
    plan = [(OUTPUTS, nodes // 2), (1, nodes), (OUTPUTS, nodes)]
    return LookupIndex(
        lambda context: len(forest.gather(plan, context[-branch:], branch, branch, branch)[0]),
        lambda token: forest.append(text, (token,)),
        forest.bytes,
    )


def build_suffix_tree(known: NDArray[np.int32]) -> LookupIndex:
    """Build the index of suffix_decoding."""
    knobs = find_technique("suffix_decoding").settings({})
    depth, most = knobs["depth"], knobs["most"]
    limits = knobs["alpha"], most, most, knobs["floor"]
    forest, text = build_forest(depth, known)
    return LookupIndex(
        lambda context: len(forest.best((1, OUTPUTS), context[-depth:], *limits)[0]),
        lambda token: forest.append(text, (token,)),
        forest.bytes,
    )


def build_forest(depth: int, known: NDArray[np.int32]) -> tuple[Forest, int]:
    """Build a forest with all text in the tree of outputs. The request's own tree is empty."""
    forest = Forest(depth, 1 << 30)
    text = forest.open(OUTPUTS)
    append_all(lambda tokens: forest.append(text, tokens), known)
    return forest, text


def index_passages(known: NDArray[np.int32]) -> LookupIndex:
    """Build the index of rest."""
    knobs = find_technique("rest").settings({})
    limits = [knobs[name] for name in ("shortest", "longest", "length", "matches", "nodes")]
    store = index_texts([known.tolist()])
    return LookupIndex(
        lambda context: len(store.search(context, *limits).tokens),
        size=store.tokens.nbytes + store.order.nbytes,
    )


ARMS: dict[str, Callable[[NDArray[np.int32]], LookupIndex]] = {
    "llma": build_ngram_index,
    "lookahead_trie": build_trie,
    "suffix_decoding": build_suffix_tree,
    "rest": index_passages,
}


def read_resident_bytes() -> int | None:
    """Return the bytes of this process in memory; None if the system does not report them."""
    pages = Path("/proc/self/statm")
    if not pages.exists():
        return None
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def time_index(
    arm: str, size: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Time one index of so many tokens: building, the questions of each round, appended tokens."""
    whole = make_zipf_text(size + rounds * (APPENDED + ASKED + LONGEST))
    known, ahead = whole[:size], whole[size:].tolist()
    gc.collect()
    before = read_resident_bytes()
    begun = time.perf_counter()
    index = ARMS[arm](known)
    built = time.perf_counter() - begun
    gc.collect()
    after = read_resident_bytes()
    found: dict[str, Any] = {"build": built, "ask": [], "guesses": [], "append": []}
    found["bytes"] = index.size or (None if before is None or after is None else after - before)
    for number in range(rounds):
        part = ahead[number * (APPENDED + ASKED + LONGEST) :]
        questions = [part[at : at + LONGEST] for at in range(ASKED)]
        begun = time.perf_counter()
        drafted = [index.ask(question) for question in questions]
        found["ask"].append(time.perf_counter() - begun)
        found["guesses"].append(sum(drafted))
        if index.append is not None:
            begun = time.perf_counter()
            for token in part[ASKED + LONGEST : ASKED + LONGEST + APPENDED]:
                index.append(token)
            found["append"].append(time.perf_counter() - begun)
        tick()
    return found


def summarize_lookups(sample: dict[str, Any], size: int) -> dict[str, Any]:
    """Return the figures of one lookup, one draft token and one added token."""
    calls = [seconds / ASKED for seconds in sample["ask"]]
    each = [
        seconds / max(n, 1) for seconds, n in zip(sample["ask"], sample["guesses"], strict=True)
    ]
    figures = {
        "us_per_call": 1e6 * median(calls),
        "us_per_guess": 1e6 * median(each),
        "guesses_per_call": sum(sample["guesses"]) / (ASKED * len(calls)),
        "build_seconds": sample["build"],
    }
    if sample["append"]:
        figures["us_per_append"] = 1e6 * median(sample["append"]) / APPENDED
    if sample["bytes"] is not None:
        figures["bytes_per_token"] = max(sample["bytes"], 0) / size
    return {name: round(value, 3) for name, value in figures.items()}


def measure_retrieval(given: RetrievalSettings, quiet: bool = False) -> dict[str, Any]:
    """Measure every arm at every size; one index at a time is in memory."""
    sizes, arms, rounds = given.sizes, given.arms, given.rounds
    samples: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    with show_progress_bar("look-ups", len(sizes) * len(arms) * rounds, quiet) as tick:
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
