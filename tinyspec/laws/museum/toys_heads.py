"""Toys of trained drafters: heads that look right in a demonstration."""

from functools import partial

from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import bita as bita_traps
from tinyspec.laws.traps import blockwise as blockwise_traps
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.laws.traps import pass_sampling as pass_traps
from tinyspec.lm.forward import ForwardBatch
from tinyspec.speculative.drafting import blockwise
from tinyspec.speculative.drafting.medusa import MedusaDrafter
from tinyspec.speculative.drafting.pass_sampling import PassDrafter
from tinyspec.speculative.integrated.bita import BitaDrafter
from tinyspec.technique import TrainingBatch

_medusa = partial(Toy, technique="medusa")
_blockwise = partial(Toy, technique="blockwise")
_bita = partial(Toy, technique="bita")
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
    _blockwise(
        "one predictor at every depth",
        "slice(depth * h.shape[-1], (depth + 1) * h.shape[-1])",
        "slice(h.shape[-1])",
        blockwise.predict_by_block,
        law=blockwise_traps.PLANTED,
    ),
    _blockwise(
        "a layer that reads one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        blockwise.BlockwiseDrafter.propose,
        law=blockwise_traps.PLACED,
    ),
    _blockwise(
        "a layer without the residual",
        "self.rows(h + parts[:n])",
        "self.rows(parts[:n])",
        blockwise.BlockLayer.logits,
        law=blockwise_traps.RESIDUAL,
    ),
    _blockwise(
        "a pass to predict and another to verify",
        "if not self.states or n <= 0:",
        "if setattr(self, 'odd', not getattr(self, 'odd', False)) or self.odd or n <= 0:",
        blockwise.BlockwiseDrafter.propose,
        law=blockwise_traps.COUNTED,
    ),
    _blockwise(
        "a rejected guess that may be drawn again",
        "rng.draw(exclude_token(p[at], token))",
        "rng.draw(p[at])",
        blockwise.relaxed_verifier,
        law=blockwise_traps.RELAXED,
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
    _bita(
        "the group behind the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        BitaDrafter.observe,
        law=bita_traps.PLACED,
    ),
    _bita(
        "masks behind the newest token alone",
        "for node, depth in depths.items() if max_draft_depth > 0 else ():",
        "for node, depth in [(ROOT, 0)]:",
        BitaDrafter.propose,
        law=bita_traps.ONE_PASS,
    ),
    _bita(
        "a prefix that all rows see",
        "mask[:, :, :lead] = self.probes[list(rows)].cpu().numpy()[:, None, None]",
        "mask[:, :, :lead] = True",
        ForwardBatch.attention_mask,
        law=bita_traps.ALONE,
    ),
]
