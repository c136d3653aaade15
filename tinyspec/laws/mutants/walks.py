"""Walks of another shape than the right one, right walks over the wrong rows, and walks that trust
what they are given.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import TargetProbs, Verifier
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.laws import theorems
from tinyspec.laws.exact import JOINT
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.mutants.verifiers import judge
from tinyspec.laws.parts import PARTS, Siblings
from tinyspec.laws.uniform import Span
from tinyspec.tree import ROOT, TokenTree


def accepted_anywhere(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """Counts the positions that pass, wherever they are, and keeps so many."""
    if any(q is None for q in tree.draft_probs) or tree.depths() != list(
        range(1, len(tree.tokens) + 1)
    ):
        return verify_tree(tree, p, rng)
    ups = zip(tree.tokens, tree.parents, tree.draft_probs, strict=True)
    n = sum(rng.accept(p[up][x] / q[x]) for x, up, q in ups)  # type: ignore[index]  # right: up to the first refusal
    row = p[n - 1]
    rest = row if n == len(tree.tokens) else residual(row, tree.draft_probs[n])
    return Verdict(tuple(range(n)), rng.draw(rest))


def recovered_token_lost(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    verdict = verify_tree(tree, p, rng)
    if verdict.accepted and verdict.rejected:
        return verdict._replace(next=None)  # right: the round ends with the recovered token
    return verdict


def sampled_and_matched(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """A sample of the target's own says where to go. Exact, and it accepts sum p q instead of sum
    min(p, q).
    """
    path, here = list[int](), {ROOT}
    while True:
        said = rng.draw(p[path[-1] if path else ROOT])
        here = {i for i, up in enumerate(tree.parents) if up in here and tree.tokens[i] == said}
        if not here:
            return Verdict(tuple(path), said)
        path.append(min(here))


def only_the_first(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """Exact, and it gives away what the other siblings would have earned."""
    first = [i for i, up in enumerate(tree.parents) if up not in tree.parents[:i]]
    if len(first) == len(tree.tokens) or max(tree.depths()) > 1:
        return verify_tree(tree, p, rng)
    return verify_tree(
        TokenTree.chain(tree.tokens[:1], tree.draft_probs[:1]), p, rng
    )  # right: all of them, in order


def lazily(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """Exact, and it lets a coin decide whether the draft is looked at."""
    return verify_tree(tree if rng.accept(Fraction(1, 2)) else TokenTree(), p, rng)  # right: always


class OneUniform:
    """Answers every `accept` from one uniform."""

    def __init__(self, rng: Any):
        self.rng, self.u = rng, Span(rng)

    def accept(self, ratio: Any) -> bool:
        return self.u.below(ratio)  # right: self.chance.accept(ratio), a new uniform each time

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rng, name)


def one_uniform(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    return verify_tree(tree, p, OneUniform(rng))


def merged_duplicates(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """Equal siblings drawn independently are merged into one and tested once."""
    keep = [
        i
        for i, x in enumerate(tree.tokens)
        if (x, tree.parents[i]) not in zip(tree.tokens[:i], tree.parents[:i], strict=True)
    ]
    if max(tree.depths(), default=1) > 1 or len(keep) == len(tree.tokens):
        return verify_tree(tree, p, rng)
    small = TokenTree(
        [tree.tokens[i] for i in keep],
        [ROOT] * len(keep),
        [tree.draft_probs[i] for i in keep],
        [False] * len(keep),
    )
    verdict = verify_tree(small, p, rng)  # right: each draw is a proposal of its own
    return verdict._replace(accepted=tuple(keep[node] for node in verdict.accepted))


# ------------------------------------------------------------------ which law is the target's


class Rows:
    """The target's rows, some of them wrong."""

    def __init__(self, p: Any, row: Callable[[Any, int], Any]):
        self.p, self.row = p, row

    def __getitem__(self, node: int) -> Any:
        return self.row(self.p, node)


