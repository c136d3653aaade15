"""Laws of verifiers beyond the plain walk: block verification, K-SEQ, and coupling on shared noise.

Block verification (Sun et al., ICLR 2025, arXiv 2403.10444) judges a chain as a whole; K-SEQ
(SpecTr, NeurIPS 2023, arXiv 2310.15141) selects among independent drafts. Rows depend on the text,
so that a verifier which reads the wrong row is seen; every draft and outcome is walked. A coupling
(Daliri et al. 2024, arXiv 2408.07978) has continuous noise, so nothing is enumerated there: tokens
are compared seed by seed, and the probability of agreement with an area that is measured.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.rng import Replay, Seeded
from tinyspec.decoding.sampling import HOST, SamplingParams, sample_inverse_cdf
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws.checking.check import prove_form
from tinyspec.laws.checking.forms import HouseVerifierForm
from tinyspec.laws.checking.trees import TREE_KINDS, ShapedCase, deep_tree_cases
from tinyspec.laws.evidence import Evidence, LawViolated, accuse, expect_equal
from tinyspec.laws.exact.models import FunctionDrafter
from tinyspec.laws.exact.rational import Exact, distribution_pairs, overlap_mass
from tinyspec.laws.loop_laws import Table, format_table, table_model
from tinyspec.laws.row_laws import normalize_weights
from tinyspec.laws.theorems import NodeRows, TreeVerifier, kseq_acceptance
from tinyspec.technique import Request
from tinyspec.tree import ROOT, TokenTree

BLOCK_TOKENS = (
    "tokens kept of a block = sum_i E[w_i], w_i the clipped running ratio "
    "(block verification, arXiv 2403.10444)"
)
BLOCK_EMITTED = (
    "the tokens of a block have the target's distribution (block verification, arXiv 2403.10444)"
)

SLOWEST = 300.0  # seconds for the trees of one kind, which take half a second
TREES = "a verifier keeps the target's distribution on trees of every kind"

Tokens = tuple[int, ...]


class DeepVerifierForm(HouseVerifierForm):
    """A verifier on the hand-made trees of one kind that reach beyond two siblings."""

    def cases(self, seed: int) -> Iterator[ShapedCase]:
        return deep_tree_cases(self.kind)


def hand_made_trees(verifier: TreeVerifier, kind: str) -> Evidence:
    """Check a verifier on wide, deep or mixed trees, in Fractions and in float64.

    An exception of the verifier goes through, with its file and line.
    """
    form = DeepVerifierForm(verifier)
    form.kind = kind
    found = prove_form(form, seconds=SLOWEST, through=(Exception,))
    if not found.is_proved:
        raise TinyspecError(f"the verifier took more than {SLOWEST:g} s on {TREE_KINDS[kind]}")
    return found


def trees_of_every_kind(
    verifier: TreeVerifier, kinds: Sequence[str] = tuple(TREE_KINDS)
) -> Evidence:
    """Check a verifier on the hand-made trees of all kinds."""
    found = Evidence(TREES)
    try:
        for kind in kinds:
            found += hand_made_trees(verifier, kind)
    except LawViolated as violated:
        broken = violated.counterexample
        accuse(TREES, broken.expected, broken.got, **broken.case, part=broken.law)
    return found


class TokensKept(NamedTuple):
    """How many tokens of a draft are kept on average.

    by_token  by token verification: sum_i E_q[product of min(1, p / q)]
    block     by block verification: sum_i E_q[w_i], w_i = min(1, w_(i-1) p / q)
    bound     by none more: sum_i sum_x min(p(x_1..x_i), q(x_1..x_i))
    """

    by_token: Fraction
    block: Fraction
    bound: Fraction


class BlockCase(NamedTuple):
    """p and q at the beginning of the text, whether they change along it, gamma, and k drafts."""

    p: Exact
    q: Exact
    bent: bool
    gamma: int
    k: int = 1

    def target(self, text: Tokens) -> Exact:
        """Return p after a text: turned by one place for each 0, where it is bent."""
        return _turned_row(self.p, text.count(0) if self.bent else 0)

    def draft(self, text: Tokens) -> Exact:
        """Return q after a text: turned by one place for each token, where it is bent."""
        return _turned_row(self.q, len(text) if self.bent else 0)

    def kept(self) -> "TokensKept":
        """Return what a verifier keeps of a draft on average, by the paper."""
        totals = [Fraction(0)] * 3

        def visit(
            text: Tokens, q: Fraction, p: Fraction, clipped: Fraction, alone: Fraction
        ) -> None:
            """Add a text of probability p and q, its clipped ratio, and that of single tokens."""
            if text:
                for i, share in enumerate((alone, clipped, min(Fraction(1), p / q))):
                    totals[i] += q * share
            if len(text) == self.gamma:
                return
            for token, (a, b) in enumerate(zip(self.target(text), self.draft(text), strict=True)):
                if b:
                    step, single = clipped * a / b, alone * min(Fraction(1), a / b)
                    visit((*text, token), q * b, p * a, min(Fraction(1), step), single)

        visit((), *[Fraction(1)] * 4)
        return TokensKept(*totals)

    def words(self) -> dict[str, Any]:
        """Return the case for a counterexample."""
        case: dict[str, Any] = {"p": self.p, "q": self.q}
        if self.bent:
            case["rows"] = "p one place on after each 0, q one place on after each token"
        return case | {"gamma": self.gamma} | ({"k": self.k} if self.k > 1 else {})


def block_cases(vocabularies: Sequence[int], largest: int, gamma: int) -> Iterator[BlockCase]:
    """Yield the cases, smallest first; three tokens with drafts of two at most."""
    for p, q in distribution_pairs(vocabularies, largest):
        for bent, length in product((False, True), range(1, gamma + 1)):
            if length < 3 or len(p) == 2:
                yield BlockCase(p, q, bent, length)


def block_keeps_its_promise(
    verifier: TreeVerifier,
    vocabularies: Sequence[int] = (2, 3),
    largest: int = 5,
    gamma: int = 3,
    laws: Sequence[str] = (BLOCK_EMITTED, BLOCK_TOKENS),
) -> Evidence:
    """Check block verification: the output has distribution p, and as many tokens as promised.

    The kept tokens are as many as the clipped ratio says: never fewer than token verification
    keeps, never more than any verifier can.
    """
    began, cases, branches = perf_counter(), 0, 0
    for case in block_cases(vocabularies, largest, gamma):
        round = play_rounds(verifier, case)
        cases, branches = cases + 1, branches + round.branches
        if BLOCK_EMITTED in laws:
            expect_target_probs(BLOCK_EMITTED, case, round)
        due = case.kept()
        assert due.by_token <= due.block <= due.bound  # the theorem, of the oracle itself
        if BLOCK_TOKENS in laws and round.kept != due.block:
            accuse(BLOCK_TOKENS, due.block, round.kept, **case.words(), token_by_token=due.by_token)
    return Evidence(laws[-1], cases, branches, perf_counter() - began)


class PlayedRounds(NamedTuple):
    """Every outcome of a round: tokens kept on average, and the probabilities of its texts.

    `emitted` is the probability that each text is emitted, `beyond` that more follows it.
    """

    kept: Fraction
    emitted: dict[Tokens, Fraction]
    beyond: dict[Tokens, Fraction]
    branches: int


def play_rounds(verifier: TreeVerifier, case: BlockCase) -> PlayedRounds:
    """Draw drafts, judge them, and count."""
    kept, branches = Fraction(0), 0
    emitted = defaultdict[Tokens, Fraction](Fraction)
    beyond = defaultdict[Tokens, Fraction](Fraction)
    outcomes = Exhaustive.walk(lambda rng: _play_round(verifier, case, rng))
    for (accepted, text), probability in outcomes:
        branches += 1
        kept += probability * accepted
        for n in range(len(text) + 1):
            emitted[text[:n]] += probability
            beyond[text[:n]] += probability if n < len(text) else 0
    return PlayedRounds(kept, emitted, beyond, branches)


def _play_round(verifier: TreeVerifier, case: BlockCase, rng: Any) -> tuple[int, Tokens]:
    """Draw k drafts side by side, depth by depth; return tokens kept, and the output."""
    rows, stream = {ROOT: case.target(())}, rng.split("draft", 0)
    texts: list[Tokens] = []
    parents, draft_probs = list[int](), list[Any]()
    for node in range(case.k * case.gamma):
        parents.append(node - case.k if node >= case.k else ROOT)
        before = texts[parents[-1]] if node >= case.k else ()
        draft_probs.append(list(case.draft(before)))
        texts.append((*before, stream.draw(case.draft(before))))
        rows[node] = case.target(texts[-1])
    tree = TokenTree([text[-1] for text in texts], parents, draft_probs, (False,) * len(texts))
    verdict = verifier(tree, NodeRows(rows), rng.split("verify", 0))
    text = texts[verdict.accepted[-1]] if verdict.accepted else ()
    return len(text), (*text, *(() if verdict.next is None else (verdict.next,)))


def expect_target_probs(name: str, case: BlockCase, round: PlayedRounds) -> None:
    """Raise LawViolated unless a round that goes beyond a text continues with p.

    That is necessary and enough, since later rounds start afresh.
    """
    for text, mass in sorted(round.beyond.items(), key=lambda entry: (len(entry[0]), entry[0])):
        if mass:
            tokens = range(len(case.p))
            got = tuple(round.emitted.get((*text, y), Fraction(0)) / mass for y in tokens)
            expect_equal(name, case.target(text), got, **case.words(), text=text)


def _turned_row(row: Exact, places: int) -> Exact:
    places %= len(row)
    return row[places:] + row[:places]


SELECTED = (
    "a token selected among k drafts, or drawn after them, has the target's distribution "
    "(SpecTr, arXiv 2310.15141)"
)
FACTOR = "K-SEQ accepts what it does at the least lawful rho (SpecTr, arXiv 2310.15141)"
FACTOR_TOLERANCE = 1e-8


def selection_cases(largest: int) -> Iterator[BlockCase]:
    """Yield one position first, then two: two drafts of two tokens, and three of one."""
    for p, q in distribution_pairs(largest=largest):
        yield BlockCase(p, q, False, 1, 2)
    for p, q in distribution_pairs((2,), largest):
        yield BlockCase(p, q, False, 1, 3)
        yield BlockCase(p, q, True, 2, 2)
    p, q = (tuple(Fraction(x, 6) for x in row) for row in ((3, 2, 1), (1, 2, 3)))
    # Three tokens: where both drafts begin with 1 or 2, the residual has more than one token.
    yield BlockCase(p, q, True, 2, 2)


def selection_keeps_target(verifier: TreeVerifier, largest: int = 5) -> Evidence:
    """Check that after any text that a round has emitted so far, the next token has distribution
    p."""
    began, cases, branches = perf_counter(), 0, 0
    for case in selection_cases(largest):
        round = play_rounds(verifier, case)
        cases, branches = cases + 1, branches + round.branches
        expect_target_probs(SELECTED, case, round)
    return Evidence(SELECTED, cases, branches, perf_counter() - began)


def least_factor(
    verifier: TreeVerifier, largest: int = 5, ks: Sequence[int] = (1, 2, 3)
) -> Evidence:
    """Check that one of k drafts is accepted as often as theory says, with the least rho."""
    began, cases, branches = perf_counter(), 0, 0
    for p, q in distribution_pairs(largest=largest):
        for k in ks:
            got, walked = _acceptance(verifier, p, q, k)
            cases, branches = cases + 1, branches + walked
            expected = kseq_acceptance(p, q, k)
            if abs(got - expected) > FACTOR_TOLERANCE:
                accuse(FACTOR, expected, got, p=p, q=q, k=k)
    return Evidence(FACTOR, cases, branches, perf_counter() - began)


def _acceptance(verifier: TreeVerifier, p: Exact, q: Exact, k: int) -> tuple[float, int]:
    """Return how probably one of k drafts of one token is accepted, and the outcomes walked."""
    rows, row = dict.fromkeys(range(ROOT, k), np.array(p, float)), np.array(q, float)

    def play(rng: Exhaustive) -> bool:
        tokens = [rng.draw(row) for _ in range(k)]
        tree = TokenTree(tokens, (ROOT,) * k, (row,) * k, (False,) * k)
        return bool(verifier(tree, rows, rng).accepted)

    outcomes = list(Exhaustive.walk(play))
    return float(sum(probability for passed, probability in outcomes if passed)), len(outcomes)


COUPLING_INVARIANT = "one seed gives one text, whoever drafts (arXiv 2408.07978)"
COUPLING_AGREES = (
    "a draft token is accepted where both races on the noise of its position have one winner "
    "(arXiv 2408.07978)"
)
COUPLING_FORMULA = (
    "P(same) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) >= (1 - TV) / (1 + TV) (arXiv 2408.07978)"
)

Build = Callable[..., Decoder]

COUPLING_TARGET: Table = ((1, 2, 3), (3, 1, 2), (2, 0, 1))
COUPLING_DRAFTS: Sequence[Table | None] = (
    None,
    COUPLING_TARGET,
    ((1, 1, 1),),
    ((3, 1, 0), (0, 1, 1), (1, 5, 1)),
)


def same_text_whoever_drafts(build: Build, seeds: int = 12, tokens: int = 8) -> Evidence:
    """Check that the tokens win the races of the target's rows, with each draft model and none."""
    begun, seen = perf_counter(), 0
    stop, rows = (
        StoppingCriteria(max_new_tokens=tokens),
        [normalize_weights(w) for w in COUPLING_TARGET],
    )
    for seed, gamma, q in product(range(seeds), (1, 3), COUPLING_DRAFTS):
        drafts = [] if q is None else [table_model(q).session()]
        target = table_model(COUPLING_TARGET).session()
        decoder = build(Request(target, drafts, SamplingParams(), stop), gamma=gamma)
        decoder.extend((0,))
        rng, races, text = Seeded(seed), Seeded(seed), [0]
        while not decoder.finished:
            decoder.step(rng)
        while len(text) <= tokens:
            text.append(races.exponential_race([float(x) for x in rows[text[-1]]], len(text)))
        seen += 1
        case = {
            "p": format_table(COUPLING_TARGET),
            "q": None if q is None else format_table(q),
            "gamma": gamma,
            "seed": seed,
        }
        expect_equal(COUPLING_INVARIANT, text, decoder.context, **case)
    return Evidence(COUPLING_INVARIANT, seen, seen, perf_counter() - begun)


