"""Toys of trained drafters: heads that look right in a demonstration."""

from functools import partial

from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.laws.traps import pass_sampling as pass_traps
from tinyspec.speculative.drafting.medusa import MedusaDrafter
from tinyspec.speculative.drafting.pass_sampling import PassDrafter
from tinyspec.technique import TrainingBatch

_medusa = partial(Toy, technique="medusa")
_pass = partial(Toy, technique="pass_sampling")

TOYS = [
    _medusa(
        "heads trained one token early",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=medusa_traps.PLANTED,
    ),
    _medusa(
        "heads that read one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        MedusaDrafter.propose,
        law=medusa_traps.PLACED,
    ),
    _medusa(
        "one candidate of each head",
        "ranked[depth] = sampling.rank_tokens(rows[depth], history, self.widths[depth])",
        "ranked[depth] = sampling.rank_tokens(rows[depth], history, 1)",
        MedusaDrafter.propose,
        law=medusa_traps.SPREAD,
    ),
    _pass(
        "rows that are read one look-ahead late",
        "rows[node + 1]",
        "rows[node]",
        PassDrafter.observe,
        law=pass_traps.PLACED,
    ),
    _pass(
        "look-aheads trained on the next token",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=pass_traps.AIMED,
    ),
    _pass(
        "rows that serve two drafts",
        "rows, self.logits = self.logits, ()",
        "rows = self.logits",
        PassDrafter.propose,
        law=pass_traps.CYCLE,
    ),
]
