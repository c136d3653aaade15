"""What A2 holds a trie to: its answers are those of a dictionary of everything that was inserted,
run by run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from tinyspec.grade.a2_trees import ROOT, path, words
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, LawViolated, accuse

TREE = "a draft is a tree: at most `budget` nodes, a parent before its children, siblings all different"
ANSWER = "what followed the longest known end of the context, the most frequent first"

Function = Callable[..., Any]
Operation = tuple[Any, ...]
Judge = Callable[[Function, int, Sequence[Operation]], None]


def answers(depth: int, operations: Sequence[Operation]) -> list[Any]:
    """The same by a dictionary: how often every run of tokens occurred."""
    counts: Counter[tuple[int, ...]] = Counter()
    found: list[Any] = []
    for what, *rest in operations:
        if what == "insert":
            (text,) = rest
            runs = (
                (start, end)
                for start in range(len(text))
                for end in range(start + 1, start + depth + 1)
            )
            counts.update(tuple(text[start:end]) for start, end in runs if end <= len(text))
            found.append(None)
        else:
            found.append(_behind(counts, depth, *rest))
    return found


def _behind(
    counts: Counter[tuple[int, ...]], depth: int, context: Sequence[int], budget: int
) -> tuple[Any, Any]:
    """The heaviest paths behind the longest end of a context that has any."""
    for length in range(min(len(context), depth - 1), 0, -1):
        end = tuple(context[len(context) - length :])
        paths = {
            run[length:]: count
            for run, count in counts.items()
            if run[:length] == end and len(run) > length
        }
        if paths:
            chosen = sorted(paths, key=lambda path: (-paths[path], path))[:budget]
            return [path[-1] for path in chosen], [
                chosen.index(p[:-1]) if len(p) > 1 else ROOT for p in chosen
            ]
    return [], []


def operations(cases: Cases) -> Iterator[tuple[int, list[Operation]]]:
    """Depths, and texts and questions in turn: the shorter the earlier."""
    random = Random(f"{cases.seed} trie")
    for size in range(200 * cases.times):
        longest = 2 + 8 * size // (200 * cases.times)
        alphabet = random.choice((2, 3, 4))

        def some(most: int, least: int, alphabet: int = alphabet) -> list[int]:
            return [random.randrange(alphabet) for _ in range(random.randint(least, most))]

        run: list[Operation] = []
        for _ in range(random.randint(1, 3)):
            run += [("insert", some(longest, 1)) for _ in range(random.randint(1, 2))]
            run += [
                ("retrieve", some(4, 0), random.randint(0, 6)) for _ in range(random.randint(1, 2))
            ]
        yield random.randint(2, 4), run


def shaped(
    law: str, got: Any, depth: int, run: Sequence[Operation]
) -> Iterator[tuple[int, Any, Any]]:
    """The number of every question and the tokens and parents that answer it; accuses what is no
    answer.
    """
    if not isinstance(got, (list, tuple)) or len(got) != len(run):
        accuse(law, f"a list of {len(run)} answers", words(got), depth=depth, operations=list(run))
    for number, (operation, answer) in enumerate(zip(run, got, strict=True)):
        if operation[0] == "insert":
            continue
        lists = (
            isinstance(answer, (list, tuple))
            and len(answer) == 2
            and all(isinstance(x, list) for x in answer)
        )
        if not lists or len(answer[0]) != len(answer[1]):
            said = "two lists of one length: tokens, parents"
            accuse(law, said, words(answer), depth=depth, operations=list(run[: number + 1]))
        yield number, *answer


def _trees(function: Function, depth: int, run: Sequence[Operation]) -> None:
    """Accuse the first answer that is no tree of the size that was asked for."""
    for number, tokens, parents in shaped(TREE, function(depth, list(run)), depth, run):
        budget, problem = run[number][2], ""
        if len(tokens) > budget:
            problem = f"at most {budget} node{'' if budget == 1 else 's'}"
        for node, parent in enumerate(parents):
            if problem:
                break
            if type(tokens[node]) is not int:
                problem = f"a token, not {words(tokens[node])}"
            elif type(parent) is not int or not ROOT <= parent < node:
                problem = f"a parent of node {node} that comes before it, or {ROOT}"
            elif (parent, tokens[node]) in zip(parents[:node], tokens[:node], strict=True):
                where = (
                    "at the root"
                    if parent == ROOT
                    else f"below {[tokens[n] for n in path(parents, parent)]}"
                )
                problem = f"one node for token {tokens[node]} {where}"
        if problem:
            got = {"tokens": tokens, "parents": parents}
            accuse(TREE, problem, got, depth=depth, operations=list(run[: number + 1]))


def _same(function: Function, depth: int, run: Sequence[Operation]) -> None:
    """Accuse the first answer that differs from the dictionary's."""
    expected = answers(depth, run)
    for number, tokens, parents in shaped(ANSWER, function(depth, list(run)), depth, run):
        if [tokens, parents] != list(expected[number]):
            ours, theirs = (
                {"tokens": a, "parents": b} for a, b in (expected[number], (tokens, parents))
            )
            accuse(ANSWER, ours, theirs, depth=depth, operations=list(run[: number + 1]))


def _every(law: str, judge: Judge, function: Function, cases: Cases) -> Evidence:
    """Judge all runs; what is accused is made smaller as long as it is accused."""
    seen = 0
    for depth, run in operations(cases):
        try:
            judge(function, depth, run)
        except LawViolated as accused:
            raise _smallest(judge, function, accused) from None
        seen += 1
    return Evidence(law, seen)


def _smallest(judge: Judge, function: Function, accused: LawViolated) -> LawViolated:
    """The same with fewer operations, shorter texts, smaller budgets."""
    found = True
    while found:
        found = False
        case = accused.counterexample.case
        for smaller in _smaller(case["operations"]):
            try:
                judge(function, case["depth"], smaller)
            except LawViolated as less:
                accused, found = less, True
                break
            except Exception:  # it fails there in another way
                continue
    return accused


def _smaller(run: Sequence[Operation]) -> Iterator[list[Operation]]:
    """Every way to leave something out."""
    for number, (what, text, *budget) in enumerate(run):
        before, after = list(run[:number]), list(run[number + 1 :])
        if len(run) > 1:
            yield before + after
        if len(text) > 1:
            for place in range(len(text)):
                yield [*before, (what, text[:place] + text[place + 1 :], *budget), *after]
        if budget and budget[0]:
            yield [*before, (what, text, budget[0] - 1), *after]


def is_a_tree(function: Function, cases: Cases) -> Evidence:
    """Whatever is in it, it can be drafted."""
    return _every(TREE, _trees, function, cases)


def is_the_answer(function: Function, cases: Cases) -> Evidence:
    """Node by node, in the order of the task."""
    return _every(ANSWER, _same, function, cases)
