"""BLEU by sacrebleu, on raw text: what a translation is measured with, and the signature that says how."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError


class Bleu(NamedTuple):
    score: float  # 0 to 100
    signature: str


def metric() -> Any:
    """sacrebleu's BLEU with its usual settings. TinyspecError where it is not installed."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError:
        raise TinyspecError("translations are scored by sacrebleu: pip install 'tinyspec[translation]'") from None
    return BLEU()


def bleu(found: Sequence[str], wanted: Sequence[str]) -> Bleu:
    """Corpus BLEU of translations against one reference each: case kept, sacrebleu's own tokenisation (13a).

    >>> bleu(["Ein Mann mit Hut."], ["Ein Mann mit Hut."]).score
    100.0
    """
    if len(found) != len(wanted):
        raise TinyspecError(f"{len(found)} translations of {len(wanted)} sentences cannot be scored")
    judge = metric()
    score = judge.corpus_score(list(found), [list(wanted)]).score
    return Bleu(round(float(score), 4), str(judge.get_signature()))


def repeated(texts: Sequence[Sequence[int]]) -> float:
    """The share of tokens that equal the one before: what translations whose words were chosen apart are known by.

    >>> repeated([[5, 5, 6, 6], [7]])
    0.4
    """
    total = sum(map(len, texts))
    return sum(a == b for text in texts for a, b in pairwise(text)) / total if total else 0.0
