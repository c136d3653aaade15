"""APAR (Liu et al. 2024): streams that fork, of which each reads its own text and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise, product
from math import inf
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.streams import StreamDecoder
from tinyspec.laws.checking.uniforms import Noise
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import Reference, Tokens, compare_distributions
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, run_dense, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import GREEDY, SAMPLED, Trap
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive import apar
from tinyspec.nonautoregressive.apar import ForkingDecoder, make_examples
from tinyspec.technique import StreamRequest

TOKENS_APART = "[Child] is never sampled, and no [Fork] follows [Fork] or [Child]"
LINEAR = "each stream is plain decoding of its own text"
JOINT_TREE = "streams are independent given the text that they share"
ONCE = "every token is computed once, and streams share passes"
CAPS = "bounds hold, and waiting changes no text"
EXAMPLES = "an example trains what its own stream writes"

FORK, CHILD = 3, 4
JOINT_TOKENS = 3  # of each stream: so many that a detail and its main text draw at one position
PROMPT: Tokens = (0, 1)
NETWORKS = (1, 10, 11, 13, 25, 30)
"""Random networks that fork, at temperature 1 and their own seed, and whose answers end."""

Decoders = type[ForkingDecoder]


def begin_answer(
    kind: Decoders,
    model: Model,
    sampling: SamplingParams,
    tokens: int,
    forks: int = 99,
    streams: int = 99,
) -> ForkingDecoder:
    """Return a decoder that has read PROMPT; each stream writes so many tokens."""
    stop = StoppingCriteria(max_new_tokens=tokens)
    request = StreamRequest(model, sampling=sampling, stop=stop)
    decoder = kind(request, FORK, CHILD, forks, streams)
    decoder.extend(PROMPT)
    return decoder


def forking_network(seed: int) -> Model:
    """Return a small random transformer with five tokens; the last are [Fork] and [Child]."""
    return small_network(seed, 5)


def make_reference(model: Model, sampling: SamplingParams, may_fork: bool = True) -> Reference:
    """Return plain decoding by dense passes, without the tokens that may not come next."""

    def row(text: Tokens) -> Any:
        logits = run_dense(model, list(text)).logits[-1].copy()
        logits[CHILD] = -inf
        if not may_fork or text[-1] in (FORK, CHILD):
            logits[FORK] = -inf
        return logits

    return Reference(row, sampling)


class SerialAnswer(NamedTuple):
    """An answer that was written one stream after the other.

    tokens   in the order in which they are read
    streams  how many there are
    passes   how many passes they take if each begins when its parent has run [Fork]
    """

    tokens: list[int]
    streams: int
    passes: int


def write_serially(plain: Reference, text: Tokens, n: int, rng: Any) -> SerialAnswer:
    """Write an answer by dense passes, one stream after the other, each of n tokens."""
    noise, answer, forks, streams, passes = rng.split("dense", 0), list[int](), count(), 1, n
    for done in range(1, n + 1):
        text = (*text, noise.draw_at(plain.next(text), len(text)))
        answer.append(text[-1])
        if text[-1] == FORK:
            below = write_serially(plain, (*text, CHILD), n, rng.split("fork", next(forks)))
            answer += below.tokens
            streams += below.streams
            passes = max(passes, min(done + 1, n) + below.passes)
    return SerialAnswer(answer, streams, passes)


@collect_evidence(TOKENS_APART)
def tokens_keep_apart(kind: Decoders) -> Iterator[int]:
    """Check the tokens of each round, in the order of the text, over many seeds."""
    for seed in NETWORKS:
        decoder = begin_answer(kind, forking_network(seed), SamplingParams(3.0), 6, forks=6)
        decoder.most = 1
        list(decoder.run(Seeded(seed)))
        for text in list_texts(decoder):
            for before, token in pairwise(text):
                wrong = token == FORK and before in (FORK, CHILD)
                if wrong or (token == CHILD and before != FORK):
                    accuse(TOKENS_APART, "an allowed token", token, network=seed, text=text)
        if CHILD in decoder.new:
            accuse(TOKENS_APART, "no [Child]", decoder.new, network=seed)
        yield 0


def list_texts(decoder: ForkingDecoder) -> list[list[int]]:
    """Return the whole text of every stream that was begun, forks first."""
    return [list(stream.decoder.context) for stream in decoder.begun]


@collect_evidence(LINEAR)
def streams_are_plain_texts(kind: Decoders) -> Iterator[int]:
    """Check whole answers, greedy and with a seed, against dense passes stream by stream."""
    forked = 0
    for seed, sampling, forks in product(NETWORKS, (GREEDY, SAMPLED), (0, 99)):
        model = forking_network(seed)
        decoder = begin_answer(kind, model, sampling, 4, forks)
        got = [token for round in decoder.run(Seeded(seed)) for token in round.tokens]
        plain = make_reference(model, sampling, may_fork=forks > 0)
        expected = write_serially(plain, PROMPT, 4, Seeded(seed))
        case = {"network": seed, "temperature": sampling.temperature, "forks": forks}
        expect_equal(LINEAR, expected.tokens, got, **case)
        forked += expected.streams - 1
        yield expected.streams
    if not forked:
        accuse(LINEAR, "an answer that forks", "none")


@collect_evidence(JOINT_TREE)
def streams_are_independent(kind: Decoders) -> Iterator[int]:
    """Check the joint distribution of an answer: the product over its streams."""
    for seed, sampling in product(NETWORKS[:3], (SamplingParams(top_k=2), SamplingParams(3.0, 2))):
        model = forking_network(seed)
        rows = [make_reference(model, sampling, may_fork=may) for may in (False, True)]

        def law(text: Tokens, left: int, forks: int, rows: Any = rows) -> dict[Tokens, float]:
            """Return the distribution of a stream of so many tokens, with those of its details."""
            if not left:
                return {(): 1.0}
            joint = dict[Tokens, float]()
            for token, mass in enumerate(rows[forks].next(text)):
                if mass > 0:
                    here, more = (*text, token), 0 if token == FORK else forks
                    below = law((*here, CHILD), JOINT_TOKENS, more) if token == FORK else {(): 1.0}
                    for (a, p), (b, q) in product(below.items(), law(here, left - 1, more).items()):
                        answer = (token, *a, *b)
                        joint[answer] = joint.get(answer, 0.0) + mass * p * q
            return joint

        def run(branches: Exhaustive, model: Any = model, sampling: Any = sampling) -> Tokens:
            decoder = begin_answer(kind, model, sampling, JOINT_TOKENS, forks=1)
            rounds = decoder.run(Noise(branches))
            return tuple(token for round in rounds for token in round.tokens)

        walked, got = 0, dict[Any, Any]()
        for tokens, mass in Exhaustive.walk(run):
            walked, got[tokens] = walked + 1, got.get(tokens, 0) + mass
        case = {"network": seed, "temperature": sampling.temperature, "top_k": 2, "forks": 1}
        case["tokens of a stream"] = JOINT_TOKENS
        compare_distributions(
            law(PROMPT, JOINT_TOKENS, 1), got, NETWORK_TOLERANCE, JOINT_TREE, **case
        )
        yield walked


@collect_evidence(ONCE)
def tokens_are_computed_once(kind: Decoders) -> Iterator[int]:
    """Check the rows of all passes together, and that streams which are open share them."""
    for seed in NETWORKS:
        model, n = forking_network(seed), 4
        model.forward, passes = count_rows_of(model.forward)  # type: ignore[method-assign]
        decoder = begin_answer(kind, model, SAMPLED, n)
        rounds = list(decoder.run(Seeded(seed)))
        expected = write_serially(make_reference(model, SAMPLED), PROMPT, n, Seeded(seed))
        # The last token of a stream is not run, and [Child] is. A [Fork] that ends a stream runs in
        # the detail's.
        last = sum(stream.decoder.context[-1] == FORK for stream in decoder.begun)
        total = len(PROMPT) + (n - 1) + (expected.streams - 1) * n + last
        case = {"network": seed, "streams": expected.streams, "tokens of each": n}
        expect_equal(ONCE, total, sum(passes), **case, compared="rows of all passes")
        expect_equal(ONCE, 1 + expected.passes, len(passes), **case, compared="passes")
        calls = sum(not round.is_shared for round in rounds)
        expect_equal(ONCE, expected.passes, calls, **case, compared="target calls")
        yield expected.streams


def count_rows_of(forward: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a forward function that notes the rows of every pass, and its notes."""
    rows = list[int]()

    def count_rows(feeds: Sequence[Any]) -> Any:
        rows.append(sum(len(feed.tokens) for feed in feeds))
        return forward(feeds)

    return count_rows, rows


