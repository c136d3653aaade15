"""How long will the translation be? A model that writes all places at once must know before it
writes any.

A law of lengths is a row of log-probabilities by length, [B, L], length 0 being impossible. Three
predictors give one:

    by_token       a LENGTH token before the source is a classifier of lengths (Mask-Predict)
    by_fertility   every source word says how many target words it gives; the length is their sum
                   (NAT)
    by_difference  a classifier of how much longer than its source the target is, on the mean
                   encoder state

and `beam` takes the likeliest lengths of any of them. Several lengths stand on one canvas, so they
cost one batch.
"""

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq


def by_token(model: Seq2Seq, memory: EncoderOutput) -> Tensor:
    """The law that the LENGTH token tells: [B, lengths]."""
    return model.length_logits(memory).log_softmax(dim=-1)


def by_fertility(law: Tensor, mask: Tensor) -> Tensor:
    """The law of the sum of independent fertilities: law [B, S, F], mask [B, S] of source tokens ->
    [B, S (F - 1) + 1].

    Exact, by convolution of one word after the other, and given that not all of them are 0.

    >>> coins = torch.full((1, 2, 2), 0.5)
    >>> by_fertility(coins, torch.tensor([[True, True]])).exp()
    tensor([[0.0000, 0.6667, 0.3333]])
    """
    batch, words, fertilities = law.shape
    total = torch.zeros(batch, words * (fertilities - 1) + 1, dtype=law.dtype, device=law.device)
    total[:, 0] = 1
    for word in range(words):
        longer = torch.zeros_like(total)
        for count in range(fertilities):
            longer[:, count:] += total[:, : total.shape[1] - count] * law[:, word, count, None]
        total = torch.where(mask[:, word, None], longer, total)
    return _possible(total.log())


def by_difference(logits: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Classes -R..R of |y| - |x|, logits [B, 2R + 1], of sources of these lengths [B] -> [B,
    longest + 1].
    """
    reach = logits.shape[1] // 2
    found = logits.new_full((len(logits), longest + 1), -torch.inf)
    at = lengths[:, None] + torch.arange(-reach, reach + 1, device=logits.device)  # [B, 2R + 1]
    inside = (at >= 0) & (at <= longest)
    rows = torch.arange(len(logits), device=logits.device)[:, None].expand_as(at)
    found[rows[inside], at[inside]] = logits[inside]
    return _possible(found)


def difference(lengths: Tensor, targets: Tensor, reach: int) -> Tensor:
    """The classes that `by_difference` is trained on: |y| - |x| [B], what is beyond the reach at
    its end.
    """
    return (targets - lengths).clamp(-reach, reach) + reach


def _possible(law: Tensor) -> Tensor:
    """Without length 0, and normalised."""
    return torch.cat((torch.full_like(law[:, :1], -torch.inf), law[:, 1:]), dim=1).log_softmax(
        dim=-1
    )


def beam(law: Tensor, width: int) -> list[list[int]]:
    """The `width` likeliest lengths of each row, the likeliest first, of equals the shorter; fewer
    where no more can be.

    >>> beam(torch.tensor([[0.0, 0.2, 0.5, 0.3]]).log(), 2)
    [[2, 3]]
    """
    if width < 1:
        raise TinyspecError(f"{width} lengths: a length beam holds at least one")
    order = law.sort(dim=-1, descending=True, stable=True)
    found = []
    for values, lengths in zip(
        order.values[:, :width].tolist(), order.indices[:, :width].tolist(), strict=True
    ):
        chosen = [
            length for value, length in zip(values, lengths, strict=True) if value > -torch.inf
        ]
        if not chosen:
            raise TinyspecError(
                "the model holds no length for possible: its checkpoint is broken, train it anew"
            )
        found.append(chosen)
    return found
