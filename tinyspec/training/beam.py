"""Decode many texts at once: greedy search and beam search.

A teacher writes thousands of translations this way. Techniques do not use it: their loops are
decode.py and refine.py, one text at a time. The model is a `BatchDecoder`; here tokens are chosen.

Beam search keeps the `beam` most probable texts of each length. Texts that have ended are set
aside, and the search stops when there are `beam` of them. It returns the text with the highest

    log-probability / (number of tokens, end included) ** length_power    (0: sum, 1: mean)

A text that reaches its limit must end there.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


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


class _Beam(NamedTuple):
    """A text that has not ended.

    source  number of the source that it translates
    score   its log-probability
    text    its tokens
    """

    source: int
    score: float
    text: list[int]


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
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in limits]  # score by the rule, text
    beams = [_Beam(source, 0.0, []) for source in range(len(limits))]
    tokens = torch.full((len(beams),), bos)
    while beams:
        # 1. Score: each beam's best continuations. Of 2 * beam of them at most half end a text.
        logprobs = rows.step(tokens).log_softmax(-1)  # [N, V]
        so_far = torch.tensor([one.score for one in beams], dtype=logprobs.dtype)
        scores = logprobs + so_far.to(logprobs.device)[:, None]
        best = scores.topk(min(2 * beam, scores.shape[-1]), dim=-1)
        values, choices = best.values.tolist(), best.indices.tolist()
        ends = scores[:, eos].tolist()
        candidates: list[list[tuple[float, int, int]]] = [[] for _ in limits]  # score, row, token
        for row, (source, _, text) in enumerate(beams):
            if len(text) < limits[source]:
                continuations = list(zip(values[row], choices[row], strict=True))
            else:
                continuations = [(ends[row], eos)]
            candidates[source] += [(score, row, token) for score, token in continuations]
        # 2. Select: the best `beam` of each source, and the texts that end among them.
        selected: list[tuple[int, int, float]] = []  # row, token, score
        for source, found in enumerate(candidates):
            found.sort(key=lambda one: -one[0])
            kept: list[tuple[int, int, float]] = []
            for rank, (score, row, token) in enumerate(found):
                if token != eos:
                    kept.append((row, token, score))
                elif rank < beam:
                    text = beams[row].text
                    ended[source].append((score / (len(text) + 1) ** length_power, text))
                if len(kept) == beam:
                    break
            if len(ended[source]) < beam:
                selected += kept
        # 3. Extend the selected texts.
        beams = [
            _Beam(beams[row].source, score, [*beams[row].text, token])
            for row, token, score in selected
        ]
        tokens = torch.tensor([token for _, token, _ in selected], dtype=torch.long)
        if beams:
            rows.select(torch.tensor([row for row, _, _ in selected]))
    return [max(texts, key=lambda one: one[0])[1] for texts in ended]
