"""Skeleton-of-Thought (Ning et al. 2024): independent points, written at once after one prefix."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.checking.uniforms import Noise
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.joint import compare_distributions
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.stream_laws import decode_plainly, plain_reference, text_network, write_script
from tinyspec.laws.traps import GREEDY, Trap
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive.sot import SkeletonDecoder
from tinyspec.technique import StreamRequest

INDEPENDENT = "points are independent given the skeleton"
LINEAR = "a point is plain decoding of its own prompt"
TOGETHER = "points share passes, and their common prefix is computed once"
NO_POINTS = "no points: plain decoding"
INFORMED = "a point reads the question and the whole skeleton"
ROUTED = "the router decides whether there is a skeleton"

Decoders = type[SkeletonDecoder]
PREFIX: tuple[int, ...] = (0, 1, 2)
TAILS: tuple[tuple[int, ...], ...] = ((3,), (0,), (1,))
QUESTION = "Why?"
OUTLINE_CUE, LETTER_CUE = "Question: Why?\nOutline:\n1.", "Answer with A, B or C.\n"


def begin_points(
    kind: Decoders, model: Model, sampling: SamplingParams, tokens: int
) -> SkeletonDecoder:
    """Return a decoder whose points have so many tokens."""
    stop = StoppingCriteria(max_new_tokens=tokens)
    return kind(StreamRequest(model, sampling=sampling, stop=stop), "always", 10)


def write_ids(
    decoder: SkeletonDecoder, prompts: Sequence[Sequence[int]], rng: Any
) -> list[list[int]]:
    """Return the tokens of each point; all have as many."""
    rounds = list(decoder.write_points([""] * len(prompts), prompts, rng))
    tokens = [token for round in rounds for token in round.tokens]
    n = len(tokens) // len(prompts)
    return [tokens[at : at + n] for at in range(0, len(tokens), n)]


@collect_evidence(INDEPENDENT)
def points_are_independent(kind: Decoders) -> Iterator[int]:
    """Check that the joint distribution of two points is the product of the two alone."""
    prompts = [(*PREFIX, *tail) for tail in TAILS[:2]]
    for seed, sampling in product(range(2), (SamplingParams(top_k=2), SamplingParams(0.7, 3))):
        model = small_network(seed)

        def run(branches: Exhaustive, model: Any = model, sampling: Any = sampling) -> Any:
            decoder = begin_points(kind, model, sampling, 2)
            texts = write_ids(decoder, prompts, Noise(branches))
            return tuple(token for text in texts for token in text)

        walked, got = 0, dict[Any, Any]()
        for tokens, mass in Exhaustive.walk(run):
            walked, got[tokens] = walked + 1, got.get(tokens, 0) + mass
        alone = [plain_reference(model, sampling).distribution(2, prompt) for prompt in prompts]
        expected = {(*a, *b): alone[0][a] * alone[1][b] for a, b in product(*alone)}
        case = {"network": seed, "prompts": prompts, "top_k": sampling.top_k}
        compare_distributions(expected, got, NETWORK_TOLERANCE, INDEPENDENT, **case)
        yield walked


@collect_evidence(LINEAR)
def points_are_plain_texts(kind: Decoders) -> Iterator[int]:
    """Check each point, greedy and with a seed, against dense passes over its own prompt."""
    for seed, sampling, most in product(range(2), (GREEDY, SamplingParams(0.8)), (1, 2, 9)):
        model = small_network(seed)
        prompts = [(*PREFIX, *tail, *TAILS[0] * at) for at, tail in enumerate(TAILS)]
        decoder = begin_points(kind, model, sampling, 5)
        decoder.most = most
        got, source = write_ids(decoder, prompts, Seeded(seed)), Seeded(seed)
        expected = [
            decode_plainly(model, prompt, 5, sampling, source.split("point", at))
            for at, prompt in enumerate(prompts)
        ]
        case = {"network": seed, "prompts": prompts, "temperature": sampling.temperature}
        expect_equal(LINEAR, expected, got, **case, at_once=most)
        yield 0


@collect_evidence(TOGETHER)
def points_share_their_passes(kind: Decoders) -> Iterator[int]:
    """Check the passes: one for the prefix, then as many as a point has tokens; and the rows."""
    for n, length in product((2, 3), (1, 3, 6)):
        model, passes = small_network(1), list[int]()
        forward = model.forward

        def count(feeds: Any, forward: Any = forward, passes: list[int] = passes) -> Any:
            passes.append(sum(len(feed.tokens) for feed in feeds))
            return forward(feeds)

        model.forward = count  # type: ignore[method-assign]
        prefix = (PREFIX * 2)[:length]
        decoder = begin_points(kind, model, GREEDY, 4)
        write_ids(decoder, [(*prefix, *tail) for tail in TAILS[:n]], Seeded(0))
        case = {"prefix": prefix, "points": n, "tokens of each": 4}
        expected = [length, n, n, n, n]  # the tails of one token, then the tokens but the last
        expect_equal(TOGETHER, expected, passes, **case, compared="rows of every pass")
        spared = [record.shared for record in decoder.forward_log if record.shared]
        expect_equal(TOGETHER, [length] * n, spared, **case, compared="positions spared")
        yield 0


def answer_question(kind: Decoders, router: str, script: dict[str, str]) -> SkeletonDecoder:
    """Return a decoder that has answered QUESTION by a script."""
    model = text_network()

    class Scripted(kind):  # type: ignore[misc,valid-type]
        def wrap_target(self, session: Any) -> Any:
            return write_script(model, script)(session)

    stop = StoppingCriteria(eos=frozenset(model.config.eos), max_new_tokens=24)
    request = StreamRequest(model, QUESTION, sampling=GREEDY, stop=stop)
    decoder: SkeletonDecoder = Scripted(request, router, 10)
    decoder.extend(model.tokenizer.encode(QUESTION))
    for _ in decoder.run(Seeded(0)):
        pass
    return decoder


@collect_evidence(NO_POINTS)
def no_points_are_plain_decoding(kind: Decoders) -> Iterator[int]:
    """Check the answer after an outline without a point: it is plain decoding's, and not empty."""
    for outline in ("", "\n\n", " \nNothing to list"):
        decoder = answer_question(kind, "always", {OUTLINE_CUE: outline, QUESTION: "Because."})
        expect_equal(NO_POINTS, "Because.", decoder.text, outline="1." + outline)
        yield 0
    script = {OUTLINE_CUE: " Red\n2. Blue", "point 1:\n1. Red": "!", "point 2:\n2. Blue": "?"}
    expect_equal(
        NO_POINTS, "1. Red!\n2. Blue?", answer_question(kind, "always", script).text, points=2
    )
    yield 0


