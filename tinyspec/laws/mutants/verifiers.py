"""Verifiers with one defect each.

`judge` is the walk down a draft tree with its three decisions left open: the ratio a guess is
accepted with, the law that is left after a refusal, and the law behind the last accepted node. With
the defaults it is right (a test holds it to every law); a mutant replaces one of them, so that what
is wrong stands alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import Verifier
from tinyspec.decoding.verify import Verdict, residual
from tinyspec.laws import theorems
from tinyspec.laws.exact import JOINT
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS
from tinyspec.tree import ROOT, TokenTree


def drawn_from(tree: TokenTree, node: int, vocabulary: int) -> Any:
    """The law a guess was drawn from; of none that was declared, the point mass."""
    declared = tree.draft_probs[node]
    return (
        [Fraction(int(x == tree.tokens[node])) for x in range(vocabulary)]
        if declared is None
        else declared
    )


def right_ratio(row: Any, q: Any, x: int, at: int) -> Any:
    """A guess x from q passes with min(1, row / q), `row` being the law in force behind the node
    `at`.
    """
    return row[x] / q[x]


def right_rest(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    """After `node` was refused behind the node `at`: what is left of the law in force."""
    return residual(row, q)


def right_last(p: Any, tree: TokenTree, at: int) -> Any:
    """Behind the last accepted node: the target's row there. None: nothing more is drawn."""
    return p[at]


def judge(
    ratio: Callable[..., Any] = right_ratio,
    rest: Callable[..., Any] = right_rest,
    last: Callable[..., Any] = right_last,
) -> Verifier:
    """A verifier that decides so."""

    def verifier(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        path: tuple[int, ...] = ()
        at, row, here = ROOT, p[ROOT], {ROOT}
        untested = [node for node, parent in enumerate(tree.parents) if parent in here]
        while untested:
            node, *untested = untested
            x = tree.tokens[node]
            q = drawn_from(tree, node, len(row))
            if rng.accept(ratio(row, q, x, at)):
                path, at, row = (*path, node), node, p[node]
                here = {
                    twin
                    for twin, up in enumerate(tree.parents)
                    if up == tree.parents[node] and tree.tokens[twin] == x
                }
                untested = [child for child, parent in enumerate(tree.parents) if parent in here]
                if not untested:
                    row = last(p, tree, at)
            else:
                row = rest(p, at, node, row, q)
        return Verdict(path, None if row is None else rng.draw(row))

    return verifier


# ------------------------------------------------------------------ residuals


def softmax_of_difference(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    weights = [math.exp(a - b) for a, b in zip(row, q, strict=True)]  # right: max(0, a - b)
    return [w / sum(weights) for w in weights]


def without_relu(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    """p - q sums to 0, so a search in its running sum for any u finds the first place where it is
    positive.
    """
    running = [sum(a - b for a, b in zip(row[: x + 1], q, strict=False)) for x in range(len(row))]
    first = next(x for x, so_far in enumerate(running) if so_far > 0 or x == len(row) - 1)
    return [Fraction(int(x == first)) for x in range(len(row))]


def not_normalised(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    left = [max(a - b, Fraction(0)) for a, b in zip(row, q, strict=True)]
    return left if sum(left) else row  # right: over its sum, for the next sibling's ratio


def of_p_itself(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    return residual(p[at], q)  # right: row, which earlier siblings' refusals have made of it


def of_the_row_before(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    return residual(
        p[max(at - 1, ROOT)], q
    )  # right: row, that is p[at] where nothing was refused before


def absolute(p: Any, at: int, node: int, row: Any, q: Any) -> Any:
    weights = [abs(a - b) for a, b in zip(row, q, strict=True)]  # right: max(0, a - b)
    return [w / sum(weights) for w in weights]


def _entry(
    name: str, bug: str, verifier: Verifier, law: str = JOINT, witness: Any = see.chains
) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, walk=verifier), witness)


MUTANTS = [
    # the ratio
    _entry("everything is accepted", "slip", judge(ratio=lambda row, q, x, at: 1)),
    _entry(
        "p and q swapped", "slip", judge(ratio=lambda row, q, x, at: q[x] / row[x] if row[x] else 1)
    ),
    _entry("root of the ratio", "slip", judge(ratio=lambda row, q, x, at: (row[x] / q[x]) ** 0.5)),
    _entry(
        "ratio times 1.05",
        "slip",
        judge(ratio=lambda row, q, x, at: row[x] / q[x] * Fraction(21, 20)),
    ),
    _entry(
        "first guess not verified",
        "B15",
        judge(ratio=lambda row, q, x, at: 1 if at == ROOT else row[x] / q[x]),
    ),
    # the residual
    _entry("residual is p", "slip", judge(rest=lambda p, at, node, row, q: p[at])),
    _entry("residual is |p - q|", "slip", judge(rest=absolute)),
    _entry("residual without relu", "slip", judge(rest=without_relu)),
    _entry("residual is softmax(p - q)", "B2", judge(rest=softmax_of_difference)),
    _entry("residual of the row before", "slip", judge(rest=of_the_row_before)),
    _entry("row behind the refused guess", "B16", judge(rest=lambda p, at, node, row, q: p[node])),
    # siblings
    _entry(
        "a sample of the target for each sibling",
        "B8",
        judge(lambda row, q, x, at: row[x], lambda p, at, *_: p[at]),
    ),
    _entry("refusal of a sibling forgotten", "slip", judge(rest=of_p_itself), JOINT, see.siblings),
    _entry(
        "residual not normalised between siblings",
        "slip",
        judge(rest=not_normalised),
        theorems.REJECTION,
        see.siblings,
    ),
    _entry(
        "every sibling accepted", "slip", judge(ratio=lambda row, q, x, at: 1), theorems.TRANSPORT
    ),
    # the last token
    _entry("no bonus token", "slip", judge(last=lambda p, tree, at: None), theorems.TOKENS),
    _entry(
        "bonus from the draft's law",
        "slip",
        judge(last=lambda p, tree, at: drawn_from(tree, at, len(p[at]))),
    ),
    _entry("bonus from the row at the root", "slip", judge(last=lambda p, tree, at: p[ROOT])),
]
EQUIVALENT = [
    Equivalent(
        "ratio not capped at 1",
        "slip",
        "accept(r) asks whether u < r for a uniform u < 1; for r >= 1 it is true, capped or not.",
        (JOINT, theorems.ACCEPTANCE, theorems.TOKENS, theorems.REJECTION),
        replace(PARTS, walk=judge()),
    ),
]
