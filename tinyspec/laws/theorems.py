"""What the papers prove, as laws: each takes the code to judge and searches for a counterexample.

A verifier is judged on small rational p and q, every outcome walked, so that "with probability"
means exactly that. The oracles are a few lines of Fractions and call nothing that is judged. A law
that finds a counterexample raises `LawViolated` with the first, which is the smallest.

The most that any lossless verifier can accept of k drafts at one position is an optimal transport
with membership cost (SpecTr, Sun et al. 2023, arXiv 2310.15141): couple the draws X = (x_1..x_k)
with y ~ p so that P(y is among X) is greatest. The emitted token has distribution p, and an
accepted token is one of the drafts, so the acceptance is P(y among X) for *some* coupling, and
never above the best.

Two oracles share nothing. `by_linear_program` solves the transport. `optimal_transport` is its dual
in Fractions: a flow from the set of drafted tokens S (capacity P(S)) to tokens y in S (capacity
p(y)). By max-flow min-cut it is the least, over sets of tokens H, of p(H) + P(S not inside H). For
k i.i.d. drafts P(S inside H) is q(H)^k, hence the optimum 1 + min_H (p(H) - q(H)^k).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, combinations, product
from typing import Any

from tinyspec.decoding.rng import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal, import_extra
from tinyspec.laws.exact.rational import (
    Exact,
    distribution_pairs,
    overlap_mass,
    positive_part,
    without_token,
)
from tinyspec.tree import ROOT, TokenTree

Drafts = Mapping[frozenset[int], Fraction]
"""The distribution of the set of drafted tokens."""


def drafted_sets(q: Sequence[Fraction], k: int, replace: bool) -> dict[frozenset[int], Fraction]:
    """Return the distribution of the set that k draws from q make.

    Without replacement the draws end where q is used up.

    >>> sets = drafted_sets((Fraction(1, 2), Fraction(1, 2)), 2, replace=True)
    >>> {tuple(tokens): str(mass) for tokens, mass in sets.items()}
    {(0,): '1/4', (0, 1): '1/2', (1,): '1/4'}
    """
    sets: dict[frozenset[int], Fraction] = {}

    def grow(
        drawn: frozenset[int], row: Sequence[Fraction] | None, left: int, mass: Fraction
    ) -> None:
        if not left or row is None:
            sets[drawn] = sets.get(drawn, Fraction(0)) + mass
            return
        for token, x in enumerate(row):
            if x:
                rest = row if replace else without_token(row, token)
                grow(drawn | {token}, rest, left - 1, mass * x)

    grow(frozenset(), q, k, Fraction(1))
    return sets


def optimal_transport(p: Sequence[Fraction], drawn: Drafts) -> Fraction:
    """Return the greatest acceptance, exactly: the least cut. O(2^V) sets of tokens.

    >>> p, q = (Fraction(1), Fraction(0)), (Fraction(1, 3), Fraction(2, 3))
    >>> [str(optimal_transport(p, drafted_sets(q, k, replace=True))) for k in (1, 2)]
    ['1/3', '5/9']
    """
    tokens = range(len(p))
    cuts = chain.from_iterable(combinations(tokens, n) for n in range(len(p) + 1))

    def outside(cut: set[int]) -> Fraction:
        """Return the probability that a drafted token lies outside of the cut."""
        return sum((mass for s, mass in drawn.items() if not s <= cut), Fraction(0))

    return min(sum((p[y] for y in cut), outside({*cut})) for cut in cuts)


def by_linear_program(p: Sequence[Fraction], drawn: Drafts) -> float:
    """Return the same by a linear program: maximise the mass sent from sets to their tokens.

    Needs scipy (HiGHS).
    """
    optimise, numpy = import_extra("scipy.optimize"), import_extra("numpy")
    sets = list(drawn)
    routes = [(i, y) for i, s in enumerate(sets) for y in sorted(s)]
    limits = numpy.zeros((len(sets) + len(p), len(routes)))
    for column, (i, y) in enumerate(routes):
        # the mass that leaves a set, and that arrives at a token
        limits[i, column] = limits[len(sets) + y, column] = 1
    bounds = [float(drawn[s]) for s in sets] + [float(x) for x in p]
    found = optimise.linprog(
        -numpy.ones(len(routes)), A_ub=limits, b_ub=bounds, bounds=(0, None), method="highs"
    )
    if not found.success:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    return float(-found.fun)


def kseq_share(k: int) -> Fraction:
    """Return the share of the optimum that K-SEQ reaches at least, 1 - (1 - 1/k)^k > 1 - 1/e.

    Why: it accepts a = 1 - (1 - b)^k, b = sum_x min(q, p / rho), for the least valid rho; a falls
    in rho, and rho = k is valid, so take rho = k. There k b = sum min(k q, p) is at least the
    optimum, for that is at most sum_y min(p(y), 1 - (1 - q(y))^k). And b <= 1/k, so by concavity a
    >= k b (1 - (1 - 1/k)^k).

    >>> [str(kseq_share(k)) for k in (1, 2, 3)]
    ['1', '3/4', '19/27']
    """
    return 1 - (1 - Fraction(1, k)) ** k


def kseq_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], k: int) -> float:
    """Return what K-SEQ accepts at the least valid rho: 1 - (1 - beta)^k.

    Here beta = sum_x min(q, p / rho).

    That rho solves 1 - (1 - beta)^k = rho beta: below it the residual p - min(q, p / rho) (1 - (1 -
    beta)^k) / beta would be negative where p / rho <= q. Sixty halvings in floats.

    >>> round(kseq_acceptance((Fraction(1), Fraction(0)), (Fraction(1, 4), Fraction(3, 4)), 2), 9)
    0.4375
    """
    a, b = [float(x) for x in p], [float(x) for x in q]

    def passes(rho: float) -> float:
        beta = sum(min(y, x / rho) for x, y in zip(a, b, strict=True))
        return 1 - (1 - beta) ** k

    def spare(rho: float) -> float:
        return sum(min(rho * y, x) for x, y in zip(a, b, strict=True)) - passes(rho)

    low, high = 1.0, float(k)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if spare(middle) >= 0 else (middle, high)
    return passes(high)


def matching_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], k: int) -> Fraction:
    """Return what sampling and matching accepts: sum_y p (1 - (1 - q)^k).

    It draws y ~ p and accepts it if it is among k i.i.d. drafts.
    """
    return sum((a * (1 - (1 - b) ** k) for a, b in zip(p, q, strict=True)), Fraction(0))


TreeVerifier = Callable[[TokenTree, Any, Any], Verdict]
DraftSiblings = Callable[[Exact, int, Exhaustive], tuple[Sequence[int], Sequence[Exact | None]]]
"""(q, k, rng) -> the tokens of k siblings, in the order in which they will stand, and the
distribution declared for each.
"""

ACCEPTANCE = "acceptance = 1 - TV(p, q) (Leviathan et al. 2023, theorem 3.5)"
ROUND_TOKENS = (
    "tokens of a round = (1 - alpha^(gamma+1)) / (1 - alpha) (Leviathan et al. 2023, equation 1)"
)
PREDICTION = (
    "predicted tokens = the mean over accept and reject patterns "
    "(Leviathan et al. 2023, equation 1)"
)
PLANNER = (
    "planned gamma has the greatest gain, and gains where alpha > c "
    "(Leviathan et al. 2023, corollary 3.9)"
)
LENIENCE = "lenience l: P(x) <= p(x) / l (Leviathan et al. 2023, appendix A.5)"
REJECTION = (
    "recursive rejection rejects k drafts with the product of its distances "
    "(SpecInfer, arXiv 2305.09781)"
)
TRANSPORT = "acceptance of k drafts <= the optimal transport (SpecTr, arXiv 2310.15141)"
MATCHING = "acceptance of k drafts >= sampling and matching (SpecInfer, arXiv 2305.09781)"
KSEQ = (
    "acceptance of k drafts >= (1 - (1 - 1/k)^k) of the optimal transport "
    "(SpecTr's K-SEQ, arXiv 2310.15141)"
)
DRAW_ORDER = (
    "siblings without replacement stand in the order they were drawn (MCSD, arXiv 2401.06706)"
)


class NodeRows(dict[int, Sequence[Fraction]]):
    """The target's rows by node; `soft` are the rows before temperature 0 sharpened them."""

    def __init__(self, rows: dict[int, Exact], soft: dict[int, Exact] | None = None):
        super().__init__({node: list(row) for node, row in rows.items()})
        self.soft = soft or rows
        self.sampling = SamplingParams(temperature=0.0 if soft else 1.0)

    def probs_under(self, node: int, sampling: SamplingParams) -> list[Fraction]:
        return list(self.soft[node])


