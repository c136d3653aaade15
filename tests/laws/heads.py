"""Four trained drafters with random weights, as test doubles for the feature laws.

They are not the techniques. Each is as much of its technique as decides positions, features and
masks:

    Medusa    arXiv 2401.10774  heads on the last state that is known
    EAGLE-1   arXiv 2401.15077  one layer over (next token, state) pairs, continued on its outputs
    Kangaroo  arXiv 2404.18911  an adapter over the states of an early layer
    PaSS      arXiv 2311.13581  look-ahead embeddings after the newest token, every second round

Beside each stands its training forward: the same logits for a whole text at once, in the torch
layers that training uses. Both share the weights and a head's formula, and nothing that knows a
position.

Left out: training, the papers' trees, Kangaroo's stop at low confidence, weights of the right size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.laws import hosted
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, top_k_tokens
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.contracts import MakeDecoder
from tinyspec.laws.feature_laws import TrainingForward
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Scores
from tinyspec.lm.model import Model
from tinyspec.lm.ops import attend, attend_causal, rotary_tables, rotate
from tinyspec.speculative.treedraft import sample_siblings
from tinyspec.technique import Card, Request
from tinyspec.tree import ROOT, Probs, TokenTree

Weights = dict[str, Tensor]


class Host(NamedTuple):
    """A drafter as the laws take it: the function that builds it, and its training forward."""

    make: MakeDecoder
    forward: TrainingForward

    @property
    def card(self) -> Card:
        return hosted.card(self.make, hidden=True)


def draw_weights(seed: int, **shapes: Sequence[int]) -> Weights:
    """Return float64 matrices so large that every input shows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.6 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def draw_children(
    logits: Tensor, k: int, sampling: SamplingParams, history: Sequence[int], rng: RandomSource
) -> list[tuple[int, Probs | None]]:
    """Return k siblings: the likeliest tokens at temperature 0, else sampled without
    replacement.
    """
    if sampling.temperature == 0:
        return [(token, None) for token in top_k_tokens(logits.numpy(), k)]
    return sample_siblings(sampling.probs(logits, history), k, rng)


def add_node(tree: TokenTree, token: int, parent: int, q: Probs | None, probe: bool = False) -> int:
    """Append a node to a tree whose columns are lists, and return its number."""
    for column, entry in zip(tree, (token, parent, q, probe), strict=True):
        column.append(entry)  # type: ignore[attr-defined]
    return len(tree.tokens) - 1


class FeatureDrafter(BaseDrafter):
    """Keeps one state of the target for every committed token but the newest, which has not run."""

    def __init__(self, model: Model, layer: int):
        self.model, self.hidden_layers = model, (layer,)
        self.states: list[Tensor] = []

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.states += scores.hidden[0]

    def observe(self, round: Round) -> None:
        path = (ROOT, *round.verdict.accepted)[: len(round.tokens)]
        self.states += [round.scores.hidden[0, node + 1] for node in path]

    def rewind(self, length: int) -> None:
        del self.states[max(length - 1, 0) :]

    def end(self) -> None:
        self.states.clear()


# ------------------------------------------------------------------ Medusa


def medusa_weights(config: Config) -> Weights:
    d, v = config.d_model, config.vocab_size
    return draw_weights(1, hidden=(2, d, d), bias=(2, d), head=(2, v, d))


def medusa_logits(w: Weights, head: int, h: Tensor) -> Tensor:
    """Return the logits [V] of a head: W2 (h + SiLU(W1 h + b))."""
    return w["head"][head] @ (h + F.silu(w["hidden"][head] @ h + w["bias"][head]))


class MedusaDrafter(FeatureDrafter):
    """Two tokens from the first head, and one from the second under each, as point masses."""

    widths = (2, 1)

    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        self.weights = medusa_weights(model.config)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree, level = TokenTree([], [], [], []), [ROOT]
        if not self.states:
            return tree
        h = self.states[-1]
        for head, width in enumerate(self.widths[:max_draft_depth]):
            best = top_k_tokens(medusa_logits(self.weights, head, h).numpy(), width)
            level = [add_node(tree, token, node, None) for node in level for token in best]
        return tree


