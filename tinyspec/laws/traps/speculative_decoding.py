"""Speculative decoding (Leviathan et al., Chen et al. 2023): the residual, the warped q, the bonus,
and the analysis.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder, TargetProbs, Verifier
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.laws import theorems
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, Reference
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.loop_laws import SMALL_TABLES, Table, enumerate_tokens, format_table, table_model
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.speculative.drafting import speculative_decoding as sps
from tinyspec.technique import Request
from tinyspec.tree import TokenTree

BONUS = "a draft that passes whole earns a token more"
PAIRED = "alpha is the mean overlap of paired rows (Leviathan et al. 2023, corollary 3.6)"

Build = Callable[..., Decoder]

FIVE: Table = ((1, 2, 0, 1, 4), (2, 1, 1, 0, 0), (1, 1, 1, 1, 1), (0, 3, 1, 0, 2), (1, 0, 0, 0, 1))
OTHER: Table = ((2, 1, 1, 1, 1), (1, 1, 1, 1, 2), (1, 2, 3, 1, 1), (1, 1, 1, 1, 1), (3, 1, 1, 1, 2))


def _chains() -> Iterator[tuple[Table, Table, int, SamplingParams]]:
    """p, q, gamma, warp: two tokens first, then Markov tables over five."""
    for (p, q), sampling in product(
        SMALL_TABLES, (SamplingParams(), SamplingParams(top_k=1), SamplingParams(temperature=0.5))
    ):
        yield p, q, 1, sampling
    for p, q in SMALL_TABLES[2:6]:
        yield p, q, 2, SamplingParams()
    for gamma, sampling in (
        (1, SamplingParams()),
        (2, SamplingParams(top_p=0.6)),
        (3, SamplingParams(top_k=2)),
    ):
        yield FIVE, OTHER, gamma, sampling


def joint_law_of_a_chain(build: Build) -> Evidence:
    """Two tokens over as many rounds as they take are distributed as the target's."""
    seen, branches = 0, 0
    for p, q, gamma, sampling in _chains():

        def make(
            p: Table = p, q: Table = q, gamma: int = gamma, sampling: SamplingParams = sampling
        ) -> Decoder:
            return build(
                Request(table_model(p).session(), [table_model(q).session()], sampling), gamma=gamma
            )

        got, walked = enumerate_tokens(make, 2)
        expected = Reference(lambda text, p=p: normalised(p[text[-1] % len(p)]), sampling).law(2)  # type: ignore[misc]
        seen, branches = seen + 1, branches + walked
        if got != expected:
            case = {
                "p": format_table(p),
                "q": format_table(q),
                "gamma": gamma,
                **({} if sampling == SamplingParams() else {"sampling": sampling}),
            }
            accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    return Evidence(JOINT, seen, branches)


def earns_a_bonus(build: Build) -> Evidence:
    """Where the draft is the target, at temperature 0, a round makes gamma + 1 tokens."""
    for gamma in (1, 2, 3):
        target, draft = (TableModel(1, zeros=False).session() for _ in range(2))
        decoder = build(Request(target, [draft], SamplingParams(temperature=0.0)), gamma=gamma)
        decoder.extend((0,))
        got = len(decoder.step(Seeded(0)).tokens)
        if got != gamma + 1:
            accuse(BONUS, gamma + 1, got, draft="the target itself", temperature=0, gamma=gamma)
    return Evidence(BONUS, 3)


def alpha_of_paired_rows(acceptance: Callable[[Sequence[tuple[Any, Any]]], float]) -> Evidence:
    """The estimator against sum min(p, q), on pairs and on their mean."""
    seen = 0
    for p, q in distribution_pairs((2, 3), 6):
        for rows, expected in (
            ([(p, q)], overlap_mass(p, q)),
            ([(p, q), (p, p)], (overlap_mass(p, q) + 1) / Fraction(2)),
        ):
            got, seen = acceptance(rows), seen + 1
            if abs(got - expected) > 1e-12:
                accuse(PAIRED, expected, got, rows=rows)
    return Evidence(PAIRED, seen)


# ------------------------------------------------------------------ toys