def with_replacement(
    q: Exact, k: int, rng: Exhaustive
) -> tuple[Sequence[int], Sequence[Exact | None]]:
    """Draw k i.i.d. siblings."""
    return [rng.draw(q) for _ in range(k)], [q] * k


def without_replacement(
    q: Exact, k: int, rng: Exhaustive
) -> tuple[Sequence[int], Sequence[Exact | None]]:
    """Draw k siblings, each from what the earlier ones left of q; fewer where q is used up."""
    tokens: list[int] = []
    draft_probs: list[Exact] = []
    row: Exact | None = q
    while row is not None and len(tokens) < k:
        draft_probs.append(row)
        tokens.append(rng.draw(row))
        row = without_token(row, tokens[-1])
    return tokens, draft_probs


def play_siblings(
    verifier: TreeVerifier, draft: DraftSiblings, p: Exact, q: Exact, k: int
) -> tuple[Fraction, dict[int, Fraction], int]:
    """Play one position with k siblings.

    Returns the probability that one is accepted, the distribution of the first token, and the
    branches walked.
    """

    def play(rng: Exhaustive) -> tuple[bool, int | None]:
        tokens, draft_probs = draft(q, k, rng.split("draft", 0))
        n = len(tokens)
        declared = [None if row is None else list(row) for row in draft_probs]
        tree = TokenTree(tokens, (ROOT,) * n, declared, (False,) * n)
        verdict = verifier(tree, NodeRows(dict.fromkeys(range(ROOT, n), p)), rng.split("verify", 0))
        output = [tokens[node] for node in verdict.accepted]
        return bool(output), output[0] if output else verdict.next

    accepted, first, outcomes = Fraction(0), dict[int, Fraction](), 0
    for (passed, token), probability in Exhaustive.walk(play):
        outcomes += 1
        accepted += probability if passed else 0
        if token is not None:
            first[token] = first.get(token, Fraction(0)) + probability
    return accepted, first, outcomes


