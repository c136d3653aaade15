"""What A3 holds Jacobi iteration to: the greedy text, in blocks, a token a sweep at least, and no
sweep too many.

The judge asks the model's rule for one token after the other; it knows no blocks and no guesses.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from tinyspec.grade.a3_laws import Function, words
from tinyspec.grade.props_a3 import CountedModel
from tinyspec.grade.task import Cases, GradedLaw
from tinyspec.laws.accused import Evidence, accuse

GREEDY = "Jacobi iteration ends at the greedy text (Santilli et al. 2023, arXiv 2305.10427)"
BLOCKS = "a sweep is one forward pass over what is left of one block"
SAID = "every token that is returned is an answer of the model to those returned before it"
PROGRESS = "each sweep makes one more token final at least"
BLIND = "the first guess of a block is made before the model has seen it"
CALLS = "a block of m tokens takes m sweeps at most, and two where no answer depends on a guess"

MOST_TRUE = 0.75  # of the first guesses: with two to four tokens, about 0.36 come true


class Case(NamedTuple):
    """What the function is given; the first four make the model."""

    rule: str
    seed: int
    vocabulary: int
    eos: int | None
    prompt: tuple[int, ...]
    n: int
    block: int

    def model(self) -> CountedModel:
        return CountedModel(self.rule, self.seed, self.vocabulary, self.eos)

    def shown(self) -> dict[str, Any]:
        """In the words of the task."""
        model = f'CountedModel("{self.rule}", seed={self.seed}, vocabulary={self.vocabulary}, eos={self.eos})'
        return {"model": model, "prompt": list(self.prompt), "n": self.n, "block": self.block}


def drawn(cases: Cases) -> Iterator[Case]:
    """The shortest texts first: without an end, and with one inside a block, at its end, or never
    said.
    """
    random = Random(cases.seed)
    for n, block in (
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 3),
        (3, 2),
        (4, 4),
        (5, 2),
        (5, 3),
        (4, 8),
        (7, 3),
        (9, 4),
    ):
        for round in range(4 * cases.times):
            vocabulary = 2 + round % 3
            prompt = tuple(random.randrange(vocabulary) for _ in range(1 + round % 2))
            for rule in ("places", "counting", "mixing", "mixing"):
                eos = random.choice((None, random.randrange(vocabulary)))
                yield Case(rule, random.randrange(97), vocabulary, eos, prompt, n, block)


def greedy(case: Case, ends: bool = True) -> list[int]:
    """Token by token; without looking for the end, as many as are wanted."""
    model, made = case.model(), list[int]()
    while len(made) < case.n and not (ends and made and made[-1] == case.eos):
        made += model.says([*case.prompt, *made], [0])
    return made


class Solved(NamedTuple):
    """What came back, and the calls: (text, guesses, said)."""

    tokens: list[int]
    calls: list[Any]


def solved(law: str, function: Function, case: Case) -> Solved:
    """One run."""
    model = case.model()
    got = function(model, list(case.prompt), case.n, case.block)
    if not isinstance(got, (list, tuple)) or not all(
        isinstance(x, int) and not isinstance(x, bool) for x in got
    ):
        accuse(law, f"a list of at most {case.n} tokens", words(got), **case.shown())
    return Solved(list(got), model.trace)


def ends_at_greedy(function: Function, cases: Cases) -> Evidence:
    """The end of text cuts it, wherever in a block it stands; a guess of it does not."""
    seen = 0
    for case in drawn(cases):
        got, expected, seen = solved(GREEDY, function, case), greedy(case), seen + 1
        if got.tokens != expected:
            accuse(GREEDY, expected, got.tokens, **case.shown(), **_shown(got.calls))
    return Evidence(GREEDY, seen)


def says_what_is_returned(function: Function, cases: Cases) -> Evidence:
    """By the calls alone: an answer is final where the text and the guesses that it was given are
    what is returned.
    """
    seen = 0
    for case in drawn(cases):
        got = solved(SAID, function, case)
        seen += bool(got.tokens)
        told = {
            ((*text, *guesses[:at]), token)
            for text, guesses, said in got.calls
            for at, token in enumerate(said)
        }
        for at, token in enumerate(got.tokens):
            if ((*case.prompt, *got.tokens[:at]), token) not in told:
                shown = (
                    f"a forward pass that answers {token} after {[*case.prompt, *got.tokens[:at]]}",
                    "no such forward pass",
                )
                returned = {"returned": got.tokens, "forward passes": len(got.calls)}
                accuse(SAID, shown[0], shown[1], **case.shown(), **returned, **_shown(got.calls))
    return Evidence(SAID, seen)


def sweeps_one_block(function: Function, cases: Cases) -> Evidence:
    """Blocks begin behind the prompt, one behind the other; a block of one token is plain greedy
    decoding.
    """
    seen = 0
    for case in drawn(cases):
        got, whole = solved(BLOCKS, function, case), greedy(case, ends=False)
        seen += bool(got.calls)
        for text, guesses, _ in got.calls:
            made = len(text) - len(case.prompt)
            final = [*case.prompt, *whole][: len(text)]
            if made < 0 or made >= case.n or list(text) != final:
                accuse(
                    BLOCKS,
                    "a forward pass after a text that is final",
                    text,
                    **case.shown(),
                    greedy=whole,
                )
            left = min((made // case.block + 1) * case.block, case.n) - made
            if len(guesses) != left:
                shown = (f"guesses, after {made} new tokens: {left}", f"guesses: {len(guesses)}")
                accuse(BLOCKS, shown[0], shown[1], **case.shown(), **_shown(got.calls))
    return Evidence(BLOCKS, seen)


def right(case: Case, text: Sequence[int], guesses: Sequence[int], whole: Sequence[int]) -> int:
    """How many new tokens of a text and of the guesses behind it are the greedy ones."""
    new = [*text, *guesses][len(case.prompt) :]
    return next(
        (at for at, (one, other) in enumerate(zip(new, whole, strict=False)) if one != other),
        min(len(new), len(whole)),
    )


def progresses(function: Function, cases: Cases) -> Evidence:
    """What a call made final stands in the next one: all that was right in it, and one token more
    of its block.
    """
    seen = 0
    for case in drawn(cases):
        got, whole = solved(PROGRESS, function, case), greedy(case, ends=False)
        seen += bool(got.calls)
        final = 0
        for at, (text, guesses, _) in enumerate(got.calls, 1):
            now, end = (
                right(case, text, guesses, whole),
                len(text) - len(case.prompt) + len(guesses),
            )
            if now < final:
                shown = (f"right new tokens before forward pass {at}: {final}", f"right: {now}")
                accuse(
                    PROGRESS,
                    shown[0],
                    shown[1],
                    **case.shown(),
                    greedy=whole,
                    **_shown(got.calls[:at]),
                )
            final = min(now + 1, end)
    return Evidence(PROGRESS, seen)


def guesses_blindly(function: Function, cases: Cases) -> Evidence:
    """Where a token hangs on all before it, of V tokens one in V guesses comes true, counted over
    all cases together.

    Who makes a second model and asks that, unseen, guesses all. The last guess of a call is not
    read, and does not count.
    """
    true, guessed, first = 0, 0, dict[str, Any]()
    for case in drawn(cases):
        if case.rule != "mixing":
            continue
        got, whole = solved(BLIND, function, case), greedy(case, ends=False)
        begun = set[int]()
        for text, guesses, _ in got.calls:
            made = len(text) - len(case.prompt)
            if made % case.block == 0 and made not in begun:
                begun.add(made)
                pairs = list(zip(guesses[:-1], whole[made:], strict=False))
                true, guessed = (
                    true + sum(one == other for one, other in pairs),
                    guessed + len(pairs),
                )
                first = first or ({**case.shown(), **_shown(got.calls)} if pairs else {})
    if true > MOST_TRUE * guessed:
        what = f"first guesses that come true, of {guessed}: "
        accuse(BLIND, f"{what}{int(MOST_TRUE * guessed)} at most", f"{what}{true}", **first)
    return Evidence(BLIND, guessed)


def calls_no_more_than_needed(function: Function, cases: Cases) -> Evidence:
    """Block by block. A pass that only confirms what the theorem says already is one too many."""
    seen = 0
    for case in drawn(cases):
        got, seen = solved(CALLS, function, case), seen + 1
        made = len(got.tokens)
        blocks = [min(case.block, case.n - begin) for begin in range(0, made, case.block)]
        most = sum(min(size, 2) if case.rule == "places" else size for size in blocks)
        if len(got.calls) > most:
            shown = (f"forward passes: at most {most}", f"forward passes: {len(got.calls)}")
            accuse(
                CALLS,
                shown[0],
                shown[1],
                **case.shown(),
                **{"tokens of each block": blocks},
                **_shown(got.calls),
            )
    return Evidence(CALLS, seen)


def _shown(calls: Sequence[Any]) -> dict[str, Any]:
    """The calls as a table: what was guessed behind how many tokens, and what the model said."""
    return {
        f"forward pass {at}": f"text {text}, guesses {guesses}, answers {said}"
        for at, (text, guesses, said) in enumerate(calls[:8], 1)
    }


LAWS = (
    GradedLaw(6, GREEDY, ends_at_greedy),
    GradedLaw(3, SAID, says_what_is_returned),
    GradedLaw(3, BLOCKS, sweeps_one_block),
    GradedLaw(3, PROGRESS, progresses),
    GradedLaw(3, CALLS, calls_no_more_than_needed, needs=(GREEDY,)),
    GradedLaw(2, BLIND, guesses_blindly),
)
