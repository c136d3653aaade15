"""BLEU by sacrebleu, on raw text: what a translation is measured with, and the signature that says
how.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError

ORDER = 4  # n-grams of up to so many words


class Bleu(NamedTuple):
    score: float  # 0 to 100
    signature: str


class Counts(NamedTuple):
    """What BLEU is computed from, which can be added up: n-grams found in the reference, n-grams,
    words of the references.

    >>> Counts((2, 1, 0, 0), (2, 1, 0, 0), 3) + Counts((1, 0, 0, 0), (2, 1, 0, 0), 2)
    Counts(hits=(3, 1, 0, 0), all=(4, 2, 0, 0), wanted=5)
    """

    hits: tuple[int, ...]
    all: tuple[int, ...]
    wanted: int

    def __add__(self, other: "Counts") -> "Counts":  # type: ignore[override]
        hits, all = (
            tuple(x + y for x, y in zip(a, b, strict=True))
            for a, b in ((self.hits, other.hits), (self.all, other.all))
        )
        return Counts(hits, all, self.wanted + other.wanted)

    @property
    def bleu(self) -> Bleu:
        """The score of all that was counted, by sacrebleu's settings."""
        judge = metric()
        score = judge.compute_bleu(
            list(self.hits), list(self.all), self.all[0], self.wanted, smooth_method="exp"
        ).score
        judge.corpus_score(
            ["a"], [["a"]]
        )  # the signature knows the number of references only after a score
        return Bleu(round(float(score), 4), str(judge.get_signature()))


def metric() -> Any:
    """sacrebleu's BLEU with its usual settings. TinyspecError where it is not installed."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise TinyspecError(
            "translations are scored by sacrebleu: pip install 'tinyspec[translation]'"
        ) from None
    return BLEU()


def counts(found: Sequence[str], wanted: Sequence[str]) -> Counts:
    """What sacrebleu counts in translations against one reference each: case kept, its own
    tokenisation (13a).
    """
    if len(found) != len(wanted):
        raise TinyspecError(
            f"{len(found)} translations of {len(wanted)} sentences cannot be scored"
        )
    if not found:
        return Counts((0,) * ORDER, (0,) * ORDER, 0)
    made = metric().corpus_score(list(found), [list(wanted)])
    return Counts(tuple(made.counts), tuple(made.totals), int(made.ref_len))


def bleu(found: Sequence[str], wanted: Sequence[str]) -> Bleu:
    """Corpus BLEU of translations against one reference each.

    >>> bleu(["Ein Mann mit Hut."], ["Ein Mann mit Hut."]).score
    100.0
    """
    return counts(found, wanted).bleu


def repeated(texts: Sequence[Sequence[int]]) -> float:
    """The share of tokens that equal the one before: what translations whose words were chosen
    apart are known by.

    >>> repeated([[5, 5, 6, 6], [7]])
    0.4
    """
    total = sum(map(len, texts))
    return sum(a == b for text in texts for a, b in pairwise(text)) / total if total else 0.0
