"""A knob that trades the guarantee for speed must do so: the further it is turned, the less a token
costs.

In free running this is false of any knob, because the text changes. So it is asked on fixed texts:
one round after each of them, every outcome walked.
"""

from collections.abc import Sequence
from fractions import Fraction
from time import perf_counter
from typing import Any

from tinyspec.decoding.rng import Exhaustive
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.stage import Stage
from tinyspec.technique import Card

KNOB_COST = "cost falls as the knob is turned"
PREFIXES = ((0,), (1, 0), (0, 1, 1), (1, 1, 0, 1))
STEPS = 4


def knob_ladder(card: Card) -> list[Any]:
    """Values of the lossy knob, from its neutral one outward."""
    assert card.lossy is not None
    name, neutral = card.lossy
    knob = next(knob for knob in card.knobs if knob.name == name)
    if knob.choices:
        order = list(knob.choices)
        return order if order[0] == neutral else order[::-1]
    low = knob.low if knob.low is not None else min(0.0, float(neutral))
    high = knob.high if knob.high is not None else max(1.0, 2 * float(neutral))
    if neutral == knob.beyond:  # beyond one end: from there to the other
        steps = [high + (low - high) * i / STEPS for i in range(STEPS + 1)]
        return [neutral, *(steps if neutral > high else steps[::-1])]
    far = low if abs(float(neutral) - low) >= abs(high - float(neutral)) else high
    steps = [neutral + (far - neutral) * i / STEPS for i in range(STEPS + 1)]
    return list(
        dict.fromkeys(
            knob.check(round(step) if isinstance(knob.default, int) else step) for step in steps
        )
    )


def cost_of_token(stage: Stage, name: str, value: Any) -> tuple[Any, int]:
    """Layers that the target ran a row of in one round, by the tokens it committed: expectations;
    and the outcomes walked.
    """
    work: Any = Fraction(0)
    tokens: Any = Fraction(0)
    outcomes = 0
    here = Stage(**{**_fields(stage), "knobs": {name: value}})

    def play(rng: Exhaustive) -> tuple[float, int]:
        decoder = here.decoder()
        decoder.extend(here.prompt)
        round = decoder.step(rng)
        return sum(call.row_layers for call in round.calls), len(round.tokens)

    for (layers, committed), probability in Exhaustive.walk(play):
        work, tokens, outcomes = (
            work + probability * layers,
            tokens + probability * committed,
            outcomes + 1,
        )
    return work / tokens, outcomes


def cost_is_monotone(stage: Stage, values: Sequence[Any]) -> Evidence:
    """The cost of a token on every fixed text, along the ladder."""
    begun, branches = perf_counter(), 0
    assert stage.card.lossy is not None
    name = stage.card.lossy[0]
    for prefix in PREFIXES:
        here = Stage(**{**_fields(stage), "prompt": prefix})
        before: Any = None
        for value in values:
            now, outcomes = cost_of_token(here, name, value)
            branches += outcomes
            if before is not None and now > before + 1e-9:
                accuse(
                    KNOB_COST,
                    f"at most {float(before):.6g}",
                    float(now),
                    **here.words(),
                    prefix=prefix,
                    **{name: value},
                )
            before = now
    return Evidence(KNOB_COST, len(PREFIXES) * len(values), branches, perf_counter() - begun)


def _fields(stage: Stage) -> dict[str, Any]:
    return {name: getattr(stage, name) for name in Stage.__dataclass_fields__}
