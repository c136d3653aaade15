"""Drafts that were looked up, made into others: several merged into one tree, and one that goes on
behind a replaced token.
"""

from collections.abc import Sequence

from tinyspec.tree import ROOT

LookupDraft = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[int]]
"""What a look found: tokens, parents, shares, and of each guess how long the match is that it
stands behind.
"""


def merge_drafts(
    drafts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
) -> tuple[list[int], list[int], list[float]]:
    """One tree of several drafts (tokens, parents, chances): equal paths are one, with the greatest
    of their chances.

    A parent stands before its children, and is at least as likely.

    >>> merge_drafts([([5, 6], [-1, 0], [0.5, 0.25]), ([5, 7], [-1, 0], [0.75, 0.5])])
    ([5, 6, 7], [-1, 0, 0], [0.75, 0.25, 0.5])
    """
    tokens, parents, chances = list[int](), list[int](), list[float]()
    known: dict[tuple[int, int], int] = {}
    for given in drafts:
        place = list[int]()
        for token, parent, chance in zip(*given, strict=True):
            above = ROOT if parent == ROOT else place[parent]
            at = known.setdefault((above, token), len(tokens))
            place.append(at)
            if at == len(tokens):
                tokens.append(token)
                parents.append(above)
                chances.append(chance)
            elif chance > chances[at]:
                chances[at] = chance
    return tokens, parents, chances


def continue_after_substitution(draft: LookupDraft, newest: int) -> LookupDraft:
    """What a draft behind the text without its newest token says comes behind that one: it was put
    in another's place.

    Where a copy changes a word, no suffix of the text is known behind it. So each first guess is
    taken for what `newest` replaced, and what follows that guess is offered. Guesses behind
    `newest` itself are what any look finds.

    >>> continue_after_substitution(([5, 9, 6, 7], [-1, -1, 0, 2], [0.5, 0.5, 0.5, 0.5], [4, 4, 4, 4]), 9)
    ([6, 7], [-1, 0], [0.5, 0.5], [4, 4])
    """
    place: dict[int, int] = {}
    kept = list[int]()
    for node, (token, parent) in enumerate(zip(draft[0], draft[1], strict=True)):
        if parent == ROOT:
            if token != newest:
                place[node] = ROOT
        elif parent in place:
            place[node] = len(kept)
            kept.append(node)
    tokens, parents, shares, matches = draft
    return (
        [tokens[node] for node in kept], [place[parents[node]] for node in kept],
        [shares[node] for node in kept], [matches[node] for node in kept],
    )  # fmt: skip
