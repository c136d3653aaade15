"""BiLD (Kim et al. 2023): no ratio test, no unsure token, the first bad one taken back, and nothing
kept unread.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import exp
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.speculative.verification.bild import BildDrafter, rollback_verifier
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

ALGORITHM = "the text is algorithm 1's (Kim et al. 2023)"

Build = Callable[..., Decoder]

LARGE: Table = ((1, 30, 4), (8, 1, 1), (1, 2, 1))
LITTLE: Table = ((9, 1, 2), (1, 1, 9), (3, 4, 2))
DISTANCES = (0.0, 0.5, 1.5, 3.0)
WANTED, CAP = 8, 4


def turns(
    large: Table, little: Table, fallback: float, rollback: float, rule: str
) -> Iterator[list[int]]:
    """Algorithm 1 at temperature 0, in its own words: the text after each call of the large
    model.
    """
    least = exp(-rollback)
    best = [row.index(max(row)) for row in large]
    text = [0]
    while True:
        settled = len(text)
        while len(text) < settled + CAP and max(normalised(little[text[-1]])) > fallback:
            text.append(little[text[-1]].index(max(little[text[-1]])))
        for at in range(settled, len(text)):
            before, token = text[at - 1], text[at]
            if normalised(large[before])[token] < least and (
                rule == "paper" or best[before] != token
            ):
                text = text[:at]
                break
        text.append(best[text[-1]])
        yield list(text)


def settings() -> Iterator[tuple[Table, Table, float, float, str]]:
    """Large, small, fallback, rollback, rule."""
    tables = [(p, q) for p, q in SMALL_TABLES if len(p) > 1] + [(LARGE, LITTLE), (LITTLE, LARGE)]
    for (p, q), rollback, fallback, rule in product(
        tables, DISTANCES, (0.0, 0.6), ("paper", "safe")
    ):
        yield _whole(p), _whole(q), fallback, rollback, rule


def _whole(table: Table) -> Table:
    """A row for every last token."""
    return tuple(table[token % len(table)] for token in range(len(table[0])))


def follows_the_algorithm(build: Build) -> Evidence:
    """At temperature 0: every text, and the rounds it took, against the loop of the paper."""
    seen = 0
    for p, q, fallback, rollback, rule in settings():
        decoder = build(
            Request(table_model(p).session(), [table_model(q).session()], SamplingParams(0.0)),
            fallback=fallback, rollback=rollback, rule=rule, gamma=CAP,
        )  # fmt: skip
        decoder.extend((0,))
        for expected in turns(p, q, fallback, rollback, rule):
            decoder.step(Seeded(decoder.rounds))
            seen += 1
            if decoder.context != expected:
                case = {
                    "large": format_table(p),
                    "small": format_table(q),
                    "fallback": fallback,
                    "rollback": rollback,
                    "rule": rule,
                }
                accuse(ALGORITHM, expected, decoder.context, **case, calls=decoder.rounds)
            if len(expected) > WANTED:
                break
    return Evidence(ALGORITHM, seen)


def exact_where_nothing_is_trusted(build: Build) -> Evidence:
    """At rollback 0 the joint law of two tokens is the large model's own, at any temperature."""
    seen, branches = 0, 0
    for (p, q), rule in product(SMALL_TABLES[2:7], ("paper", "safe")):

        def make(p: Table = p, q: Table = q, rule: str = rule) -> Decoder:
            request = Request(table_model(p).session(), [table_model(q).session()])
            return build(request, fallback=0.0, rollback=0.0, rule=rule, gamma=2)

        got, walked = enumerate_tokens(make, 2)
        expected = Reference(lambda text, p=p: normalised(p[text[-1] % len(p)])).law(2)  # type: ignore[misc]
        seen, branches = seen + 1, branches + walked
        if got != expected:
            accuse(
                JOINT,
                dict(sorted(expected.items())),
                dict(sorted(got.items())),
                large=format_table(p),
                small=format_table(q),
                rule=rule,
            )
    return Evidence(JOINT, seen, branches)


def policed(policy: Callable[[float, str], Verifier]) -> Build:
    """The technique with another rollback policy."""

    def build(request: Request, fallback: float, rollback: float, rule: str, gamma: int) -> Decoder:
        return _with(request, fallback, gamma, policy(rollback, rule))

    return build


# ------------------------------------------------------------------ toys


def _with(request: Request, fallback: float, gamma: int, verifier: Verifier) -> Decoder:
    return request.decoder(
        BildDrafter(fallback, request.drafts[0], gamma, frozenset(), None), verifier
    )


def ratio_test(
    request: Request, fallback: float, rollback: float, rule: str, gamma: int
) -> Decoder:
    """Speculative decoding with a confidence stop."""
    return _with(request, fallback, gamma, verify_tree)


def keeps_the_unsure(
    request: Request, fallback: float, rollback: float, rule: str, gamma: int
) -> Decoder:
    """The token that the small model was unsure of is proposed, and then the large model is
    called.
    """

    class Unsure(BildDrafter):
        def should_draft(self, laws: TargetProbs, tip: int) -> bool:
            return True

        def should_stop(self, laws: TargetProbs, tip: int, token: int) -> bool:
            return not super().should_draft(laws, tip)

    drafter = Unsure(fallback, request.drafts[0], gamma, frozenset(), None)
    return request.decoder(drafter, rollback_verifier(rollback, rule))


def worst_first(
    request: Request, fallback: float, rollback: float, rule: str, gamma: int
) -> Decoder:
    """Rolls back to the token that is furthest off, not to the first that is too far."""

    def verify(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        trust: list[Any] = [
            p.probs_under(node - 1, SamplingParams())[x] for node, x in enumerate(tree.tokens)
        ]
        if not trust or min(trust) >= exp(-rollback):
            return Verdict(tuple(range(len(trust))), rng.draw(p[len(trust) - 1]))
        worst = trust.index(min(trust))
        return Verdict(tuple(range(worst)), rng.draw(p[worst - 1]), (worst,))

    return _with(request, fallback, gamma, verify)


def as_released(
    request: Request, fallback: float, rollback: float, rule: str, gamma: int
) -> Decoder:
    """The first bad token decides for all: where the large model would write it too, the whole
    block stays.
    """

    def verify(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        for node, token in enumerate(tree.tokens):
            if p.probs_under(node - 1, SamplingParams())[token] < exp(-rollback):
                format_table = rng.draw(p[node - 1])
                if format_table != token:
                    return Verdict(tuple(range(node)), format_table, (node,))
                break
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))

    return _with(request, fallback, gamma, verify)


TRAPS = [
    Trap(ALGORITHM, follows_the_algorithm, card("bild")),
    Trap(JOINT, exact_where_nothing_is_trusted, card("bild")),
]
TOYS = [
    Toy("speculative decoding with a confidence stop", ALGORITHM, ratio_test),
    Toy("the unsure token is proposed", ALGORITHM, keeps_the_unsure),
    Toy("back to the worst token", ALGORITHM, worst_first),
    Toy("what is behind the first bad token stays unread", JOINT, as_released),
]
