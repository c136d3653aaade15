"""Verifiers of chapter 1 with one defect each: of a whole block, of several independent drafts, of
a race on shared noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, exclude_token, residual, verify_tree
from tinyspec.laws.blocks import BLOCK, EMITTED, Block, Played, played
from tinyspec.laws.couplings import AGREE, INVARIANT
from tinyspec.laws.loop_laws import WIDE, WIDER, model
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.parts import PARTS, Parts
from tinyspec.laws.selection import FACTOR, SELECTED
from tinyspec.speculative.verification.gumbel_coupling import (
    GumbelCouplingDrafter,
    verify_tree_by_race,
)
from tinyspec.tree import ROOT, TokenTree

# ------------------------------------------------------------------ of a block


def right_weight(weight: Any, ratio: Any) -> Any:
    """The running ratio, clipped at every step."""
    return min(1, weight * ratio)


def right_pass(left: Any, weight: Any, last: bool) -> Any:
    """The probability that a place passes; `left` is the mass of max(0, weight p - q) there."""
    if last:
        return weight
    return left / (left + 1 - weight) if left + 1 > weight else 1


def right_end(passed: list[bool]) -> int:
    """The largest place that passes; place 0 does."""
    return max(place for place, has in enumerate(passed) if has)


def right_scale(weight: Any) -> Any:
    """What p is multiplied by before q is taken away and the token behind the end is drawn."""
    return weight


def of_block(
    weigh: Callable[..., Any] = right_weight,
    passes: Callable[..., Any] = right_pass,
    end: Callable[[list[bool]], int] = right_end,
    scale: Callable[[Any], Any] = right_scale,
) -> Verifier:
    """Block verification that decides so: every place tested, from the first to the last."""

    def left(row: Any, q: Any, weight: Any) -> list[Any]:
        return [max(0 * a, weight * a - b) for a, b in zip(row, q, strict=True)]

    def verifier(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        n, passed, weights = len(tree.tokens), [True], [1]
        laws: Any = tree.draft_probs
        for place in range(1, n + 1):
            weights.append(
                weigh(
                    weights[-1],
                    p[place - 2][tree.tokens[place - 1]] / laws[place - 1][tree.tokens[place - 1]],
                )
            )
            mass = 0 if place == n else sum(left(p[place - 1], laws[place], weights[place]))
            passed.append(rng.accept(passes(mass, weights[place], place == n)))
        at = end(passed)
        row = p[at - 1]
        rest = row if at == n else left(row, laws[at], scale(weights[at]))
        return Verdict(tuple(range(at)), rng.draw(rest if sum(rest) else row), tuple(range(at, n)))

    return verifier


def first_failure(passed: list[bool]) -> int:
    return [*passed, False].index(False) - 1


# ------------------------------------------------------------------ of k independent drafts


def bracket(p: Any, q: Any, k: int) -> tuple[Any, Any]:
    """Two factors with the least lawful one between them; the upper one is lawful."""
    low, high = 1 + 0 * p[0], k + 0 * p[0]
    for _ in range(3 if isinstance(high, Fraction) else 50):
        rho = (low + high) / 2
        mass = sum(min(rho * b, a) for a, b in zip(p, q, strict=True))
        low, high = (low, rho) if 1 - (1 - mass / rho) ** k <= mass else (rho, high)
    return low, high


def right_factor(p: Any, q: Any, k: int) -> Any:
    """Rounded up."""
    return bracket(p, q, k)[1]


def right_remainder(row: Any, q: Any, rho: Any, k: int, refused: Sequence[int]) -> Any:
    """p less what the drafts have said of it."""
    each = [min(b, a / rho) for a, b in zip(row, q, strict=True)]
    beta = sum(each)
    share = (1 - (1 - beta) ** k) / beta if beta else 0
    return [max(0 * a, a - b * share) for a, b in zip(row, each, strict=True)]


def right_count(alive: int, k: int) -> int:
    """K-SEQ for as many drafts as are left."""
    return alive


def right_alive(tokens: Sequence[int], token: int) -> list[int]:
    """Which drafts go on: those that spell what was taken."""
    return [i for i, x in enumerate(tokens) if x == token]


def of_drafts(
    factor: Callable[..., Any] = right_factor,
    rest: Callable[..., Any] = right_remainder,
    count: Callable[[int, int], int] = right_count,
    alive: Callable[..., list[int]] = right_alive,
) -> Verifier:
    """K-SEQ over texts side by side that decides so."""

    def verifier(tree: TokenTree, p: Any, rng: Any) -> Verdict:
        path, here = list[int](), [ROOT]
        widest = sum(up == ROOT for up in tree.parents)
        while True:
            row = p[path[-1] if path else ROOT]
            drafts = [node for node, up in enumerate(tree.parents) if up in here]
            if not drafts:
                return Verdict(tuple(path), rng.draw(row))
            q: Any = tree.draft_probs[drafts[0]]
            tokens, k = tree.tokens_on(drafts), count(len(drafts), widest)
            rho = factor(row, q, k)
            took = next(
                (i for i, x in enumerate(tokens) if q[x] and rng.accept(row[x] / (rho * q[x]))),
                None,
            )
            if took is None:
                left = rest(row, q, rho, k, tokens)
                return Verdict(tuple(path), rng.draw(left if sum(left) else row), tuple(drafts))
            path.append(drafts[took])
            here = [drafts[i] for i in alive(tokens, tokens[took])]

    return verifier


def without_its_share(row: Any, q: Any, rho: Any, k: int, refused: Sequence[int]) -> Any:
    return [a - min(b, a / rho) for a, b in zip(row, q, strict=True)]


# ------------------------------------------------------------------ of a race on shared noise


class OwnNoise(ModelDrafter):
    """Guesses drawn from the draft's own stream."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        return TokenTree.chain(
            super().propose(context, max_draft_depth, sampling, rng).tokens
        )  # right: raced