@collect_evidence(ACCEPTANCE)
def acceptance_theorem(verifier: TreeVerifier, largest: int = 6) -> Iterator[int]:
    """Check that a draft token x ~ q passes with probability sum_x min(p, q) = 1 - TV(p, q)."""
    for p, q in distribution_pairs(largest=largest):
        got, _, outcomes = play_siblings(verifier, with_replacement, p, q, 1)
        expect_equal(ACCEPTANCE, overlap_mass(p, q), got, p=p, q=q)
        yield outcomes


@collect_evidence(ROUND_TOKENS)
def tokens_of_a_round(verifier: TreeVerifier, gamma: int = 3, largest: int = 5) -> Iterator[int]:
    """Check that a chain of gamma commits 1 + alpha + ... + alpha^gamma tokens on average.

    Every position has the same p and q.
    """
    for (p, q), length in product(distribution_pairs(largest=largest), range(1, gamma + 1)):

        def count(rng: Exhaustive, p: Exact = p, q: Exact = q, length: int = length) -> int:
            stream = rng.split("draft", 0)
            tree = TokenTree.chain([stream.draw(q) for _ in range(length)], [list(q)] * length)
            rows = NodeRows(dict.fromkeys(range(ROOT, length), p))
            verdict = verifier(tree, rows, rng.split("verify", 0))
            return len(verdict.accepted) + (verdict.next is not None)

        outcomes = list(Exhaustive.walk(count))
        got = sum(n * probability for n, probability in outcomes)
        alpha = overlap_mass(p, q)
        expected = sum(alpha**i for i in range(length + 1))
        expect_equal(ROUND_TOKENS, expected, got, p=p, q=q, gamma=length, alpha=alpha)
        yield len(outcomes)


