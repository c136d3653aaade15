"""TETRIS: verify the draft tokens of a batch that are most likely to be accepted.

Paper: Wu et al., ACL 2025, arXiv 2502.15197. Nothing is trained.

Idea. A server can verify so many rows in a pass, the *capacity*. Requests differ in how well they
are drafted, so an equal share for each is not the best. TETRIS drafts a few tokens more than the
capacity holds, scores each by the probability that it and all before it are accepted, and verifies
those with the highest scores, over all requests of the batch:

    score(i, j)  = s_i1 s_i2 ... s_ij      s_ij: how likely token j of request i is to be accepted
    verified     = the `capacity` greatest scores

A product falls along a draft, so what is chosen of a draft is always its beginning. If tokens are
accepted independently, no other choice accepts more of them in this pass.

Guarantee: EXACT, because s_ij is known before token j is drawn: it is the draft model's highest
probability there. The paper's s_ij is the draft probability of the token that *was* drawn. Above
temperature 0 that is not exact. An example: a pass has room for one draft token, and two requests
have one each. For the first one p = (1/2, 1/2) and q = (9/10, 1/10); the score of the second one's
token is 1/2. Then token 0 of the first request is verified and token 1 is not, so

    P(0) = 9/10 * 5/9 + 1/10 * 1/2 = 11/20         and not p(0) = 1/2

`tinyspec laws --toys` shows it. At temperature 0 both scores are the same.
Pitfall: scores of the drawn tokens; an equal share for each request.
Tests: tests/speculative/test_tetris.py (the choice against all choices of a small batch; the
distribution of one request of two, by fractions; the capacity of every pass).
Left out: scores that are learnt from what was accepted. The capacity is set by hand, as by the
authors' script: so many rows for each request that asks together. The defaults of both knobs are
ours: the script's depend on the server.
Ours: s_ij is read before the temperature; the released code reads it after. A request alone drafts
the extra tokens too; the released code drafts them from two requests on.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter, highest_probability
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.batched import BatchDrafter
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import TokenTree


def share_capacity(chances: Mapping[int, Sequence[float]], capacity: int) -> dict[int, int]:
    """Return how many draft tokens of each request are verified.

    chances  of each draft token to be accepted if all before it are, by request

    Of equal scores, the shallower token is verified, then that of the earlier request.

    >>> share_capacity({0: [0.9, 0.9, 0.9], 1: [0.5, 0.9]}, capacity=3)
    {0: 3, 1: 0}
    >>> share_capacity({0: [0.9, 0.5, 0.5], 1: [0.5, 0.9]}, capacity=3)
    {0: 2, 1: 1}
    """
    ranked = sorted(
        (-score, depth, request)
        for request, row in chances.items()
        for depth, score in enumerate(accumulate(row, mul))
    )
    verified = dict.fromkeys(chances, 0)
    for _, _, request in ranked[:capacity]:
        verified[request] += 1
    return verified


class TetrisRule:
    """Share the rows of a pass. `verified`: draft tokens for each request, on average."""

    def __init__(self, verified: int):
        self.verified = verified

    def decide(
        self, questions: Mapping[int, Sequence[float]], n_decoding: int
    ) -> Mapping[int, int]:
        """Return how many tokens of each draft are verified."""
        return share_capacity(questions, self.verified * len(questions))


class TetrisDrafter(BatchDrafter):
    """Draft, and then keep what the batch has room for."""

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.chances: list[float] = []
        kept = self.longest
        if self.override is not None:  # any length that is known before the tokens are drawn
            kept = self.override(self.longest + 1, rng)
        tree = ModelDrafter.propose(self, context, max_draft_depth, sampling, rng)
        if self.override is None:
            kept = self.ask(self.chances[: len(tree.tokens)])
        return TokenTree.chain(tree.tokens[:kept], tree.draft_probs[:kept])

    def should_draft(self, probs: TargetProbs, tip: int) -> bool:
        self.chances.append(float(highest_probability(probs, tip)))
        return True


@technique(
    title="TETRIS",
    summary="verifies the likeliest drafts of a batch",
    paper="Wu et al. 2025, arXiv 2502.15197",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    of_batch=True,
    knobs=(
        Knob("gamma", 5, "tokens that each request drafts", low=1, high=64, small=(2,)),
        Knob(
            "verified",
            3,
            "draft tokens that a pass verifies for each request, on average",
            low=1,
            high=64,
            small=(1, 2),
        ),
    ),
)
def tetris(request: Request, *, gamma: int, verified: int) -> Decoder:
    """Return a decoder whose drafts share the rows of a pass with those of its batch."""
    name = ("tetris", verified)
    drafter = TetrisDrafter(request, gamma, name, lambda: TetrisRule(verified))
    return request.decoder(drafter, verify_tree)
