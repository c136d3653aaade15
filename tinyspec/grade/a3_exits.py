"""Laws of assignment A3 on decoding with early exits, on a model whose every step is recorded.

The oracle knows no cache: it takes the tokens and the layers after which they left, and runs the
text layer by layer. A token that has left keeps its state from there on ("copy"), or goes on to the
top, before the next token ("recompute") or with the next one that does ("wait").
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise, product
from random import Random
from typing import Any, NamedTuple

from tinyspec.grade.props_a3 import MODULUS, LayeredModel
from tinyspec.grade.task import (
    Cases,
    Function,
    GradedLaw,
    Task,
    describe_result,
    expect_close,
    graded_law,
    is_token,
)
from tinyspec.laws.evidence import accuse

PAIR = "the new tokens come back, and the layers after which they were read"
NEVER = "a model that nobody leaves early is the full model"
HOLES = "no key or value is read that was never stored"
PROMPT = "prompt tokens before the last never leave"
COPIED = (
    "a token that left is filled from its state at the exit, by each layer above itself "
    "(CALM, arXiv 2207.07061)"
)
RECOMPUTED = "with recomputation the cache is that of the full model on the same text"
READ = "the word is the likeliest of the row at the exit"
SURE = "a token leaves after the first layer whose gap reaches the threshold"
COUNTED = "each layer is run once for every token that needs it, and for no other"
SYNCHRONISED = (
    "a token that waited has the keys and values of the full model (FREE, arXiv 2310.05424)"
)
EXCEEDS = "a token leaves after the shallow layers if its gap exceeds the threshold"
BLOCKS_OF_WAITING = "a layer reads its weights once for all tokens that wait"

COPY, RECOMPUTE, WAIT = "copy", "recompute", "wait"
"""The ways to fill what a token left out."""

SENTENCES: dict[str, dict[str, str]] = {
    COPY: {},
    RECOMPUTE: {COPIED: RECOMPUTED},
    WAIT: {COPIED: SYNCHRONISED, SURE: EXCEEDS},
}
"""Of each way: the laws that say something else than those of copying."""

THRESHOLDS = (Fraction(1, 10), Fraction(1, 4), Fraction(1, 3), Fraction(0), math.inf)


# ---------------------------------------------------------------------- cases and runs


class ExitCase(NamedTuple):
    """What the function is given; `seed` and `depth` make the model.

    shallow  the one layer after which tokens may leave; 0: any
    """

    seed: int
    depth: int
    prompt: tuple[int, ...]
    n: int
    threshold: Any
    shallow: int = 0

    def model(self) -> LayeredModel:
        """Return a model with an empty cache."""
        return LayeredModel(self.seed, self.depth)

    def arguments(self) -> dict[str, Any]:
        """Return what the function gets beside its model, in its order."""
        shallow = {"shallow": self.shallow} if self.shallow else {}
        return {"prompt": list(self.prompt), "n": self.n, **shallow, "threshold": self.threshold}

    def shown(self) -> dict[str, Any]:
        """Return it in the words of the task."""
        given = self.arguments()
        return {"model": f"LayeredModel(seed={self.seed}, depth={self.depth})", **given}


class ExitRun(NamedTuple):
    """What came back (new tokens, and the layers after which they left), and the model's trace."""

    tokens: list[int]
    layers: list[int]
    trace: list[Any]


def draw_exit_cases(cases: Cases, fill: str) -> list[ExitCase]:
    """Return cases, those of the fewest layers and tokens first.

    Where tokens wait, a case has a layer after which they may leave.
    """
    random, found = Random(cases.seed), list[ExitCase]()
    for depth, n, n_more in (
        (1, 1, 0),
        (2, 1, 0),
        (2, 2, 0),
        (2, 2, 1),
        (2, 3, 1),
        (3, 2, 0),
        (3, 3, 1),
        (3, 5, 2),
        (4, 6, 1),
    ):
        for number in range(4 * cases.times):
            prompt = tuple(random.randrange(3) for _ in range(1 + n_more))
            seed = (number + 10 * cases.seed) % MODULUS
            found += [ExitCase(seed, depth, prompt, n, threshold) for threshold in THRESHOLDS]
    if fill == WAIT:
        return [
            case._replace(shallow=1 + at % (case.depth - 1))
            for at, case in enumerate(found)
            if case.depth > 1
        ]
    return found


