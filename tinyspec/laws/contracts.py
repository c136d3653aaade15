"""The contracts of a drafter as laws: every technique's drafter, under every warper and in every
dtype.

What the contracts are stands in offences.py, which finds the breaches; here is what drafters are
tried on.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws.accused import Counterexample, Evidence, LawViolated
from tinyspec.laws.offences import (
    CONTRACT_LAWS,
    EXAMINED,
    PRESENCE,
    TRUTHFUL,
    examined_nodes,
    find_violations,
)
from tinyspec.laws.stage import Stage, choose_every_way
from tinyspec.laws.tables import TableModel
from tinyspec.technique import Card, Request

__all__ = [
    "CONTRACT_LAWS",
    "EXAMINED",
    "PRESENCE",
    "TRUTHFUL",
    "check_contracts",
    "contracts_of_technique",
    "examined_nodes",
    "find_violations",
]

EXPECTED_BY_CONTRACT = {
    TRUTHFUL: "tokens drawn from the declared distribution",
    PRESENCE: "tokens drawn from the declared distribution, proposed whatever they are",
    EXAMINED: "tokens of the declared distribution that no verifier has looked at (else declare None)",
}

MakeDecoder = Callable[[Request], Decoder]
"""What is judged: a technique's builder, or a function that puts a drafter into a decoder."""


class _TypedTable(TableModel):
    """A table whose rows are logits in a dtype, as a network gives them."""

    dtype = torch.float64

    def head(self, state: Any) -> Any:
        if state not in self._heads:
            weights = torch.tensor(
                [float(x) for x in self.network.weights(state)], dtype=torch.float64
            )
            self._heads[state] = weights.log().to(self.dtype)
        return self._heads[state]


class ContractSetting(NamedTuple):
    """Rows by hand, the same in every context, or tables from a seed; a warper; what rows are made
    of; rounds.
    """

    rows: tuple[tuple[int, ...], tuple[int, ...]] | int
    sampling: SamplingParams = SamplingParams()
    dtype: torch.dtype | None = None
    rounds: int = 1

    def model(self, which: int) -> TableModel:
        """The target is 0, drafts are 1, 2, ..."""
        kind: Any = TableModel
        if self.dtype is not None:
            kind = type("Typed", (_TypedTable,), {"dtype": self.dtype})
        if isinstance(self.rows, int):
            return kind(3 * self.rows + which, 3)  # type: ignore[no-any-return]
        weights = self.rows[min(which, 1)]
        return kind(0, len(weights), rows=lambda context: weights)  # type: ignore[no-any-return]

    def shown(self) -> dict[str, Any]:
        """For an accusation."""
        case: dict[str, Any] = (
            {"tables": f"TableModel(seed, 3), seeds from {3 * self.rows} on"}
            if isinstance(self.rows, int)
            else {}
        )
        if not isinstance(self.rows, int):
            case = {
                name: [Fraction(x, sum(row)) for x in row]
                for name, row in zip("pq", self.rows, strict=True)
            }
        if self.sampling != SamplingParams():
            case["sampling"] = self.sampling
        if self.dtype is not None:
            case["rows"] = str(self.dtype).removeprefix("torch.")
        return case


EXACT_SAMPLINGS = (
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=1 / 3),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=2),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.4),
    SamplingParams(temperature=0.5, top_k=2),
    SamplingParams(top_k=2, top_p=0.7),
    SamplingParams(temperature=0.5, min_p=0.3),
    SamplingParams(top_p=0.8, min_p=0.3),
)
"""Sampling settings that Fractions can follow."""