@collect_evidence(CAPS)
def bounds_hold(kind: Decoders) -> Iterator[int]:
    """Check both bounds, and the text under every bound of streams."""
    for seed in NETWORKS:
        texts = list[list[int]]()
        for streams in (1, 2, 99):
            model = forking_network(seed)
            model.forward, passes = count_rows_of(model.forward)  # type: ignore[method-assign]
            decoder = begin_answer(kind, model, SAMPLED, 4, streams=streams)
            list(decoder.run(Seeded(seed)))
            texts.append(decoder.new)
            case = {"network": seed, "streams": streams}
            widest = max(passes[1:])
            if widest > 2 * streams:  # a stream's first pass may run [Fork] and [Child]
                accuse(CAPS, f"at most {2 * streams} rows", widest, **case)
            expect_equal(CAPS, texts[0], decoder.new, **case)
        for forks in (0, 1, 2):
            decoder = begin_answer(kind, forking_network(seed), SAMPLED, 4, forks=forks)
            list(decoder.run(Seeded(seed)))
            expect_equal(CAPS, True, decoder.new.count(FORK) <= forks, network=seed, forks=forks)
        yield 0


@collect_evidence(EXAMPLES)
def examples_train_their_own_stream(make: Callable[..., Any]) -> Iterator[int]:
    """Check the examples of an answer by hand: what each reads, and what it trains."""
    question, end = [9], 0
    for n in (1, 2, 3):
        pairs = [([10 + i, 20 + i], [30 + i] * (i + 1)) for i in range(n)]
        main = [token for root, _ in pairs for token in (*root, FORK)]
        expected = [([*question, *main, end], [*main, end])]
        for i, (_, detail) in enumerate(pairs):
            before = [*question, *main[: 3 * (i + 1)], CHILD]
            expected.append(([*before, *detail, end], [*detail, end]))
        made = make(question, pairs, FORK, CHILD, end)
        got = [(list(ids), list(ids[first:])) for ids, first in made]
        expect_equal(EXAMPLES, expected, got, pairs=pairs)
        yield 0


