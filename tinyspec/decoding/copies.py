"""What a parallel decoder reads: the source's own words, copied to the places of the target.

A decoder that writes all places at once has no word before it to read. Gu et al. 2018, arXiv
1711.02281, give it copies of the source: spread evenly (the uniform copy, which needs a length), or
each word as often as it is fertile (which makes the length).
"""

import torch
from torch import Tensor

SPARE = 4  # target tokens beyond two for each source token: a source of one token may be a word of several


def uniform(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [B] and [B] -> the source place that each target place copies [B, T], and which are
    slots [B, T].

    Place i of T takes the source place nearest to i (S - 1) / (T - 1): first to first, last to
    last.

    >>> uniform(torch.tensor([3]), torch.tensor([5]))[0].tolist()
    [[0, 1, 1, 2, 2]]
    """
    i = torch.arange(int(targets.max()), device=targets.device)[None]
    slots = i < targets[:, None]
    last = (targets[:, None] - 1).clamp(min=1)
    places = (2 * i * (sources[:, None] - 1) + last) // (2 * last)
    return places.masked_fill(~slots, 0), slots


def by_fertility(fertilities: Tensor) -> tuple[Tensor, Tensor]:
    """Fertilities [B, S] -> the source place that each target place copies [B, T], and which are
    slots [B, T].

    Source words stand in order, each as often as its fertility says; a word with fertility 0
    vanishes.

    >>> places, slots = by_fertility(torch.tensor([[2, 0, 1], [0, 1, 0]]))
    >>> places.tolist(), slots.tolist()
    ([[0, 0, 2], [1, 0, 0]], [[True, True, True], [True, False, False]])
    """
    ends = fertilities.cumsum(dim=-1)  # [B, S] where each word's copies end
    i = torch.arange(int(ends[:, -1].max()), device=ends.device).expand(len(ends), -1).contiguous()
    slots = i < ends[:, -1:]
    return torch.searchsorted(ends, i, right=True).masked_fill(~slots, 0), slots


def guarded(fertilities: Tensor, fertile: Tensor, max_target_length: Tensor | int) -> Tensor:
    """Return fertilities [B, S] that can be decoded: together at least 1 and at most
    `max_target_length`.

    max_target_length  target tokens: one number for all, or [B, 1]


    Words from where the running sum passes the room give nothing, as in the authors' code. Where no
    word gives anything, the one that most probably does gives one token: `fertile` [B, S] is each
    word's probability of giving any, 0 at padding.

    >>> guarded(torch.tensor([[1, 3, 1], [0, 0, 0]]), torch.tensor([[0.1, 0.7, 0.2]]).expand(2, 3), 2).tolist()
    [[1, 0, 0], [0, 1, 0]]
    """
    kept = fertilities.masked_fill(fertilities.cumsum(dim=-1) > max_target_length, 0)
    silent = kept.sum(dim=-1, keepdim=True) == 0
    first = torch.zeros_like(kept).scatter(-1, fertile.argmax(dim=-1, keepdim=True), 1)
    return torch.where(silent, first, kept)
