"""Staged speculative decoding (Spector & Re 2023): a tree that follows the draft's probability.

N-grams run ahead of the draft model and spare its calls.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import GREEDY, SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents
from tinyspec.tree import TokenTree

AHEAD = "n-grams spare the draft calls"
DRAFTS = "every draft token is the draft's, whatever the n-grams say"
LIKELY = "every tree is as likely with n-grams as without, and declares the same"
GUIDED = "a tree that follows the draft's probability beats fixed trees of its size"

KNOBS: dict[str, Any] = {
    "budget": 6,
    "width": 2,
    "children": "likeliest",
    "guesses": 4,
    "order": 2,
    "sample": 200,
}


def make_counter(name: str) -> TableModel:
    """Return a model in which mostly x + 1 follows a token x, so that n-grams can know it."""
    rows = lambda text: [8 if x == (text[-1] + 1) % 5 else 1 for x in range(5)]  # noqa: E731
    return TableModel(vocabulary=5, rows=rows, name=name)


@collect_evidence(AHEAD)
def calls_are_spared(build: Build) -> Iterator[int]:
    """Check that the draft is called less than once for each level of the tree.

    Three leaves in a row get children. Where the n-grams know the likeliest path, one call of the
    draft shows all; the rounds after the first are counted.
    """
    for sampling, width in ((SamplingParams(0.0), 1), (SamplingParams(0.0), 2), (SAMPLED, 1)):
        models = [make_counter("table"), make_counter("draft")]
        knobs: dict[str, Any] = {**KNOBS, "width": width, "budget": 3 * width}
        decoder = begin_decoder(build, models, (0, 1, 2), sampling, **knobs)
        rounds = [decoder.step(Seeded(number)) for number in range(6)]
        calls, levels = sum(len(round.draft_calls) for round in rounds), 3 * len(rounds)
        most = len(rounds) if sampling.greedy else levels - 1
        if calls > most:
            case = {"sampling": sampling, **knobs, "rounds": len(rounds), "levels": levels}
            accuse(AHEAD, f"at most {most} calls", calls, **case)
        yield 0


@collect_evidence(DRAFTS)
def tokens_are_the_drafts(build: Build) -> Iterator[int]:
    """Check that children are the likeliest tokens of the draft, at temperature 0.

    N-grams of another draft's text change no node of the tree.
    """
    for seed in range(8):
        draft = TableModel(seed, 4, zeros=False)
        decoder = begin_decoder(build, [TableModel(seed + 50, 4), draft], (0, 1), GREEDY, **KNOBS)
        for number in range(3):
            context = tuple(decoder.context)
            tree = decoder.step(Seeded(number)).tree
            for node, token in enumerate(tree.tokens):
                above = tree.tokens_on(tree.path(node))[:-1]
                row = draft.row((*context, *above))
                best = [x for _, x in sorted((-p, x) for x, p in enumerate(row))][:2]
                if token not in best:
                    case = {"draft": seed, "context": context, "above": above, "q": row}
                    accuse(DRAFTS, f"one of {best}", token, **case)
            yield 0


@collect_evidence(LIKELY)
def trees_are_as_likely(build: Build) -> Iterator[int]:
    """Check the probability of every tree and its distributions, also where a guess ends a text."""
    models = [TableModel(1, 3), TableModel(2, 3, zeros=False)]
    settings = SAMPLED, SamplingParams(top_k=2), SamplingParams(top_k=1), GREEDY
    for sampling, eos in product(settings, (frozenset[int](), frozenset({1}))):

        def play(rng: Exhaustive, knobs: dict[str, Any], sampling: Any, eos: Any) -> Any:
            decoder = begin_decoder(build, models, (0, 1), sampling, eos=eos, **knobs)
            tree = decoder.drafter.propose([0, 1], 5, sampling, rng.split("draft", 0))
            rows = tuple(None if q is None else tuple(q) for q in tree.draft_probs)
            return tuple(tree.tokens), tuple(tree.parents), rows

        small = KNOBS | {"budget": 4, "children": "drawn", "sample": 96}
        alone, helped = (
            Exhaustive.distribution(partial(play, knobs=small | more, sampling=sampling, eos=eos))
            for more in ({"guesses": 0}, {})
        )
        for tree in (*alone, *helped):
            case = {"sampling": sampling, "eos": sorted(eos), **small, "tree": tree[:2]}
            case["declared"] = [row and [str(x) for x in row] for row in tree[2]]
            expect_equal(LIKELY, alone.get(tree, 0), helped.get(tree, 0), **case)
        yield len(helped)


@collect_evidence(GUIDED)
def beats_fixed_trees(build: Build) -> Iterator[int]:
    """Check the tokens of a round, expected over every outcome, against all fixed trees.

    The fixed trees have the same size and are alike at each depth. p = q is sure after token 0, and
    uniform after the others.
    """
    rows = lambda text: [8, 1, 1] if text[-1] == 0 else [1, 1, 1]  # noqa: E731
    tokens = {}
    for name, children in {"6": (6,), "2x2": (2, 2), "staged": ()}.items():

        def play(rng: Exhaustive, children: tuple[int, ...] = children) -> int:
            def build_fixed(request: Any, **knobs: Any) -> Decoder:
                drafter = TreeDrafter(request.drafts[0], branching_parents(children))
                return request.decoder(drafter, verify_tree)  # type: ignore[no-any-return]

            models = [TableModel(vocabulary=3, rows=rows) for _ in range(2)]
            decoder = begin_decoder(build_fixed if children else build, models, (0,), **KNOBS)
            tree = decoder.drafter.propose([0], 9, GREEDY, rng.split("draft", 0))
            return count_reached(tree, rows, rng)

        tokens[name] = sum((n * weight for n, weight in Exhaustive.walk(play)), Fraction(0))
    best = max(tokens["6"], tokens["2x2"])
    if tokens["staged"] <= best:
        case = {"p": "8:1:1 after 0, else 1:1:1", "fixed": tokens}
        accuse(GUIDED, f"more than {best} tokens expected", tokens["staged"], **case)
    yield 0


def count_reached(tree: TokenTree, rows: Callable[[Sequence[int]], Sequence[int]], rng: Any) -> int:
    """Draw from p until the text leaves the tree, and return how many nodes it passed."""
    passed, at, text = 0, -1, [0]
    while True:
        token = rng.draw([Fraction(x) for x in rows(text)])
        below = [n for n, up in enumerate(tree.parents) if up == at and tree.tokens[n] == token]
        if not below:
            return passed
        passed, at, text = passed + 1, below[0], [*text, token]


TRAPS = [
    Trap(AHEAD, calls_are_spared, card("staged")),
    Trap(DRAFTS, tokens_are_the_drafts, card("staged")),
    Trap(LIKELY, trees_are_as_likely, card("staged")),
    Trap(GUIDED, beats_fixed_trees, card("staged")),
]
