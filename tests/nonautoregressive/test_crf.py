"""The CRF equals an enumeration of all sentences: log Z, marginals, the best path."""

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from tinyspec.laws.traps.nar_crf import score_sentences, sum_in_logs
from tinyspec.nonautoregressive.crf import (
    DOWN,
    Lattice,
    build_lattice,
    dynamic_transition_shapes,
    find_best_path,
    log_likelihood,
    log_partition,
    score_choice,
    static_transition_shapes,
    transition_matrices,
    word_logprobs,
)

RANK, WIDTH = 2, 3
SIZES = [(2, 1), (2, 5), (4, 3), (5, 4), (16, 3), (8, 4)]  # words and places: V^T <= 4096
TRANSITIONS = ("none", "static", "dynamic")


def random_weights(words: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = static_transition_shapes(words, RANK) | dynamic_transition_shapes(WIDTH, RANK)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def random_inputs(words: int, places: int, seed: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Emissions and states."""
    generator = torch.Generator().manual_seed(100 + seed)
    shape = (rows, places, words)
    emissions = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return emissions, torch.randn(rows, places, WIDTH, generator=generator, dtype=torch.float64)


def enumerate_sentences(
    weights: dict[str, Tensor], emissions: Tensor, states: Tensor, transitions: str
) -> dict[tuple[int, ...], float]:
    """The score of every sentence of all words."""
    candidates = [range(emissions.shape[1])] * len(emissions)
    return score_sentences(weights, emissions.tolist(), states, transitions, candidates)


def whole_lattice(words: int, places: int, seed: int, transitions: str) -> Lattice:
    """All words are candidates."""
    emissions, states = random_inputs(words, places, seed)
    slots = torch.ones(1, places, dtype=torch.bool)
    return build_lattice(random_weights(words, seed), emissions, slots, words, transitions, states)


@pytest.mark.parametrize("transitions", TRANSITIONS)
@pytest.mark.parametrize(("words", "places"), SIZES)
def test_it_equals_an_enumeration_of_all_sentences(
    words: int, places: int, transitions: str
) -> None:
    """log Z; the marginals, as its gradient; Viterbi; the probability of the best sentence."""
    for seed in range(2):
        weights = random_weights(words, seed)
        emissions, states = random_inputs(words, places, seed)
        scores = enumerate_sentences(weights, emissions[0], states[0], transitions)
        whole = sum_in_logs(list(scores.values()))
        slots = torch.ones(1, places, dtype=torch.bool)
        read = emissions.clone().requires_grad_()
        lattice = build_lattice(weights, read, slots, words, transitions, states)
        log_z = log_partition(lattice)
        assert float(log_z.detach()) == pytest.approx(whole, abs=1e-12)
        (marginals,) = torch.autograd.grad(log_z.sum(), read)
        for i, word in product(range(places), range(words)):
            expected = math.fsum(math.exp(s - whole) for y, s in scores.items() if y[i] == word)
            assert float(marginals[0, i, word]) == pytest.approx(expected, abs=1e-12)
        lattice = build_lattice(weights, emissions, slots, words, transitions, states)
        chosen = find_best_path(lattice)
        best = max(scores, key=scores.__getitem__)
        assert tuple(lattice.tokens(chosen)[0].tolist()) == best
        assert float(score_choice(lattice, chosen)) == pytest.approx(scores[best], abs=1e-12)
        logprobs = word_logprobs(lattice, chosen)[0].tolist()
        for i, logprob in enumerate(logprobs):
            later = [s for y, s in scores.items() if y[i + 1 :] == best[i + 1 :]]
            right = [s for y, s in scores.items() if y[i:] == best[i:]]
            assert logprob == pytest.approx(sum_in_logs(right) - sum_in_logs(later), abs=1e-10)
        assert sum(logprobs) == pytest.approx(scores[best] - whole, abs=1e-10)


@pytest.mark.parametrize("transitions", TRANSITIONS)
def test_padding_and_other_sentences_change_nothing(transitions: str) -> None:
    words, lengths = 6, (3, 1, 5, 2)
    weights = random_weights(words, 0)
    emissions, states = random_inputs(words, 5, 0, rows=4)
    slots = torch.arange(5) < torch.tensor(lengths)[:, None]
    forced = torch.randint(words, (4, 5), generator=torch.Generator().manual_seed(1))
    emissions[3, :2, 0] = -torch.inf  # a word that is never written; padding is one as well
    forced[3, :2] = torch.tensor([4, 2])
    for beam in (1, 3, 6):
        inputs = (slots, beam, transitions, states)
        many = build_lattice(weights, emissions, *inputs, forced)
        free = build_lattice(weights, emissions, *inputs)
        for row, n in enumerate(lengths):
            part = (emissions[row : row + 1, :n], torch.ones(1, n, dtype=torch.bool), beam)
            rest = (transitions, states[row : row + 1, :n])
            one = build_lattice(weights, *part, *rest, forced[row : row + 1, :n])
            for function in (log_partition, log_likelihood):
                assert float(function(many)[row]) == pytest.approx(float(function(one)), abs=1e-12)
            one = build_lattice(weights, *part, *rest)
            chosen = find_best_path(free)
            assert torch.equal(chosen[row, :n], find_best_path(one)[0])
            assert not chosen[row, n:].any()
            scores = word_logprobs(free, chosen)
            torch.testing.assert_close(
                scores[row, :n], word_logprobs(one, find_best_path(one))[0], rtol=0, atol=1e-12
            )
            assert not scores[row, n:].any()


def test_padding_gives_finite_gradients() -> None:
    weights = {name: w.requires_grad_() for name, w in random_weights(4, 0).items()}
    emissions, states = random_inputs(4, 3, 0, rows=2)
    emissions = emissions.requires_grad_()
    slots = torch.tensor([[True] * 3, [True, False, False]])
    forced = torch.tensor([[1, 2, 3], [2, 0, 0]])
    for beam in (1, 2):
        banned = emissions.index_fill(-1, torch.tensor([0]), -torch.inf)
        lattice = build_lattice(weights, banned, slots, beam, "dynamic", states, forced)
        (-log_likelihood(lattice).sum()).backward()
    for gradient in (emissions.grad, *(w.grad for w in weights.values())):
        assert gradient is not None and bool(gradient.isfinite().all())
    assert not emissions.grad[1, 1:].any()  # type: ignore[index]


def test_z_rises_with_the_candidates_to_that_of_all_sentences() -> None:
    for seed, transitions in product(range(4), TRANSITIONS):
        weights = random_weights(8, seed)
        emissions, states = random_inputs(8, 4, seed)
        slots = torch.ones(1, 4, dtype=torch.bool)
        values = [
            float(log_partition(build_lattice(weights, emissions, slots, k, transitions, states)))
            for k in range(1, 12)
        ]
        scores = enumerate_sentences(weights, emissions[0], states[0], transitions)
        assert all(a < b for a, b in pairwise(values[:8]))
        assert values[7:] == pytest.approx([sum_in_logs(list(scores.values()))] * 4)


def test_the_right_words_are_candidates_however_unlikely() -> None:
    """Without that a sentence could be likelier than certain."""
    for seed in range(8):
        weights = random_weights(8, seed)
        emissions, states = random_inputs(8, 4, seed)
        slots = torch.ones(1, 4, dtype=torch.bool)
        gold = emissions.argmin(dim=-1)
        for k in (1, 2, 5, 8):
            lattice = build_lattice(weights, emissions, slots, k, "dynamic", states, gold)
            assert torch.equal(lattice.words[..., 0], gold)
            assert all(len(set(row)) == k for row in lattice.words[0].tolist())
            assert float(log_likelihood(lattice)) <= 1e-12
            scores = enumerate_sentences(weights, emissions[0], states[0], "dynamic")
            candidates = product(*lattice.words[0].tolist())
            expected = scores[tuple(gold[0].tolist())] - sum_in_logs(
                [scores[y] for y in candidates]
            )
            assert float(log_likelihood(lattice)) == pytest.approx(expected, abs=1e-10)


def test_a_constant_on_all_words_of_a_place_changes_nothing() -> None:
    weights, (emissions, states) = random_weights(5, 3), random_inputs(5, 4, 3)
    slots, gold = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1, 4, 0, 2]])
    moved = emissions + torch.tensor([3.0, -7.0, 0.5, 100.0])[:, None]
    both = [build_lattice(weights, e, slots, 3, "static", states, gold) for e in (emissions, moved)]
    assert torch.equal(both[0].words, both[1].words)
    torch.testing.assert_close(log_likelihood(both[0]), log_likelihood(both[1]))


def test_without_transitions_the_best_sentence_is_the_best_word_of_each_place() -> None:
    lattice = whole_lattice(7, 6, 0, "none")
    emissions = random_inputs(7, 6, 0)[0]
    assert torch.equal(lattice.tokens(find_best_path(lattice)), emissions.argmax(dim=-1))
    expected = emissions.logsumexp(dim=-1).sum(dim=1)
    torch.testing.assert_close(log_partition(lattice), expected)
    best = emissions.log_softmax(dim=-1).max(dim=-1).values
    torch.testing.assert_close(word_logprobs(lattice, find_best_path(lattice)), best)


def test_dynamic_transitions_without_f_are_the_static_ones() -> None:
    weights, (_, states) = random_weights(4, 1), random_inputs(4, 3, 1)
    for name in (f"{DOWN}.weight", f"{DOWN}.bias"):
        weights[name] = torch.zeros_like(weights[name])
    assert torch.equal(
        transition_matrices(weights, states), torch.eye(2, dtype=torch.float64).expand(1, 2, 2, 2)
    )


def test_gradients_are_those_of_finite_differences() -> None:
    weights, (emissions, states) = random_weights(4, 2), random_inputs(4, 3, 2)
    slots, gold = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[1, 3, 0]])
    names = list(weights)

    def loss(states: Tensor, *values: Tensor) -> Tensor:
        read = dict(zip(names, values, strict=True))
        return log_likelihood(build_lattice(read, emissions, slots, 3, "dynamic", states, gold))

    inputs = [w.clone().requires_grad_() for w in (states, *weights.values())]
    assert torch.autograd.gradcheck(loss, inputs)
