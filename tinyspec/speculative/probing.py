"""Guess by probes: the training forward and the loss that PaSS, BiTA and their like share.

Probe j behind the token at position t stands at position t + 1 + j. It is trained to predict the
token t + 2 + j, which is j + 1 places behind the token that the target itself predicts from t.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.lm.heads import FrozenTarget, mean_cross_entropy
from tinyspec.lm.probes import run_probe_groups
from tinyspec.technique import TrainingBatch

ANCHORS = 32  # positions of a text at which a step trains


def begin_probes(target: FrozenTarget, n: int, seed: int) -> Tensor:
    """Return embeddings [n, d] near the mean embedding, each a little different."""
    noise = torch.randn(n, target.config.d_model, generator=torch.Generator().manual_seed(seed))
    return target.embed.mean(0) + 0.1 * target.embed.std() * noise.to(target.embed)


def predict_by_probes(
    target: FrozenTarget, ids: Tensor, embeddings: Tensor, depth: int, prefix: Tensor | None = None
) -> Tensor:
    """Return the logits [B, T, V] of probe `depth` behind every position of a text.

    embeddings  [n, d] of the probes;  prefix  [2, L, KV, P, hd], which only probes attend to
    """
    assert target.blocks is not None
    anchors = torch.arange(ids.shape[1], device=ids.device)
    states = run_probe_groups(target.blocks, ids, anchors, embeddings[: depth + 1], prefix)
    return F.linear(states[:, :, -1], target.head)


def draw_anchors(batch: TrainingBatch, n: int) -> Tensor:
    """Return random positions of a batch that n further tokens follow the next one of."""
    width = batch.ids.shape[1]
    return torch.randperm(max(width - 1 - n, 1), device=batch.ids.device)[:ANCHORS]


def probe_loss(
    target: FrozenTarget, batch: TrainingBatch, embeddings: Tensor, prefix: Tensor | None = None
) -> Tensor:
    """Return the mean cross-entropy of all probes behind random positions."""
    assert target.blocks is not None
    n, anchors = len(embeddings), draw_anchors(batch, len(embeddings))
    states = run_probe_groups(target.blocks, batch.ids, anchors, embeddings, prefix)
    total = states.new_zeros(())
    for depth in range(n):
        is_known, rows = batch.known_tokens(target, depth)
        inside = anchors[anchors < is_known.shape[1]]
        known = is_known[:, inside]
        logits = F.linear(states[:, : len(inside), depth][known], target.head)
        total = total + mean_cross_entropy(logits, rows[:, inside][known]) / n
    return total
