"""Looked-up drafts: several become the union of their paths, and a replaced word is passed over."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tinyspec.speculative.lookup import continue_after_substitution, merge_drafts
from tinyspec.tree import ROOT


@st.composite
def drafts(draw: Any, deepest: int = 8) -> tuple[list[int], list[int], list[float]]:
    """A tree over three tokens without equal siblings; no draft token is likelier than the one it
    follows.
    """
    tokens, parents, chances = list[int](), list[int](), list[float]()
    for _ in range(draw(st.integers(0, deepest))):
        parent = draw(st.integers(ROOT, len(tokens) - 1))
        taken = {tokens[n] for n in range(len(tokens)) if parents[n] == parent}
        token = draw(st.integers(0, 2))
        if token not in taken:
            tokens.append(token)
            parents.append(parent)
            chances.append(draw(st.floats(0, 1)) * (1.0 if parent == ROOT else chances[parent]))
    return tokens, parents, chances


def spelled(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """What each node's path says."""
    texts = list[tuple[int, ...]]()
    for token, parent in zip(tokens, parents, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


@given(st.lists(drafts(), max_size=4))
def test_the_merged_tree_has_every_path_once_with_the_greatest_of_its_chances(
    given: list[Any],
) -> None:
    wanted: dict[tuple[int, ...], float] = {}
    for tokens, parents, chances in given:
        for text, chance in zip(spelled(tokens, parents), chances, strict=True):
            wanted[text] = max(chance, wanted.get(text, 0.0))
    tokens, parents, chances = merge_drafts(given)
    assert dict(zip(spelled(tokens, parents), chances, strict=True)) == wanted
    assert len(tokens) == len(wanted)
    assert all(parent < node for node, parent in enumerate(parents))
    assert all(
        chances[node] <= chances[parent] for node, parent in enumerate(parents) if parent != ROOT
    )


@given(drafts(), st.integers(0, 2))
def test_substitution_continues_with_what_followed_other_tokens(given: Any, newest: int) -> None:
    tokens, parents, shares = given
    matches = list(range(len(tokens)))
    texts = spelled(tokens, parents)
    said, above, kept, places = continue_after_substitution(
        (tokens, parents, shares, matches), newest
    )
    expected = [node for node, text in enumerate(texts) if len(text) > 1 and text[0] != newest]
    assert [texts[node][1:] for node in expected] == spelled(said, above)
    assert list(kept) == [shares[node] for node in expected]
    assert list(places) == expected
