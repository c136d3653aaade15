"""SkipDecode (Del Corro et al. 2023): the top layers are kept, and the cost is known before."""

from collections.abc import Iterator
from functools import partial

from tinyspec.decoding.rng import Seeded
from tinyspec.early_exit.skip_decode import DepthSchedule, SkipTarget
from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import BY_PLACE, PLACE_SETTINGS, follows_the_places
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.session import Session

KNOWN_COST = "each token runs its layers once, the same in every text of a batch"

PROMPTS, TOKENS = ((1,), (0, 1, 2), (0, 1, 2, 1, 0)), 5


@collect_evidence(KNOWN_COST)
def cost_is_known_before(build: Build) -> Iterator[int]:
    """Check the rows and layers of every pass against the sets that were worked out by hand."""
    for setting in PLACE_SETTINGS:
        expected = [(1, len(setting.sets[min(t, len(setting.sets) - 1)])) for t in range(TOKENS)]
        for model in (
            TableModel(2, 4, setting.layers, zeros=False),
            small_network(2, layers=setting.layers),
        ):
            for prompt in PROMPTS:
                decoder = begin_decoder(build, [model], prompt, SAMPLED, TOKENS, **setting.knobs)
                got = []
                while not decoder.finished:
                    calls = decoder.step(Seeded(1).split("round", decoder.rounds)).calls
                    got.append(
                        (
                            sum(call.rows for call in calls),
                            int(sum(call.row_layers for call in calls)),
                        )
                    )
                case = {"model": repr(model), "prompt": prompt, **setting.knobs}
                expect_equal(KNOWN_COST, expected, got, **case, counted="rows, layers of a token")
                yield 1


TRAPS = [
    Trap(BY_PLACE, follows_the_places, card("skip_decode")),
    Trap(KNOWN_COST, cost_is_known_before, card("skip_decode")),
]

_skip = partial(Toy, technique="skip_decode")
SETS = "return [*range(self.warmup), *range(max(first, self.warmup), self.depth)]"

TOYS = [
    _skip(
        "an early exit whose depth decays",
        SETS,
        "return [*range(self.count_layers(t))]",
        DepthSchedule.layers_at,
        law=BY_PLACE,
    ),
    _skip(
        "no warm-up",
        SETS,
        "return [*range(self.depth - self.count_layers(t), self.depth)]",
        DepthSchedule.layers_at,
        law=BY_PLACE,
    ),
    _skip(
        "the place in the text, whatever the prompt's length",
        "self.start = len(self.session) - 1",
        "self.start = 0",
        SkipTarget._begin_schedule,
        law=KNOWN_COST,
    ),
    _skip(
        "a new plan runs the newest token again",
        "self._advance_ready()",
        "pass",
        Session.set_plan,
        law=KNOWN_COST,
    ),
]
