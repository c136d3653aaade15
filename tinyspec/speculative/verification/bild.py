"""BiLD, the Big Little Decoder: let a small model write, and a large one correct it when asked.

Paper: Kim et al., NeurIPS 2023, arXiv 2302.07863. Nothing is trained here.

Idea. The small model writes on while it is confident. *Fallback*: if its greatest probability does
not exceed a threshold, its token is dropped and the large model is called, which reads all that the
small model wrote since the last call in one forward pass. *Rollback*: the first of these tokens
whose distance under the large model exceeds a second threshold is removed with all after it, and
the large model writes that position. If there is none, the large model writes the next token.

    fall back  if  max over x of q(x) <= fallback
    roll back  if  -log p(x) > rollback                        p: large model, q: small model

Both thresholds look at the distributions before temperature and filters. Both models sample under
the user's settings (at temperature 0: the argmax). `rule` says what ends a block. "paper"
(algorithm 1): the first token over the threshold, whatever the large model writes there. "safe": if
the large model writes the very token that stood there, nothing is removed and the scan goes on.

Guarantee: LOSSY in `rollback`. At 0 every token is over the threshold, so every position is the
large model's own sample: EXACT under both rules, at any temperature.
Pitfall: a ratio test, or proposing the token that the small model is unsure of: that is speculative
decoding with a confidence stop. The authors' code spares an equal token the rollback, but then
accepts the rest of the block without a test (laws/museum).
Tests: tests/speculative/test_bild.py (`write_turn` against the code that runs, outcome by outcome;
both exact ends; fewer calls of the large model as either threshold is relaxed).
Left out: aligning the small model to the large one's outputs before use, which is training a draft,
and encoder-decoder models. `gamma`, a cap on one turn of the small model, is only in the authors'
code (10). Their code lets the large model write the first token; here the small model begins, as in
algorithm 1. The thresholds are the defaults of their code; the paper tunes them for each task.
"""

import math
from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter, highest_probability
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.decoding.verify import Verdict
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


def write_turn(
    p: Callable[..., Any], q: Callable[..., Any], text: list[int], fallback: float, rollback: float,
    gamma: int, rng: Any,
) -> list[int]:  # fmt: skip
    """Return the text after the small model's turn and one call of the large model (algorithm 1).

    p, q  functions from a text to the next token's distribution [V], of the large and small model

    The decoder runs `BildDrafter` and `rollback_verifier`, which read the large model's
    distributions from one forward pass. A test compares the two on every outcome.
    """
    start, text = len(text), list(text)
    while len(text) < start + gamma and max(q(text)) > fallback:  # fallback policy
        text.append(rng.choice(len(q(text)), p=q(text)))
    for i in range(start, len(text)):
        if p(text[:i])[text[i]] < math.exp(-rollback):  # rollback policy: -log p(x) > rollback
            text = text[:i]
            break
    return [*text, rng.choice(len(p(text)), p=p(text))]


class BildDrafter(ModelDrafter):
    """Let the small model write until it is unsure of the next token."""

    def __init__(
        self, fallback: float, model: Any, gamma: int, ends: frozenset[int], positions: int | None
    ):
        super().__init__(model, gamma, ends, positions)
        self.fallback = fallback

    def should_draft(self, probs: TargetProbs, tip: int) -> bool:
        """Apply the fallback policy, before anything is sampled from the distribution."""
        return bool(highest_probability(probs, tip) > self.fallback)


def rollback_verifier(rollback: float, rule: str) -> Verifier:
    """Return a verifier that applies the rollback policy and adds one token of the large model.

    It raises TinyspecError if the draft branches.
    """
    least = math.exp(-rollback)  # -log p(x) > rollback if and only if p(x) < least

    def review(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        at = ROOT
        path: tuple[int, ...] = ()
        for node in tree.chain_nodes("BiLD's review"):
            token = tree.tokens[node]
            if p.probs_under(at, UNCHANGED)[token] < least:
                own = rng.draw(p[at])
                if rule == "paper" or own != token:
                    return Verdict(path, own, (node,))
            path, at = (*path, node), node
        return Verdict(path, rng.draw(p[at]))

    return review


@technique(
    title="BiLD: the Big Little Decoder",
    summary="small model writes, large one corrects",
    paper="Kim et al. 2023, arXiv 2302.07863",
    reported="up to 2.12x, with little loss of quality (abstract)",
    family="verification",
    guarantee=Guarantee.LOSSY,
    drafts=1,
    lossy=("rollback", 0.0),
    knobs=(
        Knob(
            "fallback",
            0.6,
            "the small model hands over unless it is surer than this; 1: it always hands over",
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
        Knob(
            "rule",
            "paper",
            "a token above the rollback distance is removed: always (paper), or only if the target "
            "writes another token there (safe)",
            choices=("paper", "safe"),
            small=("safe",),
        ),
        Knob(
            "gamma",
            10,
            "most tokens the small model writes before the large model reads them",
            low=1,
            high=64,
            advised=True,
        ),
    ),
)
def bild(request: Request, *, fallback: float, rollback: float, rule: str, gamma: int) -> Decoder:
    """Return a decoder in which the draft model writes and the target removes what is bad."""
    drafter = BildDrafter(
        fallback, request.drafts[0], gamma, request.stop.eos, request.draft_max_length
    )
    return request.decoder(drafter, rollback_verifier(rollback, rule))
