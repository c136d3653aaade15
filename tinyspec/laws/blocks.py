"""What block verification proves (Sun et al., ICLR 2025, arXiv 2403.10444), as laws of a verifier
that judges a chain.

The rows depend on the text, so that a verifier which looks at the wrong row is seen. Every draft
and every outcome is walked; the oracle is the paper's running ratio in a few lines of fractions.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from time import perf_counter
from typing import Any, NamedTuple

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.small import Exact, distribution_pairs
from tinyspec.laws.theorems import NodeRows, TreeVerifier
from tinyspec.tree import ROOT, TokenTree

BLOCK_TOKENS = "tokens kept of a block = sum_i E[w_i], w_i the clipped running ratio (block verification, arXiv 2403.10444)"
BLOCK_EMITTED = "what a block emits has the target's law (block verification, arXiv 2403.10444)"

Tokens = tuple[int, ...]


class TokensKept(NamedTuple):
    """Tokens kept of a draft, on average.

    by_token  by token verification: sum_i E_q[product of min(1, p / q)]
    block     by block verification: sum_i E_q[w_i], w_i = min(1, w_(i-1) p / q)
    bound     by none more: sum_i sum_x min(p(x_1..x_i), q(x_1..x_i))
    """

    by_token: Fraction
    block: Fraction
    bound: Fraction


class BlockCase(NamedTuple):
    """p and q at the beginning of the text, whether they change along it, the length of a draft,
    and how many there are.
    """

    p: Exact
    q: Exact
    bent: bool
    gamma: int
    k: int = 1

    def target(self, text: Tokens) -> Exact:
        """p behind a text: turned by one place a token 0, where it is bent."""
        return _turned_row(self.p, text.count(0) if self.bent else 0)

    def draft(self, text: Tokens) -> Exact:
        """q behind a text: turned by one place a token, where it is bent."""
        return _turned_row(self.q, len(text) if self.bent else 0)

    def kept(self) -> "TokensKept":
        """What a verifier keeps of a draft on average, as the paper says it."""
        totals = [Fraction(0)] * 3

        def along(
            text: Tokens, drafted: Fraction, said: Fraction, weight: Fraction, by_token: Fraction
        ) -> None:
            if text:
                for i, share in enumerate((by_token, weight, min(Fraction(1), said / drafted))):
                    totals[i] += drafted * share
            if len(text) == self.gamma:
                return
            for token, (a, b) in enumerate(zip(self.target(text), self.draft(text), strict=True)):
                if b:
                    clipped, alone = (
                        min(Fraction(1), weight * a / b),
                        by_token * min(Fraction(1), a / b),
                    )
                    along((*text, token), drafted * b, said * a, clipped, alone)

        along((), *[Fraction(1)] * 4)
        return TokensKept(*totals)

    def words(self) -> dict[str, Any]:
        """For a counterexample."""
        turned = (
            {"rows": "p one place on behind each 0, q one place on behind each token"}
            if self.bent
            else {}
        )
        return {
            "p": self.p,
            "q": self.q,
            **turned,
            "gamma": self.gamma,
            **({"k": self.k} if self.k > 1 else {}),
        }


def block_cases(vocabularies: Sequence[int], largest: int, gamma: int) -> Iterator[BlockCase]:
    """The smallest first; three tokens with drafts of two at most."""
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
    """Whatever text was emitted so far in a round, the next token has the law p; and the tokens
    kept are as many as the clipped ratio says: never fewer than token verification keeps, never
    more than any verifier can."""
    began, cases, branches = perf_counter(), 0, 0
    for case in block_cases(vocabularies, largest, gamma):
        round = play_rounds(verifier, case)
        cases, branches = cases + 1, branches + round.branches
        if BLOCK_EMITTED in laws:
            expect_target_law(BLOCK_EMITTED, case, round)
        due = case.kept()
        assert due.by_token <= due.block <= due.bound  # the theorem, of the oracle itself
        if BLOCK_TOKENS in laws and round.kept != due.block:
            accuse(BLOCK_TOKENS, due.block, round.kept, **case.words(), token_by_token=due.by_token)
    return Evidence(laws[-1], cases, branches, perf_counter() - began)


class PlayedRounds(NamedTuple):
    """Every outcome of a round: tokens kept on average, and the probability that each text is
    emitted, and more behind it.
    """

    kept: Fraction
    emitted: dict[Tokens, Fraction]
    beyond: dict[Tokens, Fraction]
    branches: int


def play_rounds(verifier: TreeVerifier, case: BlockCase) -> PlayedRounds:
    """Drafts drawn, judged, and counted."""
    kept, branches = Fraction(0), 0
    emitted, beyond = (
        defaultdict[Tokens, Fraction](Fraction),
        defaultdict[Tokens, Fraction](Fraction),
    )
    for (accepted, text), probability in Exhaustive.walk(
        lambda rng: _play_round(verifier, case, rng)
    ):
        branches += 1
        kept += probability * accepted
        for n in range(len(text) + 1):
            emitted[text[:n]] += probability
            beyond[text[:n]] += probability if n < len(text) else 0
    return PlayedRounds(kept, emitted, beyond, branches)


def _play_round(verifier: TreeVerifier, case: BlockCase, rng: Any) -> tuple[int, Tokens]:
    """k drafts side by side, depth by depth: how many tokens were kept, and what was emitted."""
    rows, stream = {ROOT: case.target(())}, rng.split("draft", 0)
    texts: list[Tokens] = []
    parents, laws = list[int](), list[Any]()
    for node in range(case.k * case.gamma):
        parents.append(node - case.k if node >= case.k else ROOT)
        before = texts[parents[-1]] if node >= case.k else ()
        laws.append(list(case.draft(before)))
        texts.append((*before, stream.draw(case.draft(before))))
        rows[node] = case.target(texts[-1])
    tree = TokenTree([text[-1] for text in texts], parents, laws, (False,) * len(texts))
    verdict = verifier(tree, NodeRows(rows), rng.split("verify", 0))
    said = texts[verdict.accepted[-1]] if verdict.accepted else ()
    return len(said), (*said, *(() if verdict.next is None else (verdict.next,)))


def expect_target_law(name: str, case: BlockCase, round: PlayedRounds) -> None:
    """A round that goes beyond a text goes on with p: necessary and enough, since later rounds
    start afresh.
    """
    for text, mass in sorted(round.beyond.items(), key=lambda entry: (len(entry[0]), entry[0])):
        if mass:
            law = tuple(
                round.emitted.get((*text, y), Fraction(0)) / mass for y in range(len(case.p))
            )
            if law != case.target(text):
                accuse(name, case.target(text), law, **case.words(), text=text)


def _turned_row(row: Exact, places: int) -> Exact:
    places %= len(row)
    return row[places:] + row[:places]
