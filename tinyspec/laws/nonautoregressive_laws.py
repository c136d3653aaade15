"""The exact oracles of Mask-Predict and of noisy parallel decoding, and the laws of word alignment.

An oracle decodes each candidate by itself, without padding, in plain lists; what a technique does
with all of them in one batch must give the same words, probabilities and choice. The fertilities
are learned from an aligner, whose EM is compared with plain loops.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.decoding.refine import Refinement, Refiner, refine
from tinyspec.decoding.rng import Exhaustive, RandomSource, Seeded
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.parts import Parts
from tinyspec.laws.rewriting_laws import (
    candidate_of,
    dense_logits,
    numbers_differ,
    random_translator,
)
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import RefineRequest
from tinyspec.training.dialects import Dialects

MASK_RULE = "every pass of Mask-Predict rewrites what the paper says (Ghazvininejad et al. 2019)"
LENGTH_CHOICE = (
    "of the likeliest lengths the best mean log-probability is chosen (Ghazvininejad et al. 2019)"
)
MASKS_HIDDEN = (
    "1 to N tokens are hidden, each number and each choice equally likely "
    "(Ghazvininejad et al. 2019)"
)

MASK = 3
FIRST_WORD = 4  # ids below it are special
LENGTHS = 8  # the LENGTH token predicts 1 to 7
MASK_SOURCES = ((4,), (6, 5), (4, 7, 5))
MASK_PASSES = ((1, 2), (2, 1), (3, 3), (4, 5), (9, 2))  # iterations, lengths
LENGTH_CHOICES = ((1, 3), (2, 1), (3, 4), (2, 99))

Build = Callable[..., Refiner]
Hide = Callable[[Tensor, torch.Generator], Tensor]


def random_fillers() -> Iterator[Seq2Seq]:
    """Yield random masked language models of 16 words in float64; one has few positions.

    Their weights are large, so that words differ.
    """
    for seed, positions in ((1, 16), (2, 16), (3, 16), (4, 5)):
        config = Seq2SeqConfig(20, 8, 2, 8, 1, 1, positions, lengths=LENGTHS)
        yield random_translator(config, seed, 6, "filler", embed=1)


# ---------------------------------------------------------------------- the rule, by itself


def likeliest_lengths(model: Seq2Seq, source: Sequence[int], count: int) -> list[int]:
    """Return the lengths to try, the likeliest first."""
    row = model.length_logits(model.encode(torch.tensor([list(source)])))[0].tolist()
    return sorted(
        range(1, min(len(row), model.config.max_positions + 1)), key=lambda n: (-row[n], n)
    )[:count]


def rewrite_by_rule(
    model: Seq2Seq, source: Sequence[int], n: int, passes: int
) -> list[tuple[list[int], list[float]]]:
    """Return the words of a translation of n words and their scores, after each pass.

    A score is the log-probability of a word when it was written.
    """
    memory = model.encode(torch.tensor([list(source)]))
    words, scores, found = [MASK] * n, [0.0] * n, []
    for t in range(passes):
        rewritten = max(1, math.floor(n * (passes - t) / passes))
        again = sorted(range(n), key=lambda i: (scores[i], i))[:rewritten]
        read = [MASK if i in again else word for i, word in enumerate(words)]
        rows = model.logits(model.decode(model.embed(torch.tensor([read])), memory))[0].tolist()
        for i in again:
            row = rows[i][FIRST_WORD:]
            words[i] = FIRST_WORD + row.index(max(row))
            scores[i] = max(row) - math.log(sum(math.exp(x) for x in row))
        found.append((list(words), list(scores)))
    return found


# ---------------------------------------------------------------------- the laws


def run_refinement(
    build: Build,
    request: RefineRequest,
    source: Sequence[int],
    rng: RandomSource | None = None,
    **knobs: Any,
) -> Refinement:
    """Return a whole request, run to its end."""
    refiner = build(request, **knobs)
    rng = Seeded(0) if rng is None else rng
    run = refine(request.model, source, refiner, rng, request.forward_log)
    for _ in run:
        pass
    return run


@collect_evidence(MASK_RULE)
def follows_mask_predict(build: Build) -> Iterator[int]:
    """Check the words and scores of every candidate after every pass."""
    for model, source, (passes, lengths) in product(random_fillers(), MASK_SOURCES, MASK_PASSES):
        request = RefineRequest(model)
        refiner = build(request, iterations=passes, lengths=lengths)
        run = refine(request.model, source, refiner, Seeded(0), request.forward_log)
        canvases = [step.after for step in run]
        for row, n in enumerate(likeliest_lengths(model, source, lengths)):
            expected = rewrite_by_rule(model, source, n, passes)
            got = [candidate_of(canvas, row) for canvas in canvases if row < len(canvas.tokens)]
            case = {"source": source, "length": n, "beside it": lengths - 1, "T": passes}
            case["model"] = model
            texts = [[words for words, _ in candidates] for candidates in (expected, got)]
            expect_equal(MASK_RULE, *texts, **case)
            for (_, ours), (_, theirs) in zip(expected, got, strict=True):
                if numbers_differ(ours, theirs):
                    accuse(MASK_RULE, ours, theirs, **case)
            yield 0


@collect_evidence(LENGTH_CHOICE)
def chooses_best_length(build: Build) -> Iterator[int]:
    """Check the translation, its candidates and their cost.

    The cost is one pass of the encoder and T of the decoder.
    """
    for model, source, (passes, lengths) in product(random_fillers(), MASK_SOURCES, LENGTH_CHOICES):
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(build, request, source, iterations=passes, lengths=lengths)
        tried = likeliest_lengths(model, source, lengths)
        candidates = [rewrite_by_rule(model, source, n, passes)[-1] for n in tried]
        best, _ = max(candidates, key=lambda one: sum(one[1]) / len(one[1]))
        case = {"source": source, "lengths": lengths, "T": passes, "model": model}
        assert run.canvas is not None
        expect_equal(LENGTH_CHOICE, tried, run.canvas.mask.sum(dim=1).tolist(), **case)
        expect_equal(LENGTH_CHOICE, best, run.tokens, **case)
        encoder = sum(call.model.endswith("/encoder") for call in run.forward_log)
        calls = (encoder, len(run.forward_log) - encoder)
        counted = "passes of the encoder and of the decoder"
        expect_equal(LENGTH_CHOICE, (1, passes), calls, **case, counted=counted)
        yield 0


def hides_uniformly(hide: Hide) -> Evidence:
    """Check the frequencies of all masks of rows of 1 to 4 slots by chi-square.

    The rows stand beside padding, in two batches. In a mask `x` is a hidden token.
    """
    rows, generator = 6000, torch.Generator().manual_seed(0)
    for n in (1, 2, 3, 4):
        slots = (torch.arange(5) < n).expand(rows, -1)
        first, second = (hide(slots, generator) for _ in range(2))
        got = Counter(
            "".join("x" if hidden else "." for hidden in row)
            for row in first.tolist() + second.tolist()
        )
        expected = {
            "".join("x" if i in chosen else "." for i in range(5)): 2 * rows / n / math.comb(n, k)
            for k in range(1, n + 1)
            for chosen in combinations(range(n), k)
        }
        chi_square = sum((got[mask] - mean) ** 2 / mean for mask, mean in expected.items())
        limit = len(expected) + 6 * math.sqrt(2 * len(expected))
        if set(got) - set(expected) or chi_square > limit:
            counts = {mask: round(mean) for mask, mean in expected.items()}
            accuse(MASKS_HIDDEN, counts, dict(sorted(got.items())), tokens=n)
        if n == 4 and bool((first == second).all()):
            new, same = "masks drawn anew for every batch", "the same masks twice"
            accuse(MASKS_HIDDEN, new, same, tokens=n)
    return Evidence(MASKS_HIDDEN, 8 * rows)


def _build_mask_predict(parts: Parts) -> Build:
    return lambda request, iterations, lengths: parts.mask_predict(
        request.model, iterations, lengths
    )


MASK_LAWS = {
    MASK_RULE: lambda parts: follows_mask_predict(_build_mask_predict(parts)),
    LENGTH_CHOICE: lambda parts: chooses_best_length(_build_mask_predict(parts)),
    MASKS_HIDDEN: lambda parts: hides_uniformly(parts.hide),
}


FERTILITY_RULE = "the distribution of noisy parallel decoding (Gu et al. 2018)"
NESTED = "more samples contain the fewer (Gu et al. 2018)"
SUPERVISED = "the aligner's fertilities are learnt (Gu et al. 2018)"
EXPECTED_COST = "the fertilities follow the gradient of the expected cost (Gu et al. 2018)"
FERTILITY_TOLERANCE = 1e-9


def random_student(seed: int, fertilities: int = 3, positions: int = 24) -> Seq2Seq:
    """Return a random float64 NAT with four words (ids 4 to 7) and large weights."""
    config = Seq2SeqConfig(8, 8, 2, 8, 1, 1, positions, positional=True, fertilities=fertilities)
    return random_translator(config, seed, 3, "student")


def random_teacher(seed: int, positions: int = 24) -> Seq2Seq:
    """Return a random autoregressive model over the same words."""
    config = Seq2SeqConfig(8, 8, 2, 8, 1, 1, positions)
    return random_translator(config, 1000 + seed, 3, "teacher")


# ---------------------------------------------------------------------- the rule, by itself


def fertility_probs(
    model: Seq2Seq, source: Sequence[int], temperature: float = 1.0
) -> list[list[float]]:
    """Return p_F of every source word."""
    logits = model.fertility_logits(model.encode(torch.tensor([list(source)])))[0]
    return [[float(p) for p in row] for row in (logits / temperature).softmax(dim=-1)]


def fixed_fertilities(probs: Sequence[Sequence[float]], which: str) -> list[int]:
    """Return each word's likeliest fertility, or its mean."""
    if which == "argmax":
        return [max(range(len(row)), key=row.__getitem__) for row in probs]
    return [int(sum(f * p for f, p in enumerate(row)) + 0.5) for row in probs]


