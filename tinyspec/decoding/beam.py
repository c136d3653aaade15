"""Decode many texts at once: greedy search and beam search.

A teacher writes thousands of translations with `greedy_search` and `beam_search`; the model is a
`BatchDecoder`, and here tokens are chosen. A technique that searches in passes of its own advances
a `BeamSearch` by itself.

Beam search keeps the `beam` most probable texts of each length. Texts that have ended are set
aside, and the search stops when there are `beam` of them. It returns the text with the highest

    log-probability / (number of tokens, end included) ** length_power    (0: sum, 1: mean)

A text that reaches its limit must end there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError


class BatchDecoder(Protocol):
    """A model that is decoding N texts, with its caches."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens [N], and return the logits of the next ones [N, V]."""
        ...

    def select(self, rows: Tensor) -> None:
        """Continue text rows[i] as text i, and drop the texts that are not in `rows`."""
        ...


def greedy_search(rows: BatchDecoder, bos: int, eos: int, limits: Sequence[int]) -> list[list[int]]:
    """Return one text per row: the most probable tokens until `eos` or the row's limit.

    The texts do not contain `eos`.
    """
    texts: list[list[int]] = [[] for _ in limits]
    alive = [i for i, limit in enumerate(limits) if limit > 0]
    if len(alive) < len(texts) and alive:
        rows.select(torch.tensor(alive))
    tokens = torch.full((len(alive),), bos)
    while alive:
        tokens = rows.step(tokens).argmax(-1)
        continuing = []
        for row, (i, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
            if token != eos:
                texts[i].append(token)
                if len(texts[i]) < limits[i]:
                    continuing.append(row)
        if len(continuing) < len(alive):  # texts that have ended are not computed any more
            kept = torch.tensor(continuing, dtype=torch.long)
            alive, tokens = [alive[row] for row in continuing], tokens[kept]
            if alive:
                rows.select(kept)
    return texts


class BeamText(NamedTuple):
    """A text of a beam, and the log-probability of each of its tokens.

    source  number of the source that it translates
    score   sum of the log-probabilities; of a text that has ended, by the module's rule
    text    its tokens, without the end
    """

    source: int
    score: float = 0.0
    text: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class BeamSearch(NamedTuple):
    """A beam search between two steps. Advancing it leaves it as it is.

    limits  of each source: most tokens before the end
    live    the texts that have not ended, those of a source together
    ended   of each source: the texts that have ended
    """

    eos: int
    limits: Sequence[int]
    beam: int
    length_power: float
    live: tuple[BeamText, ...]
    ended: tuple[tuple[BeamText, ...], ...]

    @classmethod
    def begin(
        cls, eos: int, limits: Sequence[int], beam: int = 4, length_power: float = 1.0
    ) -> "BeamSearch":
        """Return a search that has one empty text of each source."""
        live = tuple(BeamText(source) for source in range(len(limits)))
        return cls(eos, limits, beam, length_power, live, ((),) * len(limits))

    def advance(self, logits: Tensor) -> tuple["BeamSearch", Tensor, Tensor]:
        """Return the search after one more token.

        logits  [N, V] after each live text; -inf: never written

        Returns the search, which old live text [N'] each new one continues, and their tokens [N'].
        """
        # 1. Score: each text's best continuations. Of 2 * beam of them at most half end a text.
        logprobs = logits.log_softmax(-1)
        so_far = torch.tensor([one.score for one in self.live], dtype=logprobs.dtype)
        scores = logprobs + so_far.to(logprobs.device)[:, None]
        best = scores.topk(min(2 * self.beam, scores.shape[-1]), dim=-1)
        values, choices = best.values.tolist(), best.indices.tolist()
        ends = scores[:, self.eos].tolist()
        candidates: list[list[tuple[float, int, int]]] = [[] for _ in self.limits]
        for row, one in enumerate(self.live):  # a candidate: score, row, token
            if len(one.text) < self.limits[one.source]:
                continuations = list(zip(values[row], choices[row], strict=True))
            else:
                continuations = [(ends[row], self.eos)]
            candidates[one.source] += [
                (score, row, token) for score, token in continuations if score > -math.inf
            ]
        # 2. Select: the best `beam` of each source, and the texts that end among them.
        selected, ended = list[tuple[int, int, float]](), list(self.ended)  # row, token, score
        for source, found in enumerate(candidates):
            if not found and not ended[source]:
                raise TinyspecError("the logits define no distribution: check the weights")
            found.sort(key=lambda one: -one[0])
            kept = list[tuple[int, int, float]]()
            for rank, (score, row, token) in enumerate(found):
                if token != self.eos:
                    kept.append((row, token, score))
                elif rank < self.beam:
                    one = self.live[row]
                    ended[source] += (
                        one._replace(
                            score=score / (len(one.text) + 1) ** self.length_power,
                            logprobs=(*one.logprobs, score - one.score),
                        ),
                    )
                if len(kept) == self.beam:
                    break
            if len(ended[source]) < self.beam:
                selected += kept
        # 3. Extend the selected texts.
        live = tuple(
            BeamText(
                self.live[row].source,
                score,
                (*self.live[row].text, token),
                (*self.live[row].logprobs, score - self.live[row].score),
            )
            for row, token, score in selected
        )
        rows, tokens = (
            torch.tensor([one[at] for one in selected], dtype=torch.long) for at in (0, 1)
        )
        return self._replace(live=live, ended=tuple(ended)), rows, tokens

    def candidates_of(self, source: int) -> list[BeamText]:
        """Return the live texts of a source; after its end those that ended. The best are first."""
        live = [one for one in self.live if one.source == source]
        return sorted(live or self.ended[source], key=lambda one: -one.score)

    def list_candidates(self) -> list[BeamText]:
        """Return `beam` texts of each source, the best first; one that is missing is empty."""
        texts = list[BeamText]()
        for source in range(len(self.limits)):
            found = self.candidates_of(source)[: self.beam]
            texts += found + [BeamText(source)] * (self.beam - len(found))
        return texts


def beam_search(
    rows: BatchDecoder,
    bos: int,
    eos: int,
    limits: Sequence[int],
    beam: int = 4,
    length_power: float = 1.0,
) -> list[list[int]]:
    """Return the best text of each row by the module's rule, without `eos`.

    A limit counts tokens before `eos`.
    """
    search = BeamSearch.begin(eos, limits, beam, length_power)
    tokens = torch.full((len(limits),), bos)
    while search.live:
        search, kept, tokens = search.advance(rows.step(tokens))
        if search.live:
            rows.select(kept)
    return [list(search.candidates_of(source)[0].text) for source in range(len(limits))]
