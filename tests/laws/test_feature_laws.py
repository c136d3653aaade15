"""The feature laws accuse no right drafter, and see each mistake that no older law sees.

Four techniques with random heads are judged: heads on the last state that is known (Medusa), a
layer that goes on from its own outputs (EAGLE), an adapter on an early layer (Kangaroo), and
look-aheads every second round (PaSS). Most mistakes are toys of the museum.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.features import FeatureDrafter
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import feature_laws
from tinyspec.laws.contracts import MakeDecoder
from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.feature_laws import (
    DRAFT_OF_TEXT,
    DRAFT_OF_TRAINING,
    MakeNetwork,
    TrainingForward,
)
from tinyspec.laws.museum import find_toy
from tinyspec.laws.museum.rows import Change
from tinyspec.laws.prove import CI, list_questions
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.eagle import EagleDrafter
from tinyspec.technique import Request, find_technique


class Host(NamedTuple):
    """A drafter as the laws take it: how it is built, its training forward, and its target."""

    make: MakeDecoder
    forward: TrainingForward
    network: MakeNetwork = small_network


def host_technique(method: str, **knobs: Any) -> Host:
    """Return a technique with random heads, at these knobs."""
    card = find_technique(method)

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card, seed)

    forward = partial(feature_laws.trained_forward, card)
    return Host(partial(card.make, **knobs), forward, network)


HOSTS = {
    "medusa": host_technique("medusa", nodes=3, heads=2),
    "eagle": host_technique("eagle", nodes=4, draw="sampled"),
    "kangaroo": host_technique("kangaroo", gamma=2, threshold=0.0),
    "pass_sampling": host_technique("pass_sampling", tokens=2),
}

FEATURE_LAWS: dict[str, Callable[[Host], Evidence]] = {
    DRAFT_OF_TEXT: lambda host: feature_laws.draft_is_function_of_text(host.make, host.network),
    DRAFT_OF_TRAINING: lambda host: feature_laws.draft_is_training_forward(*host),
}


@dataclass(frozen=True)
class HeadMutant:
    """A change of a technique, and the feature laws that see it."""

    drafter: str
    change: Change
    laws: tuple[str, ...]


BOTH = DRAFT_OF_TEXT, DRAFT_OF_TRAINING
MUTANTS = [
    HeadMutant(
        "medusa", find_toy("medusa", "heads that read one position early"), (DRAFT_OF_TRAINING,)
    ),
    HeadMutant(
        "medusa",
        Change(
            "states not cut on rewind",
            "del self.states[max(length - 1, 0) :]",
            "pass",
            FeatureDrafter.rewind,
        ),
        BOTH,
    ),
    HeadMutant("eagle", find_toy("eagle", "the token beside its own state"), (DRAFT_OF_TRAINING,)),
    HeadMutant("eagle", find_toy("eagle", "rows of guessed states are kept"), BOTH),
    HeadMutant(
        "eagle",
        Change(
            "rows not cut on rewind",
            "self.stack.cut(len(self.states))",
            "pass",
            EagleDrafter.rewind,
        ),
        BOTH,
    ),
    HeadMutant("kangaroo", find_toy("kangaroo", "adapter rows of rejected tokens"), BOTH),
    HeadMutant(
        "pass_sampling",
        find_toy("pass_sampling", "rows that are read one look-ahead late"),
        (DRAFT_OF_TRAINING,),
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


@pytest.mark.slow
def test_a_distilled_draft_keeps_the_feature_laws() -> None:
    """What it proposes is what the loss of its training reads: a dense pass of the draft."""
    draft = small_network(99, feature_laws.WALK_VOCABULARY)

    def make(request: Request) -> Decoder:
        given = replace(
            request, drafts=[draft.session()], draft_max_lengths=[draft.config.max_positions]
        )
        return find_technique("distillspec").make(given, gamma=3)

    def forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        blocks = draft.torch_blocks()
        states = blocks.final_states(torch.tensor([[*text, *drafted]]))
        return states[0, -1] @ blocks.vocabulary.T

    for law in FEATURE_LAWS.values():
        assert law(Host(make, forward)).branches > 150


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.change.name)
def test_no_older_law_sees_a_misplaced_state(mutant: HeadMutant) -> None:
    """The joint distribution, the contracts, greedy equality and the laws of a round: all are kept."""
    questions = list_questions(find_technique(mutant.drafter), CI)
    older = [case for _, case in questions if case.law not in FEATURE_LAWS]
    with mutant.change.applied():
        proved = [case.run() for case in older]
    assert sum(found.branches for found in proved if found.law == JOINT) >= 50


@pytest.mark.parametrize("law", FEATURE_LAWS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.change.name)
def test_a_feature_law_names_a_misplaced_state(mutant: HeadMutant, law: str) -> None:
    """F1 alone cannot see a mistake that does not depend on the past. It needs no training
    forward.
    """
    with mutant.change.applied():
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
        feature_laws.draft_is_training_forward(
            host.make, lambda model, text, drafted: None, host.network
        )
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
    "a correction of two tokens": r"corrected by \[\d, \d\]",
}


@cache
def find_pasts(temperature: float) -> list[str]:
    """Return what the decoders of all walks have been through, at every draft."""
    host, sampling = HOSTS["medusa"], SamplingParams(temperature)
    return [
        "; ".join(proposal.past)
        for seed in feature_laws.WALK_SEEDS
        for proposal in feature_laws.walk_texts(
            host.make, host.network(seed, feature_laws.WALK_VOCABULARY), sampling, seed
        )
    ]


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("temperature", feature_laws.WALK_TEMPERATURES)
def test_the_walks_meet_every_past(past: str, temperature: float) -> None:
    assert sum(bool(re.search(PASTS[past], one)) for one in find_pasts(temperature)) >= 8
