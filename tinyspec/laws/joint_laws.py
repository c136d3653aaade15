"""The law of a joint target: after whatever happened to the text, its rows are made of its members'
own rows there.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.laws.tables import TableModel
from tinyspec.tree import ROOT, TokenTree

JOINT_ROWS = "a joint row is made of its members' rows"

JOINT_FORK = TokenTree((1, 2, 0, 1), (ROOT, ROOT, 0, 2), (None,) * 4, (False,) * 4)
JOINT_CHAIN = TokenTree.chain((2, 0))

Act = tuple[str, tuple[Any, ...]]
JOINT_STORIES: tuple[tuple[Act, ...], ...] = (
    (("score", (JOINT_CHAIN,)),),
    (("score", (JOINT_FORK,)), ("commit", ((0, 2), 1)), ("score", (JOINT_CHAIN,))),
    (("score", (JOINT_CHAIN,)), ("commit", ((0,), None)), ("score", (JOINT_FORK,))),
    (("append", ((1, 2),)), ("score", (JOINT_FORK,))),
    (
        ("score", (JOINT_FORK,)),
        ("commit", ((1,), 0)),
        ("rewind", (2,)),
        ("extend", ((0, 1),)),
        ("score", (JOINT_FORK,)),
    ),
    (("score", (JOINT_CHAIN,)), ("end", ()), ("extend", ((2, 2),)), ("score", (JOINT_CHAIN,))),
)
"""What a target goes through after its prompt."""


def penalised_row(rows: Sequence[Any], text: Sequence[int], path: Sequence[int]) -> list[Any]:
    """The first member's weights, lowered by the second's, and halved for the tokens that the text
    or the path holds.
    """
    first, second = rows
    whole = (*text, *path)
    return [
        a * (2 - b) / (2 if x in whole else 1)
        for x, (a, b) in enumerate(zip(first, second, strict=True))
    ]


def play_story(
    joint: Callable[..., Any], story: Sequence[Act], models: Sequence[TableModel]
) -> Iterator[tuple[Any, ...]]:
    """The text, a path below it, and the joint row there: for every row that is scored."""
    target = joint([model.session() for model in models], penalised_row)
    text, tree = [0, 1], TokenTree()
    target.extend(text)
    for act, given in story:
        made = getattr(target, act)(*given)
        if act == "score":
            tree = given[0]
            for node in range(ROOT, len(tree.tokens)):
                yield tuple(text), tree.tokens_on(tree.path(node)), made.logits[node + 1]
        elif act in ("extend", "append"):
            text += given[0]
        elif act == "commit":
            text += [*tree.tokens_on(given[0]), *(() if given[1] is None else given[1:])]
        else:
            del text[given[0] if given else 0 :]


def rows_are_the_members(parts: Parts) -> Evidence:
    """Against the members' rows by passes of their own."""
    seen = 0
    for story in JOINT_STORIES:
        models = [TableModel(seed, zeros=False) for seed in (3, 4)]
        for text, path, got in play_story(parts.joint, story, models):
            rows = [model.row((*text, *path)) for model in models]
            expected, seen = penalised_row(rows, text, path), seen + 1
            if [Fraction(x) for x in got] != expected:
                accuse(
                    JOINT_ROWS,
                    expected,
                    list(got),
                    text=text,
                    path=path,
                    rows=rows,
                    story=[act for act, _ in story],
                )
    return Evidence(JOINT_ROWS, seen)


JOINT_ROW_LAWS = {JOINT_ROWS: rows_are_the_members}