@collect_evidence(PREDICTION)
def predicted_tokens(
    predict: Callable[[Any, int], Any], gamma: int = 6, whole: int = 6
) -> Iterator[int]:
    """Check a formula for the tokens of a round against every pattern of accepts and rejects."""
    for length, part in product(range(gamma + 1), range(whole + 1)):
        alpha, mean = Fraction(part, whole), Fraction(0)
        for passes in product((True, False), repeat=length):
            until = passes.index(False) if False in passes else length
            odds = Fraction(1)
            for passed in passes:
                odds *= alpha if passed else 1 - alpha
            mean += odds * (until + 1)  # the recovered or the bonus token
        got = predict(alpha, length)
        if abs(got - mean) > 1e-12:
            accuse(PREDICTION, mean, got, alpha=alpha, gamma=length)
        yield 2**length


@collect_evidence(PLANNER)
def planner_is_optimal(plan: Callable[[float, float], int], longest: int = 64) -> Iterator[int]:
    """Check plan(alpha, c) against every gamma up to `longest`.

    c is the cost of a draft step in target passes.

    With gamma = 1 the gain is (1 + alpha) / (1 + c), so the best is at least that; where alpha <= c
    no gamma gains, because 1 + alpha + ... + alpha^gamma <= 1 + gamma c.
    """
    costs = [Fraction(0), *(Fraction(1, n) for n in (100, 20, 10, 5, 3, 2, 1))]
    for cost, tenths in product(costs, range(10)):
        alpha, tokens = Fraction(tenths, 10), Fraction(1)
        gains = [Fraction(1)]
        for gamma in range(1, longest + 1):
            tokens = 1 + alpha * tokens  # the first token passes, and a shorter round follows
            gains.append(tokens / (1 + gamma * cost))
        best = max(gains)
        # the oracle itself obeys the corollary
        assert best >= (1 + alpha) / (1 + cost) if alpha > cost else best == 1
        gamma = plan(float(alpha), float(cost))
        got = gains[gamma] if 0 <= gamma <= longest else Fraction(0)
        if got < best * (1 - Fraction(1, 10**12)):
            expected = {"gamma": gains.index(best), "gain": best}
            accuse(PLANNER, expected, {"gamma": gamma, "gain": got}, alpha=alpha, c=cost)
        yield 0


