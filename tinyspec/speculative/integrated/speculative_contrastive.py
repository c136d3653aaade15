"""Speculative contrastive decoding: the small model drafts, and is also what the large one is
contrasted with.

Yuan et al., ACL 2024, arXiv 2311.08981. Contrastive decoding writes what an expert holds for
likelier than an amateur does: among the tokens that the expert finds plausible, p_e(x) >= a max
p_e, the law is proportional to p_e^(1+beta) / p_a^beta, and nothing else may be said. It needs a
row of each model for every token. Speculative decoding needs both models too: the amateur samples
gamma tokens from its own law, the expert scores them in one call, and the walk keeps each with
min(1, p/q). What makes it this technique: p in that ratio, in the residual and behind the last
guess is the *contrast*, q the amateur's own law; and the amateur runs each token once for both
purposes (only its row behind the last guess is left to do). Nothing is trained. The paper writes
alpha for a (ours is the acceptance rate), M_e and M_a for expert and amateur.

Where the amateur gives a plausible token no mass at all, the contrast is taken as the limit of
little mass: only such tokens are said, by the expert's p_e^(1+beta). The contrast is of the models'
own laws; temperature and filters come after it.

Guarantee: EXACT relative to plain contrastive decoding (which is gamma 0), not to the expert; beta
0 and plausibility 0 give speculative decoding of the expert. Tested in
tests/speculative/test_speculative_contrastive.py: the joint law against the formula, the acceptance
rate 1 - TV(contrast, amateur), one row of the amateur a token.
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
from tinyspec.lm.feed import Scores
from tinyspec.lm.host import stack, to_numpy
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT, TokenTree

Make: TypeAlias = Callable[[Sequence[Any], Sequence[int], Sequence[int]], Any]
"""(one row of each member, the committed text, the path below it) -> the joint row: logits, or a
table's weights, [V]. A function of its arguments alone. The text is shared: it is read, never
changed."""


class Joint:
    """Members that hold the same text. Hidden states, and the depth that rows ran to, are the first
    member's.
    """

    def __init__(self, members: Sequence[Target], make: Make):
        self.members, self.make = tuple(members), make
        self.text: list[int] = []
        self._tree = TokenTree()  # the last that was scored

    @property
    def cache_exact(self) -> bool:
        """Whether every member's cache is what teacher-forcing the text would give."""
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
        """Every member scores the tree; entry i of the logits is made of their entries i."""
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
            rows.append(self.make(parts, self.text, tree.tokens_on(tree.path(node))))
        return first._replace(logits=_together(rows))

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


def _together(rows: list[Any]) -> Any:
    """Rows as `Scores` has them: a table's Fractions as a list, logits as one tensor [n+1, V]."""
    if kernels_of(rows[0]) is EXACT:
        return rows
    return torch.from_numpy(np.stack(rows)) if isinstance(rows[0], np.ndarray) else stack(rows)


def make_contrast(beta: float, plausibility: float) -> Make:
    """The expert's row (first) against the amateur's: logits of p_e^(1+beta) / p_a^beta where the
    expert finds x plausible.
    """

    def make(rows: Any, text: Any, path: Any) -> Any:
        expert, amateur = rows
        if kernels_of(expert) is EXACT:
            return _exact(expert, amateur, beta, plausibility)
        xp: Any = torch if kernels_of(expert) is DEVICE else np
        e, a = (
            to_numpy(row) if xp is np and isinstance(row, torch.Tensor) else xp.asarray(row)
            for row in rows
        )
        floor = e.max() + math.log(plausibility) if plausibility else -math.inf
        said = (e >= floor) & (e > -math.inf)
        unheard = said & (a == -math.inf)  # the amateur cannot say it
        if beta and bool(unheard.any()):
            said, a = unheard, e
        with np.errstate(invalid="ignore"):  # -inf of both: not said
            gap = (
                e - a if beta else xp.zeros_like(e)
            )  # the models' normalisers shift all tokens alike
        return torch.as_tensor(xp.where(said, e + beta * gap, -math.inf))

    return make


def _exact(p_e: list[Any], p_a: list[Any], beta: float, plausibility: float) -> list[Any]:
    """The same on a table's rational rows, as weights."""
    if beta != round(beta):
        raise TinyspecError(
            f"rational weights have an exact contrast at whole beta only, got {beta}"
        )
    power, floor = round(beta), as_fraction(plausibility) * max(p_e)
    said = [e > 0 and e >= floor for e in p_e]
    if power and any(ok and not a for ok, a in zip(said, p_a, strict=True)):
        said, p_a = [ok and not a for ok, a in zip(said, p_a, strict=True)], [1] * len(p_a)
    return [
        e ** (1 + power) / a**power if ok else 0 * e
        for ok, e, a in zip(said, p_e, p_a, strict=True)
    ]


@technique(
    title="Speculative contrastive decoding",
    summary="target contrasted with its own draft",
    paper="Yuan et al. 2024, arXiv 2311.08981",
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
        ),
        Knob(
            "beta",
            0.5,
            "strength of the contrast; 0 is the expert alone",
            low=0.0,
            small=(1.0, 0.0),
        ),
        Knob(
            "plausibility",
            0.1,
            "tokens below this share of the expert's best are not said",
            low=0.0,
            high=1.0,
        ),
    ),
)
def speculative_contrastive(
    request: Request, *, gamma: int, beta: float, plausibility: float
) -> Decoder:
    """The draft model is the amateur: it drafts, and the target is the contrast with it."""
    amateur = request.drafts[0]
    contexts = [
        held for held in (request.positions, *request.draft_max_lengths[:1]) if held is not None
    ]
    target = Joint([request.target, amateur], make_contrast(beta, plausibility))
    joint = replace(request, target=target, positions=min(contexts, default=None))
    return joint.decoder(SharedSessionDrafter(amateur, gamma, request.stop.eos), verify_tree)
