"""The library's own form of a verifier, verify(tree, p, rng) -> Verdict, judged on four kinds of
trees.
"""

from collections.abc import Iterator
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.cases import CheckCase, round_cases
from tinyspec.laws.dice import EnumeratedGenerator
from tinyspec.laws.forms import Misfit, RunOutcome, Tokens, VerifierForm, convert_rows
from tinyspec.laws.small import without_token
from tinyspec.tree import ROOT, TokenTree


class HouseVerifierForm(VerifierForm):
    """verify(tree, p, rng) -> Verdict, on one kind of tree."""

    kind = "chain"

    def cases(self, seed: int) -> Iterator[CheckCase]:
        cases = [case for case in round_cases(seed) if case.gamma < 3]
        return iter(cases if self.kind == "chain" else cases[::4])

    def shown(self, case: CheckCase) -> dict[str, Any]:
        return super().shown(case) | {"tree": TREE_KINDS[self.kind]}

    def play(
        self, case: CheckCase, numbers: str, dice: EnumeratedGenerator, rng: Exhaustive
    ) -> RunOutcome:
        tree = self.tree(case, numbers, rng.split("draft", 0))
        verdict: Verdict = self.function(
            tree, HouseTargetProbs(tree, case, numbers), rng.split("verify", 0)
        )
        if not hasattr(verdict, "accepted"):
            raise Misfit(f"verify(tree, p, rng) returns a Verdict; this one returned {verdict!r}")
        path, problem, text = tuple(verdict.accepted), "", tuple[int, ...]()
        for node in path:  # siblings may be equal: a child of either goes on
            if (
                not 0 <= node < len(tree.tokens)
                or tree.tokens_on(tree.path(tree.parents[node])) != text
            ):
                problem = f"a path down the tree with parents {list(tree.parents)}, not the nodes {list(path)}"
                break
            text = (*text, tree.tokens[node])
        tokens = () if problem else tree.tokens_on(path)
        return RunOutcome(
            tuple(tree.tokens),
            (*tokens, *(() if verdict.next is None else (verdict.next,))),
            (),
            problem,
        )

    def tree(self, case: CheckCase, numbers: str, rng: Exhaustive) -> TokenTree:
        """A draft of this kind; two siblings at the root, each with a child where gamma is 2."""
        if self.kind in ("chain", "point masses"):
            chain: Tokens = ()
            for _ in range(case.gamma):
                chain = (*chain, rng.draw(case.q.law(chain)))
            laws = [convert_rows(case.q.law(chain[:place]), numbers) for place in range(case.gamma)]
            return TokenTree.chain(chain, laws if self.kind == "chain" else None)
        tokens, parents, kept = list[int](), list[int](), list[Any]()
        law: Any = case.q.law(())
        for _ in range(2):
            if law is None:
                break
            tokens.append(rng.draw(law))
            parents.append(ROOT)
            kept.append(law)
            law = law if self.kind == "siblings" else without_token(law, tokens[-1])
        for node, token in enumerate(tuple(tokens)) if case.gamma > 1 else ():
            law = case.q.law((token,))
            tokens.append(rng.draw(law))
            parents.append(node)
            kept.append(law)
        return TokenTree(
            tokens, parents, [convert_rows(law, numbers) for law in kept], (False,) * len(tokens)
        )


TREE_KINDS = {
    "chain": "a chain drawn from q, its laws declared",
    "point masses": "a chain without laws: each token is judged as a point mass",
    "siblings": "two siblings drawn from q, independently",
    "without replacement": "two siblings drawn from q without replacement",
}


class HouseTargetProbs:
    """The target's rows as a house verifier reads them: p[ROOT], p[node]."""

    def __init__(self, tree: TokenTree, case: CheckCase, numbers: str):
        self.tree, self.case, self.numbers, self.sampling = tree, case, numbers, SamplingParams()

    def __getitem__(self, node: int) -> Any:
        return convert_rows(
            self.case.p.law(self.tree.tokens_on(self.tree.path(node))), self.numbers
        )

    def probs_under(self, node: int, sampling: SamplingParams) -> Any:
        return self[node]
