"""Run probes in a dense pass: rows after a text that see it and that it does not see.

PaSS, BiTA, SPACE and PPD put such rows after a token and read guesses off them. At inference a
session runs them. Here is the same for training, with gradients: all groups of probes of a text
share one pass over the text.
"""

import torch
from torch import Tensor

from tinyspec.lm.blocks import Blocks
from tinyspec.lm.ops import attend_dense


def run_probe_groups(
    blocks: Blocks, ids: Tensor, anchors: Tensor, embeddings: Tensor, prefix: Tensor | None = None
) -> Tensor:
    """Return the states after the final norm of a chain of probes after each anchor.

    ids         [B, T] texts
    anchors     [G] positions in the texts; a group stands after each and sees the text up to it
    embeddings  [n, d] of the probes of a group; probe j stands j + 1 positions after the anchor
    prefix      [2, L, KV, P, hd] keys and values that only probes attend to; None: there are none

    Returns [B, G, n, d]. Each probe sees the earlier ones of its group, and no other group.
    """
    config, (batch, n_text), n = blocks.config, ids.shape, len(embeddings)
    text = torch.arange(n_text, device=ids.device)
    steps = torch.arange(n, device=ids.device)
    at = torch.cat((text, (anchors[:, None] + 1 + steps).flatten()))  # position of each row
    group = torch.arange(len(anchors), device=ids.device).repeat_interleave(n)
    own = torch.cat((torch.full_like(text, -1), group))  # of each row; -1: the text
    last_seen = torch.cat((text, anchors.repeat_interleave(n)))  # position in the text
    of_text = (own[None] < 0) & (at[None] <= last_seen[:, None])
    of_group = (own[None] >= 0) & (own[None] == own[:, None]) & (at[None] <= at[:, None])
    mask = of_text | of_group  # [rows, rows]
    x = torch.cat(
        (
            torch.nn.functional.embedding(ids, blocks.embed),
            embeddings.to(blocks.embed.dtype).repeat(len(anchors), 1).expand(batch, -1, -1),
        ),
        dim=1,
    )
    if config.positions == "learned":
        x = x + blocks.weights["positions"][at]
    if prefix is not None:
        sees = (own >= 0)[:, None].expand(-1, prefix.shape[3])
        mask = torch.cat((sees, mask), dim=1)
    rotary = blocks.rotary_at(at.tolist())
    for layer, block in enumerate(blocks.layers):

        def mix(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
            if prefix is not None:
                lead = prefix[:, layer].transpose(1, 2)[:, None].expand(-1, batch, -1, -1, -1)
                k, v = (
                    torch.cat((lead[0].to(k.dtype), k), 1),
                    torch.cat((lead[1].to(v.dtype), v), 1),
                )
            groups = config.n_heads // config.n_kv_heads
            k, v = (part.repeat_interleave(groups, dim=2) for part in (k, v))
            return attend_dense(q, k, v, mask[None])

        x = blocks.add_mlp(block, blocks.add_attention(block, x, rotary, mix))
    states = blocks.apply_final_norm(x[:, n_text:])
    return states.view(batch, len(anchors), n, -1)