@collect_evidence(INFORMED)
def points_read_the_skeleton(kind: Decoders) -> Iterator[int]:
    """Check what each point's prompt says, beside its own number and the words it begins with."""
    prompts = list[tuple[str, str]]()

    class Noting(kind):  # type: ignore[misc,valid-type]
        def encode_prompt(self, message: str, beginning: str) -> list[int]:
            prompts.append((message, beginning))
            ids: list[int] = super().encode_prompt(message, beginning)
            return ids

    answer_question(Noting, "always", {OUTLINE_CUE: " Red\n2. Blue\n3. Green"})
    heads = ["1. Red", "2. Blue", "3. Green"]
    expect_equal(INFORMED, heads, [beginning for _, beginning in prompts[1:]], compared="begins")
    for number, (message, _) in enumerate(prompts[1:], 1):
        missing = [text for text in (QUESTION, *heads) if text not in message]
        expect_equal(INFORMED, [], missing, point=number, prompt=message)
        expect_equal(INFORMED, True, message.endswith(f" point {number}:"), prompt=message)
        yield 0


@collect_evidence(ROUTED)
def router_decides(kind: Decoders) -> Iterator[int]:
    """Check each router on a question whose outline has a point."""
    script = {OUTLINE_CUE: " Red", "point 1:\n1. Red": " is it.", QUESTION: "Because."}
    rows = [("always", "", True), ("never", "", False), ("words", "", False)]
    rows += [("prompt", letter, letter == "A") for letter in "ABC"]
    for router, letter, with_skeleton in rows:
        expected = "1. Red is it." if with_skeleton else "Because."
        got = answer_question(kind, router, {**script, LETTER_CUE: letter}).text
        case = {"router": router, "letter": letter, "question": QUESTION}
        expect_equal(ROUTED, expected, got, **case)
        yield 0


TRAPS = [
    Trap(INDEPENDENT, points_are_independent, lambda: SkeletonDecoder),
    Trap(LINEAR, points_are_plain_texts, lambda: SkeletonDecoder),
    Trap(TOGETHER, points_share_their_passes, lambda: SkeletonDecoder),
    Trap(NO_POINTS, no_points_are_plain_decoding, lambda: SkeletonDecoder),
    Trap(INFORMED, points_read_the_skeleton, lambda: SkeletonDecoder),
    Trap(ROUTED, router_decides, lambda: SkeletonDecoder),
]

_sot = partial(Toy, technique="sot")

TOYS = [
    _sot(
        "one noise for all points",
        'rng.split("point", at)',
        "rng",
        SkeletonDecoder.write_points,
        law=INDEPENDENT,
    ),
    _sot(
        "a point reads the points before it",
        "streams = list[Stream]()",
        """streams = list[Stream]()
prompts = [[t for p in prompts[: at + 1] for t in p] for at in range(len(prompts))]""",
        SkeletonDecoder.write_points,
        law=LINEAR,
    ),
    _sot(
        "a loop over the points",
        "streams = list[Stream]()",
        "streams, self.most = list[Stream](), 1",
        SkeletonDecoder.write_points,
        law=TOGETHER,
    ),
    _sot(
        "each point computes the prefix",
        "self.fork_decoder(trunk, length, prompt[length:], scheduler)",
        "self.fork_decoder(trunk, 0, prompt, scheduler)",
        SkeletonDecoder.fork_prompts,
        law=TOGETHER,
    ),
    _sot(
        "an empty answer where nothing is found",
        "if not points or not all(map(self.has_room, prompts)):",
        """if not points:
    return
if not all(map(self.has_room, prompts)):""",
        SkeletonDecoder.write_answer,
        law=NO_POINTS,
    ),
    _sot(
        "a point that reads its own line alone",
        "skeleton=skeleton.strip()",
        "skeleton=point.head",
        SkeletonDecoder.write_answer,
        law=INFORMED,
    ),
    _sot(
        "a router that always says yes",
        "if not self.wants_skeleton():",
        "if False:",
        SkeletonDecoder.write_answer,
        law=ROUTED,
    ),
]
