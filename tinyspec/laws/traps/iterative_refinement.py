"""Iterative refinement (Lee et al. 2018): a second decoder reads words and states.

It is trained to repair its own translations and damaged references.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, likeliest_lengths, run_refinement
from tinyspec.laws.plain_lists import (
    add_vectors,
    copy_evenly,
    find_likeliest_word,
    run_plain_pass,
    word_logits,
    word_vector,
)
from tinyspec.laws.rewriting_laws import numbers_differ, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import iterative_refinement as module
from tinyspec.nonautoregressive.iterative_refinement import DAMAGE, IterativeRefiner
from tinyspec.technique import RefineRequest, find_technique

REWRITTEN = "a pass reads the words and the states of the pass before (Lee et al. 2018)"
CONVERGED = "a translation is finished when its words come back (Lee et al. 2018)"
DAMAGED = "the damage to a reference has the published distribution (Lee et al. 2018)"
FOUR_PASSES = "every pass is trained, on own words or on a damaged reference (Lee et al. 2018)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
Written = tuple[list[int], list[float]]
TOLERANCE = 1e-9


def small_reviser(seed: int) -> Seq2Seq:
    """Return a random model with a LENGTH token and a second decoder."""
    return reader_of(find_technique("iterative_refinement").translator, seed)


def write_and_refine(
    model: Seq2Seq, source: tuple[int, ...], count: int, passes: int
) -> list[Written]:
    """Return the words of a translation of `count` words and their scores, after each pass."""
    inputs = [word_vector(model, word) for word in copy_evenly(source, count)]
    stack, found = "decoder", list[Written]()
    for _ in range(passes):
        states = run_plain_pass(model, source, inputs, lambda t, s: True, stack)
        best = [find_likeliest_word(model, state) for state in states]
        words = [word for word, _ in best]
        found.append((words, [score for _, score in best]))
        pairs = zip(words, states, strict=True)
        inputs = [add_vectors(word_vector(model, word), state) for word, state in pairs]
        stack = "refiner"
    return found


def count_passes(written: list[Written]) -> int:
    """Return after how many passes a translation has the words of the one before it."""
    for number in range(1, len(written)):
        if sorted(written[number][0]) == sorted(written[number - 1][0]):
            return number + 1
    return len(written)


@collect_evidence(REWRITTEN)
def passes_of_two_decoders(build: Build) -> Iterator[int]:
    """Check words and scores after every number of passes, of every length."""
    for seed, source, lengths, iterations in product(range(3), SOURCES, (1, 3), (1, 2, 4)):
        model = small_reviser(seed)
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(
            build, request, source, iterations=iterations, adaptive=False, lengths=lengths
        )
        assert run.canvas is not None
        case = {"source": source, "lengths": lengths, "iterations": iterations, "reader": seed}
        candidates = list[Written]()
        for row, count in enumerate(likeliest_lengths(model, source, lengths)):
            candidates.append(write_and_refine(model, source, count, iterations)[-1])
            slots = run.canvas.mask[row]
            words, scores = run.canvas.text(row), run.canvas.scores[row][slots].tolist()
            expect_equal(REWRITTEN, candidates[-1][0], words, **case, length=count)
            if numbers_differ(candidates[-1][1], scores):
                accuse(REWRITTEN, candidates[-1][1], scores, **case, length=count)
        best = max(candidates, key=lambda one: sum(one[1]) / len(one[1]))[0]
        expect_equal(REWRITTEN, best, run.tokens, **case)
        passes = [call.model for call in request.forward_log].count(model.name)
        expect_equal(REWRITTEN, iterations, passes, **case, counted="decoder passes")
        yield 0


REVISERS = (0, 1, 2, 3, 6)  # 6 writes the same words in other numbers before it converges


@collect_evidence(CONVERGED)
def stops_when_words_return(build: Build) -> Iterator[int]:
    """Check the passes of adaptive decoding, and that a converged candidate is not rewritten."""
    early = 0
    for seed, source, lengths, most in product(REVISERS, SOURCES, (1, 3), (1, 2, 6)):
        model = small_reviser(seed)
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(
            build, request, source, iterations=most, adaptive=True, lengths=lengths
        )
        assert run.canvas is not None
        needed, case = list[int](), {"source": source, "lengths": lengths, "reader": seed}
        for row, count in enumerate(likeliest_lengths(model, source, lengths)):
            written = write_and_refine(model, source, count, most)
            needed.append(count_passes(written))
            words = written[needed[-1] - 1][0]
            expect_equal(CONVERGED, words, run.canvas.text(row), **case, length=count)
        passes = [call.model for call in request.forward_log].count(model.name)
        expect_equal(CONVERGED, max(needed), passes, **case, counted="decoder passes")
        early += max(needed) < most
        yield 0
    if not early:
        accuse(CONVERGED, "a translation that converges", "none")


def damaged_references(
    text: tuple[int, ...], count: int, words: range
) -> dict[tuple[int, ...], float]:
    """Return the probability of every damaged reference, by enumeration."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    orders = list(permutations(range(len(text) - 1), count))
    kinds = [(kind, word) for kind in range(3) for word in (words if kind == 1 else words[:1])]
    for order, chosen in product(orders, product(kinds, repeat=count)):
        row, probability = list(text), 1 / len(orders)
        for i, (kind, word) in zip(order, chosen, strict=True):
            probability /= 3 * (len(words) if kind == 1 else 1)
            if kind == 0:
                row[i + 1] = row[i]
            elif kind == 1:
                row[i] = word
            else:
                row[i : i + 2] = row[i + 1], row[i]
        found[tuple(row)] += probability
    return dict(found)