def reading(row: Callable[[TargetProbs, int], Any]) -> Verifier:
    """The right walk over rows that are read so."""

    def verifier(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        return verify_tree(tree, Rows(p, row) if isinstance(p, TargetProbs) else p, rng)

    return verifier


def unwarped_until_the_end(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """Accepts by the raw law; only the token drawn last comes from the warped one."""
    if not isinstance(p, TargetProbs):
        return verify_tree(tree, p, rng)
    verdict = verify_tree(
        tree, Rows(p, lambda laws, node: laws.probs_under(node, SamplingParams())), rng
    )
    return (
        verdict
        if verdict.rejected
        else verdict._replace(next=rng.draw(p[verdict.accepted[-1] if verdict.accepted else ROOT]))
    )


def of_the_text_alone(laws: TargetProbs, node: int) -> Any:
    """A node's law, warped with the committed text as its history."""
    return laws.sampling.probs(
        laws.scores.logits[node + 1], laws.context
    )  # right: and the guesses on the node's path


def soft(laws: TargetProbs, node: int) -> Any:
    """The law at temperature 1 where 0 was asked for."""
    return laws.probs_under(
        node, replace(laws.sampling, temperature=laws.sampling.temperature or 1.0)
    )


# ------------------------------------------------------------------ ids and sizes


def trusting(tree: TokenTree, p: Any, rng: Any) -> Verdict:
    """A chain walked with bare Python indexing: row[-1] is the last token, and zip ends with the
    shorter row.
    """
    path: tuple[int, ...] = ()
    for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
        row = p[node - 1]
        if not rng.accept(row[x] / (q[x] if q else 1)):  # right: 0 <= x < V is looked at first
            rest = [
                max(a - b, 0) for a, b in zip(row, q or [0] * len(row), strict=False)
            ]  # right: sizes are compared
            return Verdict(path, rng.draw(rest if sum(rest) else row))
        path = (*path, node)
    return Verdict(path, rng.draw(p[len(path) - 1]))


# ------------------------------------------------------------------ changes that are none


class _Twice(Siblings):
    """Proposes each of its draws twice, as point masses."""

    def propose(
        self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        drawn = super().propose(context, max_draft_depth, sampling, rng).tokens
        tokens = [x for x in drawn for _ in range(2)]
        return TokenTree(
            tokens, (ROOT,) * len(tokens), (None,) * len(tokens), (False,) * len(tokens)
        )


class _Scaled(OneUniform):
    """Twice the row at every draw."""

    def accept(self, ratio: Any) -> bool:
        return bool(self.rng.accept(ratio))

    def draw(self, row: Any) -> int:
        return int(self.rng.draw([2 * x for x in row]))


def _entry(
    name: str, bug: str, verifier: Verifier, law: str = JOINT, witness: Any = see.chains
) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, walk=verifier), witness)


MUTANTS = [
    _entry("accepted anywhere in the draft", "B1", accepted_anywhere),
    _entry("one uniform for all positions", "B32, S6", one_uniform),
    _entry("recovered token lost", "B16, S7", recovered_token_lost),
    _entry("equal siblings merged", "slip", merged_duplicates, JOINT, see.siblings),
    _entry("sampled and matched, without a ratio", "B8", sampled_and_matched, theorems.ACCEPTANCE),
    _entry("only the first sibling tested", "slip", only_the_first, theorems.KSEQ, see.siblings),
    _entry("half of the guesses not looked at", "slip", lazily, theorems.MATCHING),
    _entry(
        "draft warped, target not",
        "B6",
        reading(lambda laws, node: laws.probs_under(node, SamplingParams())),
    ),
    _entry("warped only at the last token", "B7", unwarped_until_the_end),
    _entry("penalty forgets the guesses", "B7", reading(of_the_text_alone), JOINT, see.penalised),
    _entry(
        "temperature 0 judged by the soft law",
        "B14, S5",
        reading(soft),
        "greedy equality",
        see.greedy_texts,
    ),
    _entry("placeholder -1 accepted", "B37, B35", trusting, "vocabulary", see.drafted_outside),
]
EQUIVALENT = [
    Equivalent(
        "a refused point mass tested again",
        "slip",
        "After x was refused as a point mass the law in force gives x nothing: an equal sibling passes with probability 0, "
        "and taking x out of a law that has none of it changes nothing.",
        (JOINT,),
        replace(PARTS, walk=judge(), siblings=_Twice),
    ),
    Equivalent(
        "residual scaled before the last draw",
        "S10",
        "A draw divides by the sum of the row it is given, so a constant factor (one over the sum, or over the sum plus "
        "epsilon) cancels. In the ratio of a sibling that follows it does not: that is a mutant, above.",
        (JOINT, theorems.TOKENS),
        replace(PARTS, walk=lambda tree, p, rng: verify_tree(tree, p, _Scaled(rng))),
    ),
]
