"""EAGLE: one layer guesses the target's next state, and the target's head reads a token from it.

Paper: Li et al., ICML 2024, arXiv 2401.15077 (EAGLE-1). The layer is trained; the target is not.

Idea. States are easier to guess than tokens, but a state alone does not say which token was sampled
from it. So the layer reads both: state f_i and the token x_{i+1} that was sampled from it.

    u_i       = W [e(x_{i+1}); f_i]     e: the target's embedding                    [d]
    g_{i+1}   = layer(u_0 .. u_i)       a causal LLaMA layer without input norm      [d]
    q(x_{i+2}) = softmax(H g_{i+1})     H: the target's output matrix                [V]

f_i is the target's last state after its final norm, so g_{i+1} goes to H without another norm. The
state after a draft token is not known: then g stands in for f, and the draft goes on. Nodes of one
depth run together. The tree has the paths with the greatest products of

    a[i][r] = how often the candidate of rank r at depth i was right on held-out texts

Above temperature 0 siblings are sampled without replacement, as in the authors' first release. They
declare their distributions. `draw=top_k` proposes the most likely tokens as point masses instead,
as their code does since EAGLE-2.

Training minimises, on texts that the target wrote, with p the target's distribution,

    SmoothL1(g_{i+1}, f_{i+1}) + 0.1 CE(p(x_{i+2}), q(x_{i+2}))

Uniform noise is added to the states that the layer reads, because at depth 1 and deeper it reads
its own guesses.

Guarantee: EXACT, at any temperature.
Pitfall: rows of accepted draft tokens were made from guessed states. They must be run again with
the true ones, shifted by one: state i goes with token i + 1. The output stays right and the drafts
are bad otherwise; laws F1 and F2 see it.
Tests: tests/speculative/test_eagle.py (what the layer reads; fitted heads draft all of a text; one
pass for each depth; siblings and their distributions), tests/lm/test_stack.py (the layer itself).
Additions of ours: the tree follows measured ranks (the paper's is made by hand, with as many
nodes), and `draft_vocab` restricts H to the target's most frequent tokens.
The noise is divided by the length of the longest text of a batch; in the authors' code each text
has noise by its own length.
Left out: a bias of W, which the authors' code has and vLLM's loader lacks; the authors' texts,
dialogues that the target did not write (ShareGPT).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder, Round
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
from tinyspec.lm.stack import HeadLayer, Stack, UnrolledLayer, layer_shapes
from tinyspec.speculative.treedraft import (
    StaticTree,
    append_node,
    build_static_tree,
    sample_siblings,
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
from tinyspec.tree import ROOT, Probs, TokenTree

RANKED_DEPTHS = 5  # levels of the paper's tree, and so of the table of ranks
TOKEN_LOSS = 0.1  # weight of the cross-entropy against that of the states
NOISE = 0.2  # width of the noise on states, for texts of NOISE_TOKENS tokens
NOISE_TOKENS = 512  # the authors' code: noise is inversely proportional to the text's length

# ------------------------------------------------------------------ what is trained


def eagle_shapes(config: Config, settings: HeadSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, under the names that vLLM reads."""
    d = config.d_model
    return {"fc.weight": (d, 2 * d), **layer_shapes(config)}


def initialize_eagle(target: FrozenTarget, settings: HeadSettings, seed: int) -> dict[str, Tensor]:
    """Return random matrices, uniform within 1 / sqrt(inputs), and gains of one."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict[str, Tensor]()
    for name, shape in eagle_shapes(target.config, settings).items():
        drawn = torch.ones(shape, dtype=torch.float64)
        if len(shape) == 2:
            drawn = (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) / (
                shape[1] ** 0.5
            )
        weights[name] = drawn.to(target.embed)
    return weights


def unroll_states(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield the guessed states [B, T, d] of a whole text, for each depth from 0 on.

    Row t of a depth is of the token t + 1 + depth, and depends on the states up to t.
    """
    layer, guessed = UnrolledLayer(target.config, weights), states
    for step in range(1, depths + 1):
        following = F.embedding(shift_tokens(ids, step), target.embed)
        joined = F.linear(torch.cat((following, guessed), -1), weights["fc.weight"])
        guessed = layer.run(joined.to(states.dtype))  # which autocast may have lowered
        yield guessed


