"""The theorems hold for the real code, and each of them kills implementations that look right."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction as F

import pytest

from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import theorems
from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.laws.exact.rational import distribution_pairs, without_token
from tinyspec.speculative.drafting.speculative_decoding import best_gamma
from tinyspec.tree import ROOT, TokenTree


def positive(row):
    left = [max(x, F(0)) for x in row]
    mass = sum(left)
    return [x / mass for x in left] if mass else None


@dataclass(frozen=True)
class Toy:
    """Recursive rejection written once more, with a hole for every way to get it wrong."""

    ratio: Callable = lambda p, q: p / q
    left: Callable = lambda row, q: positive([a - b for a, b in zip(row, q, strict=True)]) or row
    bonus: bool = True
    tests: int = 99  # siblings looked at
    prefix: bool = True  # stop at the first rejection of a chain
    scale: Callable = lambda q, lenience: [lenience * x for x in q]
    lenience: F = F(1)
    greedy: Callable = lambda soft, token, lenience: soft[token] >= lenience * max(soft)

    def __call__(self, tree: TokenTree, p, rng) -> Verdict:
        path, rejected, row, at = (), (), p[ROOT], ROOT
        children = [i for i, parent in enumerate(tree.parents) if parent == ROOT][: self.tests]
        while children:
            node, children = children[0], children[1:]
            token, q = tree.tokens[node], self.scale(tree.draft_probs[node], self.lenience)
            if p.sampling.temperature == 0:
                passed = self.greedy(p.soft[at], token, self.lenience)
            else:
                passed = rng.accept(self.ratio(row[token], q[token]))
            if passed or not self.prefix:
                path, row, at = (*path, *([node] if passed else [])), p[node], node
                children = [i for i, parent in enumerate(tree.parents) if parent == node][
                    : self.tests
                ]
            else:
                rejected = (*rejected, node)
                row = row if p.sampling.temperature == 0 else self.left(row, q)
        whole = not rejected and not self.bonus
        return Verdict(path, None if whole and path else rng.draw(row), rejected)


RIGHT = Toy()


def killed(law: str, run: Callable[[], Evidence]) -> LawViolated:
    with pytest.raises(LawViolated) as verdict:
        run()
    assert verdict.value.counterexample.law == law
    return verdict.value


# ------------------------------------------------------------------------------------- one position


def test_what_is_right_is_never_accused() -> None:
    """A second implementation, written here; that of the library is in test_theory."""
    for law in (
        theorems.acceptance_theorem,
        theorems.tokens_of_a_round,
        theorems.recursive_rejection_law,
        theorems.several_drafts,
    ):
        evidence = law(RIGHT, largest=4)
        assert evidence.branches > evidence.cases >= 95


@pytest.mark.parametrize(
    "broken",
    [
        Toy(ratio=lambda p, q: p / q * F(21, 20)),
        Toy(ratio=lambda p, q: q / p if p else F(0)),
        Toy(ratio=lambda p, q: F(1)),
        Toy(ratio=lambda p, q: (p / q) ** 2),
    ],
    ids=["5 % too easy", "ratio turned round", "always", "squared"],
)
def test_leviathan_theorem_3_5_kills_a_wrong_ratio(broken: Toy) -> None:
    killed(theorems.ACCEPTANCE, lambda: theorems.acceptance_theorem(broken))


def test_a_counterexample_is_the_smallest_and_speaks_of_p_and_q() -> None:
    accused = killed(
        theorems.ACCEPTANCE, lambda: theorems.acceptance_theorem(Toy(ratio=lambda p, q: F(1)))
    )
    assert accused.counterexample.case == {"p": (0, 1), "q": (1, 0)}
    assert (accused.counterexample.expected, accused.counterexample.got) == (0, 1)


@pytest.mark.parametrize(
    "broken", [Toy(bonus=False), Toy(prefix=False)], ids=["no bonus", "counts after a rejection"]
)
def test_leviathan_equation_1_kills_a_wrong_count(broken: Toy) -> None:
    killed(theorems.ROUND_TOKENS, lambda: theorems.tokens_of_a_round(broken))


# ------------------------------------------------------------------------------------- the analysis


@pytest.mark.parametrize(
    "formula",
    [
        lambda alpha, gamma: sum(alpha**i for i in range(gamma)),
        lambda alpha, gamma: sum(alpha**i for i in range(1, gamma + 2)),
        lambda alpha, gamma: 1 + gamma * alpha,
    ],
    ids=["no bonus", "no recovered token", "linear"],
)
def test_equation_1_kills_a_wrong_formula(formula) -> None:
    killed(theorems.PREDICTION, lambda: theorems.predicted_tokens(formula))


@pytest.mark.parametrize(
    "plan",
    [
        lambda alpha, c: 4,
        lambda alpha, c: 64,
        lambda alpha, c: max(0, best_gamma(alpha, c) - 1),
        lambda alpha, c: best_gamma(alpha, c / 2),
        lambda alpha, c: max(best_gamma(alpha, c), 1),
    ],
    ids=["always 4", "draft as much as you can", "one less", "half the cost", "always drafts"],
)
def test_corollary_3_9_kills_a_wrong_planner(plan) -> None:
    killed(theorems.PLANNER, lambda: theorems.planner_is_optimal(plan))


# ----------------------------------------------------------------------------------------- lenience


def test_lenience_is_capped_with_either_residual() -> None:
    theorems.lenience_cap(lambda lenience: replace(RIGHT, lenience=lenience), largest=4)
    plain = Toy(
        left=lambda row, q: positive([a - b / sum(q) for a, b in zip(row, q, strict=True)]) or row
    )
    theorems.lenience_cap(
        lambda lenience: replace(plain, lenience=lenience), largest=4
    )  # the other residual


@pytest.mark.parametrize(
    "broken",
    [
        Toy(scale=lambda q, lenience: [lenience**2 * x for x in q]),
        Toy(scale=lambda q, lenience: q),
        Toy(left=lambda row, q: row),
        Toy(greedy=lambda soft, token, lenience: True),
        Toy(greedy=lambda soft, token, lenience: soft[token] >= max(soft)),
    ],
    ids=[
        "too lenient",
        "not lenient",
        "recovers from p",
        "greedy takes all",
        "greedy takes the best alone",
    ],
)
def test_leviathan_a_5_kills(broken: Toy) -> None:
    killed(
        theorems.LENIENCE,
        lambda: theorems.lenience_cap(lambda lenience: replace(broken, lenience=lenience)),
    )


# ----------------------------------------------------------------------------------- several drafts


def test_spectr_kills_a_walk_that_tests_every_sibling_against_p() -> None:
    """It accepts more than any coupling of draft and target can, so what it emits cannot be p."""
    killed(theorems.TRANSPORT, lambda: theorems.several_drafts(Toy(left=lambda row, q: row)))
    killed(theorems.TRANSPORT, lambda: theorems.several_drafts(Toy(ratio=lambda p, q: F(1))))


def test_specinfer_kills_a_walk_that_looks_at_the_first_sibling_alone() -> None:
    killed(theorems.MATCHING, lambda: theorems.several_drafts(Toy(tests=1)))
    killed(theorems.REJECTION, lambda: theorems.recursive_rejection_law(Toy(tests=1)))


@pytest.mark.parametrize(
    "left",
    [
        lambda row, q: positive([abs(a - b) for a, b in zip(row, q, strict=True)]) or row,
        lambda row, q: (
            left if sum(left := [max(a - b, F(0)) for a, b in zip(row, q, strict=True)]) else row
        ),
        lambda row, q: positive([a * (1 - b) for a, b in zip(row, q, strict=True)]) or row,
    ],
    ids=["|p - q|", "not normalised", "p (1 - q)"],
)
def test_recursive_rejection_kills_a_wrong_residual(left) -> None:
    killed(theorems.REJECTION, lambda: theorems.recursive_rejection_law(Toy(left=left)))


def k_seq(tree: TokenTree, p, rng) -> Verdict:
    """K-SEQ on one position: one division factor for all drafts, and the residual that goes with
    it.
    """
    row, q, k = p[ROOT], tree.draft_probs[0], len(tree.tokens)

    def beta(rho: F) -> F:
        return sum(min(b, a / rho) for a, b in zip(row, q, strict=True))

    low, rho = F(1), F(k)
    for _ in range(
        5
    ):  # any rho from the root up to k is exact: the upper end of the bracket is taken
        middle = (low + rho) / 2
        low, rho = (
            (low, middle) if 1 - (1 - beta(middle)) ** k <= middle * beta(middle) else (middle, rho)
        )
    for node, token in enumerate(tree.tokens):
        if rng.accept(row[token] / (rho * q[token])):
            return Verdict((node,), rng.draw(p[node]))
    b = beta(rho)
    share = (1 - (1 - b) ** k) / b if b else F(0)
    return Verdict((), rng.draw([a - min(c, a / rho) * share for a, c in zip(row, q, strict=True)]))


def test_k_seq_reaches_its_share_of_the_optimum_and_keeps_the_distribution() -> None:
    theorems.kseq_reaches_share(k_seq, largest=4)
    for p, q in list(distribution_pairs(largest=5))[::9]:
        _, law, _ = theorems.play_siblings(k_seq, theorems.with_replacement, p, q, 3)
        assert law == {token: mass for token, mass in enumerate(p) if mass}


def test_k_seq_s_bound_kills_single_draft_rejection_called_k_seq() -> None:
    killed(theorems.KSEQ, lambda: theorems.kseq_reaches_share(Toy(tests=1)))


# ---------------------------------------------------------------------------- order of the siblings


def test_children_in_draw_order_keep_the_distribution() -> None:
    def by_chance(q, k, rng):  # as a drafter draws them
        tokens = rng.sample_without_replacement(q, k)
        laws = [q]
        for token in tokens[:-1]:
            laws.append(without_token(laws[-1], token))
        return tokens, laws

    theorems.draw_order(by_chance, verify_tree, largest=4)


@pytest.mark.parametrize(
    "along", [False, True], ids=["distributions stay", "distributions go along"]
)
def test_children_sorted_after_they_were_drawn_do_not(along: bool) -> None:
    """Permuting siblings changes no logits and no greedy output, and does change sampling without
    replacement.
    """

    def best_first(q, k, rng):
        tokens, laws = theorems.without_replacement(q, k, rng)
        order = sorted(range(len(tokens)), key=lambda i: (-q[tokens[i]], tokens[i]))
        return [tokens[i] for i in order], [laws[i] for i in order] if along else laws

    def shown(
        q, k, rng
    ):  # a sorted token may be impossible under its new distribution: then none is declared
        tokens, laws = best_first(q, k, rng)
        return tokens, laws if all(law[t] for t, law in zip(tokens, laws, strict=True)) else [
            q
        ] * len(tokens)

    killed(theorems.DRAW_ORDER, lambda: theorems.draw_order(shown, verify_tree))


@pytest.mark.parametrize("law_of", [lambda q, laws: [q] * len(laws)], ids=["the first law for all"])
def test_a_distribution_that_was_not_renormalised_is_seen(law_of) -> None:
    def stale(q, k, rng):
        tokens, laws = theorems.without_replacement(q, k, rng)
        return tokens, law_of(q, laws)

    killed(theorems.DRAW_ORDER, lambda: theorems.draw_order(stale, verify_tree))
