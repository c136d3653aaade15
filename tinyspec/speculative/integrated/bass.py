"""BASS: several sequences of one batch accept drafts of unequal length, and share one draft length.

Paper: Qian et al., ACL Findings 2024, arXiv 2404.15778. Nothing is trained.

Idea. Each sequence of a batch accepts another number of draft tokens, so the sequences have unequal
lengths from the first round on. Cutting all to the shortest would waste what the others accepted.
BASS keeps them ragged: one product for the rows of all sequences, and attention for each sequence
over its own keys. All drafts of a round have the same length l, so that the sequences stay in step.
It follows what was accepted (algorithm 1):

    some sequence accepted all l        l = min(l + 2, 32)
    otherwise                           l = max(1, x_1, ..., x_b, l - ceil(l / 10) - s)

    x_i: draft tokens that sequence i accepted in the last round
    s: 1 if the second case held in the last round, else 0: then l falls faster

Guarantee: EXACT. The length follows from earlier rounds alone.
Pitfall: the minimum of the accepted lengths for all sequences; a length from their mean.
Tests: tests/speculative/test_bass.py (the rule against a plain list of the paper's cases; in a
batch every request's accepted tokens are its own; all drafts of a round have one length).
Left out: the attention kernels for a GPU, with padded or split keys. Here every forward pass has
one product for all rows and attention for each request over its own keys, which is the split form.
The constants 7, 2, 10 and 32 are read from quotations of the paper's algorithm 1.
Ours: a draft that the end of a text cut does not count, and requests may join and leave.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.verify import verify_tree
from tinyspec.speculative.batched import BatchDrafter
from tinyspec.technique import Guarantee, Knob, Request, technique


def next_length(length: int, accepted: Sequence[int], fell: bool, limit: int) -> tuple[int, bool]:
    """Return the next draft length, and whether the second case of algorithm 1 held.

    length    of the drafts of the last round
    accepted  draft tokens that each sequence accepted in it
    fell      whether the second case held before it
    limit     the longest draft

    >>> next_length(7, [2, 7], fell=False, limit=32)
    (9, False)
    >>> next_length(7, [2, 3], fell=False, limit=32), next_length(6, [2, 3], fell=True, limit=32)
    ((6, True), (4, True))
    """
    if max(accepted) >= length:
        return min(length + 2, limit), False
    return max(1, *accepted, length - ceil(length / 10) - fell), True


class BassRule:
    """One draft length for all requests, which follows what they accepted.

    Each request asks for its next length, and says how many tokens of its last draft were accepted.
    A round of the batch ends when all requests that decode have asked. One that decodes with
    another method never asks, so a round also ends when a request asks again. Then the new answers
    count in the round that ends, and that request has asked in the next round already.

    first     the length of the first draft;  limit  the longest
    accepted  for each request that has asked in this round, what it said; None if its draft was cut
              or was counted already
    """

    def __init__(self, first: int, limit: int):
        self.length, self.limit, self.fell = min(first, limit), limit, False
        self.accepted: dict[int, int | None] = {}

    def decide(self, questions: Mapping[int, int | None], n_decoding: int) -> Mapping[int, int]:
        """Return the length for all that ask. The questions are what they accepted."""
        asks_again = bool(self.accepted.keys() & questions.keys())
        self.accepted |= questions
        if asks_again or len(self.accepted) >= n_decoding:
            accepted = [n for n in self.accepted.values() if n is not None]
            if accepted:
                self.length, self.fell = next_length(self.length, accepted, self.fell, self.limit)
            self.accepted = dict.fromkeys(questions) if asks_again else {}
        return dict.fromkeys(questions, self.length)


class BassDrafter(BatchDrafter):
    """Draft as many tokens as the batch does. `accepted`: of the last draft; None: there is none.

    A draft that was cut, at the end of a text or of a request's limit, is not counted.
    """

    accepted: int | None = None

    def question(self) -> int | None:
        return self.accepted

    def observe(self, round: Round) -> None:
        is_whole = len(round.tree.tokens) == self.gamma and not round.truncated
        self.accepted = len(round.verdict.accepted) if is_whole else None
        super().observe(round)


@technique(
    title="BASS",
    summary="one draft length for a ragged batch",
    paper="Qian et al. 2024, arXiv 2404.15778",
    reported="2.15x, 7.8B, batch 8, A100 (arXiv 2404.15778)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    drafts=1,
    of_batch=True,
    knobs=(
        Knob("first", 7, "length of the first draft", low=1, high=64, small=(2, 1)),
        Knob("limit", 32, "most tokens of a draft", low=1, high=64, small=(2,)),
    ),
)
def bass(request: Request, *, first: int, limit: int) -> Decoder:
    """Return a decoder whose draft is as long as the others of its batch."""
    name = ("bass", first, limit)
    drafter = BassDrafter(request, limit, name, lambda: BassRule(first, limit))
    return request.decoder(drafter, verify_tree)
