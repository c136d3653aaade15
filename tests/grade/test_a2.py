"""A2: the reference keeps every law, and the law meant for each mistake catches it.

The mistakes are those of students and of the field.
"""

import doctest
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.grade.tiny import ASSIGNMENTS_FOLDER, load_reference
from tinyspec.grade import (
    a2_siblings,
    a2_trees,
    a2_trie,
    a2_walk,
    grading,
    props_a2,
    report,
    starter,
)
from tinyspec.grade.a2_siblings import LAW
from tinyspec.grade.assignments import A2 as ASSIGNMENT
from tinyspec.grade.props_a2 import TreeSession
from tinyspec.grade.task import Cases
from tinyspec.laws.evidence import Counterexample, LawViolated
from tinyspec.laws.theorems import rejection_probability

FOLDER = ASSIGNMENTS_FOLDER / "A2"
TASKS = {task.name: task for task in ASSIGNMENT.tasks}
ROOT = -1


REFERENCE = load_reference("A2")


def find_counterexample(
    name: str,
    function: Callable[..., Any],
    cases: Cases = Cases(),  # noqa: B008
) -> Counterexample | None:
    """Return the counterexample of the first law that a function breaks."""
    for law in TASKS[name].laws:
        try:
            evidence = law(function, cases)
            assert evidence.law == law.sentence
            assert evidence.cases > 0 or function not in vars(REFERENCE).values()
        except LawViolated as accusation:
            return accusation.counterexample
    return None


def test_a_hundred_points() -> None:
    assert sum(task.points for task in ASSIGNMENT.tasks) == 100
    assert [task.title.split()[0] for task in ASSIGNMENT.tasks] == [f"A2.{i}" for i in range(1, 7)]


def test_the_examples_hold() -> None:
    for module in (REFERENCE, props_a2):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("cases", [Cases(), Cases(seed=5, times=2)], ids=["public", "other"])
def test_the_reference_holds_every_law(name: str, cases: Cases) -> None:
    assert find_counterexample(name, getattr(REFERENCE, name), cases) is None


@pytest.mark.parametrize("name", TASKS)
def test_what_is_not_written_holds_no_law(name: str) -> None:
    def starter(*given: Any) -> Any:
        raise NotImplementedError

    for law in TASKS[name].laws:
        with pytest.raises(NotImplementedError):
            law(starter, Cases())
        with pytest.raises(LawViolated):
            law(lambda *given: None, Cases())


def test_other_cases_are_other_cases() -> None:
    for draws in (
        a2_trees.draw_trees,
        a2_trees.draw_drafts,
        a2_siblings.draw_sibling_cases,
        a2_walk.draw_tree_cases,
        a2_trie.draw_operations,
    ):
        public, again, final = (list(draws(cases)) for cases in (Cases(), Cases(), Cases(1, 10)))
        assert public == again
        assert public != final[: len(public)]
        assert len(final) > 2 * len(public)


# ---------------------------------------------------------------------- the hand-out, the starter


def test_the_starter_says_which_task_judges_the_class() -> None:
    text = starter.make_starter(ASSIGNMENT)
    for method in ("__init__", "insert", "retrieve"):
        assert f'raise NotImplementedError("A2.6 Trie.{method}: write me")' in text
    assert text.count("write me") == 8
    assert "| `answers`, which judges your class `Trie` | 15 |" in starter.make_readme(ASSIGNMENT)


HANDOUT = (FOLDER / "handout.md").read_text(encoding="utf-8")


def test_the_hand_out_has_the_tasks_and_their_points() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in HANDOUT.splitlines()
        if line.startswith("| A2.")
    ]
    assert [(row[0], int(row[2])) for row in rows] == [
        (task.title, task.points) for task in ASSIGNMENT.tasks
    ]
    assert all(f"{task.name}(" in row[1] for row, task in zip(rows, ASSIGNMENT.tasks, strict=True))


