"""Block verification: judge the whole draft at once, and let a lucky token pay for an unlucky one.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh, "Block verification accelerates speculative
decoding", ICLR 2025, arXiv 2403.10444. The draft is the usual chain. Behind each of its tokens
stands a *weight*, the running likelihood ratio clipped at 1 at every step: w_0 = 1, w_i = min(1,
w_(i-1) p(x_i) / q(x_i)). With p and q the rows behind x_i, the place i passes with S_i / (S_i + 1 -
w_i), S_i = sum_x max(0, w_i p(x) - q(x)); the last place, with no draft behind it, with w_i. Each
place has a uniform of its own, and the *largest* place that passes ends the round, whatever failed
before it. The token added there is drawn from max(0, w_i p - q), normalised; behind a draft that
passes whole, from p. Nothing is trained, and nothing is computed that token verification does not
compute.

Why the law is kept: the round keeps at least i of the tokens x_1..x_i with probability w_i, by
backward induction, and ends at i with probability S_i. So behind x_1..x_i it goes on to x with
min(q(x), w_i p(x)) and ends with max(0, w_i p(x) - q(x)): together w_i p(x), that is, p. And w_i is
never below the product of the min(1, p / q) of token verification.

Guarantee: EXACT, over chains; a law of None is a point mass. Every guess has been looked at, also
those behind the end: none may be proposed again with its law. Tested in
tests/speculative/test_block_verification.py: P(at least i) = w_i, so accepted tokens = sum_i
E_q[w_i], never fewer than token by token, never more than sum_i sum_x min(p(x_1..i), q(x_1..i));
11/9 against 10/9 on the paper's two-letter example; the joint law. The paper reports 5 to 8 % of
wall time over token verification.
Left out: the paper's second algorithm, greedy within a round, which the next rounds pay for with
other target laws; a verifier here has no memory, and the first is the best of those that need none.
"""

from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict
from tinyspec.errors import TinyspecError
from tinyspec.speculative.verification.vectors import as_row, ratio, vectors
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree


def verify_tree_by_block(tree: TokenTree, p: Any, rng: RandomSource) -> Verdict:
    """Keep the draft up to the largest place that passes, then draw one more token. The output has
    exactly the law p.

    One `accept` a tested place, from the last to the first, and one `draw`. O(gamma V). Raises
    TinyspecError where the draft branches, and as `verify_tree` does.
    """
    draft = _chain(tree)
    at = [ROOT, *draft]  # the node at each place; the guess behind it is draft[place]
    weights: list[Any] = [1]
    for place, node in enumerate(draft):
        weights.append(
            min(1, weights[-1] * ratio(p[at[place]], tree.draft_probs[node], tree.tokens[node]))
        )
        if not weights[-1] > 0:
            break  # what p cannot say is never kept, nor anything behind it
    place = len(weights) - 1
    if place == len(draft) and (not draft or rng.accept(weights[place])):
        return Verdict(tuple(draft), rng.draw(p[at[place]]))
    # Uniforms are independent, so the largest place that passes is the first from behind: those
    # before it need no test.
    while place > 0:
        place -= 1
        left = _left(p[at[place]], tree, draft[place], weights[place])
        if not place or rng.accept(_passes(left.sum(), weights[place])):
            break
    row = (
        as_row(left) if left.sum() > 0 else p[at[place]]
    )  # nothing left: p and q agree up to rounding
    return Verdict(tuple(draft[:place]), rng.draw(row), tuple(draft[place:]))


def _left(row: Any, tree: TokenTree, node: int, weight: Any) -> Any:
    """max(0, weight p - q), q being what the guess `node` was drawn from."""
    p, q = vectors(row, tree.draft_probs[node], tree.tokens[node])
    return (weight * p - q).clip(min=0)


def _passes(left: Any, weight: Any) -> Any:
    """S / (S + 1 - w). 0 / 0 is 1: p is q there, and the guess behind it cannot have failed."""
    return left / (left + 1 - weight) if left + 1 - weight > 0 else 1


def _chain(tree: TokenTree) -> list[int]:
    """The guesses from the first down, probes aside."""
    draft = [node for node, probe in enumerate(tree.probe) if not probe]
    if [tree.parents[node] for node in draft] != [ROOT, *draft][: len(draft)]:
        raise TinyspecError(
            "block verification judges one chain of guesses, and this draft branches: judge it with spectr"
        )
    return draft


@technique(
    title="Block verification",
    summary="accepts whole blocks, not single tokens",
    paper="Sun et al. 2025, arXiv 2403.10444",
    family="verification",
    guarantee=Guarantee.EXACT,
    drafts=1,
    knobs=(Knob("gamma", 8, "tokens the draft model proposes in a round", low=1),),
)
def block_verification(request: Request, *, gamma: int) -> Decoder:
    """A draft model guesses a chain of gamma tokens; the target judges it whole."""
    reach = request.draft_max_lengths[0] if request.draft_max_lengths else None
    return request.decoder(
        ModelDrafter(request.drafts[0], gamma, request.stop.eos, reach), verify_tree_by_block
    )