@collect_evidence(DAMAGED)
def damage_is_as_published(corrupt: Callable[..., Tensor]) -> Iterator[int]:
    """Check the frequencies of all damaged references of 1 to 4 words by chi-square."""
    rows, words, generator = 6000, range(4, 7), torch.Generator().manual_seed(0)
    for text, share in product(((4,), (4, 5), (4, 5, 6), (6, 4, 5, 4)), (0.9, 0.37, 0.1)):
        slots = (torch.arange(5) < len(text)).expand(rows, -1)
        target = torch.zeros(rows, 5, dtype=torch.long)
        target[:, : len(text)] = torch.tensor(text)
        got = Counter(map(tuple, corrupt(target, slots, share, words, generator).tolist()))
        count = min(max(1, math.floor(share * len(text))), len(text) - 1)
        padding = (0,) * (5 - len(text))
        expected = {
            (*row, *padding): rows * probability
            for row, probability in damaged_references(text, count, words).items()
        }
        chi_square = sum((got[row] - mean) ** 2 / mean for row, mean in expected.items())
        limit = len(expected) + 6 * math.sqrt(2 * len(expected))
        if set(got) - set(expected) or chi_square > limit:
            means = {str(row): round(mean) for row, mean in expected.items()}
            counts = {str(row): count for row, count in sorted(got.items())}
            accuse(DAMAGED, means, counts, text=text, share=share)
        yield rows


@collect_evidence(FOUR_PASSES)
def loss_of_four_passes(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss where every pass reads the model's own words, and where it reads references.

    A reference of one word is not damaged, so that nothing is left to chance.
    """
    cases = [
        (0.0, ((4, 6, 5, 7), (7, 5)), ((5, 8, 6), (4, 4, 7, 5))),
        (1.0, ((4, 6, 5, 7), (7, 5)), ((8,), (5,))),
    ]
    for seed, (denoising, sources, targets) in product(range(3), cases):
        model, total = small_reviser(seed), 0.0
        for source, target in zip(sources, targets, strict=True):
            inputs = [word_vector(model, word) for word in copy_evenly(source, len(target))]
            for number in range(len(DAMAGE)):
                stack = "refiner" if number else "decoder"
                states = run_plain_pass(model, source, inputs, lambda t, s: True, stack)
                for state, word in zip(states, target, strict=True):
                    row = torch.tensor(word_logits(model, state), dtype=torch.float64)
                    total -= float(row.log_softmax(dim=-1)[word]) / len(DAMAGE)
                own = [find_likeliest_word(model, state)[0] for state in states]
                read = target if denoising else own
                inputs = [
                    add_vectors(word_vector(model, word), state)
                    for word, state in zip(read, states, strict=True)
                ]
            lengths = model.length_logits(model.encode(torch.tensor([source])))[0]
            total -= float(lengths.log_softmax(dim=-1)[len(target)])
        batch = tuple(
            torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in side], batch_first=True)
            for side in (sources, targets)
        )
        generator = torch.Generator().manual_seed(seed)
        got: Any = float(loss(model, batch, generator, denoising=denoising))
        expected = total / sum(map(len, targets))
        if abs(got - expected) > TOLERANCE:
            accuse(FOUR_PASSES, expected, got, denoising=denoising, targets=targets, reader=seed)
        yield 0


TRAPS = [
    Trap(REWRITTEN, passes_of_two_decoders, refine_card("iterative_refinement")),
    Trap(CONVERGED, stops_when_words_return, refine_card("iterative_refinement")),
    Trap(DAMAGED, damage_is_as_published, lambda: module.corrupt_words),
    Trap(FOUR_PASSES, loss_of_four_passes, lambda: module.refinement_loss),
]

_refinement = partial(Toy, technique="iterative_refinement")

TOYS = [
    _refinement(
        "one decoder for all passes",
        'REFINER if iteration else "decoder"',
        '"decoder"',
        IterativeRefiner.rewrite,
        law=REWRITTEN,
    ),
    _refinement(
        "words without their states",
        "inputs = inputs + states",
        "inputs = inputs",
        IterativeRefiner.rewrite,
        law=REWRITTEN,
    ),
    _refinement(
        "every candidate runs to the last pass",
        "done = done | same.all(dim=1)",
        "done = done",
        IterativeRefiner.rewrite,
        law=CONVERGED,
    ),
    _refinement(
        "stop after one word came back",
        "done = done | same.all(dim=1)",
        "done = done | (canvas.mask & (words == before)).any(dim=1)",
        IterativeRefiner.rewrite,
        law=CONVERGED,
    ),
    _refinement(
        "stop however often a word stands in the two",
        "done = done | same.all(dim=1)",
        """rows = zip(words.tolist(), before.tolist(), strict=True)
done = done | torch.tensor([set(a) == set(b) for a, b in rows])""",
        IterativeRefiner.rewrite,
        law=CONVERGED,
    ),
    _refinement(
        "no word is repeated",
        "if kinds[number][i] == 0:",
        "if kinds[number][i] == 3:",
        module.corrupt_words,
        law=DAMAGED,
    ),
    _refinement(
        "no denoising",
        "if coin < denoising:",
        "if coin < 0:",
        module.refinement_loss,
        law=FOUR_PASSES,
    ),
    _refinement(
        "one pass is trained, and iterated in use",
        "for number, share in enumerate(DAMAGE):",
        "for number, share in enumerate(DAMAGE[:1]):",
        module.refinement_loss,
        law=FOUR_PASSES,
    ),
]