def test_the_examples_by_hand() -> None:
    parents = [-1, -1, 0, 0, 1]
    assert REFERENCE.positions(parents, 4) == [4, 4, 5, 5, 5]
    for node, row in enumerate(REFERENCE.mask(parents, 1)):
        shown = " ".join("1" if seen else "." for seen in row[1:])
        assert f"node {node}:     1  | {shown}\n" in HANDOUT
    session = TreeSession([2, 0, 1])
    REFERENCE.score(session, [0, 0, 2, 2], [-1, -1, 0, 1])
    assert session.trace == [([1, 0, 2], [2, 3, 4])]
    p, q = (tuple(Fraction(x, 12) for x in row) for row in ((2, 6, 4), (6, 3, 3)))
    assert [1 - rejection_probability(p, q, k, replace=False) for k in (1, 2)] == [
        Fraction(2, 3),
        Fraction(11, 12),
    ]
    said = a2_siblings.find_outcomes(LAW, REFERENCE.siblings, p, q, 2)
    assert sum(
        x
        for outcomes in said.values()
        for (place, token), x in outcomes.items()
        if (place, token) == (1, 2)
    ) == Fraction(1, 12)
    trie = REFERENCE.Trie(4)
    trie.insert([1, 2, 3, 1, 2, 5, 1, 2, 5])
    assert trie.retrieve([9, 1, 2], 3) == ([5, 3, 1], [-1, -1, 1])


# ---------------------------------------------------------------------- through the child process


