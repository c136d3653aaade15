"""What is said of a request, with one defect each."""

import math
from dataclasses import dataclass, replace
from typing import Any

from tinyspec.decoding.decode import Round
from tinyspec.decoding.trace import Statistics, origins
from tinyspec.laws.mutants import Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS, Parts


@dataclass
class WithoutBonus(Statistics):
    def count(self, round: Round) -> None:
        super().count(round)
        self.emitted -= (
            round.verdict.next is not None
        )  # right: the token of the round's own counts as well


@dataclass
class PlusOne(Statistics):
    @property
    def tokens_per_call(self) -> float:
        return super().tokens_per_call + 1  # right: the bonus is among the tokens already


@dataclass
class CountsTheCut(Statistics):
    def count(self, round: Round) -> None:
        super().count(round)
        self.emitted += round.truncated  # right: tokens behind a stop are none


@dataclass
class NothingOverNothing(Statistics):
    @property
    def tokens_per_call(self) -> float:
        return self.emitted / self.target_calls if self.target_calls else math.nan  # right: 0.0


@dataclass
class OfTheRounds(Statistics):
    """The acceptance rate as the share of rounds whose first guess passed."""

    kept: int = 0

    def count(self, round: Round) -> None:
        super().count(round)
        self.kept += len(round.verdict.accepted) > 0

    @property
    def acceptance(self) -> float:
        return (
            self.kept / self.target_calls if self.target_calls else 0.0
        )  # right: accepted / drafted


def always_a_bonus(round: Round) -> tuple[str, ...]:
    return tuple("bonus" if kind == "recovered" else kind for kind in origins(round))


def of_the_draft(round: Round) -> list[float]:
    """The draft's own probabilities where a guess was accepted; 0.0 for the token behind them."""
    accepted = [
        (round.tree.tokens[node], round.tree.draft_probs[node]) for node in round.verdict.accepted
    ]
    said = [math.log(q[x]) for x, q in accepted if q is not None]
    return said + [0.0] * (
        len(round.tokens) - len(said)
    )  # right: log p of each, from the target's rows


def of_the_warped(round: Round) -> list[float]:
    rows = zip(round.output_probs, round.tokens, strict=True)
    return [math.log(row[x]) for row, x in rows]  # right: from the logits, before the warpers


def _figure(name: str, bug: str, law: str, parts: Parts) -> Mutant:
    return Mutant(name, bug, law, parts, see.figures)


def _statistics(name: str, bug: str, statistics: Any) -> Mutant:
    return _figure(name, bug, "trace identities", replace(PARTS, statistics=statistics))


MUTANTS = [
    _statistics("tokens per call without the bonus", "B41", WithoutBonus),
    _statistics("tokens per call plus one", "B41", PlusOne),
    _statistics("tokens behind a stop counted", "B41", CountsTheCut),
    _statistics("0 / 0 for no tokens", "B31", NothingOverNothing),
    _statistics("acceptance of rounds, not of guesses", "B1", OfTheRounds),
    _figure(
        "recovered called a bonus",
        "B41",
        "origins name what happened",
        replace(PARTS, origins=always_a_bonus),
    ),
    _figure(
        "log-probabilities of the draft",
        "B42",
        "logprobs are the targets",
        replace(PARTS, logprobs=of_the_draft),
    ),
    _figure(
        "log-probabilities of the warped law",
        "B42",
        "logprobs are the targets",
        replace(PARTS, logprobs=of_the_warped),
    ),
]