def draft_kept_where_winners_agree(build: Build, grid: int = 12) -> Evidence:
    """Check one draft token over two, for a grid of uniforms that make its noise.

    The noise of a uniform u is E = -log(1 - u).
    """
    begun, seen = perf_counter(), 0
    for p, q in (((1, 1), (1, 3)), ((1, 4), (3, 2)), ((0, 1), (1, 1))):
        for i, j in product(range(grid), repeat=2):
            uniforms = [(i + 0.5) / grid, (j + 0.35) / grid]
            request = Request(table_model((p,)).session(), [table_model((q,)).session()])
            decoder = build(request, gamma=1)
            decoder.extend((0,))
            round = decoder.step(Replay([*uniforms, *[0.5] * 9]))
            of_p, of_q = (
                min(
                    (-math.log1p(-u) / x, token)
                    for token, (u, x) in enumerate(zip(uniforms, row, strict=True))
                    if x
                )[1]
                for row in (p, q)
            )
            expected = {"token": of_p, "accepted": of_p == of_q}
            got = {"token": round.tokens[0], "accepted": bool(round.verdict.accepted)}
            seen += 1
            case = {"p": normalize_weights(p), "q": normalize_weights(q), "uniforms": uniforms}
            expect_equal(COUPLING_AGREES, expected, got, **case)
    return Evidence(COUPLING_AGREES, seen, seen, perf_counter() - begun)


