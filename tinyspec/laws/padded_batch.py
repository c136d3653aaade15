"""A padded batch: requests as the rows of one tensor, which is how most implementations hold them.

This library has no padded batch. A forward pass takes a list of `ForwardBatch`es, each with its own
number of rows and its own cache. The padded one stands here for two reasons. The mistakes that the
field makes in it can be shown and caught: the museum changes it. And what padding costs can be
counted (EMS-SD, arXiv 2405.07542).

All rows have as many tokens in a pass as the longest one, and all caches have as many slots in use.
A row that is shorter, or whose draft tokens were rejected, has padding there. So a token's slot is
not its position, and a row must not attend to all slots ("Batch speculative decoding done right",
arXiv 2510.22876: implementations that confuse them write other texts).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.parts import Parts
from tinyspec.laws.session_laws import greedy_text
from tinyspec.lm.forward import Cache, ForwardBatch, Plan
from tinyspec.lm.model import Model

PADDED_ALONE = "a round of a padded batch is the round alone"
PADDING = 0  # the token of a row that is padding
VOCABULARY = 4
PROMPTS = ((1, 2), (3, 1), (2, 2, 1, 3, 1), (3,))
NEW_TOKENS = 8  # of the first request; each further one writes one less

Draft = Callable[[Sequence[int]], list[int]]
"""Return the draft tokens after a text."""


@cache
def batch_model() -> Model:
    """Return the target of all batches."""
    return small_network(1, VOCABULARY)


@cache
def _greedy(text: tuple[int, ...], n: int) -> list[int]:
    return greedy_text(batch_model(), text, n)


def draft_partly_right(text: Sequence[int]) -> list[int]:
    """Return up to three draft tokens. How many, and which is wrong, depends on the text."""
    drafted = _greedy(tuple(text), 1 + (len(text) + text[0]) % 3)
    wrong = sum(text) % 4
    return [(token + (at == wrong)) % VOCABULARY for at, token in enumerate(drafted)]


class PassSize(NamedTuple):
    """What a pass ran.

    rows   of all requests;  real_rows  those that are no padding
    slots  of all caches that are in use in it;  real_slots  those that hold a token of a text
    """

    rows: int
    real_rows: int
    slots: int
    real_slots: int


class PaddedBatch:
    """Requests that decode in step, greedily, in caches that are equally long.

    texts   tokens of each request
    slots   of each request, the cache slot of each of its tokens but the newest
    passes  the sizes of all passes
    """

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]]):
        self.model = model
        self.texts = [list(prompt) for prompt in prompts]
        self.slots: list[list[int]] = [[] for _ in prompts]
        self.caches = [Cache(model.config, model.dtype, model.device) for _ in prompts]
        self.passes: list[PassSize] = []
        self.run({row: text[:-1] for row, text in enumerate(self.texts)})

    @property
    def end(self) -> int:
        """Return how many slots of every cache are in use: as many as the longest row needs."""
        return max((slots[-1] + 1 for slots in self.slots if slots), default=0)

    def run(self, new: dict[int, list[int]]) -> list[Tensor]:
        """Run new tokens of some requests; return the logits [n, V] of each.

        All have as many rows as the longest one: padding stands on the left.
        """
        end, longest = self.end, max(map(len, new.values()))
        if longest == 0:  # every prompt has one token, and is run with the first draft
            return []
        feeds = list[ForwardBatch]()
        for row, tokens in new.items():
            padding = longest - len(tokens)
            past, first = self.slots[row], end + padding
            own = list(range(first, end + longest))
            seen = [[slot] for slot in range(end, first)]  # padding attends to itself
            seen += [[*past, *own[: at + 1]] for at in range(len(own))]
            positions = [0] * padding + [len(past) + at for at in range(len(own))]
            self.slots[row] = past + own
            self.caches[row].reserve(end + longest)
            feeds.append(
                ForwardBatch(
                    cache=self.caches[row],
                    plan=Plan(),
                    tokens=[PADDING] * padding + tokens,
                    positions=positions,
                    slots=list(range(end, end + longest)),
                    starts=[0] * longest,
                    stop=2 * self.model.config.n_layers,
                    n_slots=end + longest,
                    seen=[(0, tuple(slots)) for slots in seen],
                    heads=list(range(padding, longest)),
                )
            )
        rows, slots = longest * len(new), (end + longest) * len(self.texts)
        real_rows, real_slots = sum(map(len, new.values())), sum(map(len, self.slots))
        self.passes.append(PassSize(rows, real_rows, slots, real_slots))
        return [one.logits for one in self.model.forward(feeds)]

    def step(self, drafts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Verify the drafts of some requests, and commit what each accepts and one token more."""
        logits = self.run({row: [self.texts[row][-1], *drafts[row]] for row in drafts})
        output = dict[int, list[int]]()
        for (row, draft), own in zip(drafts.items(), logits, strict=True):
            best = own.argmax(dim=-1).tolist()
            accepted = count_equal(draft, best)
            del self.slots[row][len(self.texts[row]) + accepted :]
            output[row] = best[: accepted + 1]
            self.texts[row] += output[row]
        return output


class BatchRun(NamedTuple):
    """The tokens of each round of each request, and the sizes of all passes."""

    rounds: list[list[list[int]]]
    passes: list[PassSize]


def run_padded(prompts: Sequence[Sequence[int]], draft: Draft) -> BatchRun:
    """Decode in a padded batch until each request has its tokens; those that have leave."""
    batch = PaddedBatch(batch_model(), prompts)
    rounds: list[list[list[int]]] = [[] for _ in prompts]
    while live := [
        row
        for row, prompt in enumerate(prompts)
        if len(batch.texts[row]) < len(prompt) + NEW_TOKENS - row
    ]:
        for row, tokens in batch.step({row: draft(batch.texts[row]) for row in live}).items():
            rounds[row].append(tokens)
    return BatchRun(rounds, batch.passes)


def count_equal(draft: Sequence[int], best: Sequence[int]) -> int:
    """Return how many draft tokens are accepted: those before the first one that is not the best.

    >>> count_equal([3, 1, 2], [3, 1, 0, 2])
    2
    """
    return next((at for at, token in enumerate(draft) if token != best[at]), len(draft))


def rounds_alone(prompt: Sequence[int], n: int, draft: Draft) -> list[list[int]]:
    """Return the tokens of each round of one request, from whole passes over its text."""
    rounds = list[list[int]]()
    while sum(map(len, rounds)) < n:
        text = (*prompt, *(token for tokens in rounds for token in tokens))
        drafted = draft(text)
        best = _greedy(text, len(drafted) + 1)
        rounds.append(best[: count_equal(drafted, best) + 1])
    return rounds


@collect_evidence(PADDED_ALONE)
def padded_request_is_alone(parts: Parts) -> Iterator[int]:
    """Check every batch of one to three prompts, round by round."""
    for size in (1, 2, 3):
        for prompts in combinations(PROMPTS, size):
            got = run_padded(prompts, draft_partly_right).rounds
            for row, prompt in enumerate(prompts):
                expected = rounds_alone(prompt, NEW_TOKENS - row, draft_partly_right)
                case = {"prompts": prompts, "row": row, "compared": "tokens of each round"}
                expect_equal(PADDED_ALONE, expected, got[row], **case)
            yield 0


PADDED_LAWS: dict[str, Callable[[Parts], Evidence]] = {PADDED_ALONE: padded_request_is_alone}
