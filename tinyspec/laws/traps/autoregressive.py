"""Plain decoding: even the baseline can be got wrong."""

from collections.abc import Callable
from itertools import product
from typing import Any

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.session_laws import family_model
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.lm.forward import ForwardRecord
from tinyspec.technique import Request

ROWS = "every token of the text is run once"


def runs_each_token_once(build: Callable[..., Decoder]) -> Evidence:
    """The prompt and n new tokens are len(prompt) + n - 1 rows: a cache spares the rest, and the
    last is never run.
    """
    seen = 0
    for prompt, n in product(((1,), (1, 2, 3)), (1, 4)):
        forward_log, seen = list[ForwardRecord](), seen + 1
        target = family_model("rotations").session(forward_log)
        decoder = build(
            Request(
                target,
                (),
                SamplingParams(temperature=0.0),
                StoppingCriteria(max_new_tokens=n),
                forward_log=forward_log,
            )
        )
        decoder.extend(prompt)
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        rows = sum(call.rows for call in forward_log)
        if rows != len(prompt) + n - 1:
            accuse(
                ROWS,
                len(prompt) + n - 1,
                rows,
                prompt=prompt,
                new_tokens=n,
                counted="rows that were run",
            )
    return Evidence(ROWS, seen)


# ------------------------------------------------------------------ toys


class Rereading(Decoder):
    """Runs the whole text for every token."""

    def step(self, rng: Any) -> Any:
        text = list(self.context)
        self.target.rewind(0)
        self.target.extend(text)
        return super().step(rng)


def without_cache(request: Request) -> Decoder:
    """The first program one writes."""
    return Rereading(
        request.target,
        BaseDrafter(),
        verify_tree,
        sampling=request.sampling,
        stop=request.stop,
        forward_log=request.forward_log,
    )


TRAPS = [Trap(ROWS, runs_each_token_once, card("autoregressive"))]
TOYS = [Toy("no cache", ROWS, without_cache)]
