"""What A2 holds a walk to: the text that comes out of a drawn tree has the target's joint law, and
the tree is made use of.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.grade.a2_siblings import MASSLESS, at_least, played
from tinyspec.grade.a2_trees import WITHIN, Parents, path, words
from tinyspec.grade.task import Cases, Failed
from tinyspec.laws.accused import Counterexample, Evidence, LawViolated
from tinyspec.laws.cases import CheckCase, cases_of_kind, shrink_case
from tinyspec.laws.forms import Form, OutcomeProbs, RunOutcome, to_small_fraction
from tinyspec.laws.small import without_token
from tinyspec.tree import ROOT, TokenTree

PATH = "the path goes down the tree from its root"
JOINT = "the text has the target's joint distribution"
ROOTS, CHILDREN = "the root's children", "the children of node {}"
KEPT = "as many nodes are accepted as recursive rejection accepts"

Function = Callable[..., Any]


@dataclass(frozen=True)
class Grown(CheckCase):
    """A case with the tree that is drawn: its shape, and the nodes whose children are point
    masses.
    """

    parents: Parents = (ROOT,)
    points: tuple[int, ...] = ()


SHAPES: tuple[tuple[Parents, tuple[int, ...]], ...] = (
    ((), ()),
    ((-1,), ()),
    ((-1, -1), ()),
    ((-1, -1), (ROOT,)),
    ((-1, 0), ()),
    ((-1, 0), (0,)),
    ((-1, -1, 0), ()),
    ((-1, -1, 1), ()),
    ((-1, 0, -1), (ROOT,)),
    ((-1, -1, 1, 1), (1,)),
    ((-1, 0, -1, 2), ()),
    ((-1, -1, 1, 0), ()),
    ((-1, 0, 0, -1), ()),
    ((-1, -1, 1, 0, 1), (ROOT,)),
    ((-1, -1, 1, 0, 0), (ROOT, 0, 1)),
    ((-1, 0, 1), ()),
    ((-1, 0, 1), (1,)),
    ((-1, 0, -1, 1, 2, 3), (ROOT, 1, 2)),
)
"""Parents, and below which of them (of the root and the nodes) stand point masses. Of three levels
are the last ones.
"""


def cases_of(cases: Cases) -> Iterator[Grown]:
    """Trees over two tokens, then over three; every text has rows of its own."""
    for vocabulary, whole, count in ((2, 2, 6), (2, 4, 4), (3, 4, 8)):
        for parents, points in SHAPES:
            depth = max((len(path(parents, node)) for node in range(len(parents))), default=0)
            texts = [sum(vocabulary**n for n in range(length)) for length in range(depth + 2)]
            if (
                depth > 2 < vocabulary
            ):  # as many rows as there are texts: more than anyone would read
                continue
            lengths = (texts[depth + 1], max(1, texts[depth]))
            for case in cases_of_kind(
                vocabulary,
                depth,
                depth + 1,
                whole,
                lengths,
                "text",
                count * cases.times,
                cases.seed,
            ):
                yield Grown(**vars(case), parents=parents, points=points)


def drawn(case: Grown, chance: Exhaustive) -> tuple[TokenTree, list[Any]]:
    """A tree of this shape, with fewer siblings where no more can be drawn; and what each node's
    children were drawn from.
    """
    number: dict[int, int] = {ROOT: ROOT}  # of a node of the shape, in the tree
    tokens, parents, laws = list[int](), list[int](), list[Any]()
    left: dict[int, Any] = {}
    tree = TokenTree(tokens, parents, laws, [])
    q_rows: list[Any] = [None]
    for node, shaped in enumerate(case.parents):
        if shaped not in number:
            continue
        above = number[shaped]
        if shaped in case.points:
            law, token = None, case.vocabulary - 1 - parents.count(above)
        else:
            full = case.q.law(tree.tokens_on(tree.path(above)))
            law = left.get(above, full)
            if law is None:
                continue
            token = chance.draw(law)
            left[above], q_rows[above + 1] = without_token(law, token), list(full)
        number[node] = len(tokens)
        tokens.append(token)
        parents.append(above)
        laws.append(law)
        q_rows.append(None)
    return tree._replace(probe=(False,) * len(tokens)), q_rows


def rows_of(case: Grown, tree: TokenTree) -> list[list[Fraction]]:
    """[n + 1][V] the target's rows, the root's first."""
    return [
        list(case.p.law(tree.tokens_on(tree.path(node)))) for node in range(ROOT, len(tree.tokens))
    ]


class Walks(Form):
    """A walk on one case after the other, and what must be true of it."""

    law = JOINT

    def outcome(self, case: Grown, chance: Exhaustive) -> RunOutcome:
        """One tree, walked."""
        tree, q_rows = drawn(case, chance)
        said = tuple(tree.tokens)
        try:
            got = self.function(
                list(tree.tokens), list(tree.parents), rows_of(case, tree), q_rows, chance
            )
        except Failed:
            raise
        except TinyspecError as error:  # from the chance
            return RunOutcome(said, (), (str(error),), MASSLESS)
        if (
            not isinstance(got, (list, tuple))
            or len(got) != 2
            or not isinstance(got[0], (list, tuple))
        ):
            return RunOutcome(
                said, (), (words(got),), "two things: the list of accepted nodes, and a token"
            )
        down, token = list(got[0]), got[1]
        if (
            isinstance(token, bool)
            or not isinstance(token, int)
            or not 0 <= token < case.vocabulary
        ):
            return RunOutcome(said, (), (words(token),), f"a token, 0 to {case.vocabulary - 1}")
        nodes = range(len(tree.tokens))
        if not all(type(node) is int and node in nodes for node in down) or down != (
            list(tree.path(down[-1])) if down else []
        ):
            return RunOutcome(
                said,
                (),
                (tuple(down),),
                f"nodes of the tree with parents {list(tree.parents)}, each a child of the one before",
            )
        return RunOutcome(said, (*tree.tokens_on(down), token))

    def outcomes(self, case: Grown) -> OutcomeProbs:
        known = played(self.function)
        if case not in known:
            known[case] = Exhaustive.law(lambda chance: self.outcome(case, chance))
        return known[case]  # type: ignore[no-any-return]

    def shown(self, case: Grown) -> dict[str, Any]:
        how = "drawn from q without replacement"
        if case.points:
            how += f", but {' and '.join(CHILDREN.format(node) if node >= 0 else ROOTS for node in case.points)}: point masses"
        tree = f"parents {list(case.parents)}, {how} (fewer where q has no more)"
        rows = {"target rows": case.p.shown(case.gamma)}
        if case.gamma:
            rows["draft rows"] = case.q.shown(case.gamma - 1)
        return {"tree": tree, **rows}

    def report(self, *given: Any) -> tuple[dict[str, Any], Any, Any]:
        shown, expected, got = super().report(*given)
        names = {"draft": "tokens of the tree", "output of each draft": "each tree"}
        return {names.get(name, name): value for name, value in shown.items()}, expected, got

    def problem(self, case: Grown, law: OutcomeProbs) -> Counterexample | None:
        """What is no path, or no token."""
        for outcome in law:
            if outcome.problem:
                shown = self.shown(case) | {"tokens of the tree": list(outcome.draft)}
                name = JOINT if outcome.problem == MASSLESS else PATH
                return Counterexample(name, shown, outcome.problem, outcome.laws[0])
        return None

    def joint(self, case: Grown, law: OutcomeProbs) -> Counterexample | None:
        return self.problem(case, law) or self.compare(case, law)

    def kept(self, case: Grown, law: OutcomeProbs) -> Counterexample | None:
        """The expected number of accepted tokens, against the library's walk."""
        if (problem := self.problem(case, law)) is not None:
            return problem

        def accepted(chance: Exhaustive) -> int:
            tree, _ = drawn(case, chance)
            rows = rows_of(case, tree)
            return len(
                verify_tree(
                    tree, {node: rows[node + 1] for node in range(ROOT, len(tree.tokens))}, chance
                ).accepted
            )

        expected: Any = sum(
            (count * mass for count, mass in Exhaustive.walk(accepted)), Fraction(0)
        )
        got: Any = sum(
            ((len(outcome.tokens) - 1) * mass for outcome, mass in law.items()), Fraction(0)
        )
        if at_least(expected, got):
            return None
        said = (f"on average, accepted tokens: {to_small_fraction(x)}" for x in (expected, got))
        return Counterexample(KEPT, self.shown(case), *said)


