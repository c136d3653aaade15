"""What A2 holds its trees to: where a node stands, what it sees, and that its row is the row of its
path alone.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

from tinyspec.grade.props_a2 import TreeSession
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, accuse

STANDS = "a node stands where its token would stand if its path were the text"
SEES = "a node sees the committed text, its ancestors and itself, and nothing else"
ROWS = "every row is the row of its path alone"
BILL = "one forward pass for the whole tree, and each path is fed once"

ROOT = -1
WITHIN = 1e-9
Function = Callable[..., Any]
Parents = tuple[int, ...]


def words(got: Any) -> str:
    """What came back in place of what was asked for."""
    return "None: nothing was returned" if got is None else f"{got!r} ({type(got).__name__})"


def items(law: str, got: Any, count: int, what: str, **case: Any) -> Sequence[Any]:
    """What came back, if it is a list of so many."""
    if not isinstance(got, (list, tuple)):
        accuse(law, f"{what}: a list of {count}", words(got), **case)
    if len(got) != count:
        accuse(law, f"{what}: a list of {count}", f"a list of {len(got)}", **case)
    return got  # type: ignore[no-any-return]


def same(expected: Any, got: Any) -> bool:
    """Exactly so between fractions, to nine digits where a float is among them."""
    return bool(
        expected == got or (isinstance(expected - got, float) and abs(expected - got) <= WITHIN)
    )


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the first guess down to this one."""
    return [] if node == ROOT else [*path(parents, parents[node]), node]


def shapes(largest: int) -> Iterator[Parents]:
    """Every tree of up to so many nodes, in every order in which a parent comes before its
    children.
    """
    for count in range(largest + 1):
        yield from product(*(range(ROOT, node) for node in range(count)))


def drawn(random: Random, largest: int) -> Parents:
    """A tree of up to so many nodes."""
    return tuple(random.randrange(ROOT, node) for node in range(random.randint(1, largest)))


def deep(random: Random, largest: int) -> Parents:
    """A tree of up to so many nodes, where a node hangs from one of the last two before it: most of
    them are far down.
    """
    return tuple(
        random.randrange(max(ROOT, node - 2), node) for node in range(random.randint(1, largest))
    )


DEEP: tuple[Parents, ...] = (
    tuple(range(ROOT, 7)),  # a chain of 8
    (ROOT, *range(ROOT, 14)),  # two chains of 8, node by node in turn
    (
        ROOT,
        *(node - node % 2 - 1 for node in range(1, 16)),
    ),  # a chain of 8 in which every node has a sibling
)


def trees(cases: Cases) -> Iterator[tuple[Parents, int]]:
    """Trees and tokens of committed text: all of up to four nodes, then larger ones, of few levels
    and of many.
    """
    for parents in shapes(4):
        for committed in (1, 0, 3):
            yield parents, committed
    for parents in DEEP:
        for committed in (5, 0):
            yield parents, committed
    random = Random(f"{cases.seed} trees")
    larger = [(drawn(random, 12), random.randrange(9)) for _ in range(60 * cases.times)]
    larger += [(deep(random, 20), random.randrange(9)) for _ in range(20 * cases.times)]
    yield from sorted(larger, key=lambda tree: len(tree[0]))


def stands(function: Function, cases: Cases) -> Evidence:
    """Not at its index, nor one off, nor from the beginning of the tree."""
    seen = 0
    for parents, committed in trees(cases):
        case: dict[str, Any] = {"parents": list(parents), "committed": committed}
        got = items(STANDS, function(list(parents), committed), len(parents), "positions", **case)
        expected = [committed + len(path(parents, node)) - 1 for node in range(len(parents))]
        for node, position in enumerate(got):
            if type(position) is not int:
                case["what is wrong"] = (
                    f"the position of node {node} is {words(position)}, not a whole number"
                )
                accuse(STANDS, expected, list(got), **case)
        if list(got) != expected:
            accuse(STANDS, expected, list(got), **case)
        seen += 1
    return Evidence(STANDS, seen)


def sees(function: Function, cases: Cases) -> Evidence:
    """All of its ancestors, none of its siblings and cousins, all of the committed text."""
    seen = 0
    for parents, committed in trees(cases):
        case: dict[str, Any] = {"parents": list(parents), "committed": committed}
        rows = items(SEES, function(list(parents), committed), len(parents), "rows", **case)
        for node, row in enumerate(rows):
            case["row of node"] = node
            got = items(SEES, row, committed + len(parents), "entries", **case)
            above = path(parents, node)
            expected = [True] * committed + [other in above for other in range(len(parents))]
            if list(got) != expected or not all(map(_is_bit, got)):
                case["what is wrong"] = _difference(expected, got, committed, node)
                accuse(SEES, expected, list(got), **case)
        seen += 1
    return Evidence(SEES, seen)


def _is_bit(entry: Any) -> bool:
    """True and False, or 1 and 0; no float."""
    return type(entry) in (bool, int) and entry in (0, 1)


