"""Train a draft on its target's outputs: its vocabulary, its batches, its loss, its figures."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.distillspec import DIVERGENCES, append_rest
from tinyspec.training.outputs import TargetOutput
from tinyspec.training.train import Batch


def most_frequent_tokens(
    texts: Sequence[TargetOutput], words: int, config: Config
) -> tuple[int, ...]:
    """Return the ids that the target wrote most often, in rising order.

    Ends of text are always among them. Of two equally frequent ids the lower one comes first.
    """
    counts = torch.zeros(config.vocab_size, dtype=torch.float64)
    for text in texts:
        counts += torch.bincount(text.ids.long()[text.positions + 1], minlength=config.vocab_size)
        counts.index_put_(
            (text.top_ids.long().flatten(),), text.top_probs.double().flatten(), accumulate=True
        )
    counts[list(config.eos)] = torch.inf
    order = torch.sort(counts, descending=True, stable=True).indices[
        : min(words, config.vocab_size)
    ]
    return tuple(sorted(order.tolist()))


def make_collate_fn(
    texts: Sequence[TargetOutput], config: Config
) -> Callable[[Sequence[int], int, torch.device], Batch]:
    """Return a function that makes a batch of texts with these numbers.

    inputs      [B, T] ids; a long text is cut on the left
    head_rows   [B, T, k] rows of the draft's head for the target's most probable tokens
    top_probs   [B, T, k] the target's probabilities; 0 for a token that the head has no row for
    is_known    [B, T] 1 at positions where the target's probabilities are known, else 0
    """
    head_row = torch.arange(config.vocab_size)  # of each token; -1: it has none
    if config.head_ids:
        head_row = torch.full((config.vocab_size,), -1)
        head_row[torch.tensor(config.head_ids)] = torch.arange(len(config.head_ids))

    def collate(numbers: Sequence[int], context: int, device: torch.device) -> Batch:
        chosen = [texts[i] for i in numbers]
        width = min(max(len(text.ids) for text in chosen) - 1, context)
        k = max(text.top_ids.shape[1] for text in chosen)
        inputs = torch.zeros(len(chosen), width, dtype=torch.long)
        head_rows = torch.zeros(len(chosen), width, k, dtype=torch.long)
        top_probs = torch.zeros(len(chosen), width, k)
        is_known = torch.zeros(len(chosen), width)
        for b, text in enumerate(chosen):
            cut = max(len(text.ids) - 1 - width, 0)
            ids = text.ids[cut:-1].long()
            inputs[b, : len(ids)] = ids
            inside = text.positions >= cut
            at = text.positions[inside] - cut
            rows = head_row[text.top_ids[inside].long()]
            head_rows[b, at] = rows.clamp_min(0)
            top_probs[b, at] = text.top_probs[inside].float() * (rows >= 0)
            is_known[b, at] = 1
        return tuple(t.to(device) for t in (inputs, head_rows, top_probs, is_known))

    return collate


def known_probabilities(
    blocks: Blocks, inputs: Tensor, head_rows: Tensor, top_probs: Tensor, is_known: Tensor
) -> tuple[Tensor, Tensor]:
    """Return p [n, k] of the target's most probable tokens, and log q [n, k] of the draft.

    There is a row for each position where the target's probabilities are known.
    """
    known = is_known.bool()
    states = blocks.final_states(inputs)[known]
    logits = torch.nn.functional.linear(states, blocks.vocabulary).float()
    return top_probs[known], logits.log_softmax(-1).gather(-1, head_rows[known])


def cross_entropy_and_alpha(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of cross-entropy and alpha over the known part of the distributions."""
    return -(p * log_q).sum(-1).mean(), torch.minimum(p, log_q.exp()).sum(-1).mean()


def imitation_loss(kind: str, p: Tensor, log_q: Tensor) -> Tensor:
    """Return the loss of a draft: "lk", or a divergence of DistillSpec by its name.

        lk = lambda CE(p, q) + (1 - lambda) (1 - alpha),    lambda = exp(-3 alpha)

    A token of the target that the draft's head has no row for has p = 0 here, and a q that is not
    counted twice: for a divergence it is part of the rest.
    """
    if kind == "lk":
        cross_entropy, alpha = cross_entropy_and_alpha(p, log_q)
        lead = torch.exp(-3 * alpha.detach())
        return lead * cross_entropy + (1 - lead) * (1 - alpha)
    q = log_q.exp() * (p > 0)
    return DIVERGENCES[kind](append_rest(p), append_rest(q)).mean()


@torch.no_grad()
def evaluate_draft(target: Model, draft: Model, texts: Sequence[TargetOutput]) -> dict[str, float]:
    """Return figures over whole distributions, at the positions where the target wrote.

    alpha      mean of sum min(p, q) at temperature 1
    agreement  share of positions where both have the same most probable token
    sayable    probability of p on tokens in the draft's vocabulary
    """
    alpha = agree = sayable = 0.0
    count = 0
    for text in texts:
        ids, at = text.ids.tolist(), text.positions.tolist()
        p, q = (model.logits(ids)[at].float().softmax(-1) for model in (target, draft))
        alpha += float(torch.minimum(p, q).sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        head_ids = list(draft.config.head_ids)
        sayable += float(p[:, head_ids].sum()) if head_ids else len(at)
        count += len(at)
    return {"alpha": alpha / count, "agreement": agree / count, "sayable": sayable / count}
