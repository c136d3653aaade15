"""Kangaroo: the target's first layers and a small adapter draft; the other layers verify.

Paper: Liu et al. 2024, arXiv 2404.18911. The adapter is trained; the target is not.

Idea. LayerSkip reads draft tokens off an early layer, which only a target trained for it can give.
Here one attention sublayer is trained to turn the state after layer E into what the last layer
would say. It has keys and values of its own, and no MLP:

    s_i = state of token i after E layers                                       [d]
    a_i = s_i + attention(norm(s_0 .. s_i))      the adapter                    [d]
    q(next) = softmax(H norm'(a_i))              H: the target's output matrix  [V]

A draft token runs E layers and the adapter. It ends the draft if the highest probability of its q
was below `threshold`: the second early exit. The target then runs the layers E + 1 to L of
all draft tokens at once, *from the states that the draft has left*: no layer is computed twice.

    layer evaluations of a round with n draft tokens = n E + E + (L - E) (n + 1)

Training minimises the cross-entropy of q against the target's own distribution at the same
position, on texts that the target wrote.

Guarantee: EXACT, at any temperature: draft tokens are sampled and declare their distributions.
Pitfall: the last draft token has no row in the adapter if the whole draft was accepted; without
its row the next draft is worse, and the output stays right. Law F1 (laws/feature_laws.py) finds it.
No draft token may be taken back *because of what it is*: then it would not follow its declared
distribution. (An end of text stops the draft, and stays in it.)
Tests: tests/early_exit/test_kangaroo.py (layer evaluations; the adapter's rows are those of a dense
pass; the draft stops after an uncertain token, which stays; a fitted adapter drafts the text).
Additions of ours: `draft_vocab` restricts H to the target's most frequent tokens; sampling. The
adapter's output projection begins at zero. The authors train on conversations (ShareGPT) that the
target did not write, and also take its distribution as the label.
Left out: a draft while the text has one token, since no state is known yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import FeatureDrafter
from tinyspec.decoding.modeldraft import IncrementalProbs, highest_probability
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    TOKEN_MAP,
    FrozenTarget,
    HeadSettings,
    OutputMatrix,
    head_settings,
    head_weights,
    mean_cross_entropy,
    prepare_head,
)
from tinyspec.lm.host import to_numpy
from tinyspec.lm.ops import scatter_logits
from tinyspec.lm.stack import DOWN, INPUT_NORM, OUT, QKV, HeadLayer, Stack, UnrolledLayer
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainingBatch,
    technique,
)
from tinyspec.tree import ROOT, Probs, TokenTree

LONGEST = 6  # draft tokens of a round in the authors' code
NORM = "norm.weight"

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class KangarooSettings(HeadSettings):
    """The section [head] of a recipe.

    exit  layers of the target that the draft runs (the paper: 2 of 32, 3 of 40)
    """

    exit: int = 2


def kangaroo_layers(config: Config, settings: KangarooSettings) -> tuple[int, ...]:
    """Return the exit layer, and the last one, which the adapter learns from."""
    if settings.exit >= config.n_layers:
        raise TinyspecError(
            f"[head] exit is {settings.exit}: the model has {config.n_layers} layers, and some "
            "must be left to verify"
        )
    return settings.exit, config.n_layers


def adapter_shapes(config: Config, settings: KangarooSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names of the authors' code."""
    d, q, kv = config.d_model, config.q_dim, config.kv_dim
    shapes: dict[str, tuple[int, ...]] = {
        name: (out, d) for name, out in zip(QKV, (q, kv, kv), strict=True)
    }
    shapes |= {OUT: (d, q), INPUT_NORM: (d,)}
    return {f"layers.0.{name}.weight": shape for name, shape in shapes.items()} | {NORM: (d,)}


def initialize_adapter(
    target: FrozenTarget, settings: KangarooSettings, seed: int
) -> dict[str, Tensor]:
    """Return a random adapter that begins as an early exit."""
    return initialize_exit_layer(target, adapter_shapes(target.config, settings), seed)


