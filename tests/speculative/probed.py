"""What every drafter shows that drafts from probes: masks, prompts, look-aheads after the text."""

from collections.abc import Sequence
from typing import Any

import pytest

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import GREEDY, begin_decoder, run_all_rounds
from tinyspec.technique import Card
from tinyspec.tree import ROOT, TokenTree


def begin(
    card: Card,
    model: Any,
    text: Sequence[int],
    sampling: SamplingParams = GREEDY,
    n: int = 30,
    ends: frozenset[int] = frozenset(),
    **knobs: Any,
) -> Any:
    """Return a technique's decoder that has read a text, in the context of its model."""
    room = model.config.max_positions
    return begin_decoder(card.make, [model], text, sampling, n, ends, room, **knobs)


def propose(decoder: Any, depth: int = 9, sampling: SamplingParams = GREEDY) -> TokenTree:
    """Return the draft of the next round."""
    tree: TokenTree = decoder.drafter.propose(decoder.context, depth, sampling, Seeded(0))
    return tree


def propose_after_a_round(card: Card, model: Any, depth: int = 9, **knobs: Any) -> tuple[Any, Any]:
    """Return a decoder after its first round, which has no draft yet, and its next draft."""
    decoder = begin(card, model, (0, 1), **knobs)
    decoder.step(Seeded(0))
    return decoder, propose(decoder, depth)


def list_drafted(tree: TokenTree) -> list[int]:
    """Return the nodes that are draft tokens."""
    return [node for node, probe in enumerate(tree.probe) if not probe]


def expect_nothing_after_an_end(card: Card, model: Any, **knobs: Any) -> None:
    """Every token ends the text: all draft tokens stand after the newest one."""
    ends = frozenset(range(model.config.vocab_size))
    decoder = begin(card, model, (0, 1), ends=ends, **knobs)
    decoder.step(Seeded(0))
    decoder.finished = None
    tree = propose(decoder)
    assert {tree.parents[node] for node in list_drafted(tree)} == {ROOT}


def expect_probes_to_end_with_the_context(card: Card, model: Any, **knobs: Any) -> None:
    """A text that fills its context never runs a probe beyond it."""
    decoder = begin(card, model, [0, 1] * 29 + [2], **knobs)  # 59 of 64 positions
    assert model.config.max_positions == 64 and run_all_rounds(decoder)
    assert len(decoder.context) == 64


def expect_chains_after_each_node(decoder: Any, tree: TokenTree) -> None:
    """Each node has a group of probes of its own, one after the other."""
    assert decoder.drafter.group_of
    for node, group in decoder.drafter.group_of.items():
        assert [tree.parents[probe] for probe in group] == [node, *group[:-1]]


def expect_no_own_vocabulary(settings: Any) -> None:
    """Rows of probes are those of the target, so a draft vocabulary has no meaning."""
    with pytest.raises(TinyspecError, match="draft_vocab"):
        settings(draft_vocab=20)
