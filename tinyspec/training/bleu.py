"""Measure translations: BLEU and chrF by sacrebleu on raw text, with their signatures."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError

ORDER = 4  # n-grams of up to so many words


class TextScore(NamedTuple):
    score: float  # 0 to 100
    signature: str


class BleuCounts(NamedTuple):
    """The counts from which BLEU is computed. They can be added up.

    matches           n-grams that occur in the reference, for n = 1 to ORDER
    totals            all n-grams, for n = 1 to ORDER
    reference_length  words of the references

    >>> BleuCounts((2, 1, 0, 0), (2, 1, 0, 0), 3) + BleuCounts((1, 0, 0, 0), (2, 1, 0, 0), 2)
    BleuCounts(matches=(3, 1, 0, 0), totals=(4, 2, 0, 0), reference_length=5)
    """

    matches: tuple[int, ...]
    totals: tuple[int, ...]
    reference_length: int

    def __add__(self, other: "BleuCounts") -> "BleuCounts":  # type: ignore[override]
        hits, all = (
            tuple(x + y for x, y in zip(a, b, strict=True))
            for a, b in ((self.matches, other.matches), (self.totals, other.totals))
        )
        return BleuCounts(hits, all, self.reference_length + other.reference_length)

    @property
    def bleu(self) -> TextScore:
        """Return the score of these counts, by sacrebleu's default settings."""
        (score,) = score_counts([self])
        return TextScore(round(score, 4), read_signature(load_bleu()))


def score_counts(counts: Iterable[BleuCounts]) -> list[float]:
    """Return the BLEU of each of these counts, by sacrebleu's default settings.

    >>> score_counts([BleuCounts((4, 3, 2, 1), (4, 3, 2, 1), 4)])
    [100.0]
    """
    judge = load_bleu()
    return [
        round(
            float(
                judge.compute_bleu(
                    list(one.matches),
                    list(one.totals),
                    one.totals[0],
                    one.reference_length,
                    smooth_method="exp",
                ).score
            ),
            10,
        )
        for one in counts
    ]


def read_signature(judge: Any) -> str:
    """Return how a judge of sacrebleu scores, for one reference each."""
    judge.corpus_score(["a"], [["a"]])  # then the signature has the number of references
    return str(judge.get_signature())


def load_bleu() -> Any:
    """Return sacrebleu's BLEU with its default settings.

    Raises TinyspecError if sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise TinyspecError(
            "translations are scored by sacrebleu: pip install 'tinyspec[translation]'"
        ) from None
    return BLEU()


def count_ngrams(found: Sequence[str], wanted: Sequence[str]) -> BleuCounts:
    """Count n-grams in translations against one reference each, as sacrebleu does.

    Case is kept; the tokenization is sacrebleu's own (13a).
    """
    if len(found) != len(wanted):
        raise TinyspecError(
            f"{len(found)} translations of {len(wanted)} sentences cannot be scored"
        )
    if not found:
        return BleuCounts((0,) * ORDER, (0,) * ORDER, 0)
    made = load_bleu().corpus_score(list(found), [list(wanted)])
    return BleuCounts(tuple(made.counts), tuple(made.totals), int(made.ref_len))


def load_chrf() -> Any:
    """Return sacrebleu's chrF with its default settings: n-grams of 1 to 6 characters."""
    load_bleu()  # reports if sacrebleu is missing
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def count_characters(found: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...]:
    """Return the counts from which chrF is computed, against one reference each.

    They can be added up: n-grams of the translations, of the references, and of both, for each
    number of characters.
    """
    # sacrebleu has no public function for the counts of a part of the sentences.
    rows = load_chrf()._extract_corpus_statistics(list(found), [list(wanted)])
    return tuple(sum(column) for column in zip(*rows, strict=True))


def score_characters(counts: Sequence[int]) -> TextScore:
    """Return the chrF of such counts."""
    judge = load_chrf()
    score = judge._aggregate_and_compute([list(counts)]).score
    return TextScore(round(float(score), 4), read_signature(judge))


def corpus_bleu(found: Sequence[str], wanted: Sequence[str]) -> TextScore:
    """Return the BLEU of translations against one reference each.

    >>> corpus_bleu(["Ein Mann mit Hut."], ["Ein Mann mit Hut."]).score
    100.0
    """
    return count_ngrams(found, wanted).bleu


def repetition_rate(texts: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that equal the token before.

    It is high if tokens are chosen independently of each other.

    >>> repetition_rate([[5, 5, 6, 6], [7]])
    0.4
    """
    total = sum(map(len, texts))
    return sum(a == b for text in texts for a, b in pairwise(text)) / total if total else 0.0
