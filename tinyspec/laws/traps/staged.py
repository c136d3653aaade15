"""Staged speculative decoding (Spector & Re 2023): a tree that follows the draft's probability, and
n-grams ahead of it.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

AHEAD = "n-grams spare the draft calls"
DRAFTS = "every guess is the draft's, whatever the n-grams say"
GUIDED = "a tree that follows the draft's probability beats fixed trees of its size"

Build = Callable[..., Decoder]
KNOBS = {"budget": 6, "width": 2, "children": "likeliest", "guesses": 4, "order": 2, "sample": 200}


def _walker(name: str = "table", more: int = 8) -> TableModel:
    """After token x mostly x + 1, so that n-grams can know it."""
    rows = lambda text: [more if x == (text[-1] + 1) % 5 else 1 for x in range(5)]  # noqa: E731
    return TableModel(vocabulary=5, rows=rows, name=name)


def calls_are_spared(build: Build) -> Evidence:
    """Three leaves in a row get children. Where the n-grams know the likeliest path, one call of
    the draft shows all; the rounds after the first are counted."""
    seen = 0
    for sampling, width in (
        (SamplingParams(0.0), 1),
        (SamplingParams(0.0), 2),
        (SamplingParams(), 1),
    ):
        knobs = {**KNOBS, "width": width, "budget": 3 * width}
        forward_log: list[Any] = []
        request = Request(
            _walker().session(forward_log),
            [_walker("draft").session(forward_log)],
            sampling,
            forward_log=forward_log,
        )
        decoder = build(request, **knobs)
        decoder.extend((0, 1, 2))
        rounds = [decoder.step(Seeded(number)) for number in range(6)]
        calls, levels, seen = (
            sum(len(round.draft_calls) for round in rounds),
            3 * len(rounds),
            seen + 1,
        )
        most = len(rounds) if sampling.greedy else levels - 1
        if calls > most:
            accuse(
                AHEAD,
                f"at most {most} calls",
                calls,
                sampling=sampling,
                **knobs,
                rounds=len(rounds),
                levels=levels,
            )
    return Evidence(AHEAD, seen)


def guesses_are_the_drafts(build: Build) -> Evidence:
    """At temperature 0, children are the tokens that the draft holds for likeliest: n-grams of
    another draft's text change no node of the tree."""
    seen = 0
    for seed in range(8):
        draft = TableModel(seed, 4, zeros=False)
        decoder = build(
            Request(TableModel(seed + 50, 4).session(), [draft.session()], SamplingParams(0.0)),
            **KNOBS,
        )
        decoder.extend((0, 1))
        for number in range(3):
            context = tuple(decoder.context)
            tree, seen = decoder.step(Seeded(number)).tree, seen + 1
            for node, token in enumerate(tree.tokens):
                above = tree.tokens_on(tree.path(node))[:-1]
                row = draft.row((*context, *above))
                best = sorted(range(4), key=lambda x: (-row[x], x))[:2]
                if token not in best:
                    accuse(
                        DRAFTS,
                        f"one of {best}",
                        token,
                        draft=seed,
                        context=context,
                        above=above,
                        q=row,
                    )
    return Evidence(DRAFTS, seen)


def beats_fixed_trees(build: Build) -> Evidence:
    """Tokens of a round, expected over every outcome, against all fixed trees of equal size that
    are alike at each depth: p = q, sure of itself after token 0 and torn after the others."""
    rows = lambda text: [8, 1, 1] if text[-1] == 0 else [1, 1, 1]  # noqa: E731
    best: Any = Fraction(0)
    made = {}
    for name, children in {"6": (6,), "2x2": (2, 2), "staged": ()}.items():

        def play(rng: Exhaustive, children: tuple[int, ...] = children) -> int:
            target, draft = (TableModel(vocabulary=3, rows=rows).session() for _ in range(2))
            request = Request(target, [draft], SamplingParams(0.0))
            decoder = (
                build(request, **KNOBS)
                if not children
                else Decoder(target, TreeDrafter(draft, branching_parents(children)), verify_tree)
            )
            decoder.extend((0,))
            tree = decoder.drafter.propose([0], 9, SamplingParams(0.0), rng.split("draft", 0))
            return _reached(tree, rows, rng)

        made[name] = sum((n * weight for n, weight in Exhaustive.walk(play)), Fraction(0))
        best = max(best, made[name]) if children else best
    if made["staged"] <= best:
        accuse(
            GUIDED,
            f"more than {best} tokens expected",
            made["staged"],
            p="8:1:1 after 0, else 1:1:1",
            fixed=made,
        )
    return Evidence(GUIDED, 1)


def _reached(tree: TokenTree, rows: Callable[[Sequence[int]], Sequence[int]], rng: Any) -> int:
    """Draw from p until the text leaves the tree: nodes passed."""
    passed, at, text = 0, -1, [0]
    while True:
        weights = [Fraction(x) for x in rows(text)]
        token = rng.draw(weights)
        below = [n for n, up in enumerate(tree.parents) if up == at and tree.tokens[n] == token]
        if not below:
            return passed
        passed, at, text = passed + 1, below[0], [*text, token]


TRAPS = [
    Trap(AHEAD, calls_are_spared, card("staged")),
    Trap(DRAFTS, guesses_are_the_drafts, card("staged")),
    Trap(GUIDED, beats_fixed_trees, card("staged")),
]