TRAPS = [
    Trap(TOKENS_APART, tokens_keep_apart, lambda: ForkingDecoder),
    Trap(LINEAR, streams_are_plain_texts, lambda: ForkingDecoder),
    Trap(JOINT_TREE, streams_are_independent, lambda: ForkingDecoder),
    Trap(ONCE, tokens_are_computed_once, lambda: ForkingDecoder),
    Trap(CAPS, bounds_hold, lambda: ForkingDecoder),
    Trap(EXAMPLES, examples_train_their_own_stream, lambda: apar.make_examples),
]

_apar = partial(Toy, technique="apar")

TOYS = [
    _apar(
        "[Child] is sampled",
        "logits[:, self.child] = -inf",
        "logits[:, self.child] += 0.0",
        ForkingDecoder.wrap_target,
        law=TOKENS_APART,
    ),
    _apar(
        "a fork after a fork",
        "or text[-1] in (self.fork, self.child)",
        "or text[-1] == self.child",
        ForkingDecoder.wrap_target,
        law=TOKENS_APART,
    ),
    _apar(
        "a detail reads the next title",
        "self.fork_decoder(parent.decoder, length, [self.child])",
        "self.fork_decoder(parent.decoder, len(parent.decoder.context), [self.child])",
        ForkingDecoder.begin_child,
        law=LINEAR,
    ),
    _apar(
        "a detail has its parent's noise",
        'stream.rng.split("fork", number)',
        "stream.rng",
        ForkingDecoder.fork_after,
        law=JOINT_TREE,
    ),
    _apar(
        "both streams run [Fork]",
        "if decoder.finished:",
        "if decoder:",
        ForkingDecoder.fork_after,
        law=ONCE,
    ),
    _apar(
        "all streams at once",
        "while self._waiting and self._n_running < self.most:",
        "while self._waiting:",
        StreamDecoder._start,
        law=CAPS,
    ),
    _apar(
        "a loss on the text before [Child]",
        "len(main) + 1)",
        "len(question))",
        make_examples,
        law=EXAMPLES,
    ),
    _apar(
        "details see their siblings",
        "main += [*root, fork]",
        "main += [*root, fork] if not details else [*details[-1].ids[-2:-1], *root, fork]",
        make_examples,
        law=EXAMPLES,
    ),
]
