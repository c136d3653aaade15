"""BiLD, the Big Little Decoder: the small model writes, asks when it is unsure, and is corrected
where it was far off.

Kim et al., NeurIPS 2023, arXiv 2302.07863. The small model writes on while it is sure. *Fallback*:
where its greatest probability does not exceed a threshold, its guess is dropped and the large model
is called. The call reads all that the small model wrote since the last one. *Rollback*: the first
of these tokens whose distance -log p(x) under the large model exceeds a second threshold is taken
back with all behind it, and the large model writes that place; if none does, it writes the next.
What makes it BiLD and not speculative decoding with a confidence stop: there is no ratio test (a
token of the small model stays unless it is *bad*), and the unsure token is never proposed. Both
thresholds look at the models' laws before temperature and filters; both models draw under the
user's settings (at temperature 0: their argmax).

Two rollbacks. "paper" (algorithm 1): the first bad token ends the block, whatever the large model
writes there. "safe": where the large model writes the very token that stood there, nothing is taken
back and the scan goes on. The authors' code also saves that rollback, but then keeps the rest of
the block unread, however bad: its toy is in laws/traps/bild.py.

Guarantee: LOSSY in `rollback`. At 0 every token is bad, so that every place is the large model's
own draw: EXACT under both rules at any temperature (and a fallback of 1 calls the large model for
every token). Tested in tests/speculative/test_bild.py: both ends, the text against algorithm 1
written out, calls of the large model falling as either threshold is turned.
Left out: aligning the small model to the large one's outputs before use, which is training a draft,
and encoder-decoder models. gamma is a cap on one turn of the small model that only the authors'
code has (10).
"""

import math
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter, confidence
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.decoding.verify import Verdict
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


class BildDrafter(ModelDrafter):
    """The small model's turn: it ends where the next token would be one it is unsure of."""

    def __init__(
        self, fallback: float, model: Any, gamma: int, ends: frozenset[int], positions: int | None
    ):
        super().__init__(model, gamma, ends, positions)
        self.fallback = fallback

    def should_draft(self, laws: TargetProbs, tip: int) -> bool:
        """The fallback policy: reads the row, before anything is drawn from it."""
        return bool(confidence(laws, tip) > self.fallback)


def rollback_verifier(rollback: float, rule: str) -> Verifier:
    """The large model's turn: the rollback policy, and one token of its own."""
    least = math.exp(-rollback)  # -log p(x) > rollback

    def review(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        at = ROOT
        path: tuple[int, ...] = ()
        for node, token in enumerate(tree.tokens):
            if p.probs_under(at, UNCHANGED)[token] < least:
                said = rng.draw(p[at])
                if rule == "paper" or said != token:
                    return Verdict(path, said, (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return review


@technique(
    title="BiLD: the Big Little Decoder",
    summary="small model writes, large one corrects",
    paper="Kim et al. 2023, arXiv 2302.07863",
    family="verification",
    guarantee=Guarantee.LOSSY,
    drafts=1,
    lossy=("rollback", 0.0),
    knobs=(
        Knob(
            "fallback",
            0.6,
            "the small model hands over unless it is surer than this; 1: always",
            low=0.0,
            high=1.0,
            small=(0.5, 0.0),
        ),
        Knob(
            "rollback",
            5.0,
            "distance -log p above which a token is taken back; 0 is exact",
            low=0.0,
            high=20.0,
        ),
        Knob("rule", "paper", "what ends a block", choices=("paper", "safe"), small=("safe",)),
        Knob("gamma", 10, "most tokens the small model writes before it is read", low=1),
    ),
)
def bild(request: Request, *, fallback: float, rollback: float, rule: str, gamma: int) -> Decoder:
    """The draft model writes; the target reads when called, and takes back what is bad."""
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    little = BildDrafter(fallback, request.drafts[0], gamma, request.stop.eos, reach)
    return request.decoder(little, rollback_verifier(rollback, rule))
