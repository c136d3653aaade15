"""A drafter that reads the target's hidden states: one for every committed token but the newest.

The newest token is committed before it is run. So its state is not known yet, and the last known
state is the one that the newest token was sampled from. Every trained head starts here.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.lm.forward import Scores
from tinyspec.tree import ROOT


class FeatureDrafter(BaseDrafter):
    """Keep the states of the text's tokens; subclasses propose from them.

    hidden_layers  layers of the target whose outputs are read; n_layers: after the final norm
    states         [n - 1] states [layers, d] of the first n - 1 of n committed tokens; empty for a
                   text of one token
    """

    def __init__(self, hidden_layers: Sequence[int]):
        self.hidden_layers = tuple(hidden_layers)
        self.states: list[Tensor] = []

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.states += scores.hidden.unbind(1)

    def observe(self, round: Round) -> None:
        # A stop may have cut the round, and a round may end on an accepted token: the newest token
        # has no state in either case.
        path = (ROOT, *round.verdict.accepted)[: len(round.tokens)]
        # These rows are copied: a view would keep the states of all rejected nodes too.
        self.states += round.scores.hidden[:, [node + 1 for node in path]].unbind(1)

    def rewind(self, length: int) -> None:
        del self.states[max(length - 1, 0) :]

    def end(self) -> None:
        self.states = []


def rank_tokens(sampling: SamplingParams, logits: Any, history: Sequence[int], k: int) -> list[int]:
    """Return the k likeliest tokens after the repetition penalty, the likeliest first.

    logits   [V] of a head
    history  the text, and the draft tokens on the path to where the tokens stand
    """
    penalty = sampling.repetition_penalty
    if penalty != 1.0:
        logits = SamplingParams(repetition_penalty=penalty).probs(logits, history)
    return top_k_tokens(logits, k)
