"""Laws of `walk` of assignment A2: the text has the target's joint distribution, and uses the
tree.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.grade.a2_siblings import NEEDS_MASS, is_at_least, known_results
from tinyspec.grade.a2_trees import Parents, node_path
from tinyspec.grade.task import (
    ROUNDING,
    Cases,
    Function,
    GradedLaw,
    NoResult,
    Task,
    describe_result,
    graded_law,
    is_token,
)
from tinyspec.laws.checking.cases import CheckCase, cases_of_kind, shrink_case
from tinyspec.laws.checking.forms import Form, OutcomeProbs, RunOutcome, to_small_fraction
from tinyspec.laws.evidence import Counterexample, LawViolated
from tinyspec.laws.exact.rational import without_token
from tinyspec.tree import ROOT, TokenTree

PATH = "the path goes down the tree from its root"
JOINT = "the text has the target's joint distribution"
KEPT = "as many nodes are accepted as recursive rejection accepts"


# ---------------------------------------------------------------------- cases


@dataclass(frozen=True)
class TreeCase(CheckCase):
    """A case with the shape of its tree, and the nodes whose children are point masses."""

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
"""Parents, and the nodes (or root) whose children are point masses. The last have three levels."""


def draw_tree_cases(cases: Cases) -> Iterator[TreeCase]:
    """Yield trees over two tokens, then over three; every text has a row of its own."""
    for vocabulary, whole, count in ((2, 2, 6), (2, 4, 4), (3, 4, 8)):
        for parents, points in SHAPES:
            depth = max((len(node_path(parents, node)) for node in range(len(parents))), default=0)
            if depth > 2 < vocabulary:  # one row per text: more than anyone would read
                continue
            n_texts = [sum(vocabulary**n for n in range(length)) for length in range(depth + 2)]
            lengths = (n_texts[depth + 1], max(1, n_texts[depth]))
            drawn = count * cases.times
            for case in cases_of_kind(
                vocabulary, depth, depth + 1, whole, lengths, "text", drawn, cases.seed
            ):
                yield TreeCase(**vars(case), parents=parents, points=points)


def draw_tree(case: TreeCase, rng: Exhaustive) -> tuple[TokenTree, list[Any]]:
    """Return a tree of the case's shape, and [n + 1] what each node's children were drawn from.

    A node has fewer children where no more can be drawn without replacement.
    """
    numbers: dict[int, int] = {ROOT: ROOT}  # in the tree, by the numbers of the shape
    tokens, parents, probs = list[int](), list[int](), list[Any]()
    left: dict[int, Any] = {}  # what can still be drawn below a node
    tree = TokenTree(tokens, parents, probs, [])
    q_rows: list[Any] = [None]
    for node, shape_parent in enumerate(case.parents):
        if shape_parent not in numbers:
            continue
        parent = numbers[shape_parent]
        if shape_parent in case.points:
            row, token = None, case.vocabulary - 1 - parents.count(parent)
        else:
            whole_row = case.q.next_probs(tree.tokens_on(tree.path(parent)))
            row = left.get(parent, whole_row)
            if row is None:
                continue
            token = rng.draw(row)
            left[parent], q_rows[parent + 1] = without_token(row, token), list(whole_row)
        numbers[node] = len(tokens)
        tokens.append(token)
        parents.append(parent)
        probs.append(row)
        q_rows.append(None)
    return tree._replace(probe=(False,) * len(tokens)), q_rows


def target_rows(case: TreeCase, tree: TokenTree) -> list[list[Fraction]]:
    """Return [n + 1][V] the target's rows, the root's first."""
    nodes = range(ROOT, len(tree.tokens))
    return [list(case.p.next_probs(tree.tokens_on(tree.path(node)))) for node in nodes]


# ---------------------------------------------------------------------- runs


class WalkForm(Form):
    """A walk, run on one case after the other, and what must be true of it."""

    law = JOINT

    def outcome(self, case: TreeCase, rng: Exhaustive) -> RunOutcome:
        """Return what comes of one tree: its tokens, and the text or what is wrong."""
        tree, q_rows = draw_tree(case, rng)
        tokens, parents = list(tree.tokens), list(tree.parents)
        try:
            got = self.function(list(tokens), list(parents), target_rows(case, tree), q_rows, rng)
        except NoResult:
            raise
        except TinyspecError as error:  # of the random numbers, asked for the impossible
            return RunOutcome(tuple(tokens), (), (str(error),), NEEDS_MASS)
        is_pair = isinstance(got, (list, tuple)) and len(got) == 2
        if not is_pair or not isinstance(got[0], (list, tuple)):
            shown, problem = (
                describe_result(got),
                "two things: the list of accepted nodes, and a token",
            )
        elif not is_token(got[1], case.vocabulary):
            shown, problem = describe_result(got[1]), f"a token, 0 to {case.vocabulary - 1}"
        else:
            down, nodes = list(got[0]), range(len(tokens))
            is_path = all(type(node) is int and node in nodes for node in down)
            if is_path and down == (list(tree.path(down[-1])) if down else []):
                return RunOutcome(tuple(tokens), (*tree.tokens_on(down), got[1]))
            shown = tuple(down)  # type: ignore[assignment]
            problem = f"nodes of the tree with parents {parents}, each a child of the one before"
        return RunOutcome(tuple(tokens), (), (shown,), problem)

    def outcomes(self, case: TreeCase) -> OutcomeProbs:
        """Return the probability of each outcome."""
        known = known_results(self.function)
        if case not in known:
            known[case] = Exhaustive.distribution(lambda rng: self.outcome(case, rng))
        return known[case]  # type: ignore[no-any-return]

    def shown(self, case: TreeCase) -> dict[str, Any]:
        """Return the case in the words of the hand-out."""
        how = "drawn from q without replacement"
        if case.points:
            of_node = (f"the children of node {node}" for node in case.points if node != ROOT)
            of_root = ["the root's children"] * (ROOT in case.points)
            how += f", but {' and '.join([*of_root, *of_node])}: point masses"
        tree = f"parents {list(case.parents)}, {how} (fewer where q has no more)"
        rows = {"target rows": case.p.shown(case.gamma)}
        if case.gamma:
            rows["draft rows"] = case.q.shown(case.gamma - 1)
        return {"tree": tree, **rows}

    def report(self, *given: Any) -> tuple[dict[str, Any], Any, Any]:
        """Return a counterexample's parts in the words of the hand-out."""
        shown, expected, got = super().report(*given)
        names = {"draft": "tokens of the tree", "output of each draft": "each tree"}
        return {names.get(name, name): value for name, value in shown.items()}, expected, got

    def check_path(self, case: TreeCase, outcomes: OutcomeProbs) -> Counterexample | None:
        """Return what is no path down the tree, or no token."""
        for outcome in outcomes:
            if outcome.problem:
                shown = self.shown(case) | {"tokens of the tree": list(outcome.draft)}
                name = JOINT if outcome.problem == NEEDS_MASS else PATH
                return Counterexample(name, shown, outcome.problem, outcome.draft_probs[0])
        return None

    def check_joint(self, case: TreeCase, outcomes: OutcomeProbs) -> Counterexample | None:
        """Return a difference from the target's joint distribution.

        It compares the first token, the first two, and so on. Where a round gives fewer, the target
        goes on.
        """
        return self.check_path(case, outcomes) or self.compare(case, outcomes)

    def check_acceptance(self, case: TreeCase, outcomes: OutcomeProbs) -> Counterexample | None:
        """Return a shortfall of accepted tokens against the library's `verify_tree`.

        To accept nothing has the right distribution too.
        """
        if (problem := self.check_path(case, outcomes)) is not None:
            return problem

        def count_accepted(rng: Exhaustive) -> int:
            tree, _ = draw_tree(case, rng)
            target_probs = dict(enumerate(target_rows(case, tree), ROOT))
            return len(verify_tree(tree, target_probs, rng).accepted)

        zero: Any = Fraction(0)
        expected = sum(
            (n * mass for n, mass in Exhaustive.distribution(count_accepted).items()), zero
        )
        got = sum(((len(o.tokens) - 1) * mass for o, mass in outcomes.items()), zero)
        if is_at_least(expected, got):
            return None
        texts = (f"on average, accepted tokens: {to_small_fraction(x)}" for x in (expected, got))
        return Counterexample(KEPT, self.shown(case), *texts)


