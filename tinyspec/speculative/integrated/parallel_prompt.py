"""PPD, parallel prompt decoding: trained prompt tokens guess, along a tree that depends on them.

Paper: Chen et al., Findings of EMNLP 2025, arXiv 2405.18628. Trained are the embeddings of K prompt
tokens. The target is not trained. (`ppd` is another method, predictive pipelined decoding.)

Idea. As in BiTA, prompt tokens stand after the newest token and after *every* draft token:

    newest m m m   x_1 m m   x_2 m   ...          each chain sees its own path only

Prompt j after the token at position t guesses the token t + 2 + j. Whatever is accepted, the
prompts after the last accepted token are the next draft: verify and draft in one pass. A prompt
may be an ensemble of several virtual tokens: virtual token i sees virtual token i of the earlier
prompts and no other, and the logits of a prompt are the mean of theirs.

Where a token is unlikely to be the last accepted one, fewer prompts stand after it. The *state* is
how many prompts the last accepted token had. In state k the draft has k levels. Its tree, the
*dynamic sparse tree*, is built from how often candidate r of prompt j was right, a[j][r]:

    f(v)     = product of a over the path to v             chance that v is accepted
    end(v)   = f(v) - sum of f over the children of v      chance that v is accepted last
    value(k) = sum of f over the tree of state k           accepted tokens of a round

1. Candidates: the paths of greatest f. 2. K prompts after each. While there are too many, remove
the one that loses least; the last one after v stays:

    loss of the k-th prompt after v = end(v) (value(k) - value(k - 1))

3. The sizes of the trees are those that give the most tokens a round in the long run. end says how
often a round in state k leads to state k'. With all drafts rejected the newest token has all K
prompts. The shares pi of the states solve pi = pi P, and a round gives 1 + sum of pi_k value(k).

Training minimises the divergence of each prompt from the target, at random positions, as in the
authors' code:

    (1 / K) sum over j of 0.8^j KL(p(. | tokens to t + 1 + j) || q_j)

Guarantee: EXACT, at any temperature: candidates are point masses.
Pitfall: the chain after the wrong token, or virtual tokens that see each other. The output stays
right. Law F2 (laws/feature_laws.py) detects both.
Tests: tests/speculative/test_parallel_prompt.py (one pass a round; the state machine by hand; the
removal against all ways to remove; the steady state by hand; the loss against its formula).
Additions of ours: trees for other K than 3. The authors try every size of a tree; for K = 3 we try
at most 16. Their builder counts a further round after a rejected draft. Their decoder has
none, so we count none (laws/museum).
Left out: prompts that begin as the embeddings of a text, further heads, exits and prefixes of their
code; weights of virtual tokens; the choice of `nodes` from the times of a machine. The authors
train on the target's greedy text after a cut, against whole distributions. Our texts are sampled,
and of each distribution the most probable tokens are known; the others count as one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKS, FrozenTarget, head_weights
from tinyspec.lm.probes import run_probe_groups
from tinyspec.speculative.drafting.distillspec import append_rest, kl_divergence
from tinyspec.speculative.probing import (
    ProbeGroupDrafter,
    ProbeSettings,
    draw_anchors,
    init_probe_embeddings,
)
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
from tinyspec.tree import ROOT, TokenTree

PROMPTS = "prompts.weight"  # [K, virtual tokens of each, d]
DECAY = 0.8  # of a prompt's loss against the prompt before it
CHOICES = 256  # most combinations of tree sizes that are tried; for K = 3: 16 sizes of two trees

Chances = tuple[tuple[float, ...], ...]
"""For each prompt, how often its candidate of each rank was right."""

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class PromptSettings(ProbeSettings):
    """The section [head] of a recipe.

    prompts  prompt tokens after the newest token, and depth of a draft
    virtual  virtual tokens of each prompt
    """

    METHOD = "PPD"
    prompts: int = 3
    virtual: int = 1


def prompt_shapes(config: Config, settings: PromptSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of the embeddings."""
    return {PROMPTS: (settings.prompts, settings.virtual, config.d_model)}