@pytest.mark.slow
def test_the_reference_through_the_child_process(tmp_path: Path) -> None:
    (tmp_path / "submission.py").write_text(
        (FOLDER / "reference.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    graded = grading.grade_folder(ASSIGNMENT, tmp_path)
    assert graded.score == graded.max_score == 100, graded.problem


@pytest.mark.slow
def test_half_of_it_through_the_child_process(tmp_path: Path) -> None:
    """A forgotten renormalisation, in the words of the hand-out.

    What is built on it is judged with the reference's function.
    """
    text = (FOLDER / "reference.py").read_text(encoding="utf-8")
    wrong = text.replace(
        "q = scaled([x * (i != token) for i, x in enumerate(q)])",
        "q = [x * (i != token) for i, x in enumerate(q)]",
    )
    wrong = wrong.replace(
        "row[committed + node] = True", 'raise NotImplementedError("A2.2 mask: write me")'
    )
    assert wrong.count("write me") == 1 and "scaled([x * (i" not in wrong
    (tmp_path / "submission.py").write_text(wrong, encoding="utf-8")
    results = {
        name: grading.grade_folder(ASSIGNMENT.select([name]), tmp_path).results[0]
        for name in TASKS
        if name != "answers"
    }
    assert {name: result.score for name, result in results.items()} == {
        "positions": 10,
        "mask": 0,
        "score": 15,
        "siblings": 12,
        "walk": 20,
    }
    assert "\n".join(report.describe_counterexample(results["siblings"])) in HANDOUT
    assert "not written yet" in results["mask"].sentence
    assert results["score"].helpers == ["positions", "mask"] and results["walk"].helpers == [
        "siblings"
    ]


# ---------------------------------------------------------------------- positions


def flat(parents: list[int], committed: int) -> list[int]:
    return [committed + node for node in range(len(parents))]


def one_on(parents: list[int], committed: int) -> list[int]:
    return [x + 1 for x in REFERENCE.positions(parents, committed)]


def from_the_tree(parents: list[int], committed: int) -> list[int]:
    return REFERENCE.positions(parents, 0)  # type: ignore[no-any-return]


def level_by_level(parents: list[int], committed: int) -> list[int]:
    """One deeper whenever the parent is after the nodes of the last level."""
    found, start = list[int](), 0
    depth = committed
    for node, parent in enumerate(parents):
        if parent >= start:
            depth, start = depth + 1, node
        found.append(depth)
    return found


def in_floats(parents: list[int], committed: int) -> list[float]:
    return [float(x) for x in REFERENCE.positions(parents, committed)]


def of_four_levels(parents: list[int], committed: int) -> list[int]:
    return [min(x, committed + 3) for x in REFERENCE.positions(parents, committed)]


def test_deep_positions() -> None:
    said = find_counterexample("positions", of_four_levels)
    assert said is not None
    assert said.law == a2_trees.STANDS and said.case["parents"] == list(range(-1, 7))


@pytest.mark.parametrize("wrong", [flat, one_on, from_the_tree, level_by_level, in_floats])
def test_wrong_positions(wrong: Callable[..., Any]) -> None:
    said = find_counterexample("positions", wrong)
    assert said is not None
    assert said.law == a2_trees.STANDS
    assert len(said.case["parents"]) <= 3


# ---------------------------------------------------------------------- the mask


def from_rule(rule: Callable[[list[int], int, int], bool]) -> Callable[..., Any]:
    """Return a mask of all committed text, and of the nodes that a rule shows."""

    def mask(parents: list[int], committed: int) -> list[list[bool]]:
        nodes = range(len(parents))
        return [
            [True] * committed + [rule(parents, node, other) for other in nodes] for node in nodes
        ]

    return mask


def above(parents: list[int], node: int, other: int) -> bool:
    return other in a2_trees.node_path(parents, node)


def above_or_sibling(parents: list[int], node: int, other: int) -> bool:
    return above(parents, node, other) or parents[node] == parents[other]


def above_itself(parents: list[int], node: int, other: int) -> bool:
    return above(parents, node, other) and node != other


def mask_of_floats(parents: list[int], committed: int) -> list[list[float]]:
    return [list(map(float, row)) for row in REFERENCE.mask(parents, committed)]


MASKS = {
    "causal": from_rule(lambda parents, node, other: other <= node),
    "siblings too": from_rule(above_or_sibling),
    "not itself": from_rule(above_itself),
    "parent alone": from_rule(lambda parents, node, other: other in (node, parents[node])),
    "descendants": from_rule(lambda parents, node, other: above(parents, other, node)),
    "no text": lambda parents, committed: REFERENCE.mask(parents, 0),
    "text unseen": lambda parents, committed: [
        [False] * committed + row for row in REFERENCE.mask(parents, 0)
    ],
    "floats": mask_of_floats,
    "columns turned": lambda parents, committed: [
        row[committed:] + row[:committed] for row in REFERENCE.mask(parents, committed)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_wrong_masks(name: str) -> None:
    said = find_counterexample("mask", MASKS[name])
    assert said is not None
    assert said.law == a2_trees.SEES
    assert len(said.case["parents"]) <= 3


@pytest.mark.parametrize("levels", [4, 5, 6])
def test_a_mask_of_a_few_levels(levels: int) -> None:
    """Right of every tree of up to four nodes."""
    mask = from_rule(
        lambda parents, node, other: other in a2_trees.node_path(parents, node)[-levels:]
    )
    said = find_counterexample("mask", mask)
    assert said is not None
    assert said.law == a2_trees.SEES
    assert (said.case["parents"], said.case["committed"]) == (list(range(-1, 7)), 5)
    assert said.case["what is wrong"] == "it does not see node 0, its ancestor"


def test_a_mask_of_ones_and_zeros_will_do() -> None:
    assert (
        find_counterexample(
            "mask", lambda *given: [list(map(int, row)) for row in REFERENCE.mask(*given)]
        )
        is None
    )


def test_a_wrong_mask_is_described_in_words() -> None:
    said = find_counterexample("mask", MASKS["floats"])
    assert said is not None
    assert said.case["what is wrong"] == "entry 0 is 1.0 (float), neither True nor False"
    said = find_counterexample("mask", MASKS["causal"])
    assert said is not None
    assert said.case["what is wrong"] == "it sees node 0, which is no ancestor of it"


# ---------------------------------------------------------------------- one call


def make_score(
    positions: Callable[..., Any],
    mask: Callable[..., Any],
    back: int = 1,
    merge: Any = lambda up, token, node: node,
) -> Callable[..., Any]:
    """Return a way to score a tree, with its parts exchanged."""

    def score(session: Any, tokens: list[int], parents: list[int]) -> Any:
        fed, over, found, place = [session.text[-1]], [ROOT], dict[Any, int](), list[int]()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            up = 0 if parent == ROOT else place[parent]
            key = merge(up, token, node)
            if key not in found:
                found[key] = len(fed)
                fed.append(token)
                over.append(up)
            place.append(found[key])
        read = len(session.text) - back
        rows = session.score(
            fed,
            positions(over, read),
            [row[-(len(session.text) - 1 + len(fed)) :] for row in mask(over, read)],
        )
        return [rows[0], *(rows[at] for at in place)]

    return score  # fmt: skip


def equal_siblings_merged(session: Any, tokens: list[int], parents: list[int]) -> Any:
    """Merges equal tokens with one parent; what stands below two equal siblings is fed twice."""
    return make_score(
        REFERENCE.positions, REFERENCE.mask, merge=lambda up, token, node: (parents[node], token)
    )(session, tokens, parents)


def path_by_path(session: Any, tokens: list[int], parents: list[int]) -> Any:
    """Right, but with one forward pass per node."""
    rows = []
    for end in range(ROOT, len(tokens)):
        fed = [session.text[-1], *(tokens[node] for node in a2_trees.node_path(parents, end))]
        chain, read = list(range(-1, len(fed) - 1)), len(session.text) - 1
        rows.append(
            session.score(fed, REFERENCE.positions(chain, read), REFERENCE.mask(chain, read))[-1]
        )
    return rows


def rootless(session: Any, tokens: list[int], parents: list[int]) -> Any:
    return REFERENCE.score(session, tokens, parents)[1:]


def root_last(session: Any, tokens: list[int], parents: list[int]) -> Any:
    rows = REFERENCE.score(session, tokens, parents)
    return [*rows[1:], rows[0]]


def path_key(up: int, token: int, node: int) -> Any:
    return up, token


def by_token(up: Any, token: int, node: int) -> int:
    return token


POSITIONS, MASK = REFERENCE.positions, REFERENCE.mask
WRONG_SCORES = {
    "flat positions": (make_score(flat, MASK, merge=path_key), a2_trees.ROWS),
    "causal mask": (make_score(POSITIONS, MASKS["causal"], merge=path_key), a2_trees.ROWS),
    "siblings seen": (make_score(POSITIONS, MASKS["siblings too"], merge=path_key), a2_trees.ROWS),
    "newest token twice": (make_score(POSITIONS, MASK, 0, path_key), a2_trees.ROWS),
    "merged by token": (make_score(POSITIONS, MASK, merge=by_token), a2_trees.ROWS),
    "rootless": (rootless, a2_trees.ROWS),
    "root last": (root_last, a2_trees.ROWS),
    "a call a node": (path_by_path, a2_trees.BILL),
    "equal siblings merged": (equal_siblings_merged, a2_trees.BILL),
    "equal paths twice": (make_score(POSITIONS, MASK), a2_trees.BILL),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SCORES)
def test_wrong_scores(name: str) -> None:
    wrong, law = WRONG_SCORES[name]
    said = find_counterexample("score", wrong)
    assert said is not None
    assert said.law == law
    assert len(said.case["parents"]) <= (4 if wrong is equal_siblings_merged else 3)


def round_rows(digits: int) -> Callable[..., Any]:
    """Return the right distributions, as floats of so many digits."""
    return lambda *given: [
        [round(float(x), digits) for x in row] for row in REFERENCE.score(*given)
    ]


def test_distributions_in_floats_are_judged_to_nine_digits() -> None:
    assert find_counterexample("score", round_rows(12)) is None
    for wrong in (round_rows(7), lambda *given: [["1/3"] * 3 for _ in REFERENCE.score(*given)]):
        said = find_counterexample("score", wrong)
        assert said is not None
        assert said.law == a2_trees.ROWS


def test_what_does_not_fit_the_session_is_an_error() -> None:
    session = TreeSession([0, 1, 2])
    for given, sentence in (
        (([], [], []), "at least one"),
        (([1], [2, 3], [[1] * 3]), "as many positions"),
        (([3], [2], [[1] * 3]), "from 0 to 2"),
        (([1], [-1], [[1] * 3]), "from 0 to"),
        (([1], [2], [[1] * 4]), "it needs 3"),
        (([1], [2], [None]), "must be a list"),
        (([1], [2], [[1, 1, 7]]), "True or False"),
        (([1], [2], [[1, 1, 1.0]]), "True or False"),
        (([1], [2.0], [[1, 1, 1]]), "whole number"),
        (([1], [2], [[0, 0, 0]]), "at least to itself"),
        ((None, [2], [[1, 1, 1]]), "must be a list"),
    ):
        with pytest.raises(ValueError, match=sentence):
            session.score(*given)
    for _ in range(props_a2.MAX_CALLS):
        session.score([1], [2], [[1, 1, 1]])
    with pytest.raises(ValueError, match="not going to stop"):
        session.score([1], [2], [[1, 1, 1]])
    assert TreeSession(**session.made_of).trace == []


# ---------------------------------------------------------------------- siblings


def scale_row(row: Any) -> list[Any]:
    whole = sum(row)
    return [x / whole for x in row] if whole else list(row)


def less(p: Any, q: Any) -> list[Any]:
    return [max(Fraction(0), x - y) for x, y in zip(p, q, strict=True)]


def but(row: Any, token: int) -> list[Any]:
    return [x * (i != token) for i, x in enumerate(row)]


def make_siblings(
    residual: Any = lambda p, q: scale_row(less(p, q)),
    rest: Any = lambda q, token: scale_row(but(q, token)),
    point: Any = lambda p, token: scale_row(but(p, token)),
    ratio: Any = lambda p, q: p / q,
    most: int = 99,
    last: Any = lambda first, p: p,
    as_law: Any = lambda p: None,
) -> Callable[..., Any]:
    """Recursive rejection, with its parts exchanged."""

    def siblings(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
        first = p
        q = as_law(p) if q is None else q
        for place, token in enumerate(candidates[:most]):
            if chance.accept(p[token] if q is None else ratio(p[token], q[token])):
                return place, token
            p, q = (point(p, token), None) if q is None else (residual(p, q), rest(q, token))
        return None, chance.draw(last(first, p))

    return siblings


def drawn_and_compared(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    token = chance.draw(p)
    return (candidates.index(token) if token in candidates else None), token


def kept_as_token(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    place, token = REFERENCE.siblings(p, q, candidates, chance)
    return token if place is not None else None, token


def counted_from_one(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    place, token = REFERENCE.siblings(p, q, candidates, chance)
    return place + 1 if place is not None else None, token


def token_alone(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    return REFERENCE.siblings(p, q, candidates, chance)[1]


def every_one_tested_against_p(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    for place, token in enumerate(candidates):
        if chance.accept(p[token] / q[token] if q is not None else p[token]):
            return place, token
    return None, chance.draw(scale_row(less(p, q)) if q is not None and sum(less(p, q)) else p)


def at_most_three(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    return make_siblings(most=3 if q is not None else 99)(p, q, candidates, chance)


def not_without_candidates(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
    if q is not None and not candidates:
        return None, 0
    return make_siblings()(p, q, candidates, chance)


def less_where_any(p: Any, q: Any) -> Any:
    return less(p, q) if sum(less(p, q)) else p


def difference(p: Any, q: Any) -> Any:
    return scale_row([abs(x - y) for x, y in zip(p, q, strict=True)])


def as_uniform(p: Any) -> list[Fraction]:
    return [Fraction(1, len(p))] * len(p)


WRONG_SIBLINGS = {
    "place is the token": (kept_as_token, a2_siblings.KEPT_IS),
    "counted from one": (counted_from_one, a2_siblings.KEPT_IS),
    "the token alone": (token_alone, a2_siblings.KEPT_IS),
    "p to the end": (make_siblings(last=lambda first, p: first), LAW),
    "no residual at all": (make_siblings(residual=lambda p, q: p), LAW),
    "q not renormalised": (make_siblings(rest=but), LAW),
    "q with replacement": (make_siblings(rest=lambda q, token: q), LAW),
    "q over p": (make_siblings(ratio=lambda p, q: q / p if p else 0), LAW),
    "residual not renormalised": (make_siblings(residual=less_where_any), LAW),
    "absolute difference": (make_siblings(residual=difference), LAW),
    "candidate taken away from p": (make_siblings(residual=lambda p, q: scale_row(p)), LAW),
    "all against the first p": (every_one_tested_against_p, LAW),
    "p, and keep nothing": (make_siblings(most=0), a2_siblings.KEPT),
    "the first alone": (make_siblings(most=1), a2_siblings.KEPT),
    "three at most": (at_most_three, a2_siblings.KEPT),
    "not without candidates": (not_without_candidates, LAW),
    "drawn and compared": (drawn_and_compared, a2_siblings.KEPT),
    "point not taken away": (make_siblings(point=lambda p, token: p), a2_siblings.POINT),
    "point not renormalised": (make_siblings(point=but), a2_siblings.POINT),
    "point as uniform": (make_siblings(as_law=as_uniform), a2_siblings.POINT),
    "point as p": (make_siblings(as_law=lambda p: [x or Fraction(1) for x in p]),
    a2_siblings.POINT),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SIBLINGS)
def test_wrong_siblings(name: str) -> None:
    wrong, law = WRONG_SIBLINGS[name]
    said = find_counterexample("siblings", wrong)
    assert said is not None
    assert said.law == law
    assert len(said.case["p"]) <= (4 if wrong is at_most_three else 3)


def test_a_judge_that_fails_without_candidates() -> None:
    def siblings(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
        if q is not None and not candidates:
            raise ValueError("no candidates")
        return make_siblings()(p, q, candidates, chance)

    with pytest.raises(ValueError, match="no candidates"):
        find_counterexample("siblings", siblings)


def test_floats_will_do() -> None:
    def siblings(p: Any, q: Any, candidates: list[int], chance: Any) -> Any:
        floats = [[float(x) for x in row] if row is not None else None for row in (p, q)]
        return make_siblings()(*floats, candidates, chance)

    assert find_counterexample("siblings", siblings) is None


# ---------------------------------------------------------------------- the walk


def children(parents: list[int], here: int) -> list[int]:
    return [node for node, parent in enumerate(parents) if parent == here]


def make_walk(
    of: Callable[..., list[int]] = children,
    p_at: Callable[[int], int] = lambda here: here + 1,
    q_at: Callable[[int], int] = lambda here: here + 1,
    most: int = 99,
    judge: Callable[..., Any] = REFERENCE.siblings,
    say: Callable[..., Any] = lambda path, tokens: path,
) -> Callable[..., Any]:
    """Return a walk, with its parts exchanged."""

    def walk(tokens: list[int], parents: list[int], p_rows: Any, q_rows: Any, chance: Any) -> Any:
        path, here = list[int](), ROOT
        while True:
            nodes = of(parents, here) if len(path) < most else []
            row = p_rows[p_at(here)]
            place, token = judge(row, q_rows[q_at(here)], [tokens[node] for node in nodes], chance)
            if place is None:
                return say(path, tokens), token
            here = nodes[place]
            path.append(here)

    return walk


def bonus_everywhere(
    tokens: list[int], parents: list[int], p_rows: Any, q_rows: Any, chance: Any
) -> Any:
    """Draws its last token from p, whatever was rejected."""
    path, _ = REFERENCE.walk(tokens, parents, p_rows, q_rows, chance)
    return path, chance.draw(p_rows[path[-1] + 1 if path else 0])


def branch_by_branch(
    tokens: list[int], parents: list[int], p_rows: Any, q_rows: Any, chance: Any
) -> Any:
    """Tries every path from the root by itself, and takes the longest."""
    best: list[int] = []
    for end in range(len(tokens)):
        down = a2_trees.node_path(parents, end)
        kept: list[int] = []
        for node in down:
            q = q_rows[parents[node] + 1]
            p = p_rows[parents[node] + 1][tokens[node]]
            if not chance.accept(p / q[tokens[node]] if q else p):
                break
            kept.append(node)
        best = max(best, kept, key=len)
    return best, chance.draw(p_rows[best[-1] + 1 if best else 0])


def next_to_it(parents: list[int], here: int) -> list[int]:
    """Children stand right after their parent, in a row."""
    found = []
    for node in range(here + 1, len(parents)):
        if parents[node] != here:
            break
        found.append(node)
    return found


def points_at_the_root_alone(
    tokens: list[int], parents: list[int], p_rows: Any, q_rows: Any, chance: Any
) -> Any:
    """Takes a node without a draft distribution for one without children."""

    def of(parents: list[int], here: int) -> list[int]:
        return children(parents, here) if here == ROOT or q_rows[here + 1] is not None else []

    return make_walk(of=of)(tokens, parents, p_rows, q_rows, chance)


def say_tokens(path: list[int], tokens: list[int]) -> list[int]:
    return [tokens[node] for node in path]


def children_reversed(parents: list[int], here: int) -> list[int]:
    return children(parents, here)[::-1]


def first_child(parents: list[int], here: int) -> list[int]:
    return children(parents, here)[:1]


WRONG_WALKS = {
    "tokens for nodes": (make_walk(say=say_tokens), a2_walk.PATH),
    "from the bottom": (make_walk(say=lambda path, tokens: path[::-1]), a2_walk.PATH),
    "the last node": (make_walk(say=lambda path, tokens: path[-1:]), a2_walk.PATH),
    "p of the root everywhere": (make_walk(p_at=lambda here: 0), a2_walk.JOINT),
    "p of the node before": (make_walk(p_at=lambda here: max(here, 0)), a2_walk.JOINT),
    "bonus everywhere": (bonus_everywhere, a2_walk.JOINT),
    "branch by branch": (branch_by_branch, a2_walk.JOINT),
    "siblings in reverse": (make_walk(of=children_reversed), a2_walk.JOINT),
    "siblings with replacement": (make_walk(judge=make_siblings(rest=lambda q, token: q)),
    a2_walk.JOINT),
    "the first child alone": (make_walk(of=first_child), a2_walk.KEPT),
    "one level": (make_walk(most=1), a2_walk.KEPT),
    "two levels": (make_walk(most=2), a2_walk.KEPT),
    "points at the root alone": (points_at_the_root_alone, a2_walk.KEPT),
    "nothing": (make_walk(most=0), a2_walk.KEPT),
    "children in a row": (make_walk(of=next_to_it), a2_walk.KEPT),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_WALKS)
def test_wrong_walks(name: str) -> None:
    wrong, law = WRONG_WALKS[name]
    said = find_counterexample("walk", wrong)
    assert said is not None
    assert said.law == law
    if wrong is points_at_the_root_alone:
        assert said.case["tree"].startswith(
            "parents [-1, 0], drawn from q without replacement, but the children of node 0"
        )
    rows = said.case["target rows"]
    assert all(len(row) <= 3 for row in (rows.values() if isinstance(rows, dict) else rows))


# ---------------------------------------------------------------------- the trie


class Runs:
    """A trie as the list of all runs, with its parts exchanged."""

    ends = staticmethod(lambda longest: range(longest, 0, -1))

    def __init__(self, depth: int):
        self.depth, self.texts = depth, list[list[int]]()

    def insert(self, text: list[int]) -> None:
        self.texts.append(text)

    def runs(self) -> Iterator[tuple[int, ...]]:
        for text in self.texts:
            for start in range(len(text)):
                for end in range(start + 1, min(start + self.depth, len(text)) + 1):
                    yield tuple(text[start:end])

    def paths(self, context: list[int]) -> dict[tuple[int, ...], int]:
        runs = list(self.runs())
        for length in self.ends(min(len(context), self.depth - 1)):
            end, found = tuple(context[len(context) - length :]), dict[tuple[int, ...], int]()
            for run in runs:
                if run[:length] == end and len(run) > length:
                    found[run[length:]] = found.get(run[length:], 0) + 1
            if found or self.stops(end, runs):
                return found
        return {}

    def stops(self, end: tuple[int, ...], runs: list[tuple[int, ...]]) -> bool:
        return False

    def chosen(self, paths: dict[tuple[int, ...], int], budget: int) -> list[tuple[int, ...]]:
        return sorted(paths, key=lambda path: (-paths[path], path))[:budget]

    def retrieve(self, context: list[int], budget: int) -> Any:
        chosen = self.chosen(self.paths(context), budget)
        return [path[-1] for path in chosen], [
            chosen.index(p[:-1]) if len(p) > 1 else ROOT for p in chosen
        ]

    @classmethod
    def answers(cls, depth: int, operations: list[Any]) -> Any:
        trie = cls(depth)
        return [
            trie.insert(*x) if what == "insert" else trie.retrieve(*x) for what, *x in operations
        ]  # type: ignore[func-returns-value]


class ShortestFirst(Runs):
    ends = staticmethod(lambda longest: range(1, longest + 1))


class DeadEnd(Runs):
    def stops(self, end: tuple[int, ...], runs: list[tuple[int, ...]]) -> bool:
        return end in runs


class OneText(Runs):
    def insert(self, text: list[int]) -> None:
        self.texts = [[token for known in self.texts for token in known] + text]


class NewestText(Runs):
    def insert(self, text: list[int]) -> None:
        self.texts = [text]


class LargerFirst(Runs):
    def chosen(self, paths: dict[tuple[int, ...], int], budget: int) -> list[tuple[int, ...]]:
        return sorted(
            paths, key=lambda path: (-paths[path], len(path), [-token for token in path])
        )[:budget]


class LevelByLevel(Runs):
    def chosen(self, paths: dict[tuple[int, ...], int], budget: int) -> list[tuple[int, ...]]:
        return sorted(paths, key=lambda path: (len(path), -paths[path], path))[:budget]


class AsTheyCame(Runs):
    def chosen(self, paths: dict[tuple[int, ...], int], budget: int) -> list[tuple[int, ...]]:
        return list(paths)[:budget]


class TooShallow(Runs):
    def __init__(self, depth: int):
        super().__init__(depth - 1)


class TooDeep(Runs):
    def __init__(self, depth: int):
        super().__init__(depth + 1)


class BeginningsOnly(Runs):
    """A trie of texts, not of their ends."""

    def runs(self) -> Iterator[tuple[int, ...]]:
        for text in self.texts:
            for end in range(1, min(self.depth, len(text)) + 1):
                yield tuple(text[:end])


class Learning(Runs):
    """Inserts what it is asked about."""

    def retrieve(self, context: list[int], budget: int) -> Any:
        found = super().retrieve(context, budget)
        self.texts.append(context)
        return found


class OneMore(Runs):
    def chosen(self, paths: dict[tuple[int, ...], int], budget: int) -> list[tuple[int, ...]]:
        return super().chosen(paths, budget + 1)


class DeepestFirst(Runs):
    def retrieve(self, context: list[int], budget: int) -> Any:
        tokens, parents = super().retrieve(context, budget)
        n = len(tokens)
        return tokens[::-1], [
            ROOT if parent == ROOT else n - 1 - parent for parent in parents[::-1]
        ]


class Strands(Runs):
    """A chain for every path: what paths share stands in the tree twice."""

    def retrieve(self, context: list[int], budget: int) -> Any:
        tokens, parents = list[int](), list[int]()
        for path in self.chosen(self.paths(context), budget):
            for depth, token in enumerate(path):
                parents.append(len(tokens) - 1 if depth else ROOT)
                tokens.append(token)
        return tokens[:budget], parents[:budget]


class InFloats(Runs):
    def retrieve(self, context: list[int], budget: int) -> Any:
        tokens, parents = super().retrieve(context, budget)
        return [float(token) for token in tokens], parents


class Starless(Runs):
    def retrieve(self, context: list[int], budget: int) -> Any:
        return super().retrieve(context, budget)[0]


WRONG_TRIES = {
    a2_trie.ANSWER: (
        *(ShortestFirst, DeadEnd, OneText, NewestText, LargerFirst, LevelByLevel),
        *(AsTheyCame, TooShallow, TooDeep, BeginningsOnly, Learning),
    ),
    a2_trie.TREE: (OneMore, DeepestFirst, Strands, InFloats, Starless),
}  # fmt: skip


def test_another_way_to_the_same_answers() -> None:
    assert find_counterexample("answers", Runs.answers) is None


@pytest.mark.parametrize(
    ("law", "wrong"), [(law, wrong) for law, many in WRONG_TRIES.items() for wrong in many]
)
def test_wrong_tries(law: str, wrong: type[Runs]) -> None:
    said = find_counterexample("answers", wrong.answers)
    assert said is not None
    assert said.law == law
    assert len(said.case["operations"]) <= 4
