"""Every registered technique keeps the laws of a whole request.

Each of these laws must see the defects that are listed for it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from tests.laws.hosted import card
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, token_origins
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws import card_laws
from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.technique import Card, Guarantee, Request, find_technique, load_techniques
from tinyspec.tree import TokenTree

APPROXIMATE = [
    name
    for name, known in load_techniques().items()
    if known.kind == "decoder" and known.guarantee is Guarantee.APPROX
]


@pytest.mark.parametrize("law", card_laws.REQUEST_LAWS)
@pytest.mark.parametrize("name", APPROXIMATE)
def test_a_technique_with_an_oracle_of_its_own_keeps_the_laws_of_a_request(
    name: str, law: str
) -> None:
    """The others are asked where they are proved."""
    assert card_laws.REQUEST_LAWS[law](load_techniques()[name]).cases >= 8


def test_what_is_drafted_is_accepted_often_enough_to_cross_a_stop() -> None:
    for stage in card_laws.request_stages(find_technique("speculative_decoding")):
        if stage.draft == "right":
            rounds = card_laws.finish_request(card_laws.begin_on_stage(stage))
            assert max(len(one.tokens) for one in rounds) > 1


# --- what each law kills --------------------------------------------------------------------------


def drafting(kind: Callable[[Request], BaseDrafter], loop: type[Decoder] = Decoder) -> Card:
    """A technique with such a drafter in such a loop."""

    def build(request: Request) -> Decoder:
        made = request.decoder(kind(request), verify_tree)
        made.__class__ = loop
        return made

    return card(build, drafts=1)


def chain(request: Request) -> ModelDrafter:
    return ModelDrafter(request.drafts[0], 2)


class Shared(BaseDrafter):
    """Remembers the output in the class, so every request copies from all others."""

    said: ClassVar[list[int]] = []

    def __init__(self, request: Request):
        return None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return TokenTree.chain(self.said[-2:][:max_draft_depth])

    def observe(self, round: Round) -> None:
        self.said.extend(round.tokens)


class Python(BaseDrafter):
    """Drafts by the global generator."""

    def __init__(self, request: Request):
        return None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return TokenTree.chain([random.randrange(3)][:max_draft_depth])


class Torch(Python):
    """Drafts by torch's global generator."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        return TokenTree.chain([int(torch.randint(3, ()))][:max_draft_depth])


class Silent(Decoder):
    """Does not report what was cut off."""

    def step(self, rng: RandomSource) -> Round:
        return super().step(rng)._replace(truncated=0)


class Careless(ModelDrafter):
    """Looks ahead after the round was reported."""

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.model.score(TokenTree())


class Late(StoppingCriteria):
    """Looks for a stop at the end of a block alone."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, str | None]:
        kept, reason = super().cut(new, fresh, limit)
        if reason in ("eos", "stop") and kept < len(fresh):
            room = self.tokens_left(len(new), limit)
            return (len(fresh), None) if room is None or room[0] > len(fresh) else room
        return kept, reason


class Blockwise(StoppingCriteria):
    """Looks for stops inside of a block alone."""

    def cut(
        self, new: Sequence[int], fresh: Sequence[int], limit: int | None = None
    ) -> tuple[int, str | None]:
        kept, reason = replace(self, max_new_tokens=None).alone(fresh)
        room = self.tokens_left(len(new), limit)
        return room if room is not None and room[0] < kept + (reason is None) else (kept, reason)

    def alone(self, fresh: Sequence[int]) -> tuple[int, str | None]:
        return super().cut((), fresh)


class FirstEnd(StoppingCriteria):
    """Knows one end of text, though the model has several."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "eos", frozenset(sorted(self.eos)[:1]))


def stopping(kind: type[StoppingCriteria]) -> Card:
    """A technique whose loop has such a stop."""

    def build(request: Request) -> Decoder:
        request.stop = kind(**vars(request.stop))
        return request.decoder(chain(request), verify_tree)

    return card(build, drafts=1)


def swapped(jobs: Sequence[Callable[[Any], Any]], scheduler: Scheduler) -> list[Any]:
    return run_together(jobs, scheduler)[::-1]