def initialize_prompts(
    target: FrozenTarget, settings: PromptSettings, seed: int
) -> dict[str, Tensor]:
    """Return prompts that begin near the mean embedding."""
    begun = init_probe_embeddings(target, settings.prompts * settings.virtual, seed)
    return {PROMPTS: begun.view(settings.prompts, settings.virtual, -1)}


def count_prompts(weights: HeadWeights) -> int:
    """Return how many prompts there are."""
    return len(weights[PROMPTS])


def run_prompts(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, anchors: Tensor, n: int
) -> Tensor:
    """Return the states [B, G, n, d] of n prompts after each anchor: means over virtual tokens.

    The head is linear, so it turns the mean of states into the mean of logits.
    """
    assert target.blocks is not None
    chains = weights[PROMPTS][:n].unbind(1)  # one for each virtual token
    states = [run_probe_groups(target.blocks, ids, anchors, chain) for chain in chains]
    return torch.stack(states).mean(0)


def predict_by_prompt(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V] of a prompt after every position of a text."""
    anchors = torch.arange(ids.shape[1], device=ids.device)
    return F.linear(run_prompts(weights, target, ids, anchors, depth + 1)[:, :, -1], target.head)


def prompt_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the weighted divergence of all prompts from the target, after random positions."""
    n, total = count_prompts(weights), torch.zeros((), device=batch.ids.device)
    anchors = draw_anchors(batch, n)
    states = run_prompts(weights, target, batch.ids, anchors, n)
    for depth in range(n):
        at = anchors + 1 + depth  # the target's distribution of token t + 2 + depth stands there
        inside = at < batch.ids.shape[1]
        known = batch.is_answer[:, at[inside]]
        logits = F.linear(states[:, inside, depth][known], target.head).float()
        q = logits.softmax(-1).gather(-1, batch.top_ids[:, at[inside]][known])
        p = batch.top_probs[:, at[inside]][known]
        divergence = kl_divergence(append_rest(p), append_rest(q)).sum() / max(len(p), 1)
        total = total + DECAY**depth * divergence / n
    return total


# ------------------------------------------------------------------ the dynamic sparse tree


class PromptTree(NamedTuple):
    """The draft of a state: its candidates, and the prompts after each of them.

    places   (parent, rank) of each candidate
    ends     chance of each candidate that it is accepted last
    prompts  how many prompts stand after each candidate
    """

    places: StaticTree
    ends: tuple[float, ...]
    prompts: tuple[int, ...]


def path_chances(places: StaticTree, chances: Chances) -> list[float]:
    """Return the chance of each candidate that it is accepted.

    >>> path_chances(((-1, 0), (0, 1)), ((0.5, 0.25), (0.5, 0.25)))
    [0.5, 0.125]
    """
    depth, accepted = {ROOT: 0}, {ROOT: 1.0}
    for place, (parent, rank) in enumerate(places):
        accepted[place] = accepted[parent] * chances[depth[parent]][rank]
        depth[place] = depth[parent] + 1
    return [accepted[place] for place in range(len(places))]


def end_chances(places: StaticTree, accepted: Sequence[float]) -> list[float]:
    """Return the chance of each candidate that it is accepted last.

    >>> end_chances(((-1, 0), (0, 1)), [0.5, 0.125])
    [0.375, 0.125]
    """
    ends = list(accepted)
    for chance, (parent, _) in zip(accepted, places, strict=True):
        if parent != ROOT:
            ends[parent] -= chance
    return ends


