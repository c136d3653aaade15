"""Hydra: Medusa's heads, but each of them also reads the draft tokens before its own.

Paper: Ankner et al., COLM 2024, arXiv 2402.05109. The heads are trained; the target is not.

Idea. Medusa's heads all read one state h and do not know which tokens the others guess. Hydra's
head i reads h, the newest token y_0 and the draft tokens y_1 .. y_i. e is the target's embedding:

    x_i = [h; e(y_0); ..; e(y_i)]                                                   [(i + 2) d]
    z_i = R_i x_i + c_i + SiLU(W_i x_i + b_i), then blocks z + SiLU(W z + b)        [d]
    logits of head i = V_i z_i + v_i       V_i begins as the target's output matrix [V]

So a head's candidates depend on the node, and every node with children is computed. Nodes of one
depth run together. The draft is a tree of ranks, as Medusa's: the paths whose product of a is
greatest, where

    a[i][r] = how often the candidate of rank r of head i was right on held-out texts

Training minimises the sum of the heads' cross-entropies on texts that the target wrote.

Hydra++ (`prefix`): a LLaMA layer runs over the states of the whole text, and the heads read its
last output, after a norm, in place of h. In the paper they have four blocks each (`layers`, which
is 1 by default). Their labels are p, the target's distribution:

    loss of head i = CE(p(y_{i+1}), q(y_{i+1}))                     q: the head's distribution

Guarantee: EXACT, at any temperature: candidates are point masses. The paper verifies by typical
acceptance above temperature 0, which changes the distribution.
Pitfall: candidates that are computed once for a depth, as Medusa's, or embeddings that are one
position off. The output stays right and the drafts are bad. Laws F1 and F2 see it. In the authors'
code all further blocks of a head are one and the same; here each has weights of its own.
Tests: tests/speculative/test_hydra.py (what a head reads; heads fitted to a text have every draft
accepted; siblings' children differ; the layer of Hydra++ after a rewind; one pass for each depth).
Additions of ours: R_i begins so that R_i x_i = h and W_i as zero, so an untrained head says what
the target's own head says. `shared_rows` uses the target's output matrix for all heads. For
`draft_vocab`, see `HeadSettings`.
Left out: typical acceptance; sampled siblings; dropout and noise on the embeddings in training; the
authors' texts, dialogues that the target did not write (ShareGPT).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import FeatureDrafter, rank_tokens
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.lm.heads import (
    RANKS,
    TOKEN_MAP,
    FrozenTarget,
    HeadMatrix,
    HeadSettings,
    OutputMatrix,
    embed_tokens,
    head_weights,
    mean_cross_entropy,
    prepare_head,
    shift_tokens,
)
from tinyspec.lm.ops import scatter_logits
from tinyspec.lm.stack import INPUT_NORM, HeadLayer, Stack, UnrolledLayer, layer_shapes
from tinyspec.speculative.drafting.eagle import node_history
from tinyspec.speculative.treedraft import StaticTree, append_node, build_static_tree
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

LAYER = "prefix_embeding_layer.layers.0."  # spelled as in the authors' code
NORM = "prefix_embeding_layer.norm.weight"

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class HydraSettings(HeadSettings):
    """The section [head] of a recipe.

    heads        how many tokens are guessed after the next one
    layers       blocks of each head; 4 in Hydra++
    prefix       whether a layer over the text stands before the heads, as in Hydra++
    shared_rows  all heads use the target's output matrix; else each has its own
    """

    heads: int = 4
    layers: int = 1
    prefix: bool = False
    shared_rows: bool = False


def hydra_shapes(config: Config, settings: HydraSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names of the authors' heads without dropout."""
    d, words = config.d_model, settings.draft_vocab or config.vocab_size
    shapes = dict[str, tuple[int, ...]]()
    for i in range(settings.heads):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{i}.0.{part}.weight"] = (d, (i + 2) * d)
            shapes[f"hydra_mlp.{i}.0.{part}.bias"] = (d,)
        for j in range(1, settings.layers):
            shapes[f"hydra_mlp.{i}.{j}.linear.weight"] = (d, d)
            shapes[f"hydra_mlp.{i}.{j}.linear.bias"] = (d,)
        if not settings.shared_rows:
            shapes[f"hydra_lm_head.{i}.weight"] = (words, d)
            shapes[f"hydra_lm_head.{i}.bias"] = (words,)
    if settings.prefix:
        shapes |= layer_shapes(config, LAYER)
        shapes |= {f"{LAYER}{INPUT_NORM}.weight": (d,), NORM: (d,)}
    return shapes