def _difference(expected: Sequence[bool], got: Sequence[Any], committed: int, node: int) -> str:
    """The first wrong entry of a mask's row, in words."""
    column = next(
        at for at, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b or not _is_bit(b)
    )
    if not _is_bit(got[column]):
        return f"entry {column} is {words(got[column])}, neither True nor False"
    if column < committed:
        return f"it does not see committed token {column}"
    other = column - committed
    if expected[column]:
        return (
            "it does not see itself"
            if other == node
            else f"it does not see node {other}, its ancestor"
        )
    return f"it sees node {other}, which is no ancestor of it"


# ---------------------------------------------------------------------- one call


ALIKE: tuple[tuple[list[int], list[int], Parents], ...] = (
    (
        [2, 0, 1],
        [0, 0, 2, 2],
        (-1, -1, 0, 1),
    ),  # the hand-out's: below equal siblings stand equal paths
    (
        [2, 0],
        [1, 1, 0, 1, 0],
        (-1, -1, 1, 0, 0),
    ),  # one of these paths is spelled twice, another once
    ([1], [0, 0, 1, 1, 2, 2], (-1, -1, 0, 1, 2, 3)),  # two equal chains
    ([0, 1], [2, 2, 2, 2, 2, 2], (-1, -1, 1, 0, 3, 2)),  # of one token alone
    (
        [0, 2],
        [0, 1, 1, 0, 0],
        (-1, -1, 0, 1, 0),
    ),  # equal tokens on one level, paths that all differ but one
)
"""Texts, tokens and parents in which nodes with different parents spell the same path."""


def drafts(cases: Cases) -> Iterator[tuple[int, list[int], list[int], Parents]]:
    """Seed of a model of three tokens, a text, the tree's tokens and parents; equal siblings too.
    The smallest first.
    """
    random = Random(f"{cases.seed} drafts")

    def some(count: int) -> list[int]:
        return [random.randrange(3) for _ in range(count)]

    for parents in shapes(3):
        for length in (1, 2):
            yield random.randrange(5), some(length), some(len(parents)), parents
    for text, tokens, parents in ALIKE:
        yield random.randrange(5), list(text), list(tokens), parents
    larger = []
    for number in range(100 * cases.times):
        parents = drawn(random, 8) if number % 4 else deep(random, 8)
        tokens = some(len(parents)) if number % 2 else [token % 2 for token in some(len(parents))]
        larger.append((random.randrange(5), some(random.randint(1, 4)), tokens, parents))
    yield from sorted(larger, key=lambda draft: len(draft[3]))


def alone(seed: int, text: Sequence[int]) -> list[Any]:
    """The row behind a text without any tree."""
    return TreeSession(text, 3, seed).score(text[-1:], [len(text) - 1], [[1] * len(text)])[0]


def rows(function: Function, cases: Cases) -> Evidence:
    """The root's row and every node's, whatever else is in the tree."""
    seen = 0
    for seed, text, tokens, parents in drafts(cases):
        session = TreeSession(text, 3, seed)
        case: dict[str, Any] = {"text": text, "tokens": tokens, "parents": list(parents)}
        answer = function(session, list(tokens), list(parents))
        for read, (fed, positions) in enumerate(session.trace, 1):
            case["fed" if len(session.trace) == 1 else f"fed in forward pass {read}"] = {
                "tokens": fed,
                "positions": positions,
            }
        got = items(ROWS, answer, len(tokens) + 1, "the root's row and one for each node", **case)
        for place, row in enumerate(got):
            spelled = [*text, *(tokens[node] for node in path(parents, place - 1))]
            case["entry"] = f"{place}, the row after {spelled}"
            expected = alone(seed, spelled)
            for said, number in zip(
                items(ROWS, row, 3, "probabilities", **case), expected, strict=True
            ):
                if type(said) not in (Fraction, int, float) or not same(number, said):
                    accuse(ROWS, expected, list(row), **case)
        seen += 1
    return Evidence(ROWS, seen)


def bill(function: Function, cases: Cases) -> Evidence:
    """Rows cost, calls cost more."""
    seen = 0
    for seed, text, tokens, parents in drafts(cases):
        session = TreeSession(text, 3, seed)
        function(session, list(tokens), list(parents))
        paths = {
            tuple(tokens[node] for node in path(parents, end)) for end in range(ROOT, len(tokens))
        }
        expected = {"forward passes": 1, "rows": len(paths)}
        got = {
            "forward passes": len(session.trace),
            "rows": sum(len(fed) for fed, _ in session.trace),
        }
        if got != expected:
            case: dict[str, Any] = {"text": text, "tokens": tokens, "parents": list(parents)}
            accuse(
                BILL,
                expected,
                got,
                **case,
                paths=sorted(paths, key=lambda tokens: (len(tokens), tokens)),
            )
        seen += 1
    return Evidence(BILL, seen)