def allocate_prompts(ends: Sequence[float], values: Sequence[float], most: int) -> list[int]:
    """Return how many prompts stand after each candidate.

    There is at least 1 after each, and in all at most `most`, if that is enough for 1 each.

    ends    chance of each candidate that it is accepted last
    values  accepted tokens of a round in state 1, 2, ...; there are as many prompts as states

    All prompts are there at first. The one that loses least is removed, again and again. If each
    further prompt is worth less than the one before it, no other way to remove them loses less.

    >>> allocate_prompts([0.5, 0.1], [0.4, 0.6, 0.7], 4)
    [3, 1]
    """
    prompts = [len(values)] * len(ends)

    def loss(place: int) -> float:
        k = prompts[place]
        return ends[place] * (values[k - 1] - values[k - 2])

    waiting = [(loss(place), place) for place in range(len(ends)) if len(values) > 1]
    heapify(waiting)
    for _ in range(sum(prompts) - most):
        if not waiting:  # one prompt is left after each
            break
        _, place = heappop(waiting)
        prompts[place] -= 1
        if prompts[place] > 1:
            heappush(waiting, (loss(place), place))
    return prompts


def find_steady_state(trees: Sequence[PromptTree]) -> Any:
    """Return the share of rounds in state 1, 2, ..., [K], in the long run.

    trees  of state 1, 2, ...

    >>> all_or_none = [PromptTree(((-1, 0),), (0.5,), (1,)), PromptTree(((-1, 0),), (1.0,), (1,))]
    >>> find_steady_state(all_or_none).round(6).tolist()
    [0.666667, 0.333333]
    """
    transitions = np.zeros((len(trees), len(trees)))  # from a state to the next one
    for row, tree in zip(transitions, trees, strict=True):
        for end, n in zip(tree.ends, tree.prompts, strict=True):
            row[n - 1] += end
        row[-1] += 1 - sum(tree.ends)  # all are rejected: the newest token has all prompts
    equations = np.vstack((transitions.T - np.eye(len(trees)), np.ones(len(trees))))
    return np.linalg.lstsq(equations, np.append(np.zeros(len(trees)), 1), rcond=None)[0]


def tokens_per_round(trees: Sequence[PromptTree], values: Sequence[float]) -> float:
    """Return how many tokens a round gives in the long run, the recovered or bonus token included.

    values  accepted tokens of a round in state 1, 2, ...
    """
    return 1 + float(find_steady_state(trees) @ np.array(values))