def initialize_hydra(target: FrozenTarget, settings: HydraSettings, seed: int) -> dict[str, Tensor]:
    """Return heads that repeat the target's own head.

    A layer before them is random, uniform within 1 / sqrt(inputs), with gains of one.
    """
    generator, d = torch.Generator().manual_seed(seed), target.config.d_model
    weights = dict[str, Tensor]()
    for name, shape in hydra_shapes(target.config, settings).items():
        weight = target.head.new_zeros(shape)
        if name.startswith("hydra_lm_head") and len(shape) == 2:
            weight = target.head.clone()
        elif name.endswith("res_connection.weight"):
            weight[:, :d] = torch.eye(d)
        elif name.startswith("prefix"):
            drawn = 2 * torch.rand(shape, generator=generator) - 1
            drawn = drawn / shape[1] ** 0.5 if len(shape) == 2 else torch.ones(shape)
            weight = drawn.to(target.head)
        weights[name] = weight
    return weights


def count_hydra_heads(weights: HeadWeights) -> int:
    """Return how many heads there are."""
    return sum(name.endswith("res_connection.bias") for name in weights)


def run_prefix_layer(weights: HeadWeights, target: FrozenTarget, h: Tensor) -> Tensor:
    """Return what the heads read of the states h [B, T, d]: h itself, or the layer's outputs."""
    if NORM not in weights:
        return h
    output = UnrolledLayer(target.config, weights, LAYER).run(h)
    return F.rms_norm(output, h.shape[-1:], weights[NORM], target.config.norm_eps)


