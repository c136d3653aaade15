"""The exact oracles of Mask-Predict and of noisy parallel decoding, and the laws of word alignment.

An oracle decodes each candidate by itself, without padding, in plain lists; what a technique does
with all of them in one batch must give the same words, probabilities and choice. The fertilities
are learned from an aligner, whose EM is compared with plain loops.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, Refinement, Refiner, refine
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import RefineRequest
from tinyspec.training.dialects import Dialects

MASK_RULE = "every pass of Mask-Predict rewrites what the paper says (Ghazvininejad et al. 2019)"
LENGTH_CHOICE = (
    "of the likeliest lengths the best mean log-probability is chosen (Ghazvininejad et al. 2019)"
)
MASKS_HIDDEN = "1 to N tokens are hidden, each number and each choice equally likely (Ghazvininejad et al. 2019)"

MASK, FIRST_WORD, LENGTHS = 3, 4, 8  # ids below FIRST are special; the LENGTH token tells 1 to 7
MASK_TOLERANCE = 1e-9
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
        config = Seq2SeqConfig(
            20,
            8,
            2,
            8,
            encoder_layers=1,
            decoder_layers=1,
            max_positions=positions,
            lengths=LENGTHS,
        )
        made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
        loud = {
            name: w if w.ndim < 2 or name == "embed" else 6 * w for name, w in made.weights.items()
        }
        yield Seq2Seq(config, loud, name="filler")


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
    """Return the words and kept log-probabilities of a translation of n words, after each pass."""
    memory = model.encode(torch.tensor([list(source)]))
    words, kept, found = [MASK] * n, [0.0] * n, []
    for t in range(passes):
        again = sorted(range(n), key=lambda i: (kept[i], i))[
            : max(1, math.floor(n * (passes - t) / passes))
        ]
        read = [MASK if i in again else word for i, word in enumerate(words)]
        rows = model.logits(model.decode(model.embed(torch.tensor([read])), memory))[0].tolist()
        for i in again:
            row = rows[i][FIRST_WORD:]
            words[i] = FIRST_WORD + row.index(max(row))
            kept[i] = max(row) - math.log(sum(math.exp(x) for x in row))
        found.append((list(words), list(kept)))
    return found


# ---------------------------------------------------------------------- the laws


def follows_mask_predict(build: Build) -> Evidence:
    """Check the words and scores of every candidate after every pass."""
    seen = 0
    for model, source, (passes, lengths) in product(random_fillers(), MASK_SOURCES, MASK_PASSES):
        run = begin_translation(build, model, source, passes, lengths)
        after = [step.after for step in run]
        for row, n in enumerate(likeliest_lengths(model, source, lengths)):
            expected, got = (
                rewrite_by_rule(model, source, n, passes),
                [_candidate(canvas, row) for canvas in after],
            )
            shown = {
                "source": source,
                "length": n,
                "beside it": lengths - 1,
                "T": passes,
                "model": model,
            }
            if [words for words, _ in got] != [words for words, _ in expected]:
                accuse(
                    MASK_RULE,
                    [words for words, _ in expected],
                    [words for words, _ in got],
                    **shown,
                )
            for (_, kept), (_, scores) in zip(expected, got, strict=True):
                if any(abs(a - b) > MASK_TOLERANCE for a, b in zip(kept, scores, strict=True)):
                    accuse(MASK_RULE, kept, scores, **shown)
            seen += 1
    return Evidence(MASK_RULE, seen)


def begin_translation(
    build: Build, model: Seq2Seq, source: Sequence[int], passes: int, lengths: int
) -> Refinement:
    """Return a translation that has begun."""
    request = RefineRequest(model, forward_log=[])
    return refine(
        request.model,
        source,
        build(request, iterations=passes, lengths=lengths),
        Seeded(0),
        request.forward_log,
    )


def _candidate(canvas: Canvas, row: int) -> tuple[list[int], list[float]]:
    """Return a candidate's words and scores; nothing where there is no such candidate."""
    if row >= len(canvas.tokens):
        return [], []
    return canvas.text(row), canvas.scores[row][canvas.mask[row]].tolist()