@collect_evidence(LENIENCE)
def lenience_cap(lenient: Callable[[Any], TreeVerifier], largest: int = 5) -> Iterator[int]:
    """Check that lenient(l) makes no token more than 1 / l times as likely.

    The verifier compares p with l q: it accepts sum min(q, p / l), and the cap holds for the first
    token and for a second one after it. At l = 1 the cap leaves nothing but p.

    Why, with the residual r = norm(max(0, p - l q)): where q >= p / l, r is 0 and P(x) = min(q, p /
    l) = p / l. Elsewhere P(x) = q + R (p - l q) / N, N = sum max(0, p - l q), R = P(reject) = sum
    max(0, l q - p) / l; N - l R = 1 - l >= 0, so R / N <= 1 / l and P(x) <= p / l. With the plain
    residual norm(max(0, p - q)): R <= sum max(0, q - p), so P(x) <= p where p > q, and P(x) =
    min(q, p / l) elsewhere.

    At temperature 0 every committed token x has p(x) >= l max p, and a drafted one that has is
    accepted.
    """
    for (p, q), lenience in product(
        distribution_pairs(largest=largest), (Fraction(1), Fraction(1, 2), Fraction(1, 3))
    ):
        second = tuple(reversed(p))  # the target's distribution after the first token
        verifier = lenient(lenience)

        def play(
            rng: Exhaustive,
            p: Exact = p,
            q: Exact = q,
            second: Exact = second,
            verifier: TreeVerifier = verifier,
        ) -> tuple[bool, tuple[int, ...]]:
            stream = rng.split("draft", 0)
            tree = TokenTree.chain([stream.draw(q), stream.draw(q)], [list(q)] * 2)
            verdict = verifier(tree, NodeRows({ROOT: p, 0: second, 1: p}), rng.split("verify", 0))
            own = () if verdict.next is None else (verdict.next,)
            return bool(verdict.accepted), (*tree.tokens_on(verdict.accepted), *own)[:2]

        texts: dict[tuple[int, ...], Fraction] = {}
        acceptance, outcomes = Fraction(0), 0
        for (accepted, output), probability in Exhaustive.walk(play):
            outcomes += 1
            acceptance += probability if accepted else 0
            for n in range(1, len(output) + 1):
                texts[output[:n]] = texts.get(output[:n], Fraction(0)) + probability
        caps = {
            text: p[text[0]] / lenience * (second[text[1]] / lenience if len(text) == 2 else 1)
            for text in texts
        }
        over = min((text for text in texts if texts[text] > caps[text]), default=None, key=len)
        if over is not None:
            case = {"p": p, "p_after": second, "q": q, "lenience": lenience}
            accuse(LENIENCE, f"P{over} <= {caps[over]}", texts[over], **case)
        expected = sum(min(b, a / lenience) for a, b in zip(p, q, strict=True))
        case = {"p": p, "q": q, "lenience": lenience}
        expect_equal(LENIENCE, expected, acceptance, **case, probability="of accepting")
        _check_lenient_greedy(verifier, lenience, p, q)
        yield outcomes


def _check_lenient_greedy(verifier: TreeVerifier, lenience: Fraction, p: Exact, q: Exact) -> None:
    sharp: Exact = tuple(Fraction(i == p.index(max(p))) for i in range(len(p)))
    for token in (x for x, mass in enumerate(q) if mass):
        tree = TokenTree.chain([token], [list(q)])
        rows = dict.fromkeys((ROOT, 0), sharp)
        for verdict, _ in Exhaustive.walk(
            lambda c: verifier(tree, NodeRows(rows, dict.fromkeys((ROOT, 0), p)), c)  # noqa: B023
        ):
            output = token if verdict.accepted else verdict.next
            least = lenience * max(p)
            if bool(verdict.accepted) != (p[token] >= least) or output is None or p[output] < least:
                rule = f"a token with p >= {least}; a drafted one is accepted"
                accuse(LENIENCE, rule, verdict, p=p, draft=token, lenience=lenience, temperature=0)


@collect_evidence(REJECTION)
def recursive_rejection_law(
    verifier: TreeVerifier, largest: int = 5, most: int = 3
) -> Iterator[int]:
    """Check that all k siblings fail with probability TV(p_1, q_1) TV(p_2, q_2) ...

    The i-th sibling is tested against what the rejections before it left of p: p_i+1 = norm(max(0,
    p_i - q_i)); without replacement, averaged over the rejected draws.
    """
    for (p, q), k, replace in product(
        distribution_pairs(largest=largest), range(1, most + 1), (True, False)
    ):
        draft = with_replacement if replace else without_replacement
        got, _, outcomes = play_siblings(verifier, draft, p, q, k)
        expected = 1 - rejection_probability(p, q, k, replace)
        expect_equal(REJECTION, expected, got, p=p, q=q, k=k, replacement=replace)
        yield outcomes


