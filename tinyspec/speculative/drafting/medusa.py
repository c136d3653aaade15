"""Medusa: further heads on the target's last state guess the tokens after the next one.

Paper: Cai et al., ICML 2024, arXiv 2401.10774 (Medusa-1). The heads are trained; the target is not.

Idea. The newest token was sampled from the state of the token before it. The same state knows
something of the tokens that follow. Head i guesses the token i + 1 places after the newest:

    z_i = h + SiLU(W_i h + b_i)            one block, or several one after another     [d]
    logits of head i = V_i z_i             V_i begins as the target's output matrix    [V]

W_i and b_i begin as zero, so an untrained head guesses what the target's own head says. The heads
do not see each other's guesses. So a head's candidates are the same below every node of its depth,
and the draft is a tree of ranks: its paths are those with the greatest products of

    a[i][r] = how often the candidate of rank r of head i was right on held-out texts

Training minimises the cross-entropy of each head on texts that the target wrote, weighted by
0.8^(i + 1) (equation 1). In the authors' code, not in the paper: b_i, equal weights of the heads,
and, where a head has several blocks, the same weights in all of them.

Guarantee: EXACT, at any temperature: candidates are point masses. Above temperature 0 the paper
verifies by typical acceptance, which changes the distribution: see `typical_acceptance`.
Pitfall: a head that is trained or read one position off. The output stays right and the drafts are
bad. Law F2 compares the drafts with the training forward.
Tests: tests/speculative/test_medusa.py (an untrained head repeats the target's head; heads fitted
to a cyclic text have every draft accepted; the tree is the best of its size; a penalty is applied
with each node's own history).
Additions of ours: `shared_rows` uses the target's output matrix for all heads (the form that vLLM
calls original_lm_head), and `draft_vocab` restricts it to the target's most frequent tokens.
Left out: a chain of sampled tokens; the authors' texts, dialogues that the target did not write
(ShareGPT). Medusa-2, which trains the target too, is `medusa2`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import FeatureDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    RANKS,
    TOKEN_MAP,
    FrozenTarget,
    HeadMatrix,
    HeadSettings,
    OutputMatrix,
    head_weights,
    prepare_head,
)
from tinyspec.lm.host import stack_rows
from tinyspec.lm.ops import scatter_logits
from tinyspec.speculative.treedraft import (
    StaticTree,
    build_static_tree,
    fill_static_tree,
    rank_widths,
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
from tinyspec.tree import TokenTree

DECAY = 0.8  # of a head's loss against the head before it (equation 1)

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class MedusaSettings(HeadSettings):
    """The section [head] of a recipe.

    heads        how many tokens are guessed after the next one
    layers       blocks of each head
    shared_rows  all heads use the target's output matrix; else each has its own
    """

    heads: int = 5
    layers: int = 1
    shared_rows: bool = False


def head_shapes(config: Config, settings: MedusaSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names that vLLM reads."""
    d, words = config.d_model, settings.draft_vocab or config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(settings.heads):
        for j in range(settings.layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (d, d)
            shapes[f"blocks.{i}.layers.{j}.bias"] = (d,)
        if not settings.shared_rows:
            shapes[f"lm_heads.{i}.weight"] = (words, d)
    return shapes


def initialize_heads(
    target: FrozenTarget, settings: MedusaSettings, seed: int
) -> dict[str, Tensor]:
    """Return heads that repeat the target's own head: nothing is random."""
    return {
        name: target.head.clone() if name.startswith("lm_heads") else target.head.new_zeros(shape)
        for name, shape in head_shapes(target.config, settings).items()
    }


def count_heads(weights: HeadWeights) -> int:
    """Return how many heads there are."""
    return sum(name.endswith(".layers.0.bias") for name in weights)


def predict_by_head(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a head, for all positions of a text at once."""
    z, j = states[:, 0], 0
    while (name := f"blocks.{depth}.layers.{j}.weight") in weights:
        z = z + F.silu(F.linear(z, weights[name], weights[name.replace("weight", "bias")]))
        j += 1
    return F.linear(z, weights.get(f"lm_heads.{depth}.weight", target.head))


def medusa_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the weighted sum of the heads' cross-entropies on what the target wrote."""
    total = batch.states.new_zeros(())
    for depth in range(count_heads(weights)):
        logits = predict_by_head(weights, target, batch.ids, batch.states, depth)
        total = total + DECAY ** (depth + 1) * batch.cross_entropy(target, depth, logits)
    return total


TRAINED = Trained(
    MedusaSettings,
    lambda config, settings: (config.n_layers,),
    head_shapes,
    initialize_heads,
    count_heads,
    predict_by_head,
    medusa_loss,
    small=MedusaSettings(heads=2),
)

# ------------------------------------------------------------------ the draft


class MedusaHeads:
    """The heads of a target as they run: all of them read one state."""

    def __init__(self, model: Any):
        weights = head_weights(model, "medusa")
        self.token_map, self.vocabulary = weights.get(TOKEN_MAP), model.config.vocab_size
        self.blocks = [list[HeadMatrix]() for _ in range(count_heads(weights))]
        for i, layers in enumerate(self.blocks):  # a file has layer 10 before layer 2
            while f"{(name := f'blocks.{i}.layers.{len(layers)}')}.weight" in weights:
                weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
                layers.append(HeadMatrix(model, weight, bias))
        own = [f"lm_heads.{i}.weight" for i in range(len(self.blocks))]
        self.rows = [HeadMatrix(model, weights[name]) for name in own if name in weights]
        if not self.rows:  # one matrix for all
            self.rows = [OutputMatrix(model, self.token_map)]
        self.chances = tuple(tuple(row) for row in weights[RANKS].tolist())

    def logits(self, h: Tensor, n: int) -> Tensor:
        """Return the logits [n, V] of the first n heads on a state [d]."""
        guesses = list[Tensor]()
        for layers in self.blocks[:n]:
            z = h[None]
            for matrix in layers:
                z = z + F.silu(matrix(z))
            guesses.append(z)
        if len(self.rows) == 1:
            logits = self.rows[0](torch.cat(guesses))
        else:
            pairs = zip(self.rows, guesses, strict=False)
            logits = stack_rows([matrix(z)[0] for matrix, z in pairs])
        return scatter_logits(logits, self.token_map, self.vocabulary)


class MedusaDrafter(FeatureDrafter):
    """Fill a static tree of ranks with the heads' candidates.

    ends  tokens that nothing follows
    """

    def __init__(self, heads: MedusaHeads, layer: int, tree: StaticTree, ends: frozenset[int]):
        super().__init__((layer,))
        self.heads, self.tree, self.ends = heads, tree, ends
        self.widths = [min(width, heads.rows[0].out) for width in rank_widths(tree)]

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        deepest = min(len(self.widths), max_draft_depth)
        if not self.states or deepest <= 0:
            return TokenTree()
        logits = self.heads.logits(self.states[-1][0], deepest)
        rows = kernels_of(logits).as_rows(logits)
        tokens, parents, _ = fill_static_tree(
            self.tree, rows, self.widths, context, sampling, self.ends
        )
        return TokenTree.point_masses(tokens, parents)


@technique(
    title="Medusa",
    summary="extra heads guess the next tokens",
    paper="Cai et al. 2024, arXiv 2401.10774",
    reported="about 2x, Vicuna, MT-Bench (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=TRAINED,
    knobs=(
        Knob("nodes", 63, "nodes of the tree", low=1, high=1024, small=(3, 1), ours=5),
        Knob("heads", 16, "heads that are used, at most", low=1, high=16, small=(2, 1)),
    ),
)
def medusa(request: Request, *, nodes: int, heads: int) -> Decoder:
    """Return a decoder that drafts with the target's Medusa heads."""
    model = request.target.model  # type: ignore[attr-defined]
    known = prepare_head(model, "medusa", MedusaHeads)
    tree = build_static_tree(nodes, known.chances[:heads])
    drafter = MedusaDrafter(known, model.config.n_layers, tree, request.stop.eos)
    return request.decoder(drafter, verify_tree)
