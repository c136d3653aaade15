"""Laws for the loop: what comes out, and with which noise. Where it ends is in stop_laws.py.

Each takes a `Parts`, searches its cases smallest first, raises `LawViolated` with the first that
breaks it, and returns `Evidence`. What must come out is worked out here from the tables themselves;
no part that is judged has a say in it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder, Drafter
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.exact import JOINT, JointLaw, Reference
from tinyspec.laws.noise import Name, Noise
from tinyspec.laws.parts import Parts
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.tables import TableModel
from tinyspec.tree import ROOT, TokenTree

ONE, TWO, BOTH, FEW = "chain of 1", "chain of 2", "2 siblings", "2 siblings without replacement"
FORK = "2 siblings without replacement, one below the first"
POINTS, BESIDE = "the tokens 1, 0", "the tokens 0 | 1 side by side"

Table = tuple[tuple[int, ...], ...]
"""Weights of the next token, one row for each token that the text may end with; one row alone: the
same everywhere.
"""


def table_model(table: Table) -> TableModel:
    """A table model whose rows are these weights, by the last token."""
    return TableModel(
        vocabulary=len(table[0]), rows=lambda context: table[context[-1] % len(table)]
    )


def format_table(table: Table) -> Any:
    """A table in a counterexample: one law, or one for each last token."""
    laws = [normalised(weights) for weights in table]
    return laws[0] if len(laws) == 1 else {f"after {token}": law for token, law in enumerate(laws)}


class ConstantDrafter(BaseDrafter):
    """Proposes the same tokens whatever the text is, one after the other or side by side; no law is
    declared.
    """

    def __init__(self, tokens: Sequence[int], side_by_side: bool = False):
        self.tokens, self.side_by_side = tuple(tokens), side_by_side

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if not self.side_by_side or max_draft_depth < 1:
            return TokenTree.chain(self.tokens[:max_draft_depth])
        n = len(self.tokens)
        return TokenTree(self.tokens, (ROOT,) * n, (None,) * n, (False,) * n)


class HalvingParams(SamplingParams):
    """A penalty that is exact: a token that the text holds already has half its weight."""

    def probs(self, logits: Any, history: Sequence[int] = ()) -> Any:
        weights = [x / 2 if token in history else x for token, x in enumerate(logits)]
        return [x / sum(weights) for x in weights]


# ------------------------------------------------------------------ what comes out


@dataclass(frozen=True)
class LoopCase:
    """A target and a draft, how guesses are made of the draft's law, the warpers, and how many
    tokens are looked at.
    """

    p: Table
    q: Table
    draft: str
    tokens: int
    sampling: SamplingParams | None = None

    def decoder(self, parts: Parts) -> Decoder:
        """The decoder made of these parts."""
        sampling = self.sampling or parts.sampling()
        return parts.decoder(
            table_model(self.p).session(), self._drafter(parts), parts.walk, sampling=sampling
        )

    def _drafter(self, parts: Parts) -> Drafter:
        if self.draft == POINTS:
            return ConstantDrafter((1, 0))
        if self.draft == BESIDE:
            return ConstantDrafter((0, 1), side_by_side=True)
        small = table_model(self.q).session()
        if self.draft in (ONE, TWO):
            return parts.drafter(small, 1 if self.draft == ONE else 2, frozenset())
        if self.draft == FORK:
            return parts.trees(small, (ROOT, ROOT, 0), False)
        return parts.siblings(small, 2, self.draft == BOTH)

    def expected(self, n: int) -> JointLaw:
        """The law of the first n tokens of plain decoding."""
        if isinstance(self.sampling, HalvingParams):
            sampling = self.sampling
            return Reference(lambda text: sampling.probs(normalised(self.p[0]), text)).law(n)
        return Reference(
            lambda text: normalised(self.p[text[-1] % len(self.p)]),
            self.sampling or SamplingParams(),
        ).law(n)

    def shown(self) -> dict[str, Any]:
        """For a counterexample."""
        sampling = {} if self.sampling is None else {"sampling": self.sampling}
        return {
            "p": format_table(self.p),
            "q": format_table(self.q),
            "draft": self.draft,
            **sampling,
        }


SMALL_TABLES: list[tuple[Table, Table]] = [
    (((1, 0),), ((0, 1),)),
    (((0, 1),), ((1, 1),)),
    (((1, 1),), ((0, 1),)),
    (((1, 1),), ((1, 1),)),
    (((1, 1),), ((1, 3),)),
    (((1, 3),), ((3, 1),)),
    (((1, 0), (0, 1)), ((1, 1),)),
    (((1, 3), (3, 1)), ((1, 1),)),
    (((1, 1, 0),), ((0, 1, 1),)),
    (((0, 1, 2),), ((2, 1, 1),)),
]
LOOP_KNOBS = (
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 2},
    {"top_p": 0.5},
    {"min_p": 0.7},
)
WIDE: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
WIDER: Table = ((2, 1, 1), (1, 1, 2), (1, 3, 1))


def loop_cases() -> Iterator[LoopCase]:
    """Smallest first: one guess, and under every warper; then two, in a chain and side by side;
    then larger tables.
    """
    for p, q in SMALL_TABLES:
        yield LoopCase(p, q, ONE, 2)
    for knobs in LOOP_KNOBS:
        yield LoopCase(((1, 2),), ((2, 1),), ONE, 2, SamplingParams(**knobs))
    yield LoopCase(((1, 1),), ((1, 1),), ONE, 2, HalvingParams(repetition_penalty=2.0))
    for draft in (POINTS, BESIDE, TWO, BOTH, FEW):
        for p, q in SMALL_TABLES:
            yield LoopCase(p, q, draft, 3 if len(p[0]) == 2 and draft == TWO else 2)
    for draft in (ONE, TWO, BOTH, FEW):
        yield LoopCase(WIDE, WIDER, draft, 2)
    for p, q in (*SMALL_TABLES[2:6], (((1, 1),), ((1, 3), (3, 1)))):
        yield LoopCase(p, q, FORK, 2)
    for knobs in LOOP_KNOBS:
        yield LoopCase(WIDE, WIDER, ONE, 2, SamplingParams(**knobs))
    yield LoopCase(((1, 1, 2),), ((1, 1, 1),), TWO, 2, HalvingParams(repetition_penalty=2.0))


def enumerate_tokens(
    make: Callable[[], Decoder], tokens: int
) -> tuple[dict[tuple[int, ...], Any], int]:
    """The law of the first tokens over as many rounds as they take, and how many branches it took
    to see it.
    """
    branches = 0

    def run(rng: Exhaustive) -> tuple[int, ...]:
        nonlocal branches
        branches += 1
        decoder, noise = make(), Noise(rng)
        decoder.extend((0,))
        while len(decoder.new) < tokens:
            decoder.step(noise)
        return tuple(decoder.new[:tokens])

    return Exhaustive.law(run), branches


def joint_law_of_parts(parts: Parts) -> Evidence:
    """The tokens of several rounds are distributed as the target's own, also where the same noise
    is used twice.
    """
    seen, branches = 0, 0
    for case in loop_cases():
        law, walked = enumerate_tokens(lambda case=case: case.decoder(parts), case.tokens)  # type: ignore[misc]
        seen, branches = seen + 1, branches + walked
        for n in range(1, case.tokens + 1):  # the shortest text whose law is wrong
            got: dict[tuple[int, ...], Any] = {}
            for text, x in law.items():
                got[text[:n]] = got.get(text[:n], 0) + x
            expected = case.expected(n)
            if any(_unlike(got.get(text, 0), expected.get(text, 0)) for text in (*got, *expected)):
                accuse(
                    JOINT,
                    dict(sorted(expected.items())),
                    dict(sorted(got.items())),
                    **case.shown(),
                    tokens=n,
                )
    return Evidence(JOINT, seen, branches)


def _unlike(x: Any, y: Any) -> bool:
    """Whether two probabilities differ; only where a part computes in floats may they differ by
    rounding.
    """
    return bool(abs(x - y) > 1e-12 if isinstance(x, float) else x != y)


def chance_ledger(parts: Parts) -> Evidence:
    """No two decisions of a request share a uniform, over eight rounds."""
    name, rounds = "chance ledger", 8
    for draft in (ONE, TWO, BOTH, FEW):
        case = LoopCase(((1, 3),), ((3, 1),), draft, 1)

        def request(rng: Exhaustive, case: LoopCase = case) -> list[Name]:
            decoder, noise = case.decoder(parts), Noise(rng)
            decoder.extend((0,))
            for _ in range(rounds):
                decoder.step(noise)
            return noise.reads

        reads, _ = next(iter(Exhaustive.walk(request)))
        twice = [uniform for at, uniform in enumerate(reads) if uniform in reads[:at]]
        if twice:
            accuse(
                name, "every uniform used once", f"{twice[0]} again", **case.shown(), uniforms=reads
            )
    return Evidence(name, 4)


LAWS = {JOINT: joint_law_of_parts, "chance ledger": chance_ledger}
