"""Laws of assignment A3 on Jacobi iteration: the greedy text, in blocks, in few forward passes.

The oracle asks the model for one token after the other; it knows no blocks and no guesses. A guess
is a token of the block that a sweep starts from.
"""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from tinyspec.grade.props_a3 import CountedModel
from tinyspec.grade.task import Cases, Function, Task, describe_result, expect_close, graded_law
from tinyspec.laws.evidence import accuse

GREEDY = "Jacobi iteration ends at the greedy text (Santilli et al. 2023, arXiv 2305.10427)"
BLOCKS = "a sweep is one forward pass over what is left of one block"
SAID = "every token that is returned is an answer of the model to those returned before it"
PROGRESS = "each sweep makes one more token final at least"
BLIND = "the first guess of a block is made before the model has seen it"
CALLS = "a block of m tokens takes m sweeps at most, and two where no answer depends on a guess"

MOST_TRUE = 0.75  # of the first guesses: with two to four tokens, about 0.36 come true


class JacobiCase(NamedTuple):
    """What the function is given; the first four make the model."""

    rule: str
    seed: int
    vocabulary: int
    eos: int | None
    prompt: tuple[int, ...]
    n: int
    block: int

    def model(self) -> CountedModel:
        """Return the model with an empty trace."""
        return CountedModel(self.rule, self.seed, self.vocabulary, self.eos)

    def shown(self) -> dict[str, Any]:
        """Return it in the words of the task."""
        sizes = f"seed={self.seed}, vocabulary={self.vocabulary}, eos={self.eos}"
        model = f'CountedModel("{self.rule}", {sizes})'
        return {"model": model, "prompt": list(self.prompt), "n": self.n, "block": self.block}


class JacobiRun(NamedTuple):
    """What came back, and the forward passes: (text, guesses, answers)."""

    tokens: list[int]
    passes: list[Any]

    def shown(self, most: int = 8) -> dict[str, str]:
        """Return the first forward passes, a line each."""
        return {
            f"forward pass {number}": f"text {text}, guesses {guesses}, answers {answers}"
            for number, (text, guesses, answers) in enumerate(self.passes[: min(most, 8)], 1)
        }


def draw_jacobi_cases(cases: Cases) -> Iterator[JacobiCase]:
    """Yield the shortest texts first, without an end token and with one anywhere."""
    random = Random(cases.seed)
    lengths = ((1, 1), (2, 1), (2, 2), (3, 3), (3, 2), (4, 4), (5, 2), (5, 3), (4, 8), (7, 3))
    for n, block in (*lengths, (9, 4)):
        for number in range(4 * cases.times):
            vocabulary = 2 + number % 3
            prompt = tuple(random.randrange(vocabulary) for _ in range(1 + number % 2))
            for rule in ("places", "counting", "mixing", "mixing"):
                eos = random.choice((None, random.randrange(vocabulary)))
                yield JacobiCase(rule, random.randrange(97), vocabulary, eos, prompt, n, block)


def decode_greedily(case: JacobiCase, stops_at_eos: bool = True) -> list[int]:
    """Return the greedy text, one token after the other."""
    model, new = case.model(), list[int]()
    while len(new) < case.n and not (stops_at_eos and new and new[-1] == case.eos):
        new += model.says([*case.prompt, *new], [0])
    return new


def run_jacobi(law: str, jacobi: Function, case: JacobiCase) -> JacobiRun:
    """Return what came of one run."""
    model = case.model()
    got = jacobi(model, list(case.prompt), case.n, case.block)
    is_list = isinstance(got, (list, tuple))
    if not is_list or not all(isinstance(x, int) and not isinstance(x, bool) for x in got):
        accuse(law, f"a list of at most {case.n} tokens", describe_result(got), **case.shown())
    return JacobiRun(list(got), model.trace)


