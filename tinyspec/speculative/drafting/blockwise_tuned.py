"""Blockwise decoding, fine-tuned: the whole model is trained on together with its block layer.

Paper: Stern, Shazeer, Uszkoreit, NeurIPS 2018, arXiv 1811.03115. The layer and the model are
trained. What is said of the authors' loss was read in their code (tensor2tensor,
transformer_parallel.py, commit 609ff30).

Idea. A layer on a frozen model (`blockwise`) can only use what the model's last state happens to
hold about later tokens. If the model is trained on with the layer, its states learn to hold more.
So more guesses are right, and the model itself becomes another one.

Formula. Of the k predictors, the model's own p_1 among them, each batch trains one, i, drawn with
equal chances:

    loss = mean over t of -log p_i(x_{t+i} | x_1 .. x_t)

Its mean over the draws is the mean of all k losses. No other term protects p_1.

Guarantee: EXACT, at any temperature, for the tuned model: its output is not that of the model that
was tuned. The layer, the draft and the three relaxed rules are those of `blockwise`.
Pitfall: drawing among the k - 1 guesses alone. The guesses become good, and the model forgets to
write. The page of a tuned model shows its perplexity before and after.
Tests: tests/speculative/test_blockwise_tuned.py (each of the k losses against its formula, all
equally likely; the gradient reaches the model; a model that is tuned by a recipe drafts and writes
its own text).
Ours: the texts are the target's own, at the recipe's temperature. The paper gains by tuning. Our 20
minutes did not: 1.43 tokens per pass, and 1.51 with the frozen model (tutorials/results/heads.md).
Left out: outputs of a beam search as texts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.errors import TinyspecError
from tinyspec.lm.heads import FrozenTarget, mean_cross_entropy
from tinyspec.speculative.drafting.blockwise import (
    KNOBS,
    TRAINED,
    BlockwiseSettings,
    blockwise,
    count_parts,
    draw_predictors,
    guess_loss,
    initialize_block,
)
from tinyspec.technique import Guarantee, Request, TrainingBatch, Tuned, Tuning, technique


@dataclass(frozen=True)
class BlockwiseTunedSettings(BlockwiseSettings):
    """The section [head] of a recipe."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab:
            raise TinyspecError(
                "[head] draft_vocab: the layer uses the whole output matrix of the model that is "
                "tuned with it: leave draft_vocab out"
            )


def tuned_block_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the cross-entropy of one of the k predictors, drawn at random.

    Where no gradient is wanted, it is the mean over all of them.
    """
    blocks = tuning.blocks
    states = blocks.final_states(batch.ids)  # [B, T, d]
    target = FrozenTarget(blocks.config, blocks.embed, blocks.vocabulary)
    with_states = batch._replace(states=states[:, None])

    def predictor_loss(i: int) -> Tensor:
        if i > 0:
            return guess_loss(tuning.beside, target, with_states, i - 1)
        known = batch.is_answer[:, :-1]
        logits = F.linear(states[:, :-1][known], blocks.vocabulary)
        return mean_cross_entropy(logits, batch.ids[:, 1:][known])

    drawn = draw_predictors(1 + count_parts(tuning.beside), generator)
    return torch.stack([predictor_loss(i) for i in drawn]).mean()


@technique(
    title="Blockwise parallel decoding, fine-tuned",
    summary="blockwise in a model tuned with it",
    paper="Stern et al. 2018, arXiv 1811.03115",
    reported="3.31x, translation (arXiv 1811.03115)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    lossy=("slack", 0),
    keeps="the tuned model's distribution",
    trained=TRAINED,
    head_of="blockwise",
    tuned=Tuned(
        BlockwiseTunedSettings,
        tuned_block_loss,
        small=BlockwiseTunedSettings(heads=2),
        initialize=initialize_block,
    ),
    knobs=KNOBS,
)
def blockwise_tuned(request: Request, *, k: int, slack: int, rule: str) -> Decoder:
    """Return a decoder that drafts by the block layer of a model that was tuned with it."""
    return blockwise(request, k=k, slack=slack, rule=rule)