def agreement_formula(agreement: Callable[[Any, Any], Any], largest: int = 5) -> Evidence:
    """Check P(same) against the share of noise on which both races have one winner.

    Over two tokens the noise matters by its ratio alone: the races differ between two thresholds, a
    set of probability TV. Over three, exponentials divided by their sum are uniform on the
    triangle, and the share is an area.
    """
    begun, seen = perf_counter(), 0
    for p, q in distribution_pairs(largest=largest):
        got, same = agreement(list(p), list(q)), overlap_mass(p, q)
        expected, within = (same, 0.0) if len(p) == 2 else (_agreement_area(p, q), 0.03)
        seen += 1
        if abs(got - expected) > within:
            accuse(COUPLING_FORMULA, expected, got, p=p, q=q)
        if not same / (2 - same) <= got <= same:  # TV = 1 - same
            accuse(COUPLING_FORMULA, f"from {same / (2 - same)} to {same}", got, p=p, q=q)
    return Evidence(COUPLING_FORMULA, seen, 0, perf_counter() - begun)


def _agreement_area(p: Exact, q: Exact, grid: int = 90) -> float:
    """Return the share of the triangle where argmin E / p is argmin E / q, on a grid."""
    at = (np.arange(grid) + 0.5) / grid
    x, y = (side.ravel() for side in np.meshgrid(at, at))
    folded = x + y > 1  # the other half of the square is folded over
    x, y = np.where(folded, 1 - x, x), np.where(folded, 1 - y, y)
    noise = np.stack([x, y, 1 - x - y])
    of_p, of_q = (
        np.stack(
            [e / float(w) if w else e + np.inf for e, w in zip(noise, row, strict=True)]
        ).argmin(axis=0)
        for row in (p, q)
    )
    return float((of_p == of_q).mean())


