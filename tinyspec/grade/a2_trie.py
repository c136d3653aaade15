"""Laws of the trie of assignment A2: it answers as a dictionary of all runs of tokens does."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tinyspec.grade.a2_trees import ROOT, node_path
from tinyspec.grade.task import Cases, Function, GradedLaw, Task, describe_result, graded_law
from tinyspec.laws.evidence import LawViolated, accuse

TREE = (
    "a draft is a tree: at most `budget` nodes, a parent before its children, siblings all "
    "different"
)
ANSWER = "what followed the longest known end of the context, the most frequent first"

Operation = tuple[Any, ...]
"""("insert", text) or ("retrieve", context, budget)."""

Judge = Callable[[Function, int, Sequence[Operation]], None]
"""Accuses the first wrong answer of a trie of some depth to operations."""


# ---------------------------------------------------------------------- the oracle and the cases


def answer_by_counting(depth: int, operations: Sequence[Operation]) -> list[Any]:
    """Return the right answers, from how often every run of tokens occurred."""
    counts: Counter[tuple[int, ...]] = Counter()
    found: list[Any] = []
    for what, *given in operations:
        if what == "insert":
            (text,) = given
            for start in range(len(text)):
                ends = range(start + 1, min(start + depth, len(text)) + 1)
                counts.update(tuple(text[start:end]) for end in ends)
            found.append(None)
        else:
            found.append(_heaviest_paths(counts, depth, *given))
    return found


def _heaviest_paths(
    counts: Counter[tuple[int, ...]], depth: int, context: Sequence[int], budget: int
) -> tuple[list[int], list[int]]:
    """Return tokens and parents of the most frequent paths after the longest known end."""
    for length in range(min(len(context), depth - 1), 0, -1):
        end = tuple(context[len(context) - length :])
        runs = counts.items()
        paths = {r[length:]: n for r, n in runs if r[:length] == end and len(r) > length}
        if paths:
            chosen = sorted(paths, key=lambda path: (-paths[path], path))[:budget]
            parents = [chosen.index(p[:-1]) if len(p) > 1 else ROOT for p in chosen]
            return [path[-1] for path in chosen], parents
    return [], []


def draw_operations(cases: Cases) -> Iterator[tuple[int, list[Operation]]]:
    """Yield depths, and texts and questions in turn, shorter ones first."""
    random = Random(f"{cases.seed} trie")
    for size in range(200 * cases.times):
        longest = 2 + 8 * size // (200 * cases.times)
        alphabet = random.choice((2, 3, 4))

        def draw_tokens(most: int, least: int, alphabet: int = alphabet) -> list[int]:
            return [random.randrange(alphabet) for _ in range(random.randint(least, most))]

        found: list[Operation] = []
        for _ in range(random.randint(1, 3)):
            for _ in range(random.randint(1, 2)):
                found.append(("insert", draw_tokens(longest, 1)))
            for _ in range(random.randint(1, 2)):
                found.append(("retrieve", draw_tokens(4, 0), random.randint(0, 6)))
        yield random.randint(2, 4), found


# ---------------------------------------------------------------------- the laws


def each_answer(
    law: str, got: Any, depth: int, operations: Sequence[Operation]
) -> Iterator[tuple[dict[str, Any], int, list[Any], list[Any]]]:
    """Yield the case, the number of the question, and tokens and parents of every answer.

    Accuses what has not the form of an answer.
    """
    case: dict[str, Any] = {"depth": depth, "operations": list(operations)}
    if not isinstance(got, (list, tuple)) or len(got) != len(operations):
        accuse(law, f"a list of {len(operations)} answers", describe_result(got), **case)
    for number, (operation, answer) in enumerate(zip(operations, got, strict=True)):
        if operation[0] == "insert":
            continue
        case = {"depth": depth, "operations": list(operations[: number + 1])}
        is_pair = isinstance(answer, (list, tuple)) and len(answer) == 2
        is_pair = is_pair and all(isinstance(part, list) for part in answer)
        if not is_pair or len(answer[0]) != len(answer[1]):
            accuse(law, "two lists of one length: tokens, parents", describe_result(answer), **case)
        yield case, number, *answer


def judge_trees(answers: Function, depth: int, operations: Sequence[Operation]) -> None:
    """Accuse the first answer that is no tree of the size that was asked for."""
    got = answers(depth, list(operations))
    for case, number, tokens, parents in each_answer(TREE, got, depth, operations):
        if problem := find_problem(tokens, parents, operations[number][2]):
            accuse(TREE, problem, {"tokens": tokens, "parents": parents}, **case)


def find_problem(tokens: Sequence[Any], parents: Sequence[Any], budget: int) -> str:
    """Return what a tree ought to have and lacks; "" if nothing is wrong with it."""
    if len(tokens) > budget:
        return f"at most {budget} node{'' if budget == 1 else 's'}"
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if type(token) is not int:
            return f"a token, not {describe_result(token)}"
        if type(parent) is not int or not ROOT <= parent < node:
            return f"a parent of node {node} that comes before it, or {ROOT}"
        if (parent, token) in zip(parents[:node], tokens[:node], strict=True):
            above = [tokens[n] for n in node_path(parents, parent)]
            return f"one node for token {token} {f'below {above}' if above else 'at the root'}"
    return ""


def judge_answers(answers: Function, depth: int, operations: Sequence[Operation]) -> None:
    """Accuse the first answer that differs from the dictionary's."""
    right, got = answer_by_counting(depth, operations), answers(depth, list(operations))
    for case, number, tokens, parents in each_answer(ANSWER, got, depth, operations):
        if [tokens, parents] != list(right[number]):
            expected = dict(zip(("tokens", "parents"), right[number], strict=True))
            accuse(ANSWER, expected, {"tokens": tokens, "parents": parents}, **case)


def trie_law(points: int, sentence: str, judge: Judge) -> GradedLaw:
    """Return the law that a judge holds; what it accuses is made smaller while it is accused."""

    @graded_law(points, sentence)
    def look(answers: Function, cases: Cases) -> Iterator[bool]:
        for depth, operations in draw_operations(cases):
            try:
                judge(answers, depth, operations)
            except LawViolated as accused:
                raise shrink_operations(judge, answers, accused) from None
            yield True

    return look


def shrink_operations(judge: Judge, answers: Function, accused: LawViolated) -> LawViolated:
    """Return the accusation with fewer operations, shorter texts and smaller budgets."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        case = accused.counterexample.case
        for smaller in smaller_operations(case["operations"]):
            try:
                judge(answers, case["depth"], smaller)
            except LawViolated as less:
                accused, is_smaller = less, True
                break
            except Exception:  # it fails there in another way
                continue
    return accused


def smaller_operations(operations: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Yield every way to leave out an operation or a token, or to lower a budget."""
    for number, (what, text, *budget) in enumerate(operations):
        before, after = list(operations[:number]), list(operations[number + 1 :])
        if len(operations) > 1:
            yield before + after
        if len(text) > 1:
            for place in range(len(text)):
                yield [*before, (what, text[:place] + text[place + 1 :], *budget), *after]
        if budget and budget[0]:
            yield [*before, (what, text, budget[0] - 1), *after]


drafts_are_trees = trie_law(3, TREE, judge_trees)
answers_are_right = trie_law(12, ANSWER, judge_answers)


ANSWERS_TASK = Task("answers", "A2.6 A trie", (drafts_are_trees, answers_are_right))
