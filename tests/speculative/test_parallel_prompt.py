"""PPD: one pass a round, the dynamic sparse tree and how it is built, prompts of virtual tokens."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.speculative.probed import (
    begin,
    expect_no_own_vocabulary,
    expect_nothing_after_an_end,
    expect_probes_to_end_with_the_context,
    list_drafted,
    propose,
    propose_after_a_round,
)
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.stage import Stage
from tinyspec.laws.traps import GREEDY
from tinyspec.laws.traps import parallel_prompt as traps
from tinyspec.laws.traps.bita import every_round_drafts, rows_stay_as_they_are
from tinyspec.lm.heads import RANKED, freeze_target, head_weights
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated import parallel_prompt as ppd
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("parallel_prompt")

# How often candidates of the first prompt were right on Vicuna-7B, 1.4B and 68M, as the trees in
# the authors' code say. The second and third rows are made up: they fall.
CURVES = [
    (0.483, 0.143, 0.074, 0.045, 0.031),
    (0.350, 0.146, 0.075, 0.047, 0.034),
    (0.151, 0.092, 0.065, 0.050, 0.042),
]


def falling(curve: tuple[float, ...], prompts: int = 3) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(0.7**i * chance for chance in curve) for i in range(prompts))


def prompted_network(prompts: int, virtual: int = 1, seed: int = 0) -> Model:
    """A network of ten tokens, so that all candidates of a prompt exist."""
    small = CARD.trained._replace(  # type: ignore[union-attr]
        small=ppd.PromptSettings(prompts=prompts, virtual=virtual)
    )
    return add_random_head(small_network(seed, 10), replace(CARD, trained=small), seed)


# ---------------------------------------------------------------------- traps


def test_trap_a_draft_is_what_the_training_forward_says() -> None:
    assert traps.check_prompt_drafts(CARD.make).branches > 150


def test_trap_the_loss_is_the_weighted_divergence() -> None:
    assert traps.loss_is_the_weighted_divergence(ppd.prompt_loss).cases == 3


def test_trap_the_draft_follows_the_state() -> None:
    assert traps.draft_follows_the_state(CARD.make).cases > 50


def test_trap_removal_loses_least() -> None:
    assert traps.removal_loses_least(ppd.allocate_prompts).cases > 50


def test_trap_tokens_per_round_are_those_of_a_long_run() -> None:
    assert traps.rounds_are_those_of_a_long_run(ppd.tokens_per_round).cases == 9 + 27


def test_trap_every_round_but_the_first_drafts_in_one_pass() -> None:
    make = partial(CARD.make, nodes=6)
    assert every_round_drafts(make, lambda seed: prompted_network(2, 2, seed)).cases == 4


def test_trap_the_targets_rows_stay_as_they_are() -> None:
    make = partial(CARD.make, nodes=9)
    assert rows_stay_as_they_are(make, lambda seed: prompted_network(2, 1, seed)).cases > 20


def test_the_draft_of_a_text_does_not_depend_on_the_past() -> None:
    """F1, where the number of prompts differs between tokens."""

    def make(request: Request) -> Any:
        return CARD.make(request, nodes=9, prompts=2)

    def network(seed: int, vocabulary: int) -> Model:
        return traps.prompted_network(seed, vocabulary)

    evidence = feature_laws.draft_is_function_of_text(make, network)
    assert evidence.cases > 100 and evidence.branches > 150


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, top_k=3), GREEDY])
@pytest.mark.slow
def test_the_joint_distribution_is_the_targets_in_every_state(sampling: SamplingParams) -> None:
    for seed in range(3):
        knobs = {"nodes": 7, "prompts": 2}
        stage = Stage(CARD, seed=seed, knobs=knobs, deep=True, vocabulary=4, sampling=sampling)
        expected, got = stage.reference().distribution(3, stage.prompt), stage.distribution(3)
        stage.judge(expected, got, stage.prompt, NETWORK_TOLERANCE)


# ---------------------------------------------------------------------- how trees are built


def test_the_chance_to_end_is_what_the_children_leave() -> None:
    """0: 0.5, of which 0.2 goes on to 2 and 0.1 to 3; 1: 0.25."""
    places = ((ROOT, 0), (ROOT, 1), (0, 0), (0, 1))
    accepted = ppd.path_chances(places, ((0.5, 0.25), (0.4, 0.2)))
    assert accepted == pytest.approx([0.5, 0.25, 0.2, 0.1])
    ends = ppd.end_chances(places, accepted)
    assert ends == pytest.approx([0.2, 0.25, 0.2, 0.1])
    assert sum(ends) == pytest.approx(0.5 + 0.25)  # a round ends somewhere below the newest token


def test_one_prompt_stays_after_every_candidate() -> None:
    assert ppd.allocate_prompts([0.3, 0.2, 0.1], [0.5, 0.6], 0) == [1, 1, 1]
    assert ppd.allocate_prompts([0.3, 0.2, 0.1], [0.5, 0.6], 100) == [2, 2, 2]
    assert ppd.allocate_prompts([0.3, 0.2], [0.5], 2) == [1, 1]
    assert ppd.allocate_prompts([], [0.5, 0.6], 4) == []


def test_a_prompt_that_loses_is_removed_before_one_that_gains() -> None:
    """The tree of state 2 is worth less than that of state 1 here, that of state 3 more."""
    assert ppd.allocate_prompts([0.5, 0.1], [0.5, 0.4, 0.6], 5) == [3, 2]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("nodes", [2, 3, 9, 20, 60])
def test_a_tree_keeps_within_its_nodes(curve: tuple[float, ...], nodes: int) -> None:
    trees = ppd.build_prompt_trees(nodes, falling(curve))
    assert len(trees) == 3
    for state, tree in enumerate(trees, 1):
        assert 1 <= len(tree.places) <= nodes // 2
        assert len(tree.places) + sum(tree.prompts) <= nodes
        assert set(tree.prompts) <= {1, 2, 3}
        draft = TokenTree((0,) * len(tree.places), [parent for parent, _ in tree.places])
        assert max(draft.depths()) <= state
        assert all(end > -1e-12 for end in tree.ends)


def long_run(trees: Any, chances: Any) -> float:
    return ppd.tokens_per_round(trees, [sum(ppd.path_chances(t.places, chances)) for t in trees])


@pytest.mark.parametrize("curve", CURVES)
def test_the_trees_are_worth_more_than_the_same_number_everywhere(curve: tuple[float, ...]) -> None:
    """The other trees have nodes / 4 candidates with three prompts each, as BiTA's draft would."""
    chances, nodes = falling(curve), 40
    best = ppd.build_prompt_trees(nodes, chances)
    equal = []
    for state in (1, 2, 3):
        places = ppd.build_static_tree(nodes // 4, chances[:state])
        ends = ppd.end_chances(places, ppd.path_chances(places, chances))
        equal.append(ppd.PromptTree(places, tuple(ends), (3,) * len(places)))
    assert long_run(best, chances) > long_run(equal, chances)


def test_more_nodes_are_worth_no_less_and_better_prompts_more() -> None:
    worth = [
        long_run(ppd.build_prompt_trees(nodes, falling(CURVES[1])), falling(CURVES[1]))
        for nodes in (4, 8, 16, 32, 64)
    ]
    assert worth == sorted(worth)
    of_curves = [long_run(ppd.build_prompt_trees(20, falling(c)), falling(c)) for c in CURVES]
    assert of_curves == sorted(of_curves, reverse=True)


@pytest.mark.parametrize("chances", [((0.0,) * 10,) * 3, ((1.0,) + (0.0,) * 9,) * 3, ((1.0,) * 3,)])
def test_chances_that_cannot_be_measured_break_nothing(chances: Any) -> None:
    trees = ppd.build_prompt_trees(12, chances)
    assert len(trees) == len(chances)
    assert all(len(tree.places) == len(tree.prompts) == len(tree.ends) for tree in trees)


def test_the_largest_trees_are_built_in_seconds() -> None:
    chances = tuple(tuple(0.5 ** (i + 1) for i in range(RANKED)) for _ in range(4))
    trees = ppd.build_prompt_trees(512, chances)
    assert all(len(tree.places) + sum(tree.prompts) <= 512 for tree in trees)


# ---------------------------------------------------------------------- the draft


def test_prompts_stand_after_the_newest_token_and_every_candidate() -> None:
    decoder, tree = propose_after_a_round(CARD, prompted_network(3), nodes=20)
    expected, drafted = decoder.drafter.trees[2], list_drafted(tree)
    assert [tree.parents[node] for node in drafted] == [parent for parent, _ in expected.places]
    groups = decoder.drafter.group_of
    assert [len(groups[node]) for node in (ROOT, *drafted)] == [3, *expected.prompts]
    assert len(set(expected.prompts)) > 1  # not everywhere as many


def test_virtual_tokens_are_chains_beside_each_other() -> None:
    decoder = begin(CARD, prompted_network(2, virtual=3), (0, 1))
    tree = propose(decoder)
    assert tree.tokens == [10, 11, 12, 13, 14, 15]  # 10 to 12 are prompt 0
    assert tree.parents == [ROOT, ROOT, ROOT, 0, 1, 2]
    assert decoder.drafter.group_of == {ROOT: [0, 1, 2, 3, 4, 5]}


def test_the_logits_of_a_prompt_are_the_mean_of_its_virtual_tokens() -> None:
    """Three equal virtual tokens say what one of them says."""
    one, three = prompted_network(2), prompted_network(2, virtual=3)
    weights = head_weights(one, "parallel_prompt")
    same = weights[ppd.PROMPTS].expand(2, 3, -1)
    three = three.with_extras({**three.extras, f"parallel_prompt/{ppd.PROMPTS}": same})
    drafters = []
    for model in (one, three):
        decoder = begin(CARD, model, (0, 1, 2))
        decoder.step(Seeded(0))
        drafters.append(decoder.drafter)
    for a, b in zip(drafters[0].logits, drafters[1].logits, strict=True):
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=NETWORK_TOLERANCE)