GREEDY_VERDICT = (
    "greedy verification follows the target's tokens and names the nodes that it rejects"
)


class _GreedyTarget:
    """A target at temperature 0, whose token depends on the whole text."""

    kernels = HOST

    def __init__(self, tree: TokenTree, turn: int):
        self.tree, self.turn = tree, turn

    def token_after(self, text: Tokens) -> int:
        return (self.turn + 2 * sum(text) + len(text)) % 3

    def greedy_token(self, node: int) -> int:
        return self.token_after(self.tree.tokens_on(self.tree.path(node)))


def greedy_verdict(verifier: TreeVerifier, cases: int = 300) -> Evidence:
    """Check verdicts at temperature 0 on drawn trees, with equal siblings and with probes among
    them.

    The oracle knows texts only: a node is tested if the text up to its parent is the target's.
    """
    begun, random = perf_counter(), np.random.default_rng(0)
    for seen in range(cases):
        n = int(random.integers(1, 8))
        parents, probe = list[int](), list[bool]()
        for node in range(n):
            parents.append(int(random.choice([ROOT, *(i for i in range(node) if not probe[i])])))
            probe.append(bool(random.random() < 0.25))
        tree = TokenTree(
            tuple(random.integers(0, 3, n).tolist()), tuple(parents), (None,) * n, tuple(probe)
        )
        target = _GreedyTarget(tree, seen)
        spelled = {node: tree.tokens_on(tree.path(node)) for node in range(n) if not probe[node]}
        accepted, rejected, text = list[int](), list[int](), tuple[int, ...]()
        while True:
            wanted = (*text, target.token_after(text))
            tested = [node for node in spelled if spelled[node][:-1] == text]
            right = [node for node in tested if spelled[node] == wanted]
            rejected += [
                node for node in tested if node not in right and node < min(right, default=n)
            ]
            if not right:
                break
            accepted.append(right[0])
            text = wanted
        verdict = verifier(tree, target, Seeded(0))
        got = (verdict.accepted, verdict.next, verdict.rejected)
        expect_equal(
            GREEDY_VERDICT,
            (tuple(accepted), wanted[-1], tuple(rejected)),
            got,
            tree=tree[:2],
            probe=probe,
        )
    return Evidence(GREEDY_VERDICT, cases, cases, perf_counter() - begun)