def rejection_probability(p: Exact, q: Exact | None, k: int, replace: bool) -> Fraction:
    """Return how probable it is that recursive rejection accepts none of k siblings.

    replace  they are drawn from q with replacement

    >>> half, third = Fraction(1, 2), Fraction(1, 3)
    >>> str(rejection_probability((half, half, 0 * half), (third, third, third), 1, replace=False))
    '1/3'
    """
    if k == 0 or q is None:
        return Fraction(1)
    left = positive_part(p, q)
    if left is None:
        return Fraction(0)
    if replace:
        return (1 - overlap_mass(p, q)) * rejection_probability(left, q, k - 1, replace)
    rejected = [(x, b - a) for x, (a, b) in enumerate(zip(p, q, strict=True)) if b > a]
    return sum(
        (
            mass * rejection_probability(left, without_token(q, x), k - 1, replace)
            for x, mass in rejected
        ),
        Fraction(0),
    )


@collect_evidence(TRANSPORT)
def several_drafts(verifier: TreeVerifier, largest: int = 5, most: int = 3) -> Iterator[int]:
    """Check the acceptance of k drafts between two bounds.

    It is never above the optimal transport, with or without replacement; with i.i.d. drafts never
    below sampling y ~ p and accepting it if it is among them.

    The lower bound by induction on k: max(0, p - q) <= p (1 - q), so TV(p, q) times the bound on
    what is left of p is at most sum_x max(0, p - q) (1 - q)^(k-1) <= sum_x p (1 - q)^k.
    """
    for (p, q), k, replace in product(
        distribution_pairs(largest=largest), range(1, most + 1), (True, False)
    ):
        draft = with_replacement if replace else without_replacement
        got, _, outcomes = play_siblings(verifier, draft, p, q, k)
        best = optimal_transport(p, drafted_sets(q, k, replace))
        if got > best:
            accuse(TRANSPORT, f"at most {best}", got, p=p, q=q, k=k, replacement=replace)
        least = matching_acceptance(p, q, k)
        if replace and got < least:
            accuse(MATCHING, f"at least {least}", got, p=p, q=q, k=k)
        yield outcomes


@collect_evidence(KSEQ)
def kseq_reaches_share(verifier: TreeVerifier, largest: int = 5, most: int = 3) -> Iterator[int]:
    """Check K-SEQ's promise for k i.i.d. drafts; the proof is in `kseq_share`."""
    for (p, q), k in product(distribution_pairs(largest=largest), range(1, most + 1)):
        got, _, outcomes = play_siblings(verifier, with_replacement, p, q, k)
        bound = kseq_share(k) * optimal_transport(p, drafted_sets(q, k, replace=True))
        if got < bound:
            accuse(KSEQ, f"at least {bound}", got, p=p, q=q, k=k)
        yield outcomes


@collect_evidence(DRAW_ORDER)
def draw_order(
    draft: DraftSiblings, verifier: TreeVerifier, largest: int = 5, most: int = 3
) -> Iterator[int]:
    """Check that siblings in draw order emit p.

    Each sibling declares the distribution it was drawn from given the *earlier* ones, so sorting
    them afterwards, with these left in place or taken along, changes what is emitted.
    """
    for (p, q), k in product(distribution_pairs(largest=largest), range(2, most + 1)):
        _, first, outcomes = play_siblings(verifier, draft, p, q, k)
        got = tuple(first.get(x, Fraction(0)) for x in range(len(p)))
        expect_equal(DRAW_ORDER, p, got, p=p, q=q, k=k)
        yield outcomes