def usable_fertilities(
    fertilities: Sequence[int], probs: Sequence[Sequence[float]], positions: int
) -> list[int]:
    """Return the fertilities, cut where the sum passes 2 |x| + 4 or the positions; never empty."""
    usable, total = list[int](), 0
    for f in fertilities:
        total += f
        usable.append(f if total <= min(2 * len(fertilities) + 4, positions - 1) else 0)
    if not any(usable):
        usable[min(range(len(probs)), key=lambda word: probs[word][0])] = 1
    return usable


def translate_in_parallel(
    model: Seq2Seq, source: Sequence[int], fertilities: Sequence[int]
) -> list[int]:
    """Return the translation that these fertilities give."""
    read = [word for word, f in zip(source, fertilities, strict=True) for _ in range(f)]
    others = torch.tensor([[i != j for j in range(len(read))] for i in range(len(read))])
    memory = model.encode(torch.tensor([list(source)]))
    logits = model.logits(model.decode(model.embed(torch.tensor([read])), memory, others))[0]
    return [4 + max(range(len(row) - 4), key=row[4:].__getitem__) for row in logits.tolist()]


def teacher_score(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> float:
    """Return log p of a translation and its end, token by token."""
    total = 0.0
    for at, token in enumerate([*text, model.config.eos]):
        row = dense_logits(model, source, (model.config.bos, *text[:at]))[-1]
        total += float(row.log_softmax(dim=-1)[token])
    return total


def expected_translations(
    model: Seq2Seq,
    judge: Seq2Seq | None,
    source: Sequence[int],
    samples: int,
    fertility: str,
    temperature: float,
) -> dict[tuple[int, ...], float]:
    """Return every translation with its probability."""
    probs, drawn = fertility_probs(model, source), fertility_probs(model, source, temperature)
    second = "average" if fertility == "argmax" else "argmax"
    fixed = [fixed_fertilities(probs, which) for which in (fertility, second)][:samples]
    outcomes: dict[tuple[int, ...], float] = {}

    @cache
    def translate(usable: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(translate_in_parallel(model, source, usable))

    @cache
    def score(translation: tuple[int, ...]) -> float:
        assert judge is not None
        return teacher_score(judge, source, translation)

    def text(sequence: Sequence[int]) -> tuple[int, ...]:
        return translate(tuple(usable_fertilities(sequence, probs, model.config.max_positions)))

    sequences = list(product(*(range(len(row)) for row in drawn)))
    for chosen in product(sequences, repeat=max(0, samples - 2)):
        probability = 1.0
        for sequence in chosen:
            for row, f in zip(drawn, sequence, strict=True):
                probability *= row[f]
        candidates = [text(sequence) for sequence in (*fixed, *chosen)]
        best = candidates[0] if samples == 1 else max(candidates, key=score)
        outcomes[best] = outcomes.get(best, 0) + probability
    return outcomes


# ---------------------------------------------------------------------- the law

FERTILITY_CASES: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((5,), 3, {"samples": 1}),
    ((4, 6), 3, {"samples": 1, "fertility": "average"}),
    ((6, 4, 7), 3, {"samples": 2}),
    ((5, 4), 3, {"samples": 2, "fertility": "average"}),
    ((7, 5), 3, {"samples": 4}),
    ((4, 7, 5), 3, {"samples": 3, "temperature": 0.5}),
    ((6,), 9, {"samples": 3}),
    ((5, 6), 6, {"samples": 3, "temperature": 2.0}),
]


def fertility_runs() -> Iterator[tuple[Seq2Seq, Seq2Seq, tuple[int, ...], dict[str, Any]]]:
    """Yield models, sources and settings; the second models have few positions."""
    for seed, (source, fertilities, knobs) in product(range(2), FERTILITY_CASES):
        positions = 5 if seed == 1 else 24
        model, judge = random_student(seed, fertilities, positions), random_teacher(seed, positions)
        yield model, judge, source, {"fertility": "argmax", "temperature": 1.0, **knobs}


def expect_translations(
    law: str,
    expected: Mapping[tuple[int, ...], float],
    translate: Callable[[Exhaustive], Refinement],
    **case: Any,
) -> int:
    """Walk all outcomes of a refinement and return how many there are.

    Raises LawViolated for this case unless its translations are distributed as expected.
    """
    got, outcomes = dict[tuple[int, ...], float](), 0
    with torch.inference_mode():
        for run, probability in Exhaustive.walk(translate):
            text = tuple(run.tokens)
            got[text] = got.get(text, 0) + float(probability)
            outcomes += 1
    if any(
        abs(got.get(text, 0) - expected.get(text, 0)) > FERTILITY_TOLERANCE
        for text in {*got, *expected}
    ):
        accuse(law, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
    return outcomes


@collect_evidence(FERTILITY_RULE)
def noisy_parallel(build: Build) -> Iterator[int]:
    """Check every outcome of every setting, by walking all fertility sequences."""
    for model, judge, source, knobs in fertility_runs():
        expected = expected_translations(model, judge, source, **knobs)
        translate = partial(run_refinement, build, RefineRequest(model, judge), source, **knobs)
        case = {"source": source, **knobs, "classes of fertility": model.config.fertilities}
        yield expect_translations(FERTILITY_RULE, expected, translate, **case)


@collect_evidence(NESTED)
def samples_are_nested(build: Build) -> Iterator[int]:
    """Check that a larger sample contains the smaller one, so that the best score never falls."""
    for seed, source in product(range(3), ((4, 5), (6, 4, 7, 5))):
        model, judge = random_student(seed), random_teacher(seed)
        candidates, scores = list[Any](), list[float]()
        for samples in (1, 2, 3, 5, 8):
            request = RefineRequest(model, judge)
            run = run_refinement(build, request, source, Seeded(seed), samples=samples)
            assert run.canvas is not None
            candidates.append([run.canvas.text(row) for row in range(len(run.canvas.tokens))])
            scores.append(teacher_score(judge, source, run.tokens))
            yield 0
        for few, many in pairwise(candidates):
            case = {"source": source, "fewer": len(few), "more": len(many)}
            expect_equal(NESTED, few, many[: len(few)], **case)
        for low, high in pairwise(scores):
            if high < low - FERTILITY_TOLERANCE:
                asked = "the teacher's score of the choice"
                accuse(NESTED, f"at least {low}", high, source=source, asked=asked)


@collect_evidence(SUPERVISED)
def fertilities_are_learnt(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the slope of the loss in the head's bias.

    It is (how likely each fertility is) - (how often it was the aligner's), per target token.
    """
    source, target = torch.tensor([[4, 6, 5], [7, 5, 0]]), torch.tensor([[5, 5, 6], [4, 4, 0]])
    fertilities = torch.tensor([[2, 0, 1], [0, 2, 0]])
    for seed in range(3):
        model = random_student(seed)
        bias = [weight.requires_grad_() for weight in model.parameters()][-1]
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(
                loss(model, (source, target, fertilities)), bias, allow_unused=True
            )
        probs = model.fertility_logits(model.encode(source)).softmax(dim=-1).detach()
        sums = probs[source > 0].sum(dim=0)
        expected = [round(float(sums[f] - n) / 5, 9) for f, n in enumerate((2, 1, 2))]
        got = [0.0, 0.0, 0.0] if slope is None else [round(float(x), 9) for x in slope]
        if max(abs(a - b) for a, b in zip(expected, got, strict=True)) > 1e-8:
            case = {"source": source.tolist(), "fertilities": fertilities.tolist()}
            accuse(SUPERVISED, expected, got, **case)
        yield 0


@collect_evidence(EXPECTED_COST)
def gradient_of_the_expectation(surrogate: Callable[..., Tensor]) -> Iterator[int]:
    """Check that the mean gradient is that of sum_f p(f) cost(f), over all fertility sequences.

    What a cost itself depends on is no part of it: it is learnt by back-propagation, from the
    aligner's fertilities.
    """
    mask, count = torch.tensor([[True, True, False]]), 3
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, 3, count, generator=generator, dtype=torch.float64).requires_grad_()
        costs = torch.randn(count, count, generator=generator, dtype=torch.float64)
        with torch.enable_grad():
            p = logits.softmax(dim=-1)[0]
            expected = torch.autograd.grad((p[0][:, None] * p[1] * costs).sum(), logits)[0]
            got = torch.zeros_like(expected)
            for f in product(range(count), repeat=2):
                cost = costs[f].reshape(1) + (logits - logits.detach()).sum()
                (slope,) = torch.autograd.grad(
                    surrogate(logits, mask, torch.tensor([[*f, 1]]), cost), logits
                )
                got = got + p[0, f[0]].detach() * p[1, f[1]].detach() * slope
        if float((expected - got).abs().max()) > 1e-12:
            gradients = (gradient.flatten().tolist() for gradient in (expected, got))
            accuse(EXPECTED_COST, *gradients, words=2, classes=count)
        yield count**2


def build_fertile(parts: Parts) -> Build:
    """Return a builder of the refiner of these parts, as the technique makes it."""

    def build(
        request: RefineRequest, samples: int, fertility: str = "argmax", temperature: float = 1.0
    ) -> Refiner:
        teacher = request.teacher if samples > 1 else None
        return parts.fertile(request.model, teacher, fertility, samples, temperature)

    return build


FERTILITY_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    FERTILITY_RULE: lambda parts: noisy_parallel(build_fertile(parts)),
    NESTED: lambda parts: samples_are_nested(build_fertile(parts)),
    SUPERVISED: lambda parts: fertilities_are_learnt(parts.fertile_loss),
    EXPECTED_COST: lambda parts: gradient_of_the_expectation(parts.reinforce),
}


EM = "expectation maximisation, round by round (Brown et al. 1993)"
KNOWN = "known alignments are found (Brown et al. 1993)"

Align = Callable[..., Any]
NULL = -1
CORPORA = [
    ([[1, 2], [1, 3], [2]], [[7, 8], [9, 7], [8, 8]]),
    ([[1, 2, 1], [3], [2, 4, 3]], [[5, 6], [7, 7, 6], [6]]),
]
TWICE = (
    [[1, 2, 1], [2], [3, 4], [4, 5, 6], [5, 3]] * 5,
    [[7, 8, 7], [8], [9, 10], [10, 11, 12], [11, 9]] * 5,
)


def em_by_plain_loops(source: Any, target: Any, rounds: int, placed: int) -> list[float]:
    """Return the log-likelihood before each round and after the last: model 1, then model 2."""
    beside: dict[int, set[int]] = defaultdict(set)
    for x, y in zip(source, target, strict=True):
        for s in (NULL, *x):
            beside[s] |= set(y)
    translation = {(s, t): 1 / len(words) for s, words in beside.items() for t in words}
    place: dict[tuple[int, ...], float] = {}
    likelihoods = []
    for number in range(rounds + placed + 1):
        second, likelihood = number >= rounds and placed > 0, 0.0
        words, places = Counter[tuple[int, int]](), Counter[tuple[int, ...]]()
        for x, y in zip(source, target, strict=True):
            for i, t in enumerate(y):
                spots = [(j, i, len(x), len(y)) for j in range(len(x) + 1)]
                shares = [
                    translation[s, t]
                    * (place.get(spot, 1 / len(spots)) if second else 1 / len(spots))
                    for s, spot in zip((NULL, *x), spots, strict=True)
                ]
                likelihood += math.log(sum(shares))
                for s, spot, share in zip((NULL, *x), spots, shares, strict=True):
                    words[s, t] += share / sum(shares)  # type: ignore[assignment]
                    places[spot] += share / sum(shares)  # type: ignore[assignment]
        likelihoods.append(likelihood)
        translation = {
            (s, t): n / sum(words[s, u] for u in beside[s]) for (s, t), n in words.items()
        }
        if second:
            place = {
                (j, *r): n / sum(places[k, *r] for k in range(r[1] + 1))
                for (j, *r), n in places.items()
            }
    return likelihoods


@collect_evidence(EM)
def rounds_of_em(align: Align) -> Iterator[int]:
    """Check the likelihood after each round against plain loops, and that it never falls."""
    for (source, target), (rounds, placed) in product(CORPORA, ((3, 0), (0, 3), (2, 2))):
        expected = em_by_plain_loops(source, target, rounds, placed)
        got = align(source, target, model1_rounds=rounds, model2_rounds=placed).likelihood
        if numbers_differ(expected, got):
            case = {"source": source, "target": target, "model_1": rounds, "model_2": placed}
            accuse(EM, expected, got, **case)
        yield 0
    random = np.random.default_rng(0)
    sides = [
        [random.integers(0, 9, random.integers(1, 7)).tolist() for _ in range(150)]
        for _ in range(2)
    ]
    for before, after in pairwise(align(*sides).likelihood):
        if after < before - 1e-9:
            case = {"corpus": "150 random pairs", "asked": "the likelihood of the next round"}
            accuse(EM, f"at least {before}", after, **case)
    yield 0


@collect_evidence(KNOWN)
def known_alignments(align: Align) -> Iterator[int]:
    """Check that more than 95 in 100 known alignments are found, also of repeated words."""
    for kinds, modes in ((("lex",), 4), (("ord", "fert"), 3)):
        pairs = Dialects(kinds, modes).sample_pairs(800, seed=1)
        links = align([p.source for p in pairs], [p.target for p in pairs]).links
        right = sum(
            sum(map(int.__eq__, link.tolist(), p.alignment))
            for link, p in zip(links, pairs, strict=True)
        )
        share = right / sum(len(p.target) for p in pairs)
        if share <= 0.95:
            accuse(KNOWN, "more than 0.95", round(share, 3), task="+".join(kinds), dialects=modes)
        yield 0
    got = align(*TWICE).links[0].tolist()
    expect_equal(KNOWN, [0, 1, 2], got, source=TWICE[0][0], target=TWICE[1][0])
    yield 0


ALIGNMENT_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    EM: lambda parts: rounds_of_em(parts.align),
    KNOWN: lambda parts: known_alignments(parts.align),
}
