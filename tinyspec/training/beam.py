"""Decode many texts at once: greedy search and beam search.

A teacher writes thousands of translations this way. Techniques do not use it: their loops are
decode.py and refine.py, one text at a time. The model is a `BatchDecoder`; here tokens are chosen.

Beam search keeps the `beam` most probable texts of each length. Texts that have ended are set
aside, and the search stops when there are `beam` of them. It returns the text with the highest

    log-probability / (number of tokens, end included) ** length_power    (0: sum, 1: mean)

A text that reaches its limit must end there.
"""

from collections.abc import Sequence
from typing import Protocol

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
        goes_on = []
        for row, (i, token) in enumerate(zip(alive, tokens.tolist(), strict=True)):
            if token != eos:
                texts[i].append(token)
                if len(texts[i]) < limits[i]:
                    goes_on.append(row)
        if len(goes_on) < len(alive):  # what has ended is not computed any more
            kept = torch.tensor(goes_on, dtype=torch.long)
            alive, tokens = [alive[row] for row in goes_on], tokens[kept]
            if alive:
                rows.select(kept)
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
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in limits]
    alive: list[tuple[int, float, list[int]]] = [
        (i, 0.0, []) for i in range(len(limits))
    ]  # whose, score, text
    tokens = torch.full((len(alive),), bos)
    while alive:
        logs = rows.step(tokens).log_softmax(-1)  # [N, V]
        scores = (
            logs
            + torch.tensor([score for _, score, _ in alive], dtype=logs.dtype, device=logs.device)[
                :, None
            ]
        )
        best = scores.topk(
            min(2 * beam, scores.shape[-1]), dim=-1
        )  # of 2 * beam at most half are an end
        last = scores[:, eos].tolist()
        values, choices = best.values.tolist(), best.indices.tolist()
        goes_on: list[tuple[int, int, float]] = []  # row, token, score
        for i, its in _group_by_text(alive):
            found = [
                (value, row, token)
                for row in its
                for value, token in (
                    zip(values[row], choices[row], strict=True)
                    if len(alive[row][2]) < limits[i]
                    else [(last[row], eos)]
                )
            ]
            found.sort(key=lambda one: -one[0])
            kept: list[tuple[int, int, float]] = []
            for rank, (value, row, token) in enumerate(found):
                if token != eos:
                    kept.append((row, token, value))
                elif rank < beam:  # an end counts where it is among the best `beam`
                    text = alive[row][2]
                    ended[i].append((value / (len(text) + 1) ** length_power, text))
                if len(kept) == beam:
                    break
            if len(ended[i]) < beam:
                goes_on += kept
        alive = [(alive[row][0], value, [*alive[row][2], token]) for row, token, value in goes_on]
        tokens = torch.tensor([token for _, token, _ in goes_on], dtype=torch.long)
        if alive:
            rows.select(torch.tensor([row for row, _, _ in goes_on]))
    return [max(texts, key=lambda one: one[0])[1] for texts in ended]


def _group_by_text(alive: Sequence[tuple[int, float, list[int]]]) -> list[tuple[int, list[int]]]:
    """Return each text's number and its rows, in order."""
    owned: dict[int, list[int]] = {}
    for row, (i, _, _) in enumerate(alive):
        owned.setdefault(i, []).append(row)
    return list(owned.items())