def chooses_best_length(build: Build) -> Evidence:
    """Check the translation, its candidates and their cost: T decoder passes, one of the
    encoder."""
    seen = 0
    for model, source, (passes, lengths) in product(random_fillers(), MASK_SOURCES, LENGTH_CHOICES):
        run = begin_translation(build, model, source, passes, lengths)
        for _ in run:
            pass
        tried = likeliest_lengths(model, source, lengths)
        candidates = [rewrite_by_rule(model, source, n, passes)[-1] for n in tried]
        best = max(candidates, key=lambda one: sum(one[1]) / len(one[1]))
        shown = {"source": source, "lengths": lengths, "T": passes, "model": model}
        assert run.canvas is not None
        if (got := run.canvas.mask.sum(dim=1).tolist()) != tried:
            accuse(LENGTH_CHOICE, tried, got, **shown)
        if run.tokens != best[0]:
            accuse(LENGTH_CHOICE, best[0], run.tokens, **shown)
        if (calls := _count_passes(run.forward_log)) != (1, passes):
            accuse(
                LENGTH_CHOICE,
                (1, passes),
                calls,
                **shown,
                counted="passes of the encoder and of the decoder",
            )
        seen += 1
    return Evidence(LENGTH_CHOICE, seen)


def _count_passes(forward_log: Sequence[ForwardRecord]) -> tuple[int, int]:
    encoder = sum(call.model.endswith("/encoder") for call in forward_log)
    return encoder, len(forward_log) - encoder


def hides_uniformly(hide: Hide) -> Evidence:
    """Check the frequencies of all masks of rows of 1 to 4 slots by chi-square.

    The rows stand beside padding, in two batches.
    """
    rows, generator = 6000, torch.Generator().manual_seed(0)
    for n in (1, 2, 3, 4):
        slots = (torch.arange(5) < n).expand(rows, -1)
        first, second = (hide(slots, generator) for _ in range(2))
        found = Counter(tuple(map(bool, row)) for row in first.tolist() + second.tolist())
        law = {
            tuple(i in chosen for i in range(5)): 1 / n / math.comb(n, count)
            for count in range(1, n + 1)
            for chosen in combinations(range(n), count)
        }
        named = {
            "".join("x" if hidden else "." for hidden in key): 2 * rows * p
            for key, p in law.items()
        }
        got = {
            "".join("x" if hidden else "." for hidden in key): count for key, count in found.items()
        }
        far = sum((got.get(key, 0) - want) ** 2 / want for key, want in named.items())
        if set(got) - set(named) or far > len(named) + 6 * math.sqrt(2 * len(named)):
            accuse(
                MASKS_HIDDEN,
                {key: round(want) for key, want in named.items()},
                dict(sorted(got.items())),
                tokens=n,
            )
        if n == 4 and bool((first == second).all()):
            accuse(
                MASKS_HIDDEN, "masks drawn anew for every batch", "the same masks twice", tokens=n
            )
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


FERTILITY_RULE = "the law of noisy parallel decoding (Gu et al. 2018)"
NESTED = "more samples contain the fewer (Gu et al. 2018)"
SUPERVISED = "the aligner's fertilities are learnt (Gu et al. 2018)"
EXPECTED_COST = "the fertilities follow the gradient of the expected cost (Gu et al. 2018)"
FERTILITY_TOLERANCE = 1e-9


