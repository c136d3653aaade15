"""What a draft is trained with when it imitates a target: the words it may say, the rows of a step,
the loss, the figures.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training.outputs import Output
from tinyspec.training.train import Batch


def frequent(texts: Sequence[Output], words: int, config: Config) -> tuple[int, ...]:
    """The ids that the target wrote most often, ends of text among them; the lower id where two are
    even. Rising.
    """
    counts = torch.zeros(config.vocab_size, dtype=torch.float64)
    for text in texts:
        counts += torch.bincount(text.ids.long()[text.known + 1], minlength=config.vocab_size)
        counts.index_put_(
            (text.top.long().flatten(),), text.law.double().flatten(), accumulate=True
        )
    counts[list(config.eos)] = torch.inf
    order = torch.sort(counts, descending=True, stable=True).indices[
        : min(words, config.vocab_size)
    ]
    return tuple(sorted(order.tolist()))


def rows(
    texts: Sequence[Output], config: Config
) -> Callable[[Sequence[int], int, torch.device], Batch]:
    """What a step is made of: (inputs [B, T], top [B, T, k], law [B, T, k], known [B, T]) of some
    of the texts.

    top are places in the head's rows; where the head has none, the probability is 0. A text is cut
    on the left.
    """
    place = torch.arange(config.vocab_size)
    if config.says:
        place = torch.full((config.vocab_size,), -1)
        place[torch.tensor(config.says)] = torch.arange(len(config.says))

    def draw(chosen: Sequence[int], context: int, device: torch.device) -> Batch:
        width = min(max(len(texts[i].ids) for i in chosen) - 1, context)
        k = max(texts[i].top.shape[1] for i in chosen)
        inputs = torch.zeros(len(chosen), width, dtype=torch.long)
        top, law = (
            torch.zeros(len(chosen), width, k, dtype=torch.long),
            torch.zeros(len(chosen), width, k),
        )
        known = torch.zeros(len(chosen), width)
        for at, i in enumerate(chosen):
            text = texts[i]
            cut = max(len(text.ids) - 1 - width, 0)
            ids = text.ids[cut:-1].long()
            inputs[at, : len(ids)] = ids
            inside = text.known >= cut
            where = text.known[inside] - cut
            places = place[text.top[inside].long()]
            top[at, where] = places.clamp_min(0)
            law[at, where] = text.law[inside].float() * (places >= 0)
            known[at, where] = 1
        return tuple(t.to(device) for t in (inputs, top, law, known))

    return draw


def compared(
    blocks: Blocks, inputs: Tensor, top: Tensor, law: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and alpha against the known part of the target's laws, each a mean over the
    places where it is known.
    """
    there = known.bool()
    logits = torch.nn.functional.linear(blocks.states(inputs)[there], blocks.vocabulary).float()
    logq = logits.log_softmax(-1).gather(-1, top[there])
    p = law[there]
    return -(p * logq).sum(-1).mean(), torch.minimum(p, logq.exp()).sum(-1).mean()


@torch.no_grad()
def judged(target: Model, draft: Model, texts: Sequence[Output]) -> dict[str, float]:
    """Over whole laws, at the places where the target wrote: alpha = mean sum min(p, q) at
    temperature 1, the share of places where both would say the same at temperature 0, and the share
    of p on tokens that the draft can say."""
    alpha = agree = sayable = 0.0
    count = 0
    for text in texts:
        ids, at = text.ids.tolist(), text.known.tolist()
        p, q = (model.logits(ids)[at].float().softmax(-1) for model in (target, draft))
        alpha += float(torch.minimum(p, q).sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        sayable += float(p[:, list(draft.config.says)].sum()) if draft.config.says else len(at)
        count += len(at)
    return {"alpha": alpha / count, "agreement": agree / count, "sayable": sayable / count}