# ---------------------------------------------------------------------- the laws


def walk_law(
    points: int,
    sentence: str,
    check: Callable[[Any, TreeCase, OutcomeProbs], Counterexample | None],
    *needs: str,
    draw: Callable[[Cases], Iterator[TreeCase]] = draw_tree_cases,
    form_of: Callable[[Function, float], WalkForm] = WalkForm,
) -> GradedLaw:
    """Return the law that a check holds; a case that breaks it is made smaller.

    draw     cases -> the trees
    form_of  (function, tolerance) -> how it is run, if not with all five arguments
    """

    @graded_law(points, sentence, *needs)
    def look(walk: Function, cases: Cases) -> Iterator[bool]:
        form = form_of(walk, ROUNDING)

        def is_broken(case: CheckCase) -> bool:
            assert isinstance(case, TreeCase)
            try:
                return check(form, case, form.outcomes(case)) is not None
            except Exception:  # it fails there in another way
                return False

        for case in draw(cases):
            outcomes = form.outcomes(case)
            if check(form, case, outcomes) is not None:
                smallest: Any = shrink_case(case, is_broken)
                found = check(form, smallest, form.outcomes(smallest))
                assert found is not None
                raise LawViolated(found)
            is_any_accepted = any(len(outcome.tokens) > 1 for outcome in outcomes)
            yield sentence is not JOINT or is_any_accepted

    return look


path_goes_down = walk_law(3, PATH, WalkForm.check_path)
walk_has_the_joint_distribution = walk_law(11, JOINT, WalkForm.check_joint)
walk_accepts_as_often_as_the_rule = walk_law(6, KEPT, WalkForm.check_acceptance, JOINT)


WALK_TASK = Task(
    "walk",
    "A2.5 The walk",
    (path_goes_down, walk_has_the_joint_distribution, walk_accepts_as_often_as_the_rule),
    uses=("siblings",),
)
