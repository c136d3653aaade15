"""PPD (Chen et al. 2025): the draft follows the state, and the trees are worth most."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.lm.heads import RANKED, RANKS, add_head, freeze_target, head_weights
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated import parallel_prompt
from tinyspec.speculative.integrated.parallel_prompt import PromptDrafter, PromptTree
from tinyspec.speculative.probing import ProbeGroupDrafter
from tinyspec.technique import TrainingBatch, find_technique
from tinyspec.tree import ROOT, TokenTree

PLACED = feature_laws.DRAFT_OF_TRAINING
AIMED = "prompt j is trained on the target's distribution of the token j + 2 places on"
STATE = "the draft is that of the number of prompts after the last accepted token"
REMOVED = "no other way to remove prompts loses less, if each further prompt is worth less"
STEADY = "tokens per round are those of a long run of rounds"

CHANCES = ((0.5, 0.2, 0.1), (0.4, 0.2, 0.1))  # of two prompts


def prompted_network(seed: int, vocabulary: int = 4) -> Model:
    """Return a small network with random prompts, two of two virtual tokens each."""
    technique = find_technique("parallel_prompt")
    return add_random_head(small_network(seed, vocabulary), technique, seed)


def check_prompt_drafts(build: Build) -> Evidence:
    """Check law F2 on random prompts, where the number of prompts differs between tokens."""
    make = partial(build, nodes=9, prompts=2)
    return feature_laws.check_random_heads(find_technique("parallel_prompt"), make)


@collect_evidence(AIMED)
def loss_is_the_weighted_divergence(loss: Any) -> Iterator[int]:
    """Check the loss of a short text, of which every position is trained, against its formula.

    Two tokens of each distribution are known. The others count as one token.
    The judge runs the text up to each position with the prompts after it, one at a time.
    """
    technique, n = find_technique("parallel_prompt"), 8
    for seed in range(3):
        model = prompted_network(seed)
        weights, target = head_weights(model, "parallel_prompt"), freeze_target(model)
        ids = torch.tensor([[0, 3, 1, 2, 2, 0, 1, 3]])
        top_ids = torch.tensor([[[(i + seed) % 4, (i + seed + 1) % 4] for i in range(n)]])
        top_probs = torch.tensor([[[0.3 + i / 20, 0.2] for i in range(n)]], dtype=torch.float64)
        known, states = torch.ones_like(ids, dtype=torch.bool), torch.empty(1, 0, n, 8)
        got = float(loss(weights, target, TrainingBatch(ids, known, states, top_ids, top_probs)))
        expected = 0.0
        for depth in (0, 1):
            of_depth = []
            for t in range(n - 1 - 2):
                row = feature_laws.trained_forward(
                    technique, model, ids[0, : t + 2].tolist(), [0] * depth
                )
                assert row is not None
                at = t + 1 + depth
                known_part = top_probs[0, at], row.softmax(-1)[top_ids[0, at]]
                p, q = (torch.cat((x, 1 - x.sum(-1, keepdim=True))) for x in known_part)
                of_depth.append(float((p * (p / q).log()).sum()))
            expected += 0.8**depth * sum(of_depth) / len(of_depth) / 2
        if not math.isclose(got, expected, rel_tol=1e-3):  # the loss is float32
            accuse(AIMED, expected, got, network=seed, text=ids[0].tolist())
        yield 1


def set_chances(model: Model, chances: Sequence[Sequence[float]]) -> Model:
    """Return a model whose prompts have these chances by rank."""
    ranks = torch.zeros(len(chances), RANKED)
    for row, of_prompt in zip(ranks, chances, strict=True):
        row[: len(of_prompt)] = torch.tensor(of_prompt)
    weights = {**head_weights(model, "parallel_prompt"), RANKS: ranks}
    return add_head(model, "parallel_prompt", weights, {"prompts": 2, "virtual": 2})


def describe_draft(tree: TokenTree) -> list[tuple[int, int]]:
    """Return the depth of each draft token, and how many prompts stand after it; ROOT first.

    Each prompt has two virtual tokens.
    """
    depths, after = tree.depths(), {ROOT: 0}
    of_chain = dict[int, int]()  # node -> the draft token or ROOT that its chain stands after
    for node, parent in enumerate(tree.parents):
        if not tree.probe[node]:
            after[node] = 0
            continue
        of_chain[node] = of_chain.get(parent, parent)
        after[of_chain[node]] += 1
    return [(0 if node == ROOT else depths[node], n // 2) for node, n in after.items()]


# (depth, prompts) of the newest token and of every candidate, by hand, for 7 nodes and CHANCES. One
# level: 0.5, 0.2 and 0.1 are accepted, in sum 0.8. Two levels, three paths: 0.5, 0.2 and 0.5 * 0.4,
# in sum 0.9; they are accepted last with 0.3, 0.2 and 0.2. Two paths would be worth 0.7, less than
# one level. Three candidates leave room for four prompts: one after each, and the fourth after
# the first candidate, which is most often the last one.
OF_STATE = {
    0: [(0, 2)],
    1: [(0, 2), (1, 2), (1, 1), (1, 1)],
    2: [(0, 2), (1, 2), (1, 1), (2, 1)],
}


@collect_evidence(STATE)
def draft_follows_the_state(build: Build) -> Iterator[int]:
    """Check the shape of every draft of some texts against the prompts of the round before."""
    seen = set[int]()
    for seed in range(6):
        model = set_chances(prompted_network(seed), CHANCES)
        decoder = begin_decoder(build, [model], (0, 1, 2), max_new_tokens=24, nodes=7)
        state = 0
        while len(decoder.new) < 20:  # before the end of the text cuts the draft
            round = decoder.step(Seeded(decoder.rounds))
            got = describe_draft(round.tree)
            case = {"network": seed, "prompts after the last accepted token": state}
            expect_equal(STATE, OF_STATE[state], got, **case)
            last = (ROOT, *round.verdict.accepted)[len(round.tokens) - 1]
            state = got[1 + last][1]
            seen.add(state)
            yield 1
    if seen != {1, 2}:
        accuse(STATE, "rounds in both states", seen)


def list_all_ways(n: int, states: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield every number of prompts after each of n candidates, at least 1, in sum `most`."""
    for ways in product(range(1, states + 1), repeat=n):
        if sum(ways) == most:
            yield ways


