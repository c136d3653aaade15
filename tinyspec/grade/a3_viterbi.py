"""Laws of assignment A3 on Viterbi: the likeliest sentence of a linear-chain CRF.

The oracle adds up the score of every sentence.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from random import Random
from typing import Any, NamedTuple

from tinyspec.grade.props_a3 import MODULUS, CountedLattice
from tinyspec.grade.task import Cases, Function, Task, graded_law, is_token, require_list
from tinyspec.laws.evidence import accuse

PATH = "a sentence has one candidate at each place"
BEST = "no sentence has a greater score (linear-chain CRF, NAR-CRF, arXiv 1910.11555)"
ALONE = "without transitions each place takes its likeliest candidate"
WORK = "T k emissions and (T - 1) k^2 transitions are enough"

SIZES = (
    *((1, 1), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3), (4, 3), (5, 2)),
    *((3, 4), (3, 5), (5, 3), (4, 4), (6, 3)),
)
"""Places and candidates of the lattices whose sentences are all looked at, up to 729.

With four and five candidates, a search that keeps the three best of a place finds too little.
"""

LARGE = ((9, 3), (8, 4), (12, 5))
"""Of those whose sentences are too many to try."""


class LatticeCase(NamedTuple):
    """What the function is given."""

    kind: str
    seed: int
    places: int
    candidates: int

    def lattice(self) -> CountedLattice:
        """Return the lattice with an empty trace."""
        return CountedLattice(*self)

    def shown(self) -> dict[str, Any]:
        """Return it in the words of the task."""
        sizes = f"seed={self.seed}, places={self.places}, candidates={self.candidates}"
        return {"lattice": f'CountedLattice("{self.kind}", {sizes})'}

    def score(self, path: Sequence[int]) -> int:
        """Return the sum of a sentence's emissions and transitions."""
        lattice = self.lattice()
        emissions = sum(lattice.emission(i, a) for i, a in enumerate(path))
        pairs = enumerate(pairwise(path))
        return emissions + sum(lattice.transition(i, a, b) for i, (a, b) in pairs)


def draw_lattices(cases: Cases, sizes: Sequence[tuple[int, int]], *kinds: str) -> list[LatticeCase]:
    """Return lattices, the smallest first."""
    random = Random(cases.seed)
    return [
        LatticeCase(kind, random.randrange(MODULUS), *size)
        for size in sizes
        for _ in range(4 * cases.times)
        for kind in kinds
    ]


def run_viterbi(law: str, viterbi: Function, case: LatticeCase) -> tuple[list[int], CountedLattice]:
    """Return the sentence that came back, and the lattice, which knows what it was asked."""
    lattice = case.lattice()
    path = require_list(law, viterbi(lattice), case.places, "the candidates", **case.shown())
    if not all(is_token(a, case.candidates) for a in path):
        wanted = f"candidates from 0 to {case.candidates - 1}"
        accuse(law, wanted, path, **case.shown())
    return list(path), lattice


@graded_law(1, PATH)
def is_a_sentence(viterbi: Function, cases: Cases) -> Iterator[bool]:
    """Check the form of what comes back."""
    for case in draw_lattices(cases, SIZES + LARGE, "dynamic", "static"):
        run_viterbi(PATH, viterbi, case)
        yield True


@graded_law(5, BEST)
def has_the_greatest_score(viterbi: Function, cases: Cases) -> Iterator[bool]:
    """Compare with every sentence. Of equal ones any will do."""
    for case in draw_lattices(cases, SIZES, "static", "dynamic"):
        path, _ = run_viterbi(BEST, viterbi, case)
        sentences = product(range(case.candidates), repeat=case.places)
        best = max(sentences, key=case.score)
        scores = [case.score(one) for one in (best, path)]
        if scores[0] != scores[1]:
            shown = [
                f"score {score}, as of {list(one)}"
                for score, one in zip(scores, (best, path), strict=True)
            ]
            accuse(BEST, *shown, **case.shown())
        yield case.places > 1


@graded_law(1, ALONE)
def takes_the_likeliest_candidates(viterbi: Function, cases: Cases) -> Iterator[bool]:
    """Check lattices of every size whose transitions are 0."""
    for case in draw_lattices(cases, SIZES + LARGE, "none"):
        path, _ = run_viterbi(ALONE, viterbi, case)
        lattice = case.lattice()
        for place, chosen in enumerate(path):
            row = [lattice.emission(place, a) for a in range(case.candidates)]
            if row[chosen] != max(row):
                expected = f"candidate {row.index(max(row))} at place {place}"
                shown = {**case.shown(), f"emissions at place {place}": row}
                accuse(ALONE, expected, f"candidate {chosen}", **shown)
        yield True


@graded_law(3, WORK, BEST)
def asks_for_little(viterbi: Function, cases: Cases) -> Iterator[bool]:
    """Count what was asked for: trying every sentence takes k^T."""
    for case in draw_lattices(cases, SIZES + LARGE, "dynamic"):
        _, lattice = run_viterbi(WORK, viterbi, case)
        kinds = [kind for kind, *_ in lattice.trace]
        if case.candidates > 1 and not kinds:  # a copy of the lattice does not count
            accuse(WORK, "the lattice that is given is asked", "it was not", **case.shown())
        most = {
            "emission": case.places * case.candidates,
            "transition": (case.places - 1) * case.candidates**2,
        }
        for kind, count in most.items():
            if kinds.count(kind) > count:
                shown = [f"{kind}s asked for: {n}" for n in (f"at most {count}", kinds.count(kind))]
                accuse(WORK, *shown, **case.shown())
        yield case.places > 1


VITERBI_TASK = Task(
    "viterbi",
    "A3.10 The likeliest sentence: Viterbi",
    (
        is_a_sentence,
        has_the_greatest_score,
        takes_the_likeliest_candidates,
        asks_for_little,
    ),
)