def initialize_exit_layer(
    target: FrozenTarget, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> dict[str, Tensor]:
    """Return random matrices, norm gains of one, and output projections of zero.

    The layer adds nothing at first: its logits are those of an exit whose norm has gains of one.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, Tensor]()
    for name, shape in shapes.items():
        drawn = torch.ones(shape, dtype=torch.float64)
        if len(shape) == 2:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn = 0.0 * drawn if OUT in name or DOWN in name else drawn / shape[1] ** 0.5
        weights[name] = drawn.to(target.embed)
    return weights


def run_adapter(weights: HeadWeights, target: FrozenTarget, states: Tensor) -> Tensor:
    """Return the logits [B, T, V'] after every position, from the exit states [B, T, d]."""
    adapted = UnrolledLayer(target.config, weights).run(states)
    normed = F.rms_norm(adapted, adapted.shape[-1:], weights[NORM], target.config.norm_eps)
    return F.linear(normed, target.head)


def predict_by_adapter(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of the draft token at a depth, from 0.

    Draft tokens have exit states too: entry t is the adapter's output at t + 1 + depth.
    """
    logits = run_adapter(weights, target, states[:, 0])
    return F.pad(logits[:, 1 + depth :], (0, 0, 0, 1 + depth))


def kangaroo_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the cross-entropy against the target's distribution at the same position."""
    known = batch.is_answer
    p = F.linear(batch.states[:, 1][known], target.head).float().softmax(-1)
    return mean_cross_entropy(run_adapter(weights, target, batch.states[:, 0])[known], p)


# ------------------------------------------------------------------ the draft


class KangarooHead:
    """The adapter of a target as it runs; all requests of the target share it.

    method  whose adapter it is: another technique may have one of another form
    """

    def __init__(self, model: Any, method: str = "kangaroo"):
        weights, self.method = head_weights(model, method), method
        self.exit = head_settings(model, method)["exit"]
        self.layer = HeadLayer(model, weights)
        self.norm = weights[NORM].to(model.device, model.state_dtype)
        self.token_map, self.config = weights.get(TOKEN_MAP), model.config
        self.rows = OutputMatrix(model, self.token_map)

    def logits(self, adapted: Tensor) -> Tensor:
        """Return the logits [n, V] of the adapter's outputs [n, d]."""
        normed = F.rms_norm(adapted, adapted.shape[-1:], self.norm, self.config.norm_eps)
        return scatter_logits(self.rows(normed), self.token_map, self.config.vocab_size)


class KangarooDrafter(FeatureDrafter):
    """A chain by the target's first layers and the adapter.

    gamma      tokens of a draft, at most
    threshold  a token whose highest probability was lower is the draft's last
    """

    def __init__(self, request: Request, head: KangarooHead, gamma: int, threshold: float):
        super().__init__((head.exit,))
        target: Any = request.target
        self.target = target
        self.head, self.gamma, self.threshold = head, gamma, threshold
        self.ends = request.stop.eos
        self.adapter = Stack(target.model, [head.layer], head.method, request.forward_log)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, draft_probs = list[int](), list[Probs | None]()
        if not self.states:
            return TokenTree()
        self.adapter.cut(len(self.states))  # not the rows of draft tokens that were rejected
        if missing := [state[0] for state in self.states[len(self.adapter) :]]:
            self._adapt(torch.stack(missing))
        along = IncrementalProbs(sampling, context)
        for tip in range(ROOT, min(self.gamma, max_draft_depth) - 1):
            tree = TokenTree.chain(tokens, draft_probs)
            ran = self.target.run_to_layer(tree, self.head.exit, hidden_layers=(self.head.exit,))
            logits = self.head.logits(self._adapt(ran.hidden[0, -1:], head_rows=1))[0]
            along.extend(to_numpy(logits) if logits.device.type == "cpu" else logits, tokens[-1:])
            q, token = None, along.greedy_token(tip)
            if token is None:
                q = along[tip]
                token = rng.draw(q)
            tokens.append(token)
            draft_probs.append(q)
            if token in self.ends or highest_probability(along, tip) < self.threshold:
                break
        return TokenTree.chain(tokens, draft_probs)

    def _adapt(self, states: Tensor, head_rows: int = 0) -> Tensor:
        """Run states [n, d] after the last row of the adapter, and return its outputs [n, d]."""
        first = len(self.adapter) - 1
        return self.adapter.run(states, range(first, first + len(states)), head_rows=head_rows)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.adapter.cut(len(self.states))

    def end(self) -> None:
        super().end()
        self.adapter.cut(0)


@technique(
    title="Kangaroo",
    summary="early layers and an adapter draft",
    paper="Liu et al. 2024, arXiv 2404.18911",
    reported="up to 1.68x, Spec-Bench (abstract)",
    family="early exit",
    guarantee=Guarantee.EXACT,
    hidden=True,
    trained=Trained(
        KangarooSettings,
        kangaroo_layers,
        adapter_shapes,
        initialize_adapter,
        lambda weights: LONGEST,
        predict_by_adapter,
        kangaroo_loss,
        small=KangarooSettings(exit=1),
    ),
    knobs=(
        Knob("gamma", LONGEST, "tokens drafted in a round, at most", low=1, high=64, small=(2, 1)),
        Knob(
            "threshold",
            0.6,
            "a token below this highest probability is the draft's last",
            low=0.0,
            high=1.0,
            small=(0.0, 0.6),
        ),
    ),
)
def kangaroo(request: Request, *, gamma: int, threshold: float) -> Decoder:
    """Return a decoder whose target drafts with its first layers and its adapter."""
    target: Any = request.target
    head = prepare_head(target.model, "kangaroo", KangarooHead)
    return request.decoder(KangarooDrafter(request, head, gamma, threshold), verify_tree)
