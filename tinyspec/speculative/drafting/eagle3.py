"""EAGLE-3: a draft layer that reads three states, and is trained on its own outputs.

Paper: Li et al. 2025, arXiv 2503.01840. The layer is trained; the target is not.

Idea. EAGLE's layer must guess the target's next state. That is more than a draft needs, and it
limits what more training can give. Here nothing holds the layer's output to the target's states.
What it reads comes from a low, a middle and a high layer of the target, and the output matrix is
its own:

    g_i = A [s_i^2; s_i^(L/2); s_i^(L-3)]          s^l: state after l layers; A: trained         [d]
    a_i = layer(g_i; attention reads [norm(e(x_{i+1})); norm'(g_i)])                             [d]
    q(x_{i+2}) = softmax(H' norm''(a_i))           H': trained; V': the draft vocabulary        [V']

At the next depth a_i stands in for g. The layer must learn to go on from such states, so training
drafts as decoding does (training-time test). Step k goes on from the outputs of step k - 1, with
the true tokens; its rows attend to the text's rows of step 0, and to their own rows of the steps
between:

    loss = sum over k of 0.8^k CE(p(x_{i+2+k}), q_k(x_{i+2+k}))

p is the target's distribution over the draft vocabulary, at the places where the target's most
probable token is in it. The tree is EAGLE-2's, with 8 levels.

Guarantee: EXACT, at any temperature: nodes are point masses.
Pitfall: a layer that is trained at step 0 alone: from depth 1 on its guesses are poor. Positions
and own keys that training and drafting see differently; law F2 compares them at every depth.
Tests: tests/speculative/test_eagle3.py (the draft at every depth is what the unrolled training pass
says; three layers are read; the loss by hand, with a vocabulary that has gaps; names of the file;
a head in the format of the speculators package drafts alike).
Ours: H' begins as the target's rows; the authors' begins at random. p is made of the target's 64
most probable tokens. The loss of a step is the mean over its known rows; in the authors' code over
all rows, so that a step with fewer of them weighs less.
Left out: norms before A and further layers, which heads of other programs may have. (These programs
read offsets, `d2t`, in place of ids; `tinyspec export` writes them.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    TOKEN_MAP,
    FrozenTarget,
    HeadMatrix,
    HeadSettings,
    embed_tokens,
    prepare_head,
    shift_tokens,
)
from tinyspec.lm.heads import head_weights as weights_of
from tinyspec.lm.stack import INPUT_NORM, QKV, HeadLayer, UnrolledLayer, layer_shapes
from tinyspec.speculative.drafting.eagle2 import Eagle2Drafter, tree_knobs
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Request,
    Trained,
    TrainingBatch,
    technique,
)

TRAINED_STEPS = 7  # steps of the authors' training, and rows of the table of ranks
DECAY = 0.8  # of a step's loss against the step before it
EMBEDDING_NORM = f"layers.0.{INPUT_NORM}.weight"
STATE_NORM = "layers.0.hidden_norm.weight"

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class Eagle3Settings(HeadSettings):
    """The section [head] of a recipe.

    steps  of the training-time test: how deep a draft is trained
    """

    steps: int = TRAINED_STEPS


def feature_layers(config: Config, settings: Eagle3Settings) -> tuple[int, ...]:
    """Return the low, the middle and the high layer that are read.

    >>> feature_layers(Config(9, 4, 12, 1, 1, 4, 4, 16), Eagle3Settings())
    (2, 6, 9)
    """
    n = config.n_layers
    return min(2, n), n // 2, max(n - 3, 0)


def eagle3_shapes(config: Config, settings: Eagle3Settings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names of the speculators package."""
    d, words = config.d_model, settings.draft_vocab or config.vocab_size
    shapes = {"fc.weight": (d, 3 * d), **layer_shapes(config)}
    for name, width in zip(QKV, (config.q_dim, config.kv_dim, config.kv_dim), strict=True):
        shapes[f"layers.0.{name}.weight"] = (width, 2 * d)
    norms = dict.fromkeys((EMBEDDING_NORM, STATE_NORM, "norm.weight"), (d,))
    return {**shapes, **norms, "lm_head.weight": (words, d)}