def run_decode(decode: Function, case: ExitCase) -> ExitRun:
    """Return what came of one run. A hole is accused even if the function was stopped by it."""
    model = case.model()
    try:
        got = decode(model, *case.arguments().values())
    finally:
        for kind, layer, position, *at in model.trace:
            if kind == "hole":
                what = f"layer {layer}, run at position {position}, read position {at[0]}"
                accuse(HOLES, "no hole", f"{what}, where nothing was stored", **case.shown())
    wanted = f"{case.n} tokens and {case.n} layers from 1 to {case.depth}"
    is_pair = isinstance(got, (tuple, list)) and len(got) == 2
    if not is_pair or not all(isinstance(part, (tuple, list)) for part in got):
        accuse(PAIR, f"a pair of lists: {wanted}", describe_result(got), **case.shown())
    tokens, layers = got
    are_tokens = len(tokens) == case.n and all(is_token(x, model.vocabulary) for x in tokens)
    are_layers = len(layers) == case.n and all(is_token(x, case.depth + 1) and x for x in layers)
    if not are_tokens or not are_layers:
        accuse(PAIR, wanted, got, **case.shown())
    return ExitRun(list(tokens), list(layers), model.trace)


def each_run(fill: str, decode: Function, cases: Cases) -> Iterator[tuple[ExitCase, ExitRun]]:
    """Yield all cases and what came of them."""
    for case in draw_exit_cases(cases, fill):
        yield case, run_decode(decode, case)


def has_left_early(case: ExitCase, run: ExitRun) -> bool:
    """Return whether a token left before the last layer: else nothing was missing in the cache."""
    return any(layer < case.depth for layer in run.layers)


# ---------------------------------------------------------------------- the oracle


class FreshPass(NamedTuple):
    """A text after a pass without a cache.

    states  [L + 1][n] of every token below layer 1, above layer 1, ...
    pairs   [L + 1][n] keys and values of every layer; none of layer 0
    """

    states: list[list[int]]
    pairs: list[list[int]]


def run_fresh(case: ExitCase, text: Sequence[int], exits: Sequence[int], fill: str) -> FreshPass:
    """Run all tokens layer by layer; the token at position i has left after layer exits[i]."""
    model = case.model()
    states, pairs = [[model.embed(token) for token in text]], [list[int]()]
    for layer in range(1, case.depth + 1):
        below = list(enumerate(states[-1]))
        pairs.append([model.project(layer, position, state) for position, state in below])
        for position, pair in enumerate(pairs[-1]):
            model.store(layer, position, pair)
        above = [model.run(layer, position, state) for position, state in below]
        stays = [fill != COPY or layer <= left for left in exits]
        states.append([above[at] if stays[at] else state for at, state in below])
    return FreshPass(states, pairs)


def likeliest_word(row: Sequence[Fraction]) -> int:
    """Return the likeliest token, the lowest among equals."""
    return row.index(max(row))


def decode_by_the_rule(case: ExitCase, fill: str) -> tuple[list[int], list[int]]:
    """Return the tokens, and the layers after which they were read."""
    model, first = case.model(), len(case.prompt) - 1
    text, exits = list(case.prompt), [case.depth] * first
    for _ in range(case.n):
        for layer in [case.shallow, case.depth] if fill == WAIT else range(1, case.depth + 1):
            row = model.row(run_fresh(case, text, [*exits, layer], fill).states[layer][-1])
            top = sorted(row)
            gap = top[-1] - top[-2]
            is_sure = gap > case.threshold if fill == WAIT else gap >= case.threshold
            if layer == case.depth or is_sure:
                exits, text = [*exits, layer], [*text, likeliest_word(row)]
                break
    return text[first + 1 :], exits[first:]