class OneLate(GumbelCouplingDrafter):
    """The first guess races on the noise of the second position."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        return super().propose(context, max_draft_depth, sampling, _Moved(rng, 1))  # right: 0


class _Moved:
    """Races on the noise of a later position, or of an earlier one."""

    def __init__(self, rng: Any, by: int):
        self.rng, self.by = rng, by

    def exponential_race(self, row: Any, position: int) -> int:
        return int(self.rng.exponential_race(row, position + self.by))


class _Drawn:
    """Draws where it is asked to race."""

    def __init__(self, rng: Any):
        self.rng = rng

    def exponential_race(self, row: Any, position: int) -> int:
        return int(self.rng.draw(row))  # right: the race of the position


def drawn(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
    return verify_tree_by_race(tree, p, _Drawn(rng))  # type: ignore[arg-type]


def counted_in_the_round(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
    return verify_tree_by_race(tree, p, _Moved(rng, -len(p.context)))  # type: ignore[arg-type]  # right: by 0


# ------------------------------------------------------------------ what can be seen


HALF, THIRD = Fraction(1, 2), Fraction(1, 3)
BLOCKS = [
    Block((HALF, HALF), (THIRD, 2 * THIRD), True, 3),
    Block((HALF, THIRD, Fraction(1, 6)), (Fraction(1, 6), THIRD, HALF), True, 2),
]


def blocks_judged(parts: Parts) -> list[Played]:
    """Everything that comes of a chain judged as a block."""
    return [played(parts.block, case) for case in BLOCKS]


def drafts_judged(parts: Parts) -> list[Played]:
    """Everything that comes of two drafts."""
    return [
        played(parts.k_seq, case._replace(k=2, gamma=2 if len(case.p) == 2 else 1))
        for case in BLOCKS
    ]


def races_run(parts: Parts) -> list[Any]:
    """Texts, and what was kept of each guess, over some seeds."""
    seen = []
    for seed in range(6):
        target, draft = model(WIDE).session(), parts.racing(model(WIDER).session(), 2)
        decoder, rng = Decoder(target, draft, parts.match), Seeded(seed)
        decoder.extend((0,))
        kept = [len(decoder.step(rng).verdict.accepted) for _ in range(6)]
        seen.append((decoder.new, kept))
    return seen


def _block(name: str, law: str, verifier: Verifier) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, block=verifier), blocks_judged)


def _drafts(name: str, law: str, verifier: Verifier) -> Mutant:
    return Mutant(name, "slip", law, replace(PARTS, k_seq=verifier), drafts_judged)


MUTANTS = [
    _block("a block ends at the first place that fails", EMITTED, of_block(end=first_failure)),
    _block("a block's residual without its weight", EMITTED, of_block(scale=lambda weight: 1)),
    _block(
        "a block's ratio not clipped on the way",
        EMITTED,
        of_block(weigh=lambda weight, ratio: weight * ratio),
    ),
    _block(
        "a block's place passes with its weight",
        EMITTED,
        of_block(passes=lambda left, weight, last: weight),
    ),
    _block(
        "a block keeps as many places as pass",
        EMITTED,
        of_block(end=lambda passed: sum(passed) - 1),
    ),
    _block("a block judged token by token", BLOCK, verify_tree),
    _drafts("K-SEQ divides by k", FACTOR, of_drafts(factor=lambda p, q, k: k)),
    _drafts("K-SEQ is recursive rejection", FACTOR, verify_tree),
    _drafts(
        "K-SEQ's factor rounded down",
        SELECTED,
        of_drafts(factor=lambda p, q, k: bracket(p, q, k)[0]),
    ),
    _drafts("K-SEQ's residual without its share", SELECTED, of_drafts(rest=without_its_share)),
    _drafts(
        "K-SEQ's residual that of one draft",
        SELECTED,
        of_drafts(rest=lambda row, q, rho, k, refused: residual(row, q)),
    ),
    _drafts(
        "K-SEQ's residual of the last draft alone",
        SELECTED,
        of_drafts(rest=lambda row, q, rho, k, refused: exclude_token(row, refused[-1])),
    ),
    _drafts(
        "K-SEQ for all drafts where some have parted", SELECTED, of_drafts(count=lambda alive, k: k)
    ),
    _drafts(
        "K-SEQ lets drafts that have parted go on",
        SELECTED,
        of_drafts(alive=lambda tokens, token: list(range(len(tokens)))),
    ),
    Mutant(
        "a coupled draft with noise of its own",
        "slip",
        AGREE,
        replace(PARTS, racing=OwnNoise),
        races_run,
    ),
    Mutant(
        "a coupled draft one position late",
        "slip",
        AGREE,
        replace(PARTS, racing=OneLate),
        races_run,
    ),
    Mutant(
        "a coupled target that draws", "slip", INVARIANT, replace(PARTS, match=drawn), races_run
    ),
    Mutant(
        "noise counted in the round",
        "S1",
        INVARIANT,
        replace(PARTS, match=counted_in_the_round),
        races_run,
    ),
]
EQUIVALENT = [
    Equivalent(
        "a block's places tested from the first",
        "slip",
        "Each place has a uniform of its own, so which one of them is the largest that passes does not depend on the order in "
        "which they are tested; from behind, the first that passes is known to be it.",
        (BLOCK, EMITTED),
        replace(PARTS, block=of_block()),
    ),
    Equivalent(
        "K-SEQ's factor by halving alone",
        "slip",
        "Any factor between the least lawful one and k keeps the law, and both ways come to the least one from above, in "
        "floats to within rounding: what is accepted is the same.",
        (FACTOR, SELECTED),
        replace(PARTS, k_seq=of_drafts()),
    ),
]