@cache
def build_prompt_trees(nodes: int, chances: Chances) -> tuple[PromptTree, ...]:
    """Return the draft of state 1, 2, ..., K, for the most tokens per round.

    nodes    candidates and prompts of a tree, without the prompts after the newest token; a prompt
             counts once, whatever the number of its virtual tokens
    chances  for each of the K prompts

    As in the authors' code, a tree of two or more levels has from nodes / (K + 1) candidates, with
    room for all prompts, to nodes / 2, with room for one prompt after each.
    """
    states, largest = len(chances), nodes // 2
    smallest = min(max(nodes // (states + 1), 1), largest)
    tried = int(CHOICES ** (1 / max(states - 1, 1)))  # sizes of a tree
    sizes = range(smallest, largest + 1, -(-(largest + 1 - smallest) // tried))
    options = [[build_static_tree(largest, chances[:1])]]
    options += [[build_static_tree(n, chances[:k]) for n in sizes] for k in range(2, states + 1)]
    accepted = {places: path_chances(places, chances) for places in chain(*options)}
    ends = {places: end_chances(places, accepted[places]) for places in accepted}
    best, most_tokens = tuple[PromptTree, ...](), -math.inf
    for chosen in product(*options):
        values, trees = [sum(accepted[places]) for places in chosen], list[PromptTree]()
        for places in chosen:
            prompts = allocate_prompts(ends[places], values, nodes - len(places))
            trees.append(PromptTree(places, tuple(ends[places]), tuple(prompts)))
        if (tokens := tokens_per_round(trees, values)) > most_tokens:
            best, most_tokens = tuple(trees), tokens
    return best


# ------------------------------------------------------------------ the draft


class PromptDrafter(ProbeGroupDrafter):
    """Draft from the prompts after the last accepted token, along the tree of their number.

    trees         of state 1, 2, ...: there are as many prompts
    virtual       virtual tokens of each prompt
    first_prompt  id of the first one; those of a prompt follow each other
    positions     tokens that the target's context holds
    ends          tokens that nothing follows
    """

    def __init__(
        self,
        trees: Sequence[PromptTree],
        virtual: int,
        first_prompt: int,
        positions: int,
        ends: frozenset[int],
    ):
        super().__init__(range(first_prompt, first_prompt + len(trees) * virtual), positions)
        self.trees, self.virtual, self.ends = trees, virtual, ends
        self.widths = [rank_widths(tree.places) for tree in trees]

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.group_of = {}
        if max_draft_depth <= 0:
            return TokenTree()
        tokens, parents, prompts = list[int](), list[int](), {ROOT: len(self.trees)}
        if self.logits:
            state = len(self.logits) - 1
            tree, rows = self.trees[state], self.logits[:max_draft_depth]
            tokens, parents, node_of = fill_static_tree(
                tree.places, rows, self.widths[state], context, sampling, self.ends
            )
            prompts |= {node: tree.prompts[place] for place, node in node_of.items()}
        drafted, depths = len(tokens), [0, *TokenTree(tokens, parents).depths()]  # ROOT first
        for node, n in prompts.items():
            fits = min(n, self.positions - len(context) - depths[node + 1])
            self.group_of[node] = []
            tips = [node] * self.virtual  # of the chain of each virtual token
            for j in range(max(fits, 0)):
                for i in range(self.virtual):
                    tokens.append(self.ids[j * self.virtual + i])
                    parents.append(tips[i])
                    tips[i] = len(tokens) - 1
                self.group_of[node] += tips
        probe = [False] * drafted + [True] * (len(tokens) - drafted)
        return TokenTree(tokens, parents, (None,) * len(tokens), probe)

    def observe(self, round: Round) -> None:
        super().observe(round)
        rows = self.logits  # of every virtual token
        starts = range(0, len(rows), self.virtual)
        self.logits = [sum(rows[at : at + self.virtual]) / self.virtual for at in starts]


@technique(
    title="PPD: parallel prompt decoding",
    summary="prompt tokens draft along a dynamic tree",
    paper="Chen et al. 2025, arXiv 2405.18628",
    reported="up to 2.49x (abstract)",
    family="integrated",
    guarantee=Guarantee.EXACT,
    point_masses=True,
    hidden=True,
    trained=Trained(
        PromptSettings,
        lambda config, settings: (),
        prompt_shapes,
        initialize_prompts,
        count_prompts,
        predict_by_prompt,
        prompt_loss,
        small=PromptSettings(prompts=2, virtual=2),
    ),
    knobs=(
        Knob(
            "nodes",
            60,  # the authors' trees have 60, 105 and 285, by the model
            "candidates and prompts of a tree, without the prompts after the newest token",
            low=2,
            high=512,
            small=(6, 3),
            ours=9,
        ),
        Knob("prompts", 3, "prompts that are used, at most", low=1, high=4, small=(2, 1)),
    ),
)
def parallel_prompt(request: Request, *, nodes: int, prompts: int) -> Decoder:
    """Return a decoder that drafts with the target's prompt tokens."""
    target: Any = request.target
    model, weights = target.model, head_weights(target.model, "parallel_prompt")
    own = weights[PROMPTS][:prompts].to(model.device, model.state_dtype)  # [K, virtual, d]
    target.set_probe_embeddings(own.flatten(0, 1))
    ranks = weights[RANKS][: len(own)].clamp(0, 1).tolist()
    drafter = PromptDrafter(
        build_prompt_trees(nodes, tuple(map(tuple, ranks))),
        own.shape[1],
        model.config.vocab_size,
        request.positions or model.config.max_positions,
        request.stop.eos,
    )
    return request.decoder(drafter, verify_tree)