def test_nothing_follows_the_end_of_a_text() -> None:
    expect_nothing_after_an_end(CARD, prompted_network(3), nodes=30)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_no_candidate_is_deeper_than_the_tokens_that_are_wanted(n: int) -> None:
    _, tree = propose_after_a_round(CARD, prompted_network(3), n, nodes=30)
    assert max((tree.depths()[node] for node in list_drafted(tree)), default=0) == n


def test_prompts_end_with_the_context() -> None:
    expect_probes_to_end_with_the_context(CARD, prompted_network(3), nodes=20)


def test_a_prompt_of_one_token_is_enough() -> None:
    decoder = begin(CARD, prompted_network(2), (1,))
    assert all(decoder.step(Seeded(0)).tree.probe)
    assert not all(decoder.step(Seeded(1)).tree.probe)


def test_fewer_prompts_may_be_used_than_were_trained() -> None:
    model = prompted_network(3)
    for n in (1, 2, 3, 4):
        decoder = begin(CARD, model, (0, 1), prompts=n)
        assert propose(decoder).tokens == [10, 11, 12][:n]


# ---------------------------------------------------------------------- what is trained


def test_the_embeddings_are_all_that_is_trained() -> None:
    model = small_network(2)
    begun = ppd.initialize_prompts(
        freeze_target(model), ppd.PromptSettings(prompts=3, virtual=4), 0
    )
    assert {name: tuple(w.shape) for name, w in begun.items()} == {ppd.PROMPTS: (3, 4, 8)}
    assert ppd.count_prompts(begun) == 3


def test_a_vocabulary_of_its_own_is_refused() -> None:
    expect_no_own_vocabulary(ppd.PromptSettings)