FLOAT_SAMPLINGS = (
    SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.3), SamplingParams(temperature=1.6, top_k=2),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2), SamplingParams(temperature=0.7, min_p=0.2),
)  # fmt: skip
"""Warpers that act on logits."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def contract_settings() -> Iterator[ContractSetting]:
    """The smallest first: two rounds with p and q by hand, then every warper in Fractions and in
    every dtype.
    """
    half, third, other, quarter = (1, 1), (1, 2), (2, 1), (1, 3)
    for p, q in ((half, half), (half, third), (third, other), (quarter, other)):
        yield ContractSetting((p, q), rounds=2)
    for sampling in (SamplingParams(), *EXACT_SAMPLINGS):
        yield ContractSetting(1, sampling)
    for dtype in DTYPES:
        for sampling in (SamplingParams(), *FLOAT_SAMPLINGS, *EXACT_SAMPLINGS):
            yield ContractSetting(2, sampling, dtype)
        yield ContractSetting((third, other), FLOAT_SAMPLINGS[0], dtype, rounds=2)


def check_contracts(
    make: MakeDecoder, drafts: int = 1, laws: Sequence[str] = CONTRACT_LAWS
) -> list[Evidence]:
    """Hold the drafter of a technique to its contracts; raises LawViolated with the smallest case
    that breaks one of `laws`.

    make    request -> Decoder, as a card's `make`;  drafts: how many draft models the request
            brings
    """
    evidence = {law: Evidence(law) for law in laws}
    for setting in contract_settings():
        target, models = setting.model(0), [setting.model(1 + i) for i in range(drafts)]

        def factory(
            setting: ContractSetting = setting,
            target: TableModel = target,
            models: list[TableModel] = models,
        ) -> Decoder:
            return make(
                Request(target.session(), [model.session() for model in models], setting.sampling)
            )

        for found in check_decoder_contracts(factory, (0,), setting.rounds, laws, setting.shown()):
            evidence[found.law] += found
    return list(evidence.values())


def check_decoder_contracts(
    factory: Callable[[], Decoder],
    prompt: Sequence[int] = (0,),
    rounds: int = 1,
    laws: Sequence[str] = CONTRACT_LAWS,
    case: dict[str, Any] | None = None,
) -> list[Evidence]:
    """The contracts on the first rounds of any decoder; raises LawViolated. `case` says which one
    it is.
    """
    began = time.perf_counter()
    found, runs = find_violations(factory, prompt, rounds)
    for offence in found:
        if offence.law in laws:
            shown = (case or {}) | {
                "text": list(offence.context),
                "looked at before": list(offence.before),
                "declared": offence.declared,
            }
            raise LawViolated(
                Counterexample(offence.law, shown, EXPECTED_BY_CONTRACT[offence.law], offence.got)
            )
    return [Evidence(law, 1, runs, time.perf_counter() - began) for law in laws]


def contracts_of_technique(card: Card) -> list[Evidence]:
    """The contracts of a registered technique: on tables, or on small transformers where it reads
    hidden states.

    None for what has no drafter, and for one that races: shared noise cannot be enumerated, and a
    raced guess declares no law.
    """
    if card.kind != "decoder" or card.coupled:
        return []
    if not card.hidden:
        settings = Stage(card).settings
        texts = [[0, 1, 1, 0, 0, 1, 0]] if card.copies else []  # ids that every table here knows
        return check_contracts(
            lambda request: card.make(
                replace(request, references=texts, choose=choose_every_way), **settings
            ),
            card.hosted,
        )
    evidence = {law: Evidence(law) for law in CONTRACT_LAWS}
    for sampling, rounds in (
        (SamplingParams(top_k=2), 2),
        (SamplingParams(temperature=0.7), 1),
        (SamplingParams(top_p=0.6), 1),
    ):
        stage = Stage(card, sampling=sampling, deep=True, vocabulary=4)
        for found in check_decoder_contracts(stage.made, stage.prompt, rounds, case=stage.words()):
            evidence[found.law] += found
    return list(evidence.values())


def truthful(make: MakeDecoder, drafts: int = 1) -> Evidence:
    """A declared law is the law the token was drawn from, under every warper and dtype."""
    return check_contracts(make, drafts, (TRUTHFUL,))[0]


def presence(make: MakeDecoder, drafts: int = 1) -> Evidence:
    """Whether a node is in the tree does not depend on the token drawn at it, unless its law is
    None.
    """
    return check_contracts(make, drafts, (PRESENCE,))[0]


def examined(make: MakeDecoder, drafts: int = 1) -> Evidence:
    """What a verifier has looked at is proposed again with law None only."""
    return check_contracts(make, drafts, (EXAMINED,))[0]