def head_logits(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, h: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a head, for all positions of a text at once.

    h  [B, T, d] what the heads read; row t also reads the tokens t + 1 to t + 1 + depth
    """

    def apply(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    following = [shift_tokens(ids, k) for k in range(1, depth + 2)]
    x = torch.cat((h, *(F.embedding(tokens, target.embed) for tokens in following)), dim=-1)
    first = f"hydra_mlp.{depth}.0"
    z = apply(x, f"{first}.res_connection") + F.silu(apply(x, f"{first}.linear"))
    j = 1
    while f"{(name := f'hydra_mlp.{depth}.{j}.linear')}.weight" in weights:
        z, j = z + F.silu(apply(z, name)), j + 1
    rows = f"hydra_lm_head.{depth}"
    return apply(z, rows) if f"{rows}.weight" in weights else F.linear(z, target.head)


def predict_by_hydra(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a head, from the target's states."""
    h = run_prefix_layer(weights, target, states[:, 0])
    return head_logits(weights, target, ids, h, depth)


def hydra_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the sum of the heads' cross-entropies: on what the target wrote, or with a layer
    before the heads, on the target's distribution there.
    """
    states, total = batch.states[:, 0], batch.states.new_zeros(())
    h = run_prefix_layer(weights, target, states)
    for depth in range(count_hydra_heads(weights)):
        is_known, rows = batch.known_tokens(target, depth)
        logits = head_logits(weights, target, batch.ids, h, depth)[:, : -2 - depth][is_known]
        labels = rows[is_known]
        if NORM in weights:  # the target reads token t + 2 + depth from the state before it
            labels = F.linear(states[:, 1 + depth : -1][is_known], target.head).float().softmax(-1)
        total = total + mean_cross_entropy(logits, labels)
    return total


# ------------------------------------------------------------------ the draft


class HydraHeads:
    """The heads of a target as they run; all requests of the target share them.

    layer, gain  of Hydra++: the layer before the heads, and the norm after it; else None
    """

    def __init__(self, model: Any):
        weights = head_weights(model, "hydra")

        def matrix(*names: str) -> HeadMatrix:
            joined = [
                torch.cat([weights[f"{name}.{part}"] for name in names])
                for part in ("weight", "bias")
            ]
            return HeadMatrix(model, *joined)

        self.token_map, self.vocabulary = weights.get(TOKEN_MAP), model.config.vocab_size
        self.firsts, self.blocks = list[HeadMatrix](), list[list[HeadMatrix]]()
        for i in range(count_hydra_heads(weights)):
            first = f"hydra_mlp.{i}.0"
            self.firsts.append(matrix(f"{first}.res_connection", f"{first}.linear"))
            lead = f"hydra_mlp.{i}."
            more = sum(name.startswith(lead) and name.endswith("bias") for name in weights) - 1
            self.blocks.append([matrix(f"{lead}{j}.linear") for j in range(1, more)])
        if "hydra_lm_head.0.weight" in weights:
            self.rows = [matrix(f"hydra_lm_head.{i}") for i in range(len(self.firsts))]
        else:  # one matrix for all
            shared = OutputMatrix(model, self.token_map)
            self.rows = [shared] * len(self.firsts)
        self.chances = tuple(tuple(row) for row in weights[RANKS].tolist())
        self.layer, self.gain = None, None
        if NORM in weights:
            self.layer = HeadLayer(model, weights, LAYER)
            self.gain = weights[NORM].to(model.device, model.state_dtype)

    def logits(self, x: Tensor, depth: int) -> Tensor:
        """Return the logits [n, V] of a head on its inputs [n, (depth + 2) d]."""
        residual, linear = self.firsts[depth](x).chunk(2, dim=-1)
        z = residual + F.silu(linear)
        for block in self.blocks[depth]:
            z = z + F.silu(block(z))
        return scatter_logits(self.rows[depth](z), self.token_map, self.vocabulary)


class HydraDrafter(FeatureDrafter):
    """Fill a static tree of ranks, one pass of a head for each depth.

    ends         tokens that nothing follows
    forward_log  where passes of a layer before the heads are recorded
    """

    def __init__(
        self,
        model: Any,
        heads: HydraHeads,
        tree: StaticTree,
        ends: frozenset[int],
        forward_log: list[ForwardRecord],
    ):
        super().__init__((model.config.n_layers,))
        self.model, self.heads, self.ends = model, heads, ends
        self.stack = (
            None if heads.layer is None else Stack(model, [heads.layer], "hydra", forward_log)
        )
        below = defaultdict[int, list[tuple[int, int]]](list)
        for place, (parent, rank) in enumerate(tree):
            below[parent].append((rank, place))
        self.below = {place: sorted(ranks) for place, ranks in below.items()}  # (rank, place below)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        super().extend(tokens, scores)
        if len(self.states) > 1:  # the last one runs with the next draft
            self._run_prefix(len(self.states) - 1, prefill=True)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self._cut_prefix(len(self.states))

    def end(self) -> None:
        super().end()
        self._cut_prefix(0)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        deepest = min(len(self.heads.firsts), max_draft_depth)
        tree = TokenTree([], [], [], [])
        if not self.states or deepest <= 0 or not self.below:
            return tree
        newest = embed_tokens(self.model, context[-1:])[0]
        read = {ROOT: torch.cat((self.read_state(), newest))}  # node -> input of the head after it
        places, level = {ROOT: ROOT}, [ROOT]
        for depth in range(deepest):
            logits = self.heads.logits(torch.stack([read[node] for node in level]), depth)
            lower = list[int]()
            for node, row in zip(level, kernels_of(logits).as_rows(logits), strict=True):
                below = self.below[places[node]]
                k = min(below[-1][0] + 1, self.heads.rows[depth].out)
                history = node_history(context, tree, node, sampling)
                ranked = rank_tokens(sampling, row, history, k)
                for rank, place in below:
                    if rank >= len(ranked):  # a vocabulary smaller than the table of ranks
                        break
                    child = append_node(tree, ranked[rank], node)
                    places[child] = place
                    if place in self.below and ranked[rank] not in self.ends:
                        lower.append(child)
            if not lower:
                break
            embedded = embed_tokens(self.model, [tree.tokens[node] for node in lower])
            for node, e in zip(lower, embedded, strict=True):
                read[node] = torch.cat((read[tree.parents[node]], e))
            level = lower
        return tree

    def read_state(self) -> Tensor:
        """Return what the heads read of the text [d]: its last state, or the layer's output."""
        if self.stack is None:
            return self.states[-1][0]
        self._cut_prefix(len(self.states) - 1)  # at least the newest state is run
        output = self._run_prefix(len(self.states))
        return F.rms_norm(
            output[-1], output.shape[-1:], self.heads.gain, self.model.config.norm_eps
        )

    def _run_prefix(self, n: int, **record: Any) -> Tensor:
        """Run the states up to the n-th that have not been run; return their outputs."""
        if self.stack is None or n <= len(self.stack):
            return torch.empty(0)
        first = len(self.stack)
        x = torch.stack([state[0] for state in self.states[first:n]])
        return self.stack.run(x, range(first - 1, n - 1), **record)

    def _cut_prefix(self, n: int) -> None:
        if self.stack is not None:
            self.stack.cut(n)


@technique(
    title="Hydra",
    summary="heads that read the draft so far",
    paper="Ankner et al. 2024, arXiv 2402.05109",
    reported="Hydra++: up to 1.31x over Medusa (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=Trained(
        HydraSettings,
        lambda config, settings: (config.n_layers,),
        hydra_shapes,
        initialize_hydra,
        count_hydra_heads,
        predict_by_hydra,
        hydra_loss,
        small=HydraSettings(heads=2),
    ),
    knobs=(
        Knob("nodes", 63, "nodes of the tree", low=1, high=1024, small=(4, 1), ours=5),
        Knob("heads", 16, "heads that are used, at most", low=1, high=16, small=(2, 1)),
    ),
)
def hydra(request: Request, *, nodes: int, heads: int) -> Decoder:
    """Return a decoder that drafts with the target's Hydra heads."""
    model = request.target.model  # type: ignore[attr-defined]
    known = prepare_head(model, "hydra", HydraHeads)
    tree = build_static_tree(nodes, known.chances[:heads])
    drafter = HydraDrafter(model, known, tree, request.stop.eos, request.forward_log)
    return request.decoder(drafter, verify_tree)