@graded_law(5, GREEDY)
def ends_at_the_greedy_text(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Check that the end token cuts the text wherever in a block it stands, but no guess of it."""
    for case in draw_jacobi_cases(cases):
        run = run_jacobi(GREEDY, jacobi, case)
        expect_close(GREEDY, decode_greedily(case), run.tokens, **case.shown(), **run.shown())
        yield True


@graded_law(2, SAID)
def returns_answers_of_the_model(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Check by the forward passes alone that each token answers what was returned before it."""
    for case in draw_jacobi_cases(cases):
        run = run_jacobi(SAID, jacobi, case)
        answered = {
            ((*text, *guesses[:at]), token)
            for text, guesses, answers in run.passes
            for at, token in enumerate(answers)
        }
        for at, token in enumerate(run.tokens):
            before = [*case.prompt, *run.tokens[:at]]
            if (tuple(before), token) not in answered:
                expected = f"a forward pass that answers {token} after {before}"
                shown = {"returned": run.tokens, "forward passes": len(run.passes), **run.shown()}
                accuse(SAID, expected, "no such forward pass", **case.shown(), **shown)
        yield bool(run.tokens)


@graded_law(3, BLOCKS)
def sweeps_over_one_block(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Check that blocks follow the prompt and each other, each swept after a text that is final."""
    for case in draw_jacobi_cases(cases):
        run, greedy = run_jacobi(BLOCKS, jacobi, case), decode_greedily(case, stops_at_eos=False)
        for text, guesses, _ in run.passes:
            n_new = len(text) - len(case.prompt)
            final = [*case.prompt, *greedy][: len(text)]
            if n_new < 0 or n_new >= case.n or list(text) != final:
                expected = "a forward pass after a text that is final"
                accuse(BLOCKS, expected, text, **case.shown(), greedy=greedy)
            left = min((n_new // case.block + 1) * case.block, case.n) - n_new
            if len(guesses) != left:
                expected = f"guesses, after {n_new} new tokens: {left}"
                shown = {**case.shown(), **run.shown()}
                accuse(BLOCKS, expected, f"guesses: {len(guesses)}", **shown)
        yield bool(run.passes)


def count_right(
    case: JacobiCase, text: Sequence[int], guesses: Sequence[int], greedy: Sequence[int]
) -> int:
    """Return how many new tokens of a text and of the guesses after it are the greedy ones."""
    new = [*text, *guesses][len(case.prompt) :]
    pairs = enumerate(zip(new, greedy, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(new), len(greedy)))


@graded_law(2, PROGRESS)
def makes_progress(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Check that a forward pass starts from all that was right before, and one token more."""
    for case in draw_jacobi_cases(cases):
        run, greedy = run_jacobi(PROGRESS, jacobi, case), decode_greedily(case, stops_at_eos=False)
        final = 0
        for number, (text, guesses, _) in enumerate(run.passes, 1):
            right = count_right(case, text, guesses, greedy)
            if right < final:
                expected = f"right new tokens before forward pass {number}: {final}"
                shown = {**case.shown(), "greedy": greedy, **run.shown(number)}
                accuse(PROGRESS, expected, f"right: {right}", **shown)
            final = min(right + 1, len(text) - len(case.prompt) + len(guesses))
        yield bool(run.passes)


@graded_law(1, BLIND)
def guesses_blindly(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Count the first guesses that come true, over all cases together.

    If a token depends on all before it, one of V blind guesses comes true. A function that makes a
    second model and asks that, unseen, guesses them all. The last guess of a forward pass is not
    read, and does not count.
    """
    n_true, n_guesses, first = 0, 0, dict[str, Any]()
    for case in draw_jacobi_cases(cases):
        if case.rule != "mixing":
            continue
        run, greedy = run_jacobi(BLIND, jacobi, case), decode_greedily(case, stops_at_eos=False)
        begun = set[int]()
        for text, guesses, _ in run.passes:
            n_new = len(text) - len(case.prompt)
            if n_new % case.block == 0 and n_new not in begun:
                begun.add(n_new)
                pairs = list(zip(guesses[:-1], greedy[n_new:], strict=False))
                n_true += sum(guess == token for guess, token in pairs)
                n_guesses += len(pairs)
                first = first or ({**case.shown(), **run.shown()} if pairs else {})
    if n_true > MOST_TRUE * n_guesses:
        what = f"first guesses that come true, of {n_guesses}: "
        expected = f"{what}{int(MOST_TRUE * n_guesses)} at most"
        accuse(BLIND, expected, f"{what}{n_true}", **first)
    yield from [True] * n_guesses


@graded_law(3, CALLS, GREEDY)
def takes_few_forward_passes(jacobi: Function, cases: Cases) -> Iterator[bool]:
    """Count block by block: a pass that only confirms what the theorem says is one too many."""
    for case in draw_jacobi_cases(cases):
        run = run_jacobi(CALLS, jacobi, case)
        begins = range(0, len(run.tokens), case.block)
        blocks = [min(case.block, case.n - begin) for begin in begins]
        most = sum(min(size, 2) if case.rule == "places" else size for size in blocks)
        if len(run.passes) > most:
            expected, got = f"at most {most}", len(run.passes)
            shown = {**case.shown(), "tokens of each block": blocks, **run.shown()}
            accuse(CALLS, f"forward passes: {expected}", f"forward passes: {got}", **shown)
        yield True


JACOBI_TASK = Task(
    "jacobi",
    "A3.8 Jacobi iteration",
    (
        ends_at_the_greedy_text,
        returns_answers_of_the_model,
        sweeps_over_one_block,
        makes_progress,
        takes_few_forward_passes,
        guesses_blindly,
    ),
)