@collect_evidence(REMOVED)
def removal_loses_least(hang: Callable[..., Sequence[int]]) -> Iterator[int]:
    """Check the worth of the prompts that are left against all ways to leave as many."""
    tables = [(0.4, 0.6), (0.4, 0.6, 0.7), (0.3, 0.5, 0.55, 0.58)]  # further prompts gain less
    candidates = [(0.3,), (0.5, 0.2), (0.1, 0.4, 0.2), (0.25, 0.2, 0.05, 0.01)]
    for values, ends in product(tables, candidates):
        for most in range(len(ends), len(ends) * len(values) + 1):

            def worth(
                prompts: Sequence[int],
                ends: Sequence[float] = ends,
                values: Sequence[float] = values,
            ) -> float:
                return sum(end * values[k - 1] for end, k in zip(ends, prompts, strict=True))

            got = hang(ends, values, most)
            best = max(map(worth, list_all_ways(len(ends), len(values), most)))
            if sum(got) > most or worth(got) < best - 1e-12:
                case = {"ends": ends, "values": values, "prompts": most}
                accuse(REMOVED, f"worth {best:.6f}", f"worth {worth(got):.6f}: {got}", **case)
            yield 1


@collect_evidence(STEADY)
def rounds_are_those_of_a_long_run(count: Callable[..., float]) -> Iterator[int]:
    """Check tokens per round by hand for two states, and by many rounds for three.

    By hand: state 1 stays with a, state 2 goes to state 1 with b, and all else leads to state 2. So
    pi_1 = a pi_1 + b pi_2, which gives pi_1 : pi_2 = b : 1 - a.
    """
    for a, b in product((0.0, 0.25, 0.5), (0.1, 0.6, 1.0)):
        trees = [PromptTree(((ROOT, 0),), (chance,), (1,)) for chance in (a, b)]
        expected = 1 + (b * a + (1 - a) * 2 * b) / (b + 1 - a)
        got = count(trees, (a, 2 * b))  # accepted tokens of a round in state 1 and 2
        if not math.isclose(got, expected, rel_tol=1e-9):
            accuse(STEADY, expected, got, stays_in_state_1=a, from_state_2_to_1=b)
        yield 1
    ends = ((0.2, 0.3), (0.1, 0.2), (0.3, 0.1))
    for numbers in product((1, 2, 3), repeat=3):
        pairs = [(numbers[i], numbers[i - 1]) for i in range(3)]
        trees = [
            PromptTree(((ROOT, 0), (ROOT, 1)), of_tree, prompts)
            for of_tree, prompts in zip(ends, pairs, strict=True)
        ]
        values, share, total, rounds = (0.5, 0.7, 0.8), np.array([0.0, 0.0, 1.0]), 0.0, 400
        for number in range(2 * rounds):
            total += float(share @ np.array(values)) if number >= rounds else 0.0
            after = np.zeros(3)
            for chance, tree in zip(share, trees, strict=True):
                for end, n in zip(tree.ends, tree.prompts, strict=True):
                    after[n - 1] += chance * end
                after[2] += chance * (1 - sum(tree.ends))
            share = after
        got = count(trees, values)
        if not math.isclose(got, 1 + total / rounds, rel_tol=1e-6):
            accuse(STEADY, 1 + total / rounds, got, prompts=pairs)
        yield 1


