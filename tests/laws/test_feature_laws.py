"""The feature laws accuse no right drafter, and see each mistake that no older law sees.

The mistakes are changes of the test doubles in `heads`. They are not rows of the museum, whose rows
change the library: they move there with the techniques.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tests.laws import heads
from tests.laws.heads import HOSTS, Host
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.feature_laws import DRAFT_OF_TEXT, DRAFT_OF_TRAINING
from tinyspec.laws.museum.rows import Change
from tinyspec.laws.prove import prove_technique
from tinyspec.lm.model import Model
from tinyspec.technique import Request, find_technique

FEATURE_LAWS: dict[str, Callable[[Host], Evidence]] = {
    DRAFT_OF_TEXT: lambda host: feature_laws.draft_is_function_of_text(host.make),
    DRAFT_OF_TRAINING: lambda host: feature_laws.draft_is_training_forward(host.make, host.forward),
}


@dataclass(frozen=True, kw_only=True)
class HeadMutant(Change):
    """A change of a test double, and the feature laws that see it."""

    drafter: str
    laws: tuple[str, ...]


BOTH = DRAFT_OF_TEXT, DRAFT_OF_TRAINING
MUTANTS = [
    HeadMutant(
        "a head reads one position early",
        "h = self.states[-1]",
        "h = self.states[-2:][0]",
        heads.MedusaDrafter.propose,
        drafter="medusa",
        laws=(DRAFT_OF_TRAINING,),
    ),
    HeadMutant(
        "states not cut on rewind",
        "del self.states[max(length - 1, 0) :]",
        "pass",
        heads.FeatureDrafter.rewind,
        drafter="medusa",
        laws=BOTH,
    ),
    HeadMutant(
        "the token is not shifted against the states",
        "token = context[i + 1]",
        "token = context[i]",
        heads.EagleDrafter.propose,
        drafter="eagle",
        laws=(DRAFT_OF_TRAINING,),
    ),
    HeadMutant(
        "rows made from predicted states are kept",
        "self.layer.keep(range(len(self.states)))",
        "self.layer.keep([*range(len(self.states)), *(self.row_of[node] for node in "
        "round.verdict.accepted if node in self.row_of)])",
        heads.EagleDrafter.observe,
        drafter="eagle",
        laws=BOTH,
    ),
    HeadMutant(
        "rows not cut on rewind",
        "self.layer.keep(range(min(len(self.layer.rows), len(self.states))))",
        "pass",
        heads.EagleDrafter.rewind,
        drafter="eagle",
        laws=BOTH,
    ),
    HeadMutant(
        "adapter rows of rejected draft tokens are kept",
        "self.adapter.keep(range(min(len(self.adapter.rows), len(self.states))))",
        "pass",
        heads.KangarooDrafter.propose,
        drafter="kangaroo",
        laws=BOTH,
    ),
    HeadMutant(
        "look-ahead logits read one slot late",
        "self.logits = [round.scores.logits[node + 1] for node in probes]",
        "self.logits = [round.scores.logits[node] for node in probes]",
        heads.PassDrafter.observe,
        drafter="pass",
        laws=(DRAFT_OF_TRAINING,),
    ),
]


@pytest.mark.parametrize("law", FEATURE_LAWS)
@pytest.mark.parametrize("name", HOSTS)
def test_a_right_drafter_is_not_accused(name: str, law: str) -> None:
    evidence = FEATURE_LAWS[law](HOSTS[name])
    assert evidence.cases > 200
    assert evidence.branches > 150  # draft tokens


def test_layerskip_keeps_the_feature_laws() -> None:
    """A registered technique: its draft is what an exit's training loss reads."""

    def forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        blocks = model.torch_blocks()
        first = next(blocks.layer_states(torch.tensor([[*text, *drafted]])))
        return blocks.compute_logits(first)[0, -1]

    host = Host(partial(find_technique("layerskip").make, exit=1, gamma=2), forward)
    for law in FEATURE_LAWS.values():
        assert law(host).branches > 150


@pytest.mark.parametrize("name", HOSTS)
def test_a_right_drafter_keeps_the_older_laws(name: str) -> None:
    proved = {evidence.law: evidence for evidence in prove_technique(HOSTS[name].card)}
    assert proved[JOINT].cases >= 9
    assert proved[JOINT].branches >= 50


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_older_law_sees_a_misplaced_state(mutant: HeadMutant) -> None:
    """The joint law, the contracts, greedy equality and the laws of a round: all are kept."""
    with mutant.applied():
        proved = {law.law: law for law in prove_technique(HOSTS[mutant.drafter].card)}
    assert proved[JOINT].branches >= 50


@pytest.mark.parametrize("law", FEATURE_LAWS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_feature_law_names_a_misplaced_state(mutant: HeadMutant, law: str) -> None:
    """F1 alone cannot see a mistake that does not depend on the past. It needs no training
    forward.
    """
    with mutant.applied():
        if law not in mutant.laws:
            assert FEATURE_LAWS[law](HOSTS[mutant.drafter]).cases > 200
            return
        with pytest.raises(LawViolated) as accused:
            FEATURE_LAWS[law](HOSTS[mutant.drafter])
    found = accused.value.counterexample
    assert found.law == law
    assert len(found.case["text"]) <= 6
    assert found.expected != found.got
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_drafter_that_proposes_nothing_is_no_evidence() -> None:
    def make(request: Request) -> Decoder:
        return request.decoder(BaseDrafter(), verify_tree)

    for law in FEATURE_LAWS.values():
        with pytest.raises(LawViolated, match="no draft token"):
            law(Host(make, lambda model, text, drafted: None))


def test_a_draft_where_training_knows_no_state_is_accused() -> None:
    host = HOSTS["medusa"]
    with pytest.raises(LawViolated) as accused:
        feature_laws.draft_is_training_forward(host.make, lambda model, text, drafted: None)
    assert accused.value.counterexample.expected == "no draft token"


PASTS = {
    "another request": r"another request with the prompt",
    "a prompt of one token": r"(^|; )prompt \[\d\];",
    "a rejection": r"accepted nothing, then",
    "an accepted token and one more": r"\], then",
    "a round without a next token": r"\], ended there",
    "a stop inside a draft": r"\], cut by a stop",
    "a rewind to the first token": r"rewound to 1 tokens",
    "a correction": r"corrected by",
}


@cache
def find_pasts(temperature: float) -> list[str]:
    """Return what the decoders of all walks have been through, at every draft."""
    return [
        "; ".join(proposal.past)
        for seed in feature_laws.WALK_SEEDS
        for proposal in feature_laws.walk_texts(
            HOSTS["medusa"].make, small_network(seed), SamplingParams(temperature), seed
        )
    ]


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("temperature", feature_laws.WALK_TEMPERATURES)
def test_the_walks_meet_every_past(past: str, temperature: float) -> None:
    assert sum(bool(re.search(PASTS[past], one)) for one in find_pasts(temperature)) >= 8