def medusa(request: Request) -> Decoder:
    model: Any = request.target.model  # type: ignore[attr-defined]
    return request.decoder(MedusaDrafter(model, model.config.n_layers), verify_tree)


def medusa_forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor | None:
    """Head i predicts the token at position t + 2 + i from the state of position t."""
    if len(text) == 1:
        return None
    states = model.torch_blocks().final_states(torch.tensor([text]))[0]  # [n, d]
    return medusa_logits(medusa_weights(model.config), len(drafted), states[len(text) - 2])


# ------------------------------------------------------------------ a layer of a drafter's own


def project(
    c: Config, w: Weights, x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [n, H, hd], k and v [n, KV, hd] of x [n, d], rotated to their positions."""
    x = F.rms_norm(x, (c.d_model,), w["norm1"], c.norm_eps) if "norm1" in w else x
    q, k, v = ((x @ w[name].T).view(len(x), -1, c.head_dim) for name in ("q", "k", "v"))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def finish_layer(c: Config, w: Weights, x: Tensor, mixed: Tensor) -> Tensor:
    """Return the layer's output [n, d] from its input and the result of attention, by the MLP if
    the layer has one.
    """
    x = x + mixed @ w["o"].T
    if "up" in w:
        gate, up = (F.rms_norm(x, (c.d_model,), w["norm2"], c.norm_eps) @ w["up"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["down"].T
    return x


def run_dense_layer(c: Config, w: Weights, x: Tensor) -> Tensor:
    """Return the layer's outputs [n, d] of a whole text, with a causal mask."""
    cos, sin = rotary_tables(c, x.dtype, x.device, c.max_positions)
    q, k, v = project(c, w, x, cos[: len(x)], sin[: len(x)])
    return finish_layer(c, w, x, attend_causal(q[None], k[None], v[None])[0])


class LayerRows:
    """The rows of such a layer, run one by one: each sees itself and its ancestors.

    A row knows its parent and its position; its keys, values and output are kept.
    """

    def __init__(self, config: Config, weights: Weights):
        self.config, self.weights = config, weights
        self.cos, self.sin = rotary_tables(
            config, torch.float64, torch.device("cpu"), config.max_positions
        )
        self.rows: list[tuple[int, int, Tensor, Tensor, Tensor]] = []

    def run(self, x: Tensor, parent: int) -> int:
        """Run x [d] below a row (ROOT: at position 0), and return the new row's number."""
        position = 0 if parent == ROOT else self.rows[parent][1] + 1
        cos, sin = self.cos[[position]], self.sin[[position]]
        q, k, v = project(self.config, self.weights, x[None], cos, sin)
        self.rows.append((parent, position, k[0], v[0], x))
        seen, at = list[int](), len(self.rows) - 1
        while at != ROOT:
            seen.append(at)
            at = self.rows[at][0]
        keys, values = (torch.stack([self.rows[i][part] for i in seen], dim=1) for part in (2, 3))
        output = finish_layer(self.config, self.weights, x[None], attend(q, keys, values, None))[0]
        self.rows[-1] = (*self.rows[-1][:4], output)
        return len(self.rows) - 1

    def output(self, row: int) -> Tensor:
        return self.rows[row][4]

    def keep(self, kept: Iterable[int]) -> None:
        """Drop all rows but these, which are a chain from the first one."""
        chain = [self.rows[row] for row in kept]
        self.rows = [(i - 1, *row[1:]) for i, row in enumerate(chain)]


# ------------------------------------------------------------------ EAGLE-1


def eagle_weights(config: Config) -> Weights:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return draw_weights(
        2, fc=(d, 2 * d), q=(q, d), k=(kv, d), v=(kv, d), o=(d, q),
        norm2=(d,), up=(2 * config.d_ff, d), down=(d, config.d_ff),
    )  # fmt: skip


def pair(w: Weights, model: Model, token: int, state: Tensor) -> Tensor:
    """Return the layer's input [d] of a token and the state before it."""
    return w["fc"] @ torch.cat((model.weights["embed"][token], state))


class EagleDrafter(FeatureDrafter):
    """A tree of two branches of two tokens, sampled without replacement; it declares
    distributions.
    """

    widths = (2, 1)

    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        self.weights = eagle_weights(model.config)
        self.layer = LayerRows(model.config, self.weights)
        self.row_of: dict[int, int] = {}  # node of the draft, or ROOT -> its row in the layer

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree, level = TokenTree([], [], [], []), [ROOT] if self.states else []
        for i in range(len(self.layer.rows), len(self.states)):
            token = context[i + 1]  # it was sampled from state i
            self.layer.run(pair(self.weights, self.model, token, self.states[i]), i - 1)
        self.row_of[ROOT] = len(self.states) - 1
        for width in self.widths[:max_draft_depth]:
            below = []
            for node in level:
                history = [*context, *tree.tokens_on(tree.path(node))]
                logits = self.model.torch_blocks().vocabulary @ self.predict_state(tree, node)
                for token, q in draw_children(logits, width, sampling, history, rng):
                    below.append(add_node(tree, token, node, q))
            level = below
        return tree

    def predict_state(self, tree: TokenTree, node: int) -> Tensor:
        """Return the state [d] of a node, predicted by the layer from its own output before."""
        if node not in self.row_of:
            above = self.row_of[tree.parents[node]]
            x = pair(self.weights, self.model, tree.tokens[node], self.layer.output(above))
            self.row_of[node] = self.layer.run(x, above)
        return self.layer.output(self.row_of[node])

    def observe(self, round: Round) -> None:
        self.layer.keep(range(len(self.states)))  # all later rows were made from predicted states
        self.row_of.clear()
        super().observe(round)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.layer.keep(range(min(len(self.layer.rows), len(self.states))))

    def end(self) -> None:
        super().end()
        self.layer.keep(())


def eagle(request: Request) -> Decoder:
    model: Any = request.target.model  # type: ignore[attr-defined]
    return request.decoder(EagleDrafter(model, model.config.n_layers), verify_tree)


def eagle_forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor | None:
    """The layer's output of pair i predicts state i + 1; after the text its own outputs go on."""
    if len(text) == 1:
        return None
    blocks, w = model.torch_blocks(), eagle_weights(model.config)
    states = list(blocks.final_states(torch.tensor([text]))[0][:-1])
    tokens = [*text[1:], *drafted]
    for _ in range(len(drafted) + 1):
        pairs = [pair(w, model, token, h) for token, h in zip(tokens, states, strict=False)]
        predicted = run_dense_layer(model.config, w, torch.stack(pairs))[-1]
        states.append(predicted)
    return blocks.vocabulary @ predicted


# ------------------------------------------------------------------ Kangaroo

EXIT = 1  # layers that the draft runs


def kangaroo_weights(config: Config) -> Weights:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return draw_weights(3, norm1=(d,), q=(q, d), k=(kv, d), v=(kv, d), o=(d, q), norm=(d,))


def kangaroo_logits(w: Weights, model: Model, adapted: Tensor) -> Tensor:
    """Return the logits [V] of an adapter output [d]: its own norm, the target's head."""
    normed = F.rms_norm(adapted, adapted.shape, w["norm"], model.config.norm_eps)
    return model.torch_blocks().vocabulary @ normed


class KangarooDrafter(FeatureDrafter):
    """A chain of two tokens, by the target's first layer and an adapter of one attention
    sublayer.
    """

    def __init__(self, target: Any):
        super().__init__(target.model, EXIT)
        self.target = target
        self.weights = kangaroo_weights(self.model.config)
        self.adapter = LayerRows(self.model.config, self.weights)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = TokenTree([], [], [], [])
        self.adapter.keep(
            range(min(len(self.adapter.rows), len(self.states)))
        )  # not those of a draft
        for state in self.states[len(self.adapter.rows) :]:
            self.adapter.run(state, len(self.adapter.rows) - 1)
        for _ in range(min(2, max_draft_depth)):
            ran = self.target.run_to_layer(tree, EXIT, hidden_layers=(EXIT,)).hidden[0]
            row = self.adapter.run(ran[-1], len(self.adapter.rows) - 1)
            logits = kangaroo_logits(self.weights, self.model, self.adapter.output(row))
            history = [*context, *tree.tokens]
            [(token, q)] = draw_children(logits, 1, sampling, history, rng)
            add_node(tree, token, len(tree.tokens) - 1, q)
        return tree

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.adapter.keep(range(min(len(self.adapter.rows), len(self.states))))

    def end(self) -> None:
        super().end()
        self.adapter.keep(())


def kangaroo(request: Request) -> Decoder:
    return request.decoder(KangarooDrafter(request.target), verify_tree)


def kangaroo_forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """The adapter predicts the next token from the exit states of all tokens so far."""
    w, ids = kangaroo_weights(model.config), torch.tensor([[*text, *drafted]])
    states = list(model.torch_blocks().layer_states(ids))[EXIT - 1][0]
    return kangaroo_logits(w, model, run_dense_layer(model.config, w, states)[-1])


# ------------------------------------------------------------------ PaSS

AHEAD = 2  # look-ahead embeddings, and tokens of a draft


def pass_weights(config: Config) -> Weights:
    return draw_weights(4, ahead=(AHEAD, config.d_model))


class PassDrafter(BaseDrafter):
    """Rounds alternate: one scores the look-ahead embeddings, the next drafts from their logits."""

    def __init__(self, config: Config):
        self.config = config
        self.logits: list[Tensor] = []

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.logits = []

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree, logits, self.logits = TokenTree([], [], [], []), self.logits, []
        for row in logits[:max_draft_depth]:
            [(token, q)] = draw_children(row, 1, sampling, [*context, *tree.tokens], rng)
            add_node(tree, token, len(tree.tokens) - 1, q)
        if not tree.tokens and max_draft_depth:
            for i in range(min(AHEAD, self.config.max_positions - len(context))):
                add_node(tree, self.config.vocab_size + i, i - 1, None, probe=True)
        return tree

    def observe(self, round: Round) -> None:
        probes = [node for node, probe in enumerate(round.tree.probe) if probe]
        self.logits = [round.scores.logits[node + 1] for node in probes]

    def rewind(self, length: int) -> None:
        self.logits = []

    def end(self) -> None:
        self.logits = []


def look_ahead(request: Request) -> Decoder:
    target: Any = request.target
    target.set_probe_embeddings(pass_weights(target.model.config)["ahead"])
    return request.decoder(PassDrafter(target.model.config), verify_tree)


def look_ahead_forward(model: Model, text: Sequence[int], drafted: Sequence[int]) -> Tensor | None:
    """Return the logits of the look-ahead embeddings.

    Embedding j after a token predicts the token j + 1 after it; the text has grown by one since.
    """
    if len(text) == 1:
        return None
    c, ahead = model.config, pass_weights(model.config)["ahead"]
    embed = torch.cat(
        (model.weights["embed"], ahead)
    )  # the look-ahead embeddings as further tokens
    wide = Blocks(replace(c, vocab_size=len(embed)), {**model.weights, "embed": embed})
    slots = range(c.vocab_size, c.vocab_size + len(drafted) + 1)
    return wide.training_logits(torch.tensor([[*text[:-1], *slots]]))[0, -1, : c.vocab_size]


HOSTS: dict[str, Host] = {
    "medusa": Host(medusa, medusa_forward),
    "eagle": Host(eagle, eagle_forward),
    "kangaroo": Host(kangaroo, kangaroo_forward),
    "pass": Host(look_ahead, look_ahead_forward),
}