def random_student(seed: int, fertilities: int = 3, positions: int = 24) -> Seq2Seq:
    """Return a random float64 NAT with four words (ids 4 to 7) and large weights."""
    shape: dict[str, Any] = {
        "vocab_size": 8,
        "d_model": 8,
        "n_heads": 2,
        "d_ff": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    config = Seq2SeqConfig(
        **shape, max_positions=positions, positional=True, fertilities=fertilities
    )
    return amplify_weights(
        Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    )


def random_teacher(seed: int, positions: int = 24) -> Seq2Seq:
    """Return a random autoregressive model over the same words."""
    config = replace(
        random_student(0).config, positional=False, fertilities=0, max_positions=positions
    )
    made = amplify_weights(
        Seq2Seq.create(config, torch.Generator().manual_seed(1000 + seed), torch.float64)
    )
    return Seq2Seq(config, made.weights, name="teacher")


def amplify_weights(model: Seq2Seq) -> Seq2Seq:
    """Return the model with matrices three times as large, so that mixed-up candidates differ."""
    weights = {name: 3 * w if w.ndim == 2 else w for name, w in model.weights.items()}
    return Seq2Seq(model.config, weights, name="student")


# ---------------------------------------------------------------------- the rule, by itself


def fertility_law(
    model: Seq2Seq, source: Sequence[int], temperature: float = 1.0
) -> list[list[float]]:
    """Return p_F of every source word."""
    logits = model.fertility_logits(model.encode(torch.tensor([list(source)])))[0]
    return [[float(p) for p in row] for row in (logits / temperature).softmax(dim=-1)]


def fixed_fertilities(law: Sequence[Sequence[float]], which: str) -> list[int]:
    """Return each word's likeliest fertility, or its mean."""
    if which == "argmax":
        return [max(range(len(row)), key=row.__getitem__) for row in law]
    return [int(sum(f * p for f, p in enumerate(row)) + 0.5) for row in law]


def usable_fertilities(
    fertilities: Sequence[int], law: Sequence[Sequence[float]], positions: int
) -> list[int]:
    """Return the fertilities, cut where the sum passes 2 |x| + 4 or the positions; never empty."""
    kept, total = list[int](), 0
    for f in fertilities:
        total += f
        kept.append(f if total <= min(2 * len(fertilities) + 4, positions - 1) else 0)
    if not any(kept):
        kept[min(range(len(law)), key=lambda word: law[word][0])] = 1
    return kept


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
    memory, total = model.encode(torch.tensor([list(source)])), 0.0
    for at, token in enumerate([*text, model.config.eos]):
        read = torch.tensor([[model.config.bos, *text[:at]]])
        causal = torch.ones(at + 1, at + 1, dtype=torch.bool).tril()
        row = model.logits(model.decode(model.embed(read), memory, causal))[0, -1]
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
    law, drawn = fertility_law(model, source), fertility_law(model, source, temperature)
    second = "average" if fertility == "argmax" else "argmax"
    fixed = [fixed_fertilities(law, which) for which in (fertility, second)][:samples]
    outcomes: dict[tuple[int, ...], float] = {}
    texts: dict[tuple[int, ...], list[int]] = {}
    scores: dict[tuple[int, ...], float] = {}

    def text(sequence: Sequence[int]) -> list[int]:
        key = tuple(usable_fertilities(sequence, law, model.config.max_positions))
        if key not in texts:
            texts[key] = translate_in_parallel(model, source, key)
        return texts[key]

    def score(one: Sequence[int]) -> float:
        assert judge is not None
        if tuple(one) not in scores:
            scores[tuple(one)] = teacher_score(judge, source, one)
        return scores[tuple(one)]

    sequences = list(product(*(range(len(row)) for row in drawn)))
    for chosen in product(sequences, repeat=max(0, samples - 2)):
        probability = 1.0
        for sequence in chosen:
            for row, f in zip(drawn, sequence, strict=True):
                probability *= row[f]
        candidates = [text(sequence) for sequence in (*fixed, *chosen)]
        best = candidates[0] if samples == 1 else max(candidates, key=score)
        outcomes[tuple(best)] = outcomes.get(tuple(best), 0) + probability
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


def decode_once(
    build: Build, request: RefineRequest, source: Sequence[int], rng: Any, **knobs: Any
) -> tuple[int, ...]:
    """Return one translation."""
    run = refine(request.model, source, build(request, **knobs), rng, request.forward_log)
    for _ in run:
        pass
    return tuple(run.tokens)


def fertility_runs() -> Iterator[tuple[Seq2Seq, Seq2Seq, tuple[int, ...], dict[str, Any]]]:
    """Yield models, sources and settings; the second models have few positions."""
    for seed, (source, fertilities, knobs) in product(range(2), FERTILITY_CASES):
        positions = 5 if seed == 1 else 24
        model = random_student(seed, fertilities, positions)
        yield (
            model,
            random_teacher(seed, positions),
            source,
            {"fertility": "argmax", "temperature": 1.0, **knobs},
        )


def noisy_parallel(build: Build) -> Evidence:
    """Check every outcome of every setting, by walking all fertility sequences."""
    branches = count = 0
    for model, judge, source, knobs in fertility_runs():
        want = expected_translations(model, judge, source, **knobs)
        got: dict[tuple[int, ...], float] = {}
        with torch.inference_mode():
            for text, probability in Exhaustive.walk(
                lambda rng, model=model, judge=judge, source=source, knobs=knobs: decode_once(  # type: ignore[misc]
                    build, RefineRequest(model, judge), source, rng, **knobs
                )
            ):
                got[text] = got.get(text, 0) + float(probability)
                branches += 1
        count += 1
        if any(
            abs(got.get(text, 0) - want.get(text, 0)) > FERTILITY_TOLERANCE
            for text in {*got, *want}
        ):
            shown = {"source": source, **knobs, "classes of fertility": model.config.fertilities}
            accuse(FERTILITY_RULE, dict(sorted(want.items())), dict(sorted(got.items())), **shown)
    return Evidence(FERTILITY_RULE, count, branches)


def samples_are_nested(build: Build) -> Evidence:
    """Check that a larger sample contains the smaller one, so that the best score never falls."""
    seen = 0
    for seed, source in product(range(3), ((4, 5), (6, 4, 7, 5))):
        model, judge = random_student(seed), random_teacher(seed)
        told, scores = list[Any](), list[float]()
        for samples in (1, 2, 3, 5, 8):
            request = RefineRequest(model, judge)
            run = refine(
                request.model,
                source,
                build(request, samples=samples),
                Seeded(seed),
                request.forward_log,
            )
            for _ in run:
                pass
            assert run.canvas is not None
            told.append([run.canvas.text(row) for row in range(len(run.canvas.tokens))])
            scores.append(teacher_score(judge, source, run.tokens))
            seen += 1
        for fewer, more in pairwise(told):
            if more[: len(fewer)] != fewer:
                accuse(
                    NESTED,
                    fewer,
                    more[: len(fewer)],
                    source=source,
                    fewer=len(fewer),
                    more=len(more),
                )
        for low, high in pairwise(scores):
            if high < low - FERTILITY_TOLERANCE:
                accuse(
                    NESTED,
                    f"at least {low}",
                    high,
                    source=source,
                    asked="the teacher's score of the choice",
                )
    return Evidence(NESTED, seen)


def fertilities_are_learnt(loss: Callable[..., Tensor]) -> Evidence:
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
        law = model.fertility_logits(model.encode(source)).softmax(dim=-1).detach()
        want = [
            round(float(law[source > 0][:, f].sum() - n) / 5, 9) for f, n in enumerate((2, 1, 2))
        ]
        got = [0.0, 0.0, 0.0] if slope is None else [round(float(x), 9) for x in slope]
        if max(abs(a - b) for a, b in zip(want, got, strict=True)) > 1e-8:
            accuse(SUPERVISED, want, got, source=source.tolist(), fertilities=fertilities.tolist())
    return Evidence(SUPERVISED, 3)


def gradient_of_the_expectation(surrogate: Callable[..., Tensor]) -> Evidence:
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
            law = logits.softmax(dim=-1)[0]
            want = torch.autograd.grad((law[0][:, None] * law[1] * costs).sum(), logits)[0]
            got = torch.zeros_like(want)
            for f in product(range(count), repeat=2):
                cost = costs[f].reshape(1) + (logits - logits.detach()).sum()
                (slope,) = torch.autograd.grad(
                    surrogate(logits, mask, torch.tensor([[*f, 1]]), cost), logits
                )
                got = got + law[0, f[0]].detach() * law[1, f[1]].detach() * slope
        if float((want - got).abs().max()) > 1e-12:
            accuse(
                EXPECTED_COST,
                want.flatten().tolist(),
                got.flatten().tolist(),
                words=2,
                classes=count,
            )
    return Evidence(EXPECTED_COST, 3, 3 * count**2)


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
    said = {(s, t): 1 / len(words) for s, words in beside.items() for t in words}
    seen: dict[tuple[int, ...], float] = {}
    told = []
    for number in range(rounds + placed + 1):
        second, likelihood = number >= rounds and placed > 0, 0.0
        words, places = Counter[tuple[int, int]](), Counter[tuple[int, ...]]()
        for x, y in zip(source, target, strict=True):
            for i, t in enumerate(y):
                spots = [(j, i, len(x), len(y)) for j in range(len(x) + 1)]
                shares = [
                    said[s, t] * (seen.get(spot, 1 / len(spots)) if second else 1 / len(spots))
                    for s, spot in zip((NULL, *x), spots, strict=True)
                ]
                likelihood += math.log(sum(shares))
                for s, spot, share in zip((NULL, *x), spots, shares, strict=True):
                    words[s, t] += share / sum(shares)  # type: ignore[assignment]
                    places[spot] += share / sum(shares)  # type: ignore[assignment]
        told.append(likelihood)
        said = {(s, t): n / sum(words[s, u] for u in beside[s]) for (s, t), n in words.items()}
        if second:
            seen = {
                (j, *r): n / sum(places[k, *r] for k in range(r[1] + 1))
                for (j, *r), n in places.items()
            }
    return told


def rounds_of_em(align: Align) -> Evidence:
    """Check the likelihood after each round against plain loops, and that it never falls."""
    seen = 0
    for (source, target), (rounds, placed) in (
        (c, r) for c in CORPORA for r in ((3, 0), (0, 3), (2, 2))
    ):
        want = em_by_plain_loops(source, target, rounds, placed)
        got, seen = (
            align(source, target, model1_rounds=rounds, model2_rounds=placed).likelihood,
            seen + 1,
        )
        if len(want) != len(got) or any(abs(a - b) > 1e-9 for a, b in zip(want, got, strict=True)):
            accuse(EM, want, got, source=source, target=target, model_1=rounds, model_2=placed)
    random = np.random.default_rng(0)
    sides = [
        [random.integers(0, 9, random.integers(1, 7)).tolist() for _ in range(150)]
        for _ in range(2)
    ]
    for before, after in pairwise(align(*sides).likelihood):
        if after < before - 1e-9:
            accuse(
                EM,
                f"at least {before}",
                after,
                corpus="150 random pairs",
                asked="the likelihood of the next round",
            )
    return Evidence(EM, seen + 1)


def known_alignments(align: Align) -> Evidence:
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
    got = align(*TWICE).links[0].tolist()
    if got != [0, 1, 2]:
        accuse(KNOWN, [0, 1, 2], got, source=TWICE[0][0], target=TWICE[1][0])
    return Evidence(KNOWN, 3)


ALIGNMENT_LAWS: dict[str, Callable[[Parts], Evidence]] = {
    EM: lambda parts: rounds_of_em(parts.align),
    KNOWN: lambda parts: known_alignments(parts.align),
}
