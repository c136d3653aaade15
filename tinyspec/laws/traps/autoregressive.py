"""Plain decoding: even the baseline can be got wrong."""

from collections.abc import Iterator
from itertools import product

from tinyspec.laws.evidence import collect_evidence, expect_equal
from tinyspec.laws.session_laws import family_model
from tinyspec.laws.traps import GREEDY, Build, Trap, begin_decoder, card, run_all_rounds

ROWS = "every token of the text is run once"


@collect_evidence(ROWS)
def runs_each_token_once(build: Build) -> Iterator[int]:
    """Check that the prompt and n new tokens are len(prompt) + n - 1 rows.

    A cache spares the rest, and the last token is never run.
    """
    for prompt, n in product(((1,), (1, 2, 3)), (1, 4)):
        decoder = begin_decoder(build, [family_model("rotations")], prompt, GREEDY, n)
        run_all_rounds(decoder)
        rows = sum(call.rows for call in decoder.forward_log)
        case = {"prompt": prompt, "new_tokens": n, "counted": "rows that were run"}
        expect_equal(ROWS, len(prompt) + n - 1, rows, **case)
        yield 0


TRAPS = [Trap(ROWS, runs_each_token_once, card("autoregressive"))]
