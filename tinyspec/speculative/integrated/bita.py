"""BiTA: one pass verifies the draft and guesses the next one, by masks after every draft token.

Paper: Lin et al. 2024, arXiv 2401.12522. Trained are the mask embeddings and a prefix of keys and
values that only masks attend to. The target is not trained.

Idea. M masks stand after the newest token, and M more after *every* draft token:

    newest m m m   x_1 m m m   x_2 m m m   ...        each group sees its own path only

Whatever the target accepts, the masks after the last accepted token have already been run: their
rows are the next draft. So a round is one pass. Mask j after the token at position t is trained to
predict the token t + 2 + j. A trained prefix of P keys and values a layer tells the layers that a
row is a mask: ordinary rows do not see it, so the target's own rows stay as they are.

The draft is a tree. Slot j has max(`candidates` - j, 1) candidates, and only the first of them has
children. Candidates are point masses.

Training minimises the mean cross-entropy of all masks on texts that the target wrote, at random
positions; the groups of a text share one pass over it.

Guarantee: EXACT, at any temperature: candidates are point masses. The authors' decoder is greedy.
Pitfall: the group after the wrong token, which leaves the output right (law F2 of
laws/feature_laws.py detects it); a prefix that ordinary rows see, which changes the output.
Tests: tests/speculative/test_bita.py (the target's rows stay as they are with a prefix; one pass a
round; the group after the last accepted token is read; the tree of 12).
Left out: candidates below an end of text; a vocabulary of its own. The authors train on the
target's greedy answers, each of them sampled four times in an epoch with up to 64 positions in a
row. Our texts are sampled, and the positions are drawn at random. Masks begin near the mean
embedding, not at random, and the recipe's learning rate is 1e-2, a third of theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.heads import FrozenTarget, head_weights
from tinyspec.speculative.probing import (
    ProbeGroupDrafter,
    ProbeSettings,
    init_probe_embeddings,
    predict_by_probes,
    probe_loss,
)
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainingBatch,
    technique,
)
from tinyspec.tree import ROOT, TokenTree

MASKS, PREFIX = "masks.weight", "prefix.weight"

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class BitaSettings(ProbeSettings):
    """The section [head] of a recipe.

    masks   masks in a group, and depth of a draft
    prefix  positions of the prefix that masks attend to
    """

    METHOD = "BiTA"
    masks: int = 3
    prefix: int = 16


def bita_shapes(config: Config, settings: BitaSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes: of the prefix keys and values, layers, key heads, positions, width."""
    of_prefix = (2, config.n_layers, config.n_kv_heads, settings.prefix, config.head_dim)
    return {MASKS: (settings.masks, config.d_model), PREFIX: of_prefix}


def initialize_bita(target: FrozenTarget, settings: BitaSettings, seed: int) -> dict[str, Tensor]:
    """Return masks near the mean embedding, and a random prefix."""
    shape = bita_shapes(target.config, settings)[PREFIX]
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
    masks = init_probe_embeddings(target, settings.masks, seed)
    return {MASKS: masks, PREFIX: 0.02 * drawn.to(target.embed)}


def count_masks(weights: HeadWeights) -> int:
    """Return how many masks a group has."""
    return len(weights[MASKS])


def predict_by_mask(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V] of a mask after every position of a text."""
    return predict_by_probes(target, ids, weights[MASKS], depth, weights[PREFIX])


def bita_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the mean cross-entropy of all masks after random positions."""
    return probe_loss(target, batch, weights[MASKS], weights[PREFIX])


# ------------------------------------------------------------------ the draft


class BitaDrafter(ProbeGroupDrafter):
    """Draft a tree from the group of masks after the last accepted token.

    masks       ids of the masks of a group
    candidates  of the first slot; each further slot has one less, but at least 1
    positions   tokens that the target's context holds
    ends        tokens that nothing follows
    """

    def __init__(self, masks: Sequence[int], candidates: int, positions: int, ends: frozenset[int]):
        super().__init__(masks, positions)
        self.candidates, self.ends = candidates, ends

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, parents, path = list[int](), list[int](), list[int]()
        depths, tip = {ROOT: 0}, ROOT
        for slot, row in enumerate(self.logits[:max_draft_depth]):
            n = max(self.candidates - slot, 1)
            ranked = rank_tokens(sampling, row, [*context, *path], n)
            first = len(tokens)
            tokens += ranked
            parents += [tip] * len(ranked)
            depths |= dict.fromkeys(range(first, len(tokens)), slot + 1)
            if ranked[0] in self.ends:
                break
            tip = first  # the likeliest candidate is the one that goes on
            path.append(ranked[0])
        drafted = len(tokens)
        self.add_groups(tokens, parents, depths if max_draft_depth > 0 else {}, len(context))
        probe = [False] * drafted + [True] * (len(tokens) - drafted)
        return TokenTree(tokens, parents, (None,) * len(tokens), probe)


@technique(
    title="BiTA: bi-directional tuning",
    summary="masks draft in the verifying pass",
    paper="Lin et al. 2024, arXiv 2401.12522",
    reported="2.38x, LLaMA-2-7B, MT-Bench (authors' page)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=Trained(
        BitaSettings,
        lambda config, settings: (),
        bita_shapes,
        initialize_bita,
        count_masks,
        predict_by_mask,
        bita_loss,
        small=BitaSettings(masks=2, prefix=3),
    ),
    knobs=(
        Knob(
            "candidates",
            5,
            "candidates of the first mask; each further mask has one less, but at least 1",
            low=1,
            high=64,
            small=(2, 1),
            ours=1,
        ),
        Knob("masks", 16, "masks that are used, at most", low=1, high=16, small=(2, 1)),
    ),
)
def bita(request: Request, *, candidates: int, masks: int) -> Decoder:
    """Return a decoder that drafts with the target's masks."""
    target: Any = request.target
    model, weights = target.model, head_weights(target.model, "bita")
    own = weights[MASKS][:masks].to(model.device, model.state_dtype)
    keys, values = weights[PREFIX].to(model.device, model.state_dtype)
    target.set_probe_embeddings(own, (keys, values))
    positions = request.positions or model.config.max_positions
    ids = range(model.config.vocab_size, model.config.vocab_size + len(own))
    drafter = BitaDrafter(ids, candidates, positions, request.stop.eos)
    return request.decoder(drafter, verify_tree)
