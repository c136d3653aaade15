"""Synergy: a draft length for each batch size, from a profile that is measured once.

Paper: Su, Giannoula, Pekhimenko 2023, arXiv 2310.18813. Nothing is trained.

Idea. A single request leaves most of the arithmetic of a machine idle, and a long draft fills it. A
large batch fills it already: then each draft token that is rejected costs time. So the best draft
length falls with the batch size, and no fixed length is good for all. The seconds of passes are
measured for some batch sizes b and draft lengths s, and how many draft tokens are accepted. From
these follows a table of best lengths; 0 is plain decoding. Then the number of requests is looked up
in every round, and the nearest size of the table gives the length:

    l(s)           = tokens of a round: 1 + the mean number of accepted draft tokens of s
    seconds(b, s)  = (t_target(b, s) + s t_draft(b)) / l(s)          of a token of each request
    best(b)        = the s with the least seconds(b, s)

Guarantee: EXACT. A length is chosen before its draft is drawn.
Pitfall: a table that is typed in; no length 0 in it; a batch size that counts requests which still
read their prompts, so that the length jumps whenever one arrives (vLLM issue 49548).
Tests: tests/speculative/test_synergy.py (the table against the least time of all lengths; which
requests count; a profile of a pair of models whose passes cost what the test says).
The paper measures before requests are served, on texts of a dataset. Here the texts of the first
requests that ask are measured (192 tokens in all); all requests wait meanwhile.
Left out: the paper's power law for l(s). Here l(s) is what was measured at every s. `table` gives
lengths by hand, as vLLM's does; `longest` bounds them, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyspec.decoding.costs import CostModel
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError, describe_value
from tinyspec.speculative.batched import (
    SIZES,
    BatchDrafter,
    BatchProfile,
    find_profile,
    read_models,
)
from tinyspec.technique import Guarantee, Knob, Request, technique

MOST_SIZES = 64  # of a table: it is looked through in every round


def best_lengths(
    costs: CostModel, reach: Sequence[float], sizes: Sequence[int] = SIZES
) -> dict[int, int]:
    """Return the best draft length for each batch size; of equal ones the shortest.

    reach  [longest] share of rounds in which at least 1, 2, ... draft tokens are accepted

    >>> from tinyspec.decoding.costs import MeasuredRounds
    >>> alone, crowd = [1.0, 1.1, 1.2], [1.0, 2.0, 3.0]
    >>> costs = MeasuredRounds({1: alone, 8: crowd}, {1: 0.1, 8: 0.1})
    >>> best_lengths(costs, [0.8, 0.6], [1, 8])
    {1: 2, 8: 0}
    """

    def seconds(size: int, length: int) -> float:
        tokens = 1 + sum(reach[:length])
        steps = length * costs.step_seconds(size)
        return (costs.verify_seconds(size, size * length) + steps) / tokens

    return {
        size: min(range(len(reach) + 1), key=lambda length: (seconds(size, length), length))
        for size in sizes
    }


def read_length_table(text: str) -> dict[int, int]:
    """Return the lengths by batch size that a text gives.

    >>> read_length_table("5@1+1@8+0@16")
    {1: 5, 8: 1, 16: 0}
    """
    try:
        pairs = [entry.split("@") for entry in text.split("+")]
        table = {int(size): int(length) for length, size in pairs}
        if min(table) < 1 or min(table.values()) < 0 or len(table) > MOST_SIZES:
            raise ValueError
    except ValueError:
        raise TinyspecError(
            f"table is {describe_value(text)}: it must be draft lengths by batch size, as "
            f"5@1+1@8+0@16, of at most {MOST_SIZES} sizes"
        ) from None
    return table


class SynergyRule:
    """Look up the draft length for the number of requests that decode.

    table    lengths by batch size; empty: measured when requests ask first
    measure  texts -> the profile of the models
    """

    def __init__(
        self,
        table: Mapping[int, int],
        measure: Callable[[Sequence[Sequence[int]]], BatchProfile] | None,
    ):
        self.table, self.measure = dict(table), measure

    def decide(self, questions: Mapping[int, Sequence[int]], n_decoding: int) -> Mapping[int, int]:
        """Return one length for all. The questions are the texts of the requests."""
        if self.measure is not None:
            self.table = best_lengths(*self.measure([*questions.values()]))
            self.measure = None
        nearest = min(self.table, key=lambda size: (abs(size - n_decoding), size))
        return dict.fromkeys(questions, self.table[nearest])


class SynergyDrafter(BatchDrafter):
    """Draft as many tokens as are best for the batch."""

    def question(self) -> Any:
        return self.context


@technique(
    title="Synergy: a draft length for each batch size",
    summary="a draft length for each batch size",
    paper="Su et al. 2023, arXiv 2310.18813",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    of_batch=True,
    knobs=(
        Knob("longest", 8, "longest draft", low=1, high=64, small=(2,)),
        Knob(
            "table",
            "",
            "draft lengths by batch size, as 5@1+1@8+0@16; empty: measured when first needed",
            small=("2@1+0@2", "1@1"),
        ),
    ),
)
def synergy(request: Request, *, longest: int, table: str) -> Decoder:
    """Return a decoder whose draft length depends on how many requests decode."""
    lengths = read_length_table(table) if table else {}

    def make_rule() -> SynergyRule:
        if lengths:
            return SynergyRule(lengths, None)
        models = *read_models(request), request.sampling
        return SynergyRule({}, lambda texts: find_profile(*models, texts, longest))

    drafter = SynergyDrafter(request, longest, ("synergy", longest, table), make_rule)
    return request.decoder(drafter, verify_tree)
