"""Speculative contrastive decoding: draft with the model that the target is contrasted with.

Paper: Yuan et al., ACL 2024, arXiv 2311.08981. Its alpha is our plausibility, because alpha is the
acceptance rate here; its M_e and M_a are expert (target) and amateur (draft). Nothing is trained.

Idea. Contrastive decoding writes what an expert finds likelier than an amateur does. Each token
needs a distribution of both models, and so does speculative decoding. Here the amateur serves both
purposes: it drafts gamma tokens from its own distribution q, the expert scores them in one forward
pass, and the draft is verified against the *contrast* of the two models.

    V(x_<t)  = {x : p_e(x) >= plausibility * max p_e}                   tokens that are plausible
    p(x)     ~ p_e(x)^(1 + beta) / p_a(x)^beta  for x in V, else 0      the contrast
    q(x)     = p_a(x)                                                   the draft's distribution
    P(accept x) = min(1, p(x) / q(x))

The amateur has run all draft tokens but the last, so the contrast needs one more position of it. If
p_a is 0 at a plausible token, the quotient is infinite there: then only such tokens are possible,
in proportion to p_e^(1 + beta), which is the limit for a small p_a. The contrast is formed of the
models' own distributions; temperature and filters come after it.

Guarantee: EXACT relative to plain contrastive decoding (gamma 0), not to the expert alone. beta 0
and plausibility 0 give speculative decoding of the expert.
Pitfall: using the contrast for rejected tokens only, or the expert in place of p in the ratio or
the residual; leaving out the plausible set.
Tests: tests/speculative/test_speculative_contrastive.py (the joint distribution against the
formula; `contrast_weights` against the code that runs on logits; the acceptance rate 1 - TV(p, q);
one pass of the amateur for each token).
Left out: nothing. The defaults of beta, plausibility and gamma are those usual for contrastive
decoding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from tinyspec.decoding.decode import Decoder, Target
from tinyspec.decoding.kernels import as_fraction
from tinyspec.decoding.modeldraft import SharedSessionDrafter
from tinyspec.decoding.sampling import DEVICE, EXACT, kernels_of
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.lm.host import stack_rows, to_numpy
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree

CombineLogits: TypeAlias = Callable[[Sequence[Any], Sequence[int], Sequence[int]], Any]
"""(one row of each model, committed text, path below it) -> the joint row [V]: logits, or a table's
weights. It depends on its arguments alone and must not change the text."""


def contrast_weights(
    expert: Sequence[Any], amateur: Sequence[Any], beta: Any, plausibility: Any
) -> list[Any]:
    """Return the contrast of two distributions, not normalized (section 3).

    expert, amateur  [V] probabilities p_e and p_a
    beta             strength of the contrast
    plausibility     least share of the expert's greatest probability

    On tables of fractions this is what runs. On logits `make_contrast` computes the same.

    >>> contrast_weights([0.5, 0.25, 0.25], [0.5, 0.25, 0.125], beta=1, plausibility=0.5)
    [0.5, 0.25, 0.5]
    """
    floor = plausibility * max(expert)
    is_possible = [p_e > 0 and p_e >= floor for p_e in expert]
    only_expert = [ok and not p_a for ok, p_a in zip(is_possible, amateur, strict=True)]
    if beta and any(only_expert):  # 1 / p_a^beta is infinite there: nothing else is possible
        is_possible, amateur = only_expert, [1] * len(amateur)
    return [
        p_e ** (1 + beta) / p_a**beta if ok else 0 * p_e
        for ok, p_e, p_a in zip(is_possible, expert, amateur, strict=True)
    ]


def make_contrast(beta: float, plausibility: float) -> CombineLogits:
    """Return the function that combines the expert's row (first) and the amateur's into p."""

    def combine(rows: Any, text: Any, path: Any) -> Any:
        expert, amateur = rows
        if kernels_of(expert) is EXACT:
            if beta != round(beta):
                raise TinyspecError(
                    f"beta is {beta}: for tables of fractions use a whole number, such as "
                    f"{math.floor(beta)}"
                )
            return contrast_weights(expert, amateur, round(beta), as_fraction(plausibility))
        xp: Any = torch if kernels_of(expert) is DEVICE else np
        e, a = (
            to_numpy(row) if xp is np and isinstance(row, torch.Tensor) else xp.asarray(row)
            for row in rows
        )
        floor = e.max() + math.log(plausibility) if plausibility else -math.inf
        is_possible = (e >= floor) & (e > -math.inf)
        only_expert = is_possible & (a == -math.inf)
        if beta and bool(only_expert.any()):
            is_possible, a = only_expert, e
        # The models' normalizing constants shift all logits alike, so they need not be subtracted.
        with np.errstate(invalid="ignore"):  # -inf of both models: not possible anyway
            gap = e - a if beta else xp.zeros_like(e)
        return torch.as_tensor(xp.where(is_possible, e + beta * gap, -math.inf))

    return combine


class JointTarget:
    """Several models that hold the same text and score one tree; a function makes p of their rows.

    Contrastive decoding, cascades with deferral (the small model's row where it is good enough) and
    grammar masks are such functions. A model may draft as well (`SharedSessionDrafter`): its
    session keeps the nodes that it drafted. Hidden states and layers are the first model's.
    """

    def __init__(self, members: Sequence[Target], combine: CombineLogits):
        self.members, self.combine = tuple(members), combine
        self.text: list[int] = []
        self._tree = TokenTree()  # the last that was scored

    @property
    def cache_exact(self) -> bool:
        """Return whether every model's cache is what teacher-forcing the text would give."""
        return all(member.cache_exact for member in self.members)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        first, *_ = (
            member.extend(tokens, () if i else hidden_layers)
            for i, member in enumerate(self.members)
        )
        self.text.extend(tokens)
        return first

    def append(self, tokens: Sequence[int]) -> None:
        for member in self.members:
            member.append(tokens)
        self.text.extend(tokens)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Score the tree with every model; row i of the logits combines their rows i."""
        first, *others = (
            member.score(tree, () if i else hidden_layers) for i, member in enumerate(self.members)
        )
        self._tree, rows = tree, list[Any]()
        for node in range(ROOT, len(tree.tokens)):
            parts = [scores.logits[node + 1] for scores in (first, *others)]
            sizes = {len(part) for part in parts}
            if len(sizes) > 1:
                raise TinyspecError(
                    f"the models of a joint target have {sorted(sizes)} tokens: use one vocabulary"
                )
            rows.append(self.combine(parts, self.text, tree.tokens_on(tree.path(node))))
        return first._replace(logits=_stack_rows(rows))

    def commit(self, path: Sequence[int], next: int | None) -> None:
        for member in self.members:
            member.commit(path, next)
        self.text += [*self._tree.tokens_on(path), *(() if next is None else (next,))]

    def rewind(self, length: int) -> None:
        for member in self.members:
            member.rewind(length)
        del self.text[length:]

    def end(self) -> None:
        for member in self.members:
            member.end()
        self.text = []


def _stack_rows(rows: list[Any]) -> Any:
    """Return rows in the form of `Scores`: a list for fractions, else one tensor [n + 1, V]."""
    if kernels_of(rows[0]) is EXACT:
        return rows
    return torch.from_numpy(np.stack(rows)) if isinstance(rows[0], np.ndarray) else stack_rows(rows)


@technique(
    title="Speculative contrastive decoding",
    summary="target contrasted with its own draft",
    paper="Yuan et al. 2024, arXiv 2311.08981",
    reported="1.5x to 3x, LLaMA-2 (survey)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    keeps="the expert contrasted with the amateur",
    knobs=(
        Knob(
            "gamma",
            4,
            "tokens the amateur proposes in a round; 0 is plain contrastive decoding",
            low=0,
            high=1024,
            advised=True,
        ),
        Knob(
            "beta",
            0.5,
            "strength of the contrast; 0 is the expert alone",
            low=0.0,
            high=64.0,
            small=(1.0, 0.0),
        ),
        Knob(
            "plausibility",
            0.1,
            "tokens below this share of the expert's greatest probability are excluded",
            low=0.0,
            high=1.0,
        ),
    ),
)
def speculative_contrastive(
    request: Request, *, gamma: int, beta: float, plausibility: float
) -> Decoder:
    """Return a decoder that drafts with the amateur and verifies against the contrast."""
    amateur = request.drafts[0]
    target = JointTarget([request.target, amateur], make_contrast(beta, plausibility))
    limits = [n for n in (request.positions, request.draft_max_length) if n is not None]
    joint = replace(request, target=target, positions=min(limits, default=None))
    return joint.decoder(SharedSessionDrafter(amateur, gamma, request.stop.eos), verify_tree)
