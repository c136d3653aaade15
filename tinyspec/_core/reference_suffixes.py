"""The twin of suffixes.pyx: a suffix array, and what followed the longest match.

A text is a row of ids; a negative one stands between documents, and nothing is read across it.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from tinyspec._core.limits import MAX_DRAFT_NODES, MAX_MATCHES, check_range, read_ids
from tinyspec.errors import TinyspecError

DEPTH = 32
"""Tokens that decide the order of places: a match with its continuation is not longer."""

Found = tuple[int, list[int], list[int], list[int]]


def suffix_order(tokens: Sequence[int], tell: Callable[[int], None] | None = None) -> list[int]:
    """Return the places 0 .. n - 1 of a text, sorted by the DEPTH tokens from there on.

    tell  called with the number of tokens that the order is right for, as that grows

    >>> suffix_order([2, 1, 2, 1])
    [3, 1, 2, 0]
    """
    line = list(tokens)
    if tell is not None:
        tell(DEPTH)
    return sorted(range(len(line)), key=lambda place: line[place : place + DEPTH])


def retrieve(
    tokens: Sequence[int],
    order: Sequence[int],
    suffix: Sequence[int],
    shortest: int,
    longest: int,
    length: int,
    matches: int,
    most: int,
) -> Found:
    """Return what followed the longest end of `suffix` that occurs in the text and goes on.

    Ends of `longest` down to `shortest` tokens are looked for. At every place where the match
    occurs (at most `matches` of them, evenly spaced in their order) the next `length` tokens are
    read, as far as DEPTH and the document go. The weight of a path is how many continuations begin
    with it. The `most` heaviest paths are the tree; of equals the shallower, then the lower ids. A
    path never weighs more than its own beginning, so with a node its parent is in the tree.

    Returns the length of the match (0: none), tokens, parents (ROOT is -1) and weights. Raises
    TinyspecError if the order names a place outside of the text.

    >>> text = [5, 6, 1, 5, 6, 2, 5, 6, 1]
    >>> retrieve(text, suffix_order(text), [9, 5, 6], 1, 16, 2, 5000, 3)
    (2, [1, 2, 5], [-1, -1, 0], [2, 1, 1])
    """
    if not (
        1 <= shortest <= longest
        and length >= 1
        and longest + 1 <= DEPTH
        and matches >= 1
        and most >= 0
    ):
        raise TinyspecError(
            f"a retrieval needs 1 <= shortest <= longest < {DEPTH} and length, matches >= 1, "
            f"got {shortest}, {longest}, {length}, {matches}"
        )
    check_range("the number of matches", matches, 1, MAX_MATCHES)
    check_range("the number of draft tokens", most, 0, MAX_DRAFT_NODES)
    if len(order) != len(tokens):
        raise TinyspecError(f"an order of {len(order)} places is not that of {len(tokens)} tokens")
    suffix = read_ids(suffix[-longest:])
    suffix = list(suffix)

    def read(place: int, n: int) -> list[int]:
        if not 0 <= place < len(tokens):
            raise TinyspecError(
                "the index names a place outside of its text: it is damaged, build it again"
            )
        return [int(token) for token in tokens[place : place + n]]

    for n in range(min(longest, len(suffix)), shortest - 1, -1):
        pattern = suffix[len(suffix) - n :]
        # After those that end there: they have nothing to draft.
        low = bisect_left(order, [*pattern, 0], key=lambda place: read(place, n + 1))
        high = bisect_right(order, pattern, key=lambda place: read(place, n))
        if low < high:
            break
    else:
        return 0, [], [], []
    taken = min(matches, high - low)
    weight: Counter[tuple[int, ...]] = Counter()
    for j in range(taken if most else 0):
        rest = read(order[low + j * (high - low) // taken], n + min(length, DEPTH - n))[n:]
        end = next((at for at, token in enumerate(rest) if token < 0), len(rest))
        weight.update(tuple(rest[:at]) for at in range(1, end + 1))
    kept = sorted(weight, key=lambda path: (-weight[path], len(path), path))[:most]
    place_of = {path: at for at, path in enumerate(kept)} | {(): -1}
    return (
        n,
        [path[-1] for path in kept],
        [place_of[path[:-1]] for path in kept],
        [weight[path] for path in kept],
    )
