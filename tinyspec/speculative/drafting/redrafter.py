"""ReDrafter: a small recurrent network drafts from the target's last state by beam search.

Paper: Cheng et al. 2024, arXiv 2403.09919. Form "mlp": Wertheimer et al. 2024, arXiv 2404.19124.
The network is trained; the target is not.

Idea. Heads that do not see each other's guesses make drafts that do not fit together. Here one head
drafts step by step. It reads the target's state h, which stays the same in all steps, and a state s
of its own, which follows the draft. y_1 is the newest token, y_2 the first draft token:

    s_0 = 0,  s_k = SiLU(W e(y_k) + U s_{k-1} + b)       e: the target's embedding           [d]
    x     = [h; s_k], then blocks x + SiLU(W_j x + b_j)  one or several                      [2 d]
    q(y_{k+1}) = softmax(V x)                            V: an output matrix of its own      [V]

A *beam search* keeps the `beams` best texts of each length. Beams that begin with the same tokens
share the nodes of these: the draft is one tree, and its shape follows the head's confidence.

Form "mlp" (MLP speculator): there is one state, which begins as h. Each step mixes a token into it:

    s_0 = h,  s_k = GELU(LN(P_k s_{k-1} + c E y_k)),  q(y_{k+1}) = softmax(V s_k)            [m]

LN divides by the root mean square and has a gain and a shift. c makes the shares of state and token
alike in all steps. With `tied`, all steps share E, LN and V, and all but the first share P.

Training: the sum of the cross-entropies of five steps, on texts that the target wrote.

Guarantee: EXACT, at any temperature: the nodes are point masses.
Pitfall: a state that is not set back between rounds, or that reads h of another position. The
output stays right and the drafts are bad. Laws F1 and F2 see it.
Tests: tests/speculative/test_redrafter.py (the tree is the merged beams of a plain search; both
forms fitted to a text draft all of it; the names of the files; formulas written once more).
Additions of ours: form "rnn" begins as the target's own head, and `inner` may be any width. In
training the authors' code leaves out the projection that another width than 2 d needs.
For `draft_vocab`, see `HeadSettings`.
Left out: a state that is the sum of the embeddings (the authors' code has it beside the network),
the target's distributions as labels, the texts of the authors' trainer, which the target did not
write (ShareGPT), and for form "mlp" the first stage of training, on other
texts than the target's, and the scaling of h.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import FeatureDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Config
from tinyspec.lm.heads import (
    TOKEN_MAP,
    FrozenTarget,
    HeadMatrix,
    HeadSettings,
    embed_tokens,
    head_weights,
    prepare_head,
    shift_tokens,
)
from tinyspec.lm.ops import scatter_logits
from tinyspec.speculative.lookup import merge_drafts
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

FORMS = "rnn", "mlp"
STEPS = 5  # draft tokens that are trained: drafter_predict_n_tokens of the authors' code
FILTER = 50  # tokens of a step that the authors' search considers
NORM_EPS = 1e-6  # of form "mlp"
STATE_SHARE = 0.5 ** (0.5 / STEPS)  # weight of the state in a step: its square, STEPS times, is 1/2

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class RedrafterSettings(HeadSettings):
    """The section [head] of a recipe.

    form    rnn (ReDrafter) or mlp (MLP speculator)
    inner   width of what the output matrix reads; 0: 2 d in form rnn, d in form mlp
    layers  blocks of form rnn
    tied    whether all steps of form mlp share their weights
    """

    form: str = "rnn"
    inner: int = 0
    layers: int = 1
    tied: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in FORMS:
            raise TinyspecError(
                f"[head] form is {self.form!r}: it must be one of {', '.join(FORMS)}"
            )


def redrafter_shapes(config: Config, settings: RedrafterSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names of the authors' code, or for form mlp those
    that vLLM reads.
    """
    d, words = config.d_model, settings.draft_vocab or config.vocab_size
    if settings.form == "mlp":
        m, shapes = settings.inner or d, dict[str, tuple[int, ...]]()
        for i in range(1 if settings.tied else STEPS):
            shapes[f"speculator.emb.{i}.weight"] = (config.vocab_size, m)
            shapes[f"speculator.ln.{i}.weight"] = shapes[f"speculator.ln.{i}.bias"] = (m,)
            shapes[f"speculator.head.{i}.weight"] = (words, m)
        for i in range(2 if settings.tied else STEPS):
            shapes[f"speculator.proj.{i}.weight"] = (m, m if i else d)
        return shapes
    inner = settings.inner or 2 * d
    shapes = {"rnn_w.weight": (d, d), "rnn_u.weight": (d, d), "rnn_u.bias": (d,)}
    if inner != 2 * d:
        shapes |= {"input_proj.weight": (inner, 2 * d), "input_proj.bias": (inner,)}
    for i in range(settings.layers):
        shapes[f"lm_head.{i}.linear.weight"] = (inner, inner)
        shapes[f"lm_head.{i}.linear.bias"] = (inner,)
    shapes[f"lm_head.{settings.layers}.weight"] = (words, inner)
    return shapes


