"""SARATHI: read prompts in chunks, in the same passes in which other requests decode.

Paper: Agrawal et al. 2023, arXiv 2308.16369; Agrawal et al. 2024, arXiv 2403.02310
(Sarathi-Serve, OSDI). Nothing is trained.

Idea. While a long prompt is read, every request that decodes waits: its next token comes late. And
a pass that decodes reads all weights for a few rows. SARATHI gives each pass a budget of rows. All
requests that decode take part, and what is left of the budget goes to prompts, the oldest first. So
a prompt is read in chunks, nobody who decodes waits for long, and the rows that decode cost little,
because the chunk reads the weights anyway.

    chunks = max(C - sum(decodes), L)    rows of prompts in a pass; C: the budget, L: see below
    P^2 / (2 C)                          keys that the chunks of a prompt of P tokens read again

Each chunk reads the keys and values of all chunks before it: that is the price of small chunks.
This is the rule of Sarathi-Serve, with the budget of its released code (512). The first paper has
chunks of one prompt in a pass.

In the papers L is 0: while those that decode use up the budget, prompts wait, if need be for ever.
An addition of ours is `least`, a greater L: so many rows of prompts run in each pass, beyond the
budget where those that decode leave fewer. Then a prompt of P rows, with R rows of older prompts
before it, is read after at most ceil((R + P) / L) passes, whoever else decodes.

Guarantee: EXACT. A request's text is the one that it has alone: rows of different requests do not
see each other, and how a prompt is cut changes none of its states. On a CPU, in float32 and
bfloat16, its logits are the same to the bit.
Pitfall: chunks in passes of their own (then nothing is shared, and the others wait as before);
one product for each request; a chunk that is read again from its start; logits of chunks that end
inside a prompt, which nobody reads.
Tests: tests/speculative/test_sarathi.py (`fill_pass` against the code that runs; a decoding request
gets a token in every pass, however long the prompts; no pass over the budget; with `least` each
prompt is read within the passes above). `tinyspec laws sarathi` runs random arrivals.
Left out: the paper's rule that rows are a multiple of a GPU's tile, since the kernels here take any
number; preemption, since a scheduler reserves a request's positions before it starts; the released
code's chunks that shrink with time, which are off by default.
"""

from collections.abc import Mapping, Sequence

from tinyspec.lm.policies import Pending, split_by_model
from tinyspec.technique import Guarantee, Knob, technique


def fill_pass(
    decodes: Sequence[int], prompts: Sequence[int], budget: int, least: int = 0
) -> list[int]:
    """Return how many rows of each prompt the next pass reads (Sarathi-Serve: stall-free batching).

    decodes  rows of each request that decodes: 1, or 1 + the draft tokens to verify
    prompts  rows that are left of each prompt, the oldest first
    least    rows for prompts in every pass, also where the budget has none left; 0: the papers'

    >>> fill_pass([1, 1, 1], [100, 50], budget=64)
    [61, 0]
    >>> fill_pass([1], [20, 50], budget=64)
    [20, 43]
    >>> fill_pass([40, 40], [20, 50], budget=64, least=8)
    [8, 0]
    """
    rows, left = list[int](), max(budget - sum(decodes), least)
    for prompt in prompts:
        rows.append(max(min(prompt, left), 0))
        left -= rows[-1]
    return rows


class SarathiPolicy:
    """Run all that decode, and fill the pass with chunks of prompts.

    budget  rows of a pass, for each model
    least   rows for prompts in every pass, as in `fill_pass`
    """

    def __init__(self, budget: int = 512, least: int = 0):
        self.budget, self.least, self.most_rows = budget, least, max(budget, least)

    def pick(self, waiting: Sequence[Pending]) -> Mapping[int, int]:
        """Return the rows of each request in the next pass of its model."""
        picked: dict[int, int] = {}
        for own in split_by_model(waiting):
            prompts = [pending for pending in own if pending.is_prefill]
            decodes = [pending for pending in own if not pending.is_prefill]
            picked |= {pending.request: pending.rows for pending in decodes}
            rows = fill_pass(
                [pending.rows for pending in decodes],
                [pending.rows for pending in prompts],
                self.budget,
                self.least,
            )
            chunks = zip(prompts, rows, strict=True)
            picked |= {pending.request: n for pending, n in chunks if n > 0}
        return picked


@technique(
    title="SARATHI: chunked prefill",
    summary="prompts in chunks beside requests that decode",
    paper="Agrawal et al. 2023, arXiv 2308.16369; Agrawal et al. 2024, arXiv 2403.02310",
    family="integrated",
    guarantee=Guarantee.EXACT,
    knobs=[
        Knob(
            "budget",
            512,
            "rows of a pass: all that decode, then chunks of prompts",
            low=1,
            high=1 << 16,
            small=(3, 1),
        ),
        Knob(
            "least",
            0,
            "rows for prompts in every pass, also beyond the budget; 0 may starve a prompt (ours)",
            low=0,
            high=1 << 16,
            small=(0, 2),
        ),
    ],
    kind="policy",
)
def sarathi(budget: int, least: int) -> SarathiPolicy:
    """Return the policy."""
    return SarathiPolicy(budget, least)