def predict_states(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the guessed states [B, T, d] of one depth."""
    *_, guessed = unroll_states(weights, target, ids, states, depth + 1)
    return guessed


def predict_eagle(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V'] of a depth, for all positions of a text at once."""
    return F.linear(predict_states(weights, target, ids, states[:, 0], depth), target.head)


def unroll_eagle(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depths: int
) -> Iterator[Tensor]:
    """Yield what `predict_eagle` returns, for each depth from 0 on."""
    for guessed in unroll_states(weights, target, ids, states[:, 0], depths):
        yield F.linear(guessed, target.head)


def eagle_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the loss of the guessed states, and of the tokens that they say.

    Without gradients, as on held-out texts, no noise is added.
    """
    states = batch.states[:, 0]
    noise = torch.zeros_like(states)
    if torch.is_grad_enabled():
        noise = (torch.rand_like(states) - 0.5) * NOISE * NOISE_TOKENS / states.shape[1]
    is_known = batch.is_answer[:, 1:]  # the target wrote the token after the guessed state
    guessed = predict_states(weights, target, batch.ids, states + noise, 0)[:, :-1][is_known]
    true = states[:, 1:][is_known]
    p = F.linear(true, target.head).float().softmax(-1)
    of_states = F.smooth_l1_loss(guessed.float(), true.float(), reduction="sum")
    of_tokens = mean_cross_entropy(F.linear(guessed, target.head), p)
    return of_states / max(guessed.numel(), 1) + TOKEN_LOSS * of_tokens


TRAINED = Trained(
    HeadSettings,
    lambda config, settings: (config.n_layers,),
    eagle_shapes,
    initialize_eagle,
    lambda weights: RANKED_DEPTHS,
    predict_eagle,
    eagle_loss,
    small=HeadSettings(),
    unroll=unroll_eagle,
)

# ------------------------------------------------------------------ the draft


class EagleHead:
    """The matrices of a target's head as they run; all requests of the target share them."""

    def __init__(self, model: Any):
        weights = head_weights(model, "eagle")
        self.token_map, self.vocabulary = weights.get(TOKEN_MAP), model.config.vocab_size
        self.fc, self.layer = HeadMatrix(model, weights["fc.weight"]), HeadLayer(model, weights)
        self.rows = OutputMatrix(model, self.token_map)
        self.chances = tuple(tuple(row) for row in weights[RANKS].tolist())

    def compute_logits(self, guessed: Tensor) -> Tensor:
        """Return the logits [n, V'] of guessed states [n, d]."""
        return self.rows(guessed)


class EagleDrafter(FeatureDrafter):
    """Run the head on a text and on a draft's nodes; subclasses grow the tree.

    name           of the head in the forward log
    hidden_layers  layers of the target that the head reads; None: the last one

    Between two drafts the stack has only rows of true pairs: row i is of state i and token i + 1.
    """

    name = "eagle"

    def __init__(
        self,
        model: Any,
        head: Any,
        ends: frozenset[int],
        forward_log: list[ForwardRecord],
        hidden_layers: Sequence[int] | None = None,
    ):
        super().__init__(hidden_layers or (model.config.n_layers,))
        self.model, self.head, self.ends = model, head, ends
        self.stack = Stack(model, [head.layer], self.name, forward_log)
        self.following: list[int] = []  # the token after each state
        self.ran: dict[int, tuple[int, Tensor]] = {}  # node -> row of the stack, guessed state [d]

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        before = len(self.states)
        super().extend(tokens, scores)
        self.following += tokens[len(tokens) - (len(self.states) - before) :]
        if len(self.states) - 1 > len(self.stack):  # the last pair runs with the next draft
            self._run_pairs(len(self.states) - 1, prefill=True)

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.following += round.tokens

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self.following[len(self.states) :]
        self.stack.cut(len(self.states))

    def end(self) -> None:
        super().end()
        self.following = []
        self.stack.cut(0)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if not self.states or max_draft_depth <= 0:
            return TokenTree()
        tree = self.grow_tree(context, max_draft_depth, sampling, rng)
        self.ran = {}
        self.stack.cut(len(self.states))  # the others were made from guessed states
        return tree

    def grow_tree(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        """Return a tree of at least one level."""
        raise NotImplementedError

    def run_nodes(self, tree: TokenTree, nodes: Sequence[int]) -> Any:
        """Run nodes whose parents have been run, in one pass, and return their logits as rows.

        nodes  [ROOT], or nodes of one depth
        """
        if nodes == [ROOT]:
            self.stack.cut(len(self.states) - 1)  # at least the newest pair is run
            guessed = self._run_pairs(len(self.states), head_rows=1)[-1:]
        else:
            above, states = zip(*(self.ran[tree.parents[node]] for node in nodes), strict=True)
            tokens = [tree.tokens[node] for node in nodes]
            guessed = self._run_rows(tokens, states, above, head_rows=len(nodes))
        first = len(self.stack) - len(nodes)
        self.ran |= {node: (first + i, guessed[i]) for i, node in enumerate(nodes)}
        logits = scatter_logits(
            self.head.compute_logits(guessed), self.head.token_map, self.head.vocabulary
        )
        return kernels_of(logits).as_rows(logits)

    def _run_pairs(self, n: int, **record: Any) -> Tensor:
        """Run the true pairs up to the n-th that have not been run; return their outputs."""
        first = len(self.stack)
        states = self._read_states(self.states[first:n])
        return self._run_rows(self.following[first:n], states, range(first - 1, n - 1), **record)

    def _read_states(self, states: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what the layer reads [n, d] of the target's states, n of [layers, d]."""
        return [state[0] for state in states]

    def _run_rows(
        self, tokens: Sequence[int], states: Sequence[Tensor], parents: Sequence[int], **record: Any
    ) -> Tensor:
        """Run pairs of a token and the state before it, and return the guessed states [n, d]."""
        return self.stack.run(self._join_pairs(tokens, states), parents, **record)

    def _join_pairs(self, tokens: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        """Return the layer's input [n, d] of tokens and the states before them."""
        embedded = embed_tokens(self.model, tokens)
        x: Tensor = self.head.fc(torch.cat((embedded, torch.stack(list(states))), dim=-1))
        return x


def node_history(
    context: Sequence[int], tree: TokenTree, node: int, sampling: SamplingParams
) -> Sequence[int]:
    """Return the text up to a node, for the repetition penalty; without one the context alone."""
    if sampling.repetition_penalty == 1.0:
        return context
    return [*context, *tree.tokens_on(tree.path(node))]


class StaticEagleDrafter(EagleDrafter):
    """Fill a static tree with the head's tokens.

    is_sampled  above temperature 0 siblings are sampled; else they are the most likely tokens
    """

    def __init__(self, *head: Any, tree: StaticTree, is_sampled: bool):
        super().__init__(*head)
        self.is_sampled = is_sampled
        self.below = defaultdict[int, list[int]](list)  # place in the tree -> places below it
        for place, (parent, _) in sorted(enumerate(tree), key=lambda one: one[1][1]):
            self.below[parent].append(place)

    def grow_tree(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = TokenTree([], [], [], [])
        places = {ROOT: ROOT}  # node of the draft -> its place in the static tree
        level, depth = [ROOT], 0
        while level and depth < max_draft_depth:
            rows, lower = self.run_nodes(tree, level), list[int]()
            for node, row in zip(level, rows, strict=True):
                below = self.below[places[node]]
                history = node_history(context, tree, node, sampling)
                drawn = self.draw_siblings(row, history, len(below), sampling, rng)
                for place, (token, q) in zip(below, drawn, strict=False):  # fewer if none is left
                    child = append_node(tree, token, node, q)
                    places[child] = place
                    if place in self.below and token not in self.ends:
                        lower.append(child)
            level, depth = lower, depth + 1
        return tree

    def draw_siblings(
        self, row: Any, history: Sequence[int], k: int, sampling: SamplingParams, rng: RandomSource
    ) -> list[tuple[int, Probs | None]]:
        """Return at most k tokens after a node, in draw order, each with its distribution."""
        if self.is_sampled and not sampling.greedy:
            return sample_siblings(sampling.probs(row, history), k, rng)
        if not k:  # no node of the tree is below this one
            return []
        k = min(k, self.head.rows.out)  # the head has rows for so many tokens
        return [(token, None) for token in rank_tokens(sampling, row, history, k)]


def find_eagle_head(request: Request) -> EagleHead:
    """Return the head of the request's target, made on the first call."""
    model = request.target.model  # type: ignore[attr-defined]
    return prepare_head(model, "eagle", EagleHead)


@technique(
    title="EAGLE",
    summary="one layer guesses the next states",
    paper="Li et al. 2024, arXiv 2401.15077",
    reported="2.7x to 3.5x, LLaMA2-Chat 70B (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    hidden=True,
    trained=TRAINED,
    knobs=(
        Knob("nodes", 25, "nodes of the tree", low=1, high=1024, small=(3, 1), ours=4),
        Knob(
            "draw",
            "sampled",
            "siblings above temperature 0: sampled without replacement, or the most likely tokens",
            choices=("sampled", "top_k"),
            small=("sampled", "top_k"),
        ),
    ),
)
def eagle(request: Request, *, nodes: int, draw: str) -> Decoder:
    """Return a decoder that drafts with the target's EAGLE head."""
    head = find_eagle_head(request)
    drafter = StaticEagleDrafter(
        request.target.model,  # type: ignore[attr-defined]
        head,
        request.stop.eos,
        request.forward_log,
        tree=build_static_tree(nodes, head.chances),
        is_sampled=draw == "sampled",
    )
    return request.decoder(drafter, verify_tree)