def initialize_redrafter(
    target: FrozenTarget, settings: RedrafterSettings, seed: int
) -> dict[str, Tensor]:
    """Return random matrices, uniform within 1 / sqrt(inputs); gains of one, and zero for biases
    and blocks.

    Form rnn of the width 2 d says what the target's own head says.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, Tensor]()
    for name, shape in redrafter_shapes(target.config, settings).items():
        if len(shape) == 1 or "linear" in name:
            drawn = torch.full(shape, float(".ln." in name and name.endswith("weight")))
        else:
            drawn = (2 * torch.rand(shape, generator=generator) - 1) / shape[1] ** 0.5
        weights[name] = drawn.to(target.embed)
    if settings.form == "rnn" and "input_proj.weight" not in weights:
        output = weights[f"lm_head.{settings.layers}.weight"]
        output.zero_()[:, : target.config.d_model] = target.head
    return weights


def unroll_logits(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, h: Tensor, steps: int
) -> Iterator[Tensor]:
    """Yield the logits [B, T, V'] of each step, for all positions of a text at once.

    h  [B, T, d] the target's states; row t of step k reads the tokens t + 1 to t + k
    """
    following = (shift_tokens(ids, k) for k in range(1, steps + 1))
    if "rnn_w.weight" not in weights:
        yield from _unroll_mlp(weights, following, h)
        return
    layers = sum(name.endswith("linear.bias") for name in weights)
    s = torch.zeros_like(h)
    for tokens in following:
        entered = F.linear(F.embedding(tokens, target.embed), weights["rnn_w.weight"])
        s = F.silu(entered + F.linear(s, weights["rnn_u.weight"], weights["rnn_u.bias"]))
        x = torch.cat((h, s), dim=-1)
        if "input_proj.weight" in weights:
            x = F.linear(x, weights["input_proj.weight"], weights["input_proj.bias"])
        for j in range(layers):
            name = f"lm_head.{j}.linear"
            x = x + F.silu(F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        yield F.linear(x, weights[f"lm_head.{layers}.weight"])


def _unroll_mlp(weights: HeadWeights, following: Iterator[Tensor], h: Tensor) -> Iterator[Tensor]:
    is_tied, s = "speculator.emb.1.weight" not in weights, h
    for k, tokens in enumerate(following):
        own = 0 if is_tied else k
        table = weights[f"speculator.emb.{own}.weight"]
        scale = math.sqrt((1 - STATE_SHARE**2) * table.shape[1] / 2) / STATE_SHARE
        proj = weights[f"speculator.proj.{min(k, 1) if is_tied else k}.weight"]
        mixed = F.linear(s, proj) + scale * F.embedding(tokens, table)
        normed = F.rms_norm(
            mixed, mixed.shape[-1:], weights[f"speculator.ln.{own}.weight"], NORM_EPS
        )
        s = F.gelu(normed + weights[f"speculator.ln.{own}.bias"])
        yield F.linear(s, weights[f"speculator.head.{own}.weight"])


def predict_by_recurrence(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of one depth, for all positions of a text at once."""
    *_, logits = unroll_logits(weights, target, ids, states[:, 0], depth + 1)
    return logits


def unroll_recurrence(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depths: int
) -> Iterator[Tensor]:
    """Return what `predict_by_recurrence` returns, for each depth from 0 on."""
    return unroll_logits(weights, target, ids, states[:, 0], depths)


def redrafter_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the sum of the steps' cross-entropies on what the target wrote."""
    total = batch.states.new_zeros(())
    steps = unroll_logits(weights, target, batch.ids, batch.states[:, 0], STEPS)
    for depth, logits in enumerate(steps):
        total = total + batch.cross_entropy(target, depth, logits)
    return total


# ------------------------------------------------------------------ the draft


class RnnHead:
    """Form rnn as it runs: one step of several beams at once."""

    def __init__(self, model: Any, weights: HeadWeights):
        def matrix(name: str) -> HeadMatrix:
            return HeadMatrix(model, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        layers = sum(".linear.weight" in name for name in weights)
        self.model, self.w, self.u = model, matrix("rnn_w"), matrix("rnn_u")
        self.proj = matrix("input_proj") if "input_proj.weight" in weights else None
        self.blocks = [matrix(f"lm_head.{j}.linear") for j in range(layers)]
        self.rows = matrix(f"lm_head.{layers}")

    def step(
        self, h: Tensor, tokens: Sequence[int], s: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the states [n, d] and logits [n, V'] after each beam's newest token.

        h  [d] the target's state;  s  [n, d] states before; None: of the first step
        """
        embedded = embed_tokens(self.model, tokens)
        s = F.silu(self.w(embedded) + self.u(torch.zeros_like(embedded) if s is None else s))
        x = torch.cat((h.expand_as(s), s), dim=-1)
        x = x if self.proj is None else self.proj(x)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return s, self.rows(x)


class MlpHead:
    """Form mlp as it runs: one step of several beams at once."""

    def __init__(self, model: Any, weights: HeadWeights):
        def tensors(part: str) -> list[Tensor]:
            names = (f"speculator.{part.replace('.', f'.{i}.')}" for i in range(STEPS))
            return [weights[name] for name in names if name in weights]

        vectors = "emb.weight", "ln.weight", "ln.bias"
        self.tables, self.gains, self.shifts = (
            [w.to(model.device, model.state_dtype) for w in tensors(part)] for part in vectors
        )
        self.projs = [HeadMatrix(model, w) for w in tensors("proj.weight")]
        self.rows = [HeadMatrix(model, w) for w in tensors("head.weight")]
        token_share = math.sqrt((1 - STATE_SHARE**2) * self.projs[0].out / 2)
        self.scale = token_share / STATE_SHARE

    def step(
        self, h: Tensor, tokens: Sequence[int], s: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the states [n, m] and logits [n, V'] after each beam's newest token, as `RnnHead`
        does.
        """
        own, proj = min(depth, len(self.tables) - 1), self.projs[min(depth, len(self.projs) - 1)]
        table = self.tables[own]
        embedded = table[torch.tensor(tokens, device=table.device)]
        mixed = proj(h[None] if s is None else s) + self.scale * embedded
        size = (mixed * mixed).mean(-1, keepdim=True) + NORM_EPS
        s = F.gelu(mixed * size.rsqrt() * self.gains[own] + self.shifts[own])
        return s, self.rows[own](s)


class RecurrentHead(NamedTuple):
    """The head of a target as it runs.

    network     one form's steps
    token_map   ids that it may propose; None: all
    vocabulary  V
    """

    network: RnnHead | MlpHead
    token_map: Tensor | None
    vocabulary: int

    @classmethod
    def of(cls, model: Any) -> "RecurrentHead":
        """Return the head that a model holds."""
        weights = head_weights(model, "redrafter")
        form = RnnHead if "rnn_w.weight" in weights else MlpHead
        return cls(form(model, weights), weights.get(TOKEN_MAP), model.config.vocab_size)


class Beam(NamedTuple):
    """A text of a search.

    value   log-probability
    tokens  draft tokens
    state   [d] or [m] of the head after all tokens but the newest; None: no step was run yet
    """

    value: float
    tokens: tuple[int, ...]
    state: Tensor | None


class RedrafterDrafter(FeatureDrafter):
    """Draft the merged beams of a search.

    beams   texts that are kept at each length
    length  draft tokens of a text, at most
    ends    tokens that nothing follows
    """

    def __init__(
        self, head: RecurrentHead, layer: int, beams: int, length: int, ends: frozenset[int]
    ):
        super().__init__((layer,))
        self.head, self.beams, self.length, self.ends = head, beams, length, ends

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        length = min(self.length, max_draft_depth)
        if not self.states or length <= 0:
            return TokenTree()
        texts = [beam.tokens for beam in self.search_beams(context, length, sampling)]
        chains = [(text, range(-1, len(text) - 1), [0.0] * len(text)) for text in texts]
        tokens, parents, _ = merge_drafts(chains)
        return TokenTree.point_masses(tokens, parents)

    def search_beams(
        self, context: Sequence[int], length: int, sampling: SamplingParams
    ) -> list[Beam]:
        """Return the likeliest texts of this length under the head, the best one first.

        A text that has ended stays as it is. Temperature and the user's filters do not count.
        """
        own = SamplingParams(top_k=FILTER, repetition_penalty=sampling.repetition_penalty)
        beams, h = [Beam(0.0, (), None)], self.states[-1][0]
        for depth in range(length):
            ended = [beam for beam in beams if beam.tokens and beam.tokens[-1] in self.ends]
            going_on = [
                beam for beam in beams if not beam.tokens or beam.tokens[-1] not in self.ends
            ]
            if not going_on:
                break
            newest = [beam.tokens[-1] if depth else context[-1] for beam in going_on]
            before = [beam.state for beam in going_on if beam.state is not None]
            s, logits = self.head.network.step(
                h, newest, torch.stack(before) if before else None, depth
            )
            logits = scatter_logits(logits, self.head.token_map, self.head.vocabulary)
            found = ended
            for beam, state, row in zip(
                going_on, s, kernels_of(logits).as_rows(logits), strict=True
            ):
                q = own.probs(row, [*context, *beam.tokens])
                for token in top_k_tokens(q, self.beams):
                    if (chance := float(q[token])) > 0:
                        value = beam.value + math.log(chance)
                        found.append(Beam(value, (*beam.tokens, token), state))
            beams = sorted(found, key=lambda beam: -beam.value)[: self.beams]
        return beams


@technique(
    title="ReDrafter",
    summary="a recurrent head drafts by beam search",
    paper="Cheng et al. 2024, arXiv 2403.09919; Wertheimer et al. 2024, arXiv 2404.19124",
    reported="up to 2.8x, Vicuna, MT-Bench (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=Trained(
        RedrafterSettings,
        lambda config, settings: (config.n_layers,),
        redrafter_shapes,
        initialize_redrafter,
        lambda weights: STEPS,
        predict_by_recurrence,
        redrafter_loss,
        small=RedrafterSettings(),
        unroll=unroll_recurrence,
    ),
    knobs=(
        # `ours` is 1: of a single beam, law F2 can say which tokens the draft must have. In the
        # authors' code `length` counts the newest token too (beam length 4).
        Knob("beams", 10, "texts that the search keeps", low=1, high=64, small=(1, 2), ours=1),
        Knob("length", 3, "draft tokens of a text", low=1, high=STEPS, small=(2, 3)),
    ),
)
def redrafter(request: Request, *, beams: int, length: int) -> Decoder:
    """Return a decoder that drafts with the target's recurrent head."""
    model = request.target.model  # type: ignore[attr-defined]
    head = prepare_head(model, "redrafter", RecurrentHead.of)
    drafter = RedrafterDrafter(head, model.config.n_layers, beams, length, request.stop.eos)
    return request.decoder(drafter, verify_tree)
