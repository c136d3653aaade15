"""BiLD (Kim et al. 2023): no ratio test, no unsure token, the first bad one taken back, and nothing
kept unread.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import exp

from tinyspec.decoding.decode import Decoder, Verifier
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.traps import Trap, card
from tinyspec.speculative.verification.bild import BildDrafter
from tinyspec.technique import Request

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


def _with(request: Request, fallback: float, gamma: int, verifier: Verifier) -> Decoder:
    return request.decoder(
        BildDrafter(fallback, request.drafts[0], gamma, frozenset(), None), verifier
    )


TRAPS = [
    Trap(ALGORITHM, follows_the_algorithm, card("bild")),
    Trap(JOINT, exact_where_nothing_is_trusted, card("bild")),
]