TRAPS = [
    Trap(PLACED, check_prompt_drafts, card("parallel_prompt")),
    Trap(AIMED, loss_is_the_weighted_divergence, lambda: parallel_prompt.prompt_loss),
    Trap(STATE, draft_follows_the_state, card("parallel_prompt")),
    Trap(REMOVED, removal_loses_least, lambda: parallel_prompt.allocate_prompts),
    Trap(STEADY, rounds_are_those_of_a_long_run, lambda: parallel_prompt.tokens_per_round),
]

_ppd = partial(Toy, technique="parallel_prompt")

TOYS = [
    _ppd(
        "the prompts after the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        ProbeGroupDrafter.observe,
        law=PLACED,
    ),
    _ppd(
        "the first virtual token alone",
        "sum(rows[at : at + self.virtual]) / self.virtual",
        "rows[at]",
        PromptDrafter.observe,
        law=PLACED,
    ),
    _ppd(
        "virtual tokens that see each other",
        "parents.append(tips[i])",
        "parents.append(tips[i - 1])",
        PromptDrafter.propose,
        law=PLACED,
    ),
    _ppd(
        "prompts trained one place early",
        "at = anchors + 1 + depth",
        "at = anchors + depth",
        parallel_prompt.prompt_loss,
        law=AIMED,
    ),
    _ppd(
        "the deepest tree in every state",
        "state = len(self.logits) - 1",
        "state = len(self.trees) - 1",
        PromptDrafter.propose,
        law=STATE,
    ),
    _ppd(
        "as many prompts after every candidate",
        "prompts = [len(values)] * len(ends)",
        "return [min(most // len(ends), len(values))] * len(ends)\nprompts = []",
        parallel_prompt.allocate_prompts,
        law=REMOVED,
    ),
    _ppd(
        "a round without a draft after each rejected one, as the authors count",
        "return 1 + float(find_steady_state(trees) @ np.array(values))",
        """shares = find_steady_state(trees)
rejected = float(shares @ np.array([1 - sum(tree.ends) for tree in trees]))
return 1 + float(shares @ np.array(values)) / (1 + rejected)""",
        parallel_prompt.tokens_per_round,
        law=STEADY,
    ),
]