def initialize_eagle3(
    target: FrozenTarget, settings: Eagle3Settings, seed: int
) -> dict[str, Tensor]:
    """Return random matrices, gains of one, and the target's rows as output matrix."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, Tensor]()
    for name, shape in eagle3_shapes(target.config, settings).items():
        drawn = torch.ones(shape, dtype=torch.float64)
        if len(shape) == 2:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        weights[name] = drawn.to(target.embed)
    return {**weights, "lm_head.weight": target.head.clone()}


def layer_weights(weights: HeadWeights) -> dict[str, Tensor]:
    """Return the weights of the layer alone: it normalises no input itself."""
    return {name: w for name, w in weights.items() if name != EMBEDDING_NORM}


def unroll_layer(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, steps: int
) -> list[Tensor]:
    """Return the outputs [B, T, d] of each step of the training-time test.

    states  [B, 3, T, d]; row t of step k depends on those up to t, and on the tokens up to
            t + 1 + k
    """
    eps, width = target.config.norm_eps, (target.config.d_model,)
    layer, outputs = UnrolledLayer(target.config, layer_weights(weights)), list[Tensor]()
    g = F.linear(states.transpose(1, 2).flatten(2), weights["fc.weight"])
    for step in range(1, steps + 1):
        following = F.embedding(shift_tokens(ids, step), target.embed)
        token_part = F.rms_norm(following, width, weights[EMBEDDING_NORM], eps)
        state_part = F.rms_norm(g, width, weights[STATE_NORM], eps)
        g = layer.run(g, torch.cat((token_part.to(g.dtype), state_part), dim=-1)).to(states.dtype)
        outputs.append(g)
    return outputs


def read_logits(weights: HeadWeights, target: FrozenTarget, outputs: Tensor) -> Tensor:
    """Return the logits [..., V'] of outputs [..., d]."""
    width, eps = (target.config.d_model,), target.config.norm_eps
    normed = F.rms_norm(outputs, width, weights["norm.weight"], eps)
    return F.linear(normed, weights["lm_head.weight"])


def predict_eagle3(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a depth, for all positions of a text at once."""
    return read_logits(weights, target, unroll_layer(weights, target, ids, states, depth + 1)[-1])


def unroll_eagle3(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield what `predict_eagle3` returns, for each depth from 0 on."""
    for outputs in unroll_layer(weights, target, ids, states, depths):
        yield read_logits(weights, target, outputs)


def eagle3_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the weighted cross-entropies of all steps against the target's distributions."""
    total, steps = batch.states.new_zeros(()), target.settings.steps
    for k, outputs in enumerate(unroll_layer(weights, target, batch.ids, batch.states, steps)):
        # Row t of step k guesses the token t + 2 + k. The target's distribution of it stands at
        # the position before it.
        rows = target.row_of[batch.top_ids[:, 1 + k :]]
        p = batch.top_probs[:, 1 + k :] * (rows >= 0)
        is_known = batch.is_answer[:, 1 + k :] & (rows[..., 0] >= 0) & (p.sum(-1) > 0)
        if not bool(is_known.any()):
            continue
        p = p[is_known] / p[is_known].sum(-1, keepdim=True)
        logits = read_logits(weights, target, outputs[:, : is_known.shape[1]][is_known]).float()
        log_q = logits.log_softmax(-1).gather(-1, rows[is_known].clamp_min(0))
        total = total - DECAY**k * (p * log_q).sum(-1).mean()
    return total


# ------------------------------------------------------------------ the draft


class Eagle3Head:
    """The matrices of a target's head as they run; all requests of the target share them."""

    def __init__(self, model: Any):
        weights = weights_of(model, "eagle3")
        self.token_map, self.vocabulary = weights.get(TOKEN_MAP), model.config.vocab_size
        self.fc, self.rows = (HeadMatrix(model, weights[f"{x}.weight"]) for x in ("fc", "lm_head"))
        self.layer = HeadLayer(model, layer_weights(weights))
        names = EMBEDDING_NORM, STATE_NORM, "norm.weight"
        self.norms = [weights[name].to(model.device, model.state_dtype) for name in names]
        self.eps = model.config.norm_eps

    def normalize(self, x: Tensor, which: int) -> Tensor:
        """Return x [n, d] after the norm of tokens (0), of states (1) or of outputs (2)."""
        return F.rms_norm(x.to(self.norms[which].dtype), x.shape[-1:], self.norms[which], self.eps)

    def compute_logits(self, guessed: Tensor) -> Tensor:
        """Return the logits [n, V'] of the layer's outputs [n, d]."""
        return self.rows(self.normalize(guessed, 2))


class Eagle3Drafter(Eagle2Drafter):
    """EAGLE-2's tree on three states of the target."""

    name = "eagle3"

    def _read_states(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        g: Tensor = self.head.fc(torch.stack([state.flatten() for state in states]))
        return g.unbind(0)

    def _run_rows(
        self, tokens: Sequence[int], states: Sequence[Tensor], parents: Sequence[int], **record: Any
    ) -> Tensor:
        g = torch.stack(list(states))
        token_part = self.head.normalize(embed_tokens(self.model, tokens), 0)
        joined = torch.cat((token_part, self.head.normalize(g, 1)), dim=-1)
        return self.stack.run(g, parents, first_input=joined, **record)


@technique(
    title="EAGLE-3",
    summary="one layer reads three states",
    paper="Li et al. 2025, arXiv 2503.01840",
    reported="up to 6.5x (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=Trained(
        Eagle3Settings,
        feature_layers,
        eagle3_shapes,
        initialize_eagle3,
        lambda weights: TRAINED_STEPS,
        predict_eagle3,
        eagle3_loss,
        small=Eagle3Settings(steps=3),
        unroll=unroll_eagle3,
    ),
    knobs=tree_knobs(8),  # the authors' code: 7, after the first pass
)
def eagle3(request: Request, *, nodes: int, depth: int, width: int) -> Decoder:
    """Return a decoder that drafts with the target's EAGLE-3 head, along a dynamic tree."""
    model: Any = request.target.model  # type: ignore[attr-defined]
    drafter = Eagle3Drafter(
        model,
        prepare_head(model, "eagle3", Eagle3Head),
        request.stop.eos,
        request.forward_log,
        feature_layers(model.config, Eagle3Settings()),
        nodes=nodes,
        depth=depth,
        width=width,
    )
    return request.decoder(drafter, verify_tree)