Judge = Callable[[Walks, Grown, OutcomeProbs], Counterexample | None]


def _every(name: str, judge: Judge, function: Function, cases: Cases) -> Evidence:
    """Judge all cases; one that is accused is made smaller as long as it is accused."""
    walks, seen, branches = Walks(function, WITHIN), 0, 0

    def broken(case: CheckCase) -> bool:
        assert isinstance(case, Grown)
        try:
            return judge(walks, case, walks.outcomes(case)) is not None
        except Exception:  # it fails there in another way
            return False

    for case in cases_of(cases):
        law = walks.outcomes(case)
        if judge(walks, case, law) is not None:
            smallest: Any = shrink_case(case, broken)
            accused = judge(walks, smallest, walks.outcomes(smallest))
            assert accused is not None
            raise LawViolated(accused)
        seen += name is not JOINT or any(
            len(outcome.tokens) > 1 for outcome in law
        )  # a node was accepted
        branches += len(law)
    return Evidence(name, seen, branches)


def is_a_path(function: Function, cases: Cases) -> Evidence:
    """Nodes of the tree, each below the one before."""
    return _every(PATH, Walks.problem, function, cases)


def has_the_joint_law(function: Function, cases: Cases) -> Evidence:
    """Of the first token, the first two, ..., where a round gives fewer the target goes on."""
    return _every(JOINT, Walks.joint, function, cases)


def keeps(function: Function, cases: Cases) -> Evidence:
    """To accept nothing has the right law, too."""
    return _every(KEPT, Walks.kept, function, cases)