def wider(jobs: Sequence[Callable[[Any], Any]], scheduler: Scheduler) -> list[Any]:
    """A batch whose logits are rounded as those of no single text are."""
    rows = run_together(jobs, scheduler)
    return [
        [
            one._replace(scores=one.scores._replace(logits=one.scores.logits * (1 + 2**-22)))
            for one in row
        ]
        for row in rows
    ]


class Uncounted(Statistics):
    """A round's own token is forgotten where the whole draft passed."""

    def count(self, round: Round) -> None:
        super().count(round)
        self.emitted -= "bonus" in token_origins(round)


class Proposed(Statistics):
    """Counts every drafted token as accepted."""

    def count(self, round: Round) -> None:
        super().count(round)
        self.accepted = self.drafted


SOUND = drafting(chain)
DEFECTS: dict[str, tuple[str, Callable[[], Evidence]]] = {
    "a bonus is not counted": (
        card_laws.TRACE_IDENTITIES,
        lambda: card_laws.trace_identities(SOUND, Uncounted),
    ),
    "drafted is accepted": (
        card_laws.TRACE_IDENTITIES,
        lambda: card_laws.trace_identities(SOUND, Proposed),
    ),
    "a bonus is called accepted": (
        card_laws.TRACE_IDENTITIES,
        lambda: card_laws.trace_identities(
            SOUND, origins=lambda one: ["accepted"] * len(one.tokens)
        ),
    ),
    "the cut is not told": (
        card_laws.TRACE_IDENTITIES,
        lambda: card_laws.trace_identities(drafting(chain, Silent)),
    ),
    "a call after the report": (
        card_laws.CALLS_IN_ROUNDS,
        lambda: card_laws.every_call_is_in_a_round(
            drafting(lambda request: Careless(request.drafts[0], 2))
        ),
    ),
    "state in a class": (
        card_laws.SAME_SEED,
        lambda: card_laws.same_seed_same_output(drafting(Shared)),
    ),
    "drafts by global chance": (
        card_laws.SAME_SEED,
        lambda: card_laws.same_seed_same_output(drafting(Python)),
    ),
    "requests share a memory": (
        card_laws.TWO_REQUESTS,
        lambda: card_laws.two_requests_are_the_two_alone(drafting(Shared)),
    ),
    "random moves": (
        card_laws.GLOBAL_RANDOMNESS,
        lambda: card_laws.global_randomness_is_untouched(drafting(Python)),
    ),
    "torch moves": (
        card_laws.GLOBAL_RANDOMNESS,
        lambda: card_laws.global_randomness_is_untouched(drafting(Torch)),
    ),
    "rows come back in another order": (
        card_laws.BATCH_ROW_ALONE,
        lambda: card_laws.a_batch_row_is_the_row_alone(SOUND, swapped),
    ),
    "rows are rounded otherwise": (
        card_laws.BATCH_ROW_ALONE,
        lambda: card_laws.a_batch_row_is_the_row_alone(SOUND, wider),
    ),
    "a stop inside a block is missed": (
        card_laws.STOP_OF_REQUEST,
        lambda: card_laws.stop_of_request(stopping(Late)),
    ),
    "a stop across two blocks is missed": (
        card_laws.STOP_OF_REQUEST,
        lambda: card_laws.stop_of_request(stopping(Blockwise)),
    ),
    "one end of text of several": (
        card_laws.STOP_OF_REQUEST,
        lambda: card_laws.stop_of_request(stopping(FirstEnd)),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_law_of_requests_sees(defect: str) -> None:
    law, judge = DEFECTS[defect]
    with pytest.raises(LawViolated) as caught:
        judge()
    assert caught.value.counterexample.law == law
    Shared.said.clear()


def test_every_law_of_requests_kills_something() -> None:
    assert {law for law, _ in DEFECTS.values()} == set(card_laws.REQUEST_LAWS)


def test_the_sound_technique_under_the_defects_is_not_accused() -> None:
    for law in card_laws.REQUEST_LAWS.values():
        law(SOUND)
    assert card_laws.stop_of_request(stopping(StoppingCriteria)).cases > 100
