"""Plain decoding: even the baseline can be got wrong."""

from collections.abc import Callable
from itertools import product

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.session_laws import family_model
from tinyspec.laws.traps import Trap, card
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


TRAPS = [Trap(ROWS, runs_each_token_once, card("autoregressive"))]
