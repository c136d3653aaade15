"""Pipelined targets: they begin later tokens while the newest one still runs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tinyspec.decoding.decode import BaseDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.tree import TokenTree

NO_DRAFT = TokenTree()  # the newest token alone


class Upcoming(NamedTuple):
    """What a target needs to begin later tokens while the newest one runs.

    text      the committed tokens
    sampling  the request's settings
    room      how many more tokens may follow the next one; at least 1
    """

    text: Sequence[int]
    sampling: SamplingParams
    room: int


class PipelineDrafter(BaseDrafter):
    """Propose nothing, but tell the target before each pass which tokens may follow.

    Such a target guesses later tokens itself and begins them in the same pass. No token depends on
    a guess, so nothing is left to verify.

    target  its `upcoming` is set; None before the last token of a text, as nothing follows it
    """

    def __init__(self, target: Any):
        self.target = target

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        follows = max_draft_depth > 0
        self.target.upcoming = Upcoming(context, sampling, max_draft_depth) if follows else None
        return NO_DRAFT
