"""PPD: one pass a round, the dynamic sparse tree and how it is built, prompts of virtual tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.stage import Stage
from tinyspec.laws.traps import begin_decoder, run_all_rounds
from tinyspec.laws.traps import parallel_prompt as traps
from tinyspec.lm.heads import RANKED, freeze_target, head_weights
from tinyspec.lm.model import Model
from tinyspec.speculative.integrated import parallel_prompt as ppd
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("parallel_prompt")
GREEDY = SamplingParams(0.0)

# How often candidates of the first prompt were right on Vicuna-7B, 1.4B and 68M, as the trees in
# the authors' code say. The second and third rows are made up: they fall.
CURVES = [
    (0.483, 0.143, 0.074, 0.045, 0.031),
    (0.350, 0.146, 0.075, 0.047, 0.034),
    (0.151, 0.092, 0.065, 0.050, 0.042),
]


def falling(curve: tuple[float, ...], prompts: int = 3) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(0.7**i * chance for chance in curve) for i in range(prompts))


def begin(model: Model, text: Any, ends: frozenset[int] = frozenset(), **knobs: Any) -> Any:
    stop = StoppingCriteria(eos=ends, max_new_tokens=30)
    request = Request(model.session(), sampling=GREEDY, stop=stop)
    request.positions = model.config.max_positions
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


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
    assert traps.removal_loses_least(ppd.hang_prompts).cases > 50


def test_trap_tokens_per_round_are_those_of_a_long_run() -> None:
    assert traps.rounds_are_those_of_a_long_run(ppd.tokens_per_round).cases == 9 + 27


def test_every_round_but_the_first_drafts_in_one_pass() -> None:
    for seed in range(3):
        model = prompted_network(2, 2, seed)
        decoder = begin_decoder(CARD.make, [model], (0, 1, 2), max_new_tokens=30, nodes=6)
        rounds = run_all_rounds(decoder)
        drafted = [not all(round.tree.probe) for round in rounds if round.tree.tokens]
        assert drafted == [False] + [True] * (len(drafted) - 1)
        assert {len(round.calls) + len(round.draft_calls) for round in rounds} == {1}


def test_the_draft_of_a_text_does_not_depend_on_the_past() -> None:
    """F1, where the number of prompts differs between tokens."""

    def make(request: Request) -> Any:
        return CARD.make(request, nodes=9, prompts=2)

    def network(seed: int, vocabulary: int) -> Model:
        return traps.prompted_network(seed, vocabulary)

    evidence = feature_laws.draft_is_function_of_text(make, network)
    assert evidence.cases > 100 and evidence.branches > 150


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.7, top_k=3), GREEDY])
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


def test_one_prompt_stays_behind_every_candidate() -> None:
    assert ppd.hang_prompts([0.3, 0.2, 0.1], [0.5, 0.6], 0) == [1, 1, 1]
    assert ppd.hang_prompts([0.3, 0.2, 0.1], [0.5, 0.6], 100) == [2, 2, 2]
    assert ppd.hang_prompts([0.3, 0.2], [0.5], 2) == [1, 1]
    assert ppd.hang_prompts([], [0.5, 0.6], 4) == []


def test_a_prompt_that_loses_is_removed_before_one_that_gains() -> None:
    """The tree of state 2 is worth less than that of state 1 here, that of state 3 more."""
    assert ppd.hang_prompts([0.5, 0.1], [0.5, 0.4, 0.6], 5) == [3, 2]


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


def test_prompts_stand_behind_the_newest_token_and_every_candidate() -> None:
    decoder = begin(prompted_network(3), (0, 1), nodes=20)
    decoder.step(Seeded(0))
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    expected = decoder.drafter.trees[2]
    drafted = [node for node, probe in enumerate(tree.probe) if not probe]
    assert [tree.parents[node] for node in drafted] == [parent for parent, _ in expected.places]
    groups = decoder.drafter.group_of
    assert [len(groups[node]) for node in (ROOT, *drafted)] == [3, *expected.prompts]
    assert len(set(expected.prompts)) > 1  # not everywhere as many


def test_virtual_tokens_are_chains_beside_each_other() -> None:
    decoder = begin(prompted_network(2, virtual=3), (0, 1))
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
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
        decoder = begin(model, (0, 1, 2))
        decoder.step(Seeded(0))
        drafters.append(decoder.drafter)
    for a, b in zip(drafters[0].logits, drafters[1].logits, strict=True):
        assert torch.allclose(torch.as_tensor(a), torch.as_tensor(b), atol=NETWORK_TOLERANCE)


def test_nothing_follows_the_end_of_a_text() -> None:
    decoder = begin(prompted_network(3), (0, 1), frozenset(range(10)), nodes=30)
    decoder.step(Seeded(0))
    decoder.finished = None
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    assert {up for up, probe in zip(tree.parents, tree.probe, strict=True) if not probe} == {ROOT}


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_no_candidate_is_deeper_than_the_tokens_that_are_wanted(n: int) -> None:
    decoder = begin(prompted_network(3), (0, 1), nodes=30)
    decoder.step(Seeded(0))
    tree = decoder.drafter.propose(decoder.context, n, GREEDY, Seeded(0))
    deepest = [d for d, probe in zip(tree.depths(), tree.probe, strict=True) if not probe]
    assert max(deepest, default=0) == n


def test_prompts_end_with_the_context() -> None:
    model = prompted_network(3)
    decoder = begin(model, [0, 1] * 29 + [2], nodes=20)  # 59 of 64 positions
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert len(decoder.context) == 64


def test_a_prompt_of_one_token_is_enough() -> None:
    decoder = begin(prompted_network(2), (1,))
    assert all(decoder.step(Seeded(0)).tree.probe)
    assert not all(decoder.step(Seeded(1)).tree.probe)


def test_fewer_prompts_may_be_used_than_were_trained() -> None:
    model = prompted_network(3)
    for n in (1, 2, 3, 4):
        decoder = begin(model, (0, 1), prompts=n)
        tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
        assert tree.tokens == [10, 11, 12][:n]


def test_the_rows_of_candidates_are_the_targets() -> None:
    model = prompted_network(2)
    decoder = begin(model, (0, 1, 2), nodes=9)
    text = list(decoder.context)
    for _ in range(6):
        round = decoder.step(Seeded(decoder.rounds))
        for node, probe in enumerate(round.tree.probe):
            if not probe:
                path = round.tree.tokens_on(round.tree.path(node))
                row, expected = round.scores.logits[node + 1], model.logits([*text, *path])[-1]
                assert torch.allclose(row, expected, rtol=0, atol=NETWORK_TOLERANCE)
        text += round.tokens


# ---------------------------------------------------------------------- what is trained


def test_the_embeddings_are_all_that_is_trained() -> None:
    model = small_network(2)
    begun = ppd.begin_prompts(freeze_target(model), ppd.PromptSettings(prompts=3, virtual=4), 0)
    assert {name: tuple(w.shape) for name, w in begun.items()} == {ppd.PROMPTS: (3, 4, 8)}
    assert ppd.count_prompts(begun) == 3


def test_a_vocabulary_of_its_own_is_refused() -> None:
    with pytest.raises(TinyspecError, match="draft_vocab"):
        ppd.PromptSettings(draft_vocab=20)