def replay_run(case: ExitCase, run: ExitRun, fill: str) -> tuple[list[int], list[int], FreshPass]:
    """Return the text that was run, where its tokens left, and the pass that should come of it."""
    text = [*case.prompt, *run.tokens[:-1]]
    exits = [case.depth] * (len(case.prompt) - 1) + run.layers
    return text, exits, run_fresh(case, text, exits, fill)


# ---------------------------------------------------------------------- the laws


def is_the_full_model(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Check the tokens and layers at the threshold inf."""
    chosen = [case for case in draw_exit_cases(cases, fill) if case.threshold == math.inf]
    return _follows_the_rule(NEVER, chosen, fill, decode)


def leaves_when_sure(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Check the tokens and layers at every threshold."""
    return _follows_the_rule(
        SENTENCES[fill].get(SURE, SURE), draw_exit_cases(cases, fill), fill, decode
    )


def _follows_the_rule(
    law: str, chosen: Sequence[ExitCase], fill: str, decode: Function
) -> Iterator[bool]:
    for case in chosen:
        run = run_decode(decode, case)
        expected, got = decode_by_the_rule(case, fill), (run.tokens, run.layers)
        if got != expected:
            shown = [f"tokens {a}, read after layers {b}" for a, b in (expected, got)]
            accuse(law, *shown, **case.shown())
        yield True


def reads_no_hole(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Let `run_decode` accuse. Only cases count in which a token left early."""
    for case, run in each_run(fill, decode, cases):
        yield has_left_early(case, run)


def keeps_the_prompt(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Check the prompt's tokens: their words are known, and all that follows reads their keys."""
    for case, run in each_run(fill, decode, cases):
        ran = {(position, layer) for kind, layer, position, *_ in run.trace if kind == "run"}
        for position, layer in product(range(len(case.prompt) - 1), range(1, case.depth + 1)):
            if (position, layer) not in ran:
                place = f"for position {position} of the prompt"
                shown = [f"layer {layer} is {_times(count)} {place}" for count in (1, 0)]
                accuse(PROMPT, *shown, **case.shown())
        yield True


def fills_what_is_missing(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Check every state that a layer was given, and every key and value that it read."""
    law = SENTENCES[fill].get(COPIED, COPIED)
    for case, run in each_run(fill, decode, cases):
        text, exits, right = replay_run(case, run, fill)
        stored: dict[tuple[int, int], int] = {}
        shown = {**case.shown(), "text that was run": text, "left after layers": exits}
        for kind, layer, position, *rest in run.trace:
            if kind == "store":
                stored[layer, position] = rest[0]
            elif position < len(text):
                for at in range(position + 1):
                    expected, got = right.pairs[layer][at], stored[layer, at]
                    if got != expected:
                        what = f"key and value of position {at} in layer {layer}, when position"
                        values = (f"{what} {position} read it: {x}" for x in (expected, got))
                        accuse(law, *values, **shown)
                state = right.states[layer - 1][position]
                if rest[0] != state:
                    what = f"state below layer {layer} at position {position}: "
                    accuse(law, f"{what}{state}", f"{what}{rest[0]}", **shown)
        yield has_left_early(case, run)


def reads_at_the_exit(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Check the words, wherever the tokens chose to leave."""
    for case, run in each_run(fill, decode, cases):
        text, exits, right = replay_run(case, run, fill)
        for at, token in enumerate(run.tokens, len(case.prompt) - 1):
            row = case.model().row(right.states[exits[at]][at])
            shown = {"text that was run": text[: at + 1], "left after layers": exits[: at + 1]}
            expect_close(READ, likeliest_word(row), token, **case.shown(), **shown, row=row)
        yield True


def runs_what_is_needed(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Count the layers that were run. Neither the head counts, nor what is filled by copying."""
    for case, run in each_run(fill, decode, cases):
        text, exits, _ = replay_run(case, run, fill)
        last = len(text) - 1
        if fill == WAIT:  # nobody reads what those after the last deep token left out
            last = max((at + 1 for at, left in enumerate(exits) if left == case.depth), default=0)
        completed = 0 if fill == COPY else last
        tops = [case.depth if at < completed else left for at, left in enumerate(exits)]
        ran = Counter((position, layer) for kind, layer, position, *_ in run.trace if kind == "run")
        needed = Counter((at, layer) for at, top in enumerate(tops) for layer in range(1, top + 1))
        for position, layer in sorted(ran | needed):
            counts = needed[position, layer], ran[position, layer]
            if counts[0] != counts[1]:
                more: dict[str, Any] = {"text": [*text, run.tokens[-1]], "left after layers": exits}
                more |= {"layers run": ran.total(), "layers needed": needed.total()}
                place = f"for position {position}"
                due, got = (f"layer {layer} is {_times(count)} {place}" for count in counts)
                accuse(COUNTED, due, got, **case.shown(), **more)
        yield has_left_early(case, run)


def _times(count: int) -> str:
    return {0: "not run", 1: "run once"}.get(count, f"run {count} times")


def reads_weights_once(fill: str, decode: Function, cases: Cases) -> Iterator[bool]:
    """Count how often a layer above the shallow ones begins to run: once for a block of tokens."""
    for case, run in each_run(fill, decode, cases):
        _, exits, _ = replay_run(case, run, fill)
        order = [layer for kind, layer, *_ in run.trace if kind == "run"]
        begun = Counter(layer for layer, _ in groupby(order))
        blocks = exits.count(case.depth)
        for layer in range(case.shallow + 1, case.depth + 1):
            if begun[layer] > blocks:
                due, got = (f"layer {layer} is begun {n} times" for n in (blocks, begun[layer]))
                more: dict[str, Any] = {"left after layers": exits, "layers as they ran": order}
                accuse(BLOCKS_OF_WAITING, due, got, **case.shown(), **more)
        yield any(a < b == case.depth for a, b in pairwise(exits))


LOOKS: dict[Callable[[str, Function, Cases], Iterator[bool]], str] = {
    reads_no_hole: HOLES,
    keeps_the_prompt: PROMPT,
    fills_what_is_missing: COPIED,
    reads_at_the_exit: READ,
    is_the_full_model: NEVER,
    leaves_when_sure: SURE,
    runs_what_is_needed: COUNTED,
}


def exit_laws(fill: str, points: Sequence[int]) -> tuple[GradedLaw, ...]:
    """Return all laws with their points, for one way to fill what is missing."""
    laws, looks = [], dict(LOOKS)
    if fill == WAIT:
        looks[reads_weights_once] = BLOCKS_OF_WAITING
    for worth, (look, sentence) in zip(points, looks.items(), strict=True):
        own = SENTENCES[fill].get(sentence, sentence)
        laws.append(graded_law(worth, own)(partial(look, fill)))
    return tuple(laws)


DECODE_TASK = Task(
    "decode",
    "A3.4 Missing keys and values: copy",
    exit_laws(COPY, points=(2, 2, 5, 2, 2, 3, 2)),
    uses=("softmax_response",),
)
DECODE_RECOMPUTING_TASK = Task(
    "decode_recomputing",
    "A3.5 Missing keys and values: recompute",
    exit_laws(RECOMPUTE, points=(1, 1, 2, 1, 1, 1, 1)),
    uses=("softmax_response",),
)
DECODE_WAITING_TASK = Task(
    "decode_waiting",
    "A3.9 FREE: the block that waits",
    exit_laws(WAIT, points=(1, 1, 3, 1, 1, 2, 1, 2)),
    uses=("softmax_response",),
)