PLAIN_TEXT = "one seed gives plain decoding's text, whatever is drafted without probabilities"


def plain_text_of_a_seed(verifier: TreeVerifier, seeds: int = 40, tokens: int = 8) -> Evidence:
    """Check the text of a seed with random trees of point masses as drafts.

    The oracle draws one token after the other, with the uniforms of their positions.
    """
    begun, stop = perf_counter(), StoppingCriteria(max_new_tokens=tokens)
    rows = [[float(x) for x in normalize_weights(w)] for w in COUPLING_TARGET]
    for seed in range(seeds):
        random = np.random.default_rng(seed)

        def draft(context: Sequence[int], depth: int, random: Any = random) -> TokenTree:
            n = int(random.integers(0, min(6, depth) + 1))
            parents = [int(random.integers(ROOT, node)) for node in range(n)]
            guesses = random.integers(0, 3, n).tolist()
            return TokenTree(guesses, parents, (None,) * n, (False,) * n)

        target = table_model(COUPLING_TARGET).session()
        decoder = Decoder(target, FunctionDrafter(draft), verifier, stop=stop)
        decoder.extend((0,))
        rng, plain, text = Seeded(seed), Seeded(seed), [0]
        while not decoder.finished:
            decoder.step(rng)
        while len(text) <= tokens:
            text.append(sample_inverse_cdf(rows[text[-1]], plain.uniform_at(len(text))))
        case = {"p": format_table(COUPLING_TARGET), "seed": seed}
        expect_equal(PLAIN_TEXT, text, decoder.context, **case)
    return Evidence(PLAIN_TEXT, seeds, seeds, perf_counter() - begun)