def correction_from_p(request: Request, gamma: int) -> Decoder:
    """After a refusal the target simply draws."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row: Any = p[node - 1]
            if not rng.accept(row[x] / q[x]):  # type: ignore[index]
                return Verdict(tuple(range(node)), rng.draw(row), (node,))
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def unwarped_q(request: Request, gamma: int) -> Decoder:
    """The draft samples with the user's settings, and its plain softmax is what the ratio is made
    of.
    """

    class Draft(ModelDrafter):
        def propose(
            self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
        ) -> TokenTree:
            tree = super().propose(context, max_draft_depth, sampling, rng)
            laws = TargetProbs(self.model.score(tree), SamplingParams(), context, tree)
            return tree._replace(draft_probs=[laws[node - 1] for node in range(len(tree.tokens))])

    return request.decoder(Draft(request.drafts[0], gamma), verify_tree)


def one_uniform(request: Request, gamma: int) -> Decoder:
    """One uniform for a round: as many tokens pass as have a ratio above it, up to the first that
    has not.
    """

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        columns = zip(range(-1, len(tree.tokens)), tree.tokens, tree.draft_probs, strict=False)
        lowest, levels = 1, []
        for up, x, q in columns:
            lowest = min(lowest, p[up][x] / q[x])  # type: ignore[index]
            levels.append(lowest)  # passing so far: u < the lowest ratio so far
        cells = [a - b for a, b in zip([1, *levels], [*levels, 0], strict=True)]
        n = rng.draw(cells)  # the cell that holds u says how many pass
        row: Any = p[n - 1]
        return Verdict(
            tuple(range(n)),
            rng.draw(row if n == len(levels) else residual(row, tree.draft_probs[n])),
        )

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def filtered_afterwards(request: Request, gamma: int) -> Decoder:
    """Verify with the plain softmax; apply top-k, top-p and temperature to the bonus token."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        plain = {
            node: p.probs_under(node, SamplingParams()) for node in range(-1, len(tree.tokens))
        }
        verdict = verify_tree(tree, plain, rng)
        return (
            verdict
            if verdict.rejected
            else verdict._replace(next=rng.draw(p[len(verdict.accepted) - 1]))
        )

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


def no_bonus(request: Request, gamma: int) -> Decoder:
    """The round ends with the draft; what the target said behind it is thrown away."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        verdict = verify_tree(tree, p, rng)
        return verdict._replace(next=None) if tree.tokens and not verdict.rejected else verdict

    return request.decoder(ModelDrafter(request.drafts[0], gamma), verify)


# ------------------------------------------------------------------ its analysis


def agreeing_samples(pairs: Sequence[tuple[Any, Any]]) -> float:
    """alpha as the probability that a sample of each is the same."""
    return sum(float(sum(a * b for a, b in zip(p, q, strict=True))) for p, q in pairs) / len(pairs)


def alpha_times_gamma(alpha: Any, gamma: int) -> Any:
    """As if a token could pass behind one that was refused."""
    return 1 + alpha * gamma


def as_long_as_likely(alpha: float, c: float) -> int:
    """Draft on while the whole draft passes with probability one half."""
    gamma = 0
    while gamma < 64 and alpha ** (gamma + 1) >= 0.5:
        gamma += 1
    return gamma


def lucky(lenience: Any) -> Verifier:
    """Lenience as a second chance: what the ratio refuses passes with probability 1 - l."""

    def verify(tree: TokenTree, p: TargetProbs, rng: Any) -> Verdict:
        for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
            row: Any = p[node - 1]
            if not (rng.accept(row[x] / q[x]) or rng.accept(1 - lenience)):  # type: ignore[index]
                return Verdict(tuple(range(node)), rng.draw(residual(row, q)), (node,))
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))

    return verify


TRAPS = [
    Trap(JOINT, joint_law_of_a_chain, card("speculative_decoding")),
    Trap(BONUS, earns_a_bonus, card("speculative_decoding")),
    Trap(PAIRED, alpha_of_paired_rows, lambda: sps.acceptance_rate),
    Trap(theorems.PREDICTION, theorems.predicted_tokens, lambda: sps.expected_tokens),
    Trap(theorems.PLANNER, theorems.planner_is_optimal, lambda: sps.best_gamma),
    Trap(theorems.LENIENCE, theorems.lenience_cap, lambda: sps.lenient_verifier),
]
TOYS = [
    Toy("correction from p", JOINT, correction_from_p),
    Toy("q without the user's settings", JOINT, unwarped_q),
    Toy("one uniform for a round", JOINT, one_uniform),
    Toy("filters after the verification", JOINT, filtered_afterwards),
    Toy("no bonus token", BONUS, no_bonus),
    Toy("alpha as agreement of samples", PAIRED, agreeing_samples),
    Toy("1 + alpha gamma tokens", theorems.PREDICTION, alpha_times_gamma),
    Toy("gamma without the cost", theorems.PLANNER, as_long_as_likely),
    Toy("lenience as a second chance", theorems.LENIENCE, lucky),
]
