"""The exact oracle of noisy parallel decoding, on models so small that all fertility sequences can
be walked.

It decodes each candidate by itself, without padding, and asks the teacher for one token after the
other; what a technique does in one batch must come to the same, with the same probability.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Refiner, refine
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import RefineRequest

FERTILITY_RULE = "the law of noisy parallel decoding (Gu et al. 2018)"
NESTED = "more samples contain the fewer (Gu et al. 2018)"
SUPERVISED = "the aligner's fertilities are learnt (Gu et al. 2018)"
EXPECTED_COST = "the fertilities follow the gradient of the expected cost (Gu et al. 2018)"
FERTILITY_TOLERANCE = 1e-9

Build = Callable[..., Refiner]


def random_student(seed: int, fertilities: int = 3, positions: int = 24) -> Seq2Seq:
    """A random NAT with four words (ids 4 to 7), in float64, with strong opinions."""
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
    """A random autoregressive model over the same words."""
    config = replace(
        random_student(0).config, positional=False, fertilities=0, max_positions=positions
    )
    made = amplify_weights(
        Seq2Seq.create(config, torch.Generator().manual_seed(1000 + seed), torch.float64)
    )
    return Seq2Seq(config, made.weights, name="teacher")


def amplify_weights(model: Seq2Seq) -> Seq2Seq:
    """Matrices three times as large: random choices differ, so that what is mixed up shows."""
    weights = {name: 3 * w if w.ndim == 2 else w for name, w in model.weights.items()}
    return Seq2Seq(model.config, weights, name="student")


# ---------------------------------------------------------------------- the rule, by itself


def fertility_law(
    model: Seq2Seq, source: Sequence[int], temperature: float = 1.0
) -> list[list[float]]:
    """p_F of every source word."""
    logits = model.fertility_logits(model.encode(torch.tensor([list(source)])))[0]
    return [[float(p) for p in row] for row in (logits / temperature).softmax(dim=-1)]


def fixed_fertilities(law: Sequence[Sequence[float]], which: str) -> list[int]:
    """Each word's likeliest fertility, or its mean."""
    if which == "argmax":
        return [max(range(len(row)), key=row.__getitem__) for row in law]
    return [int(sum(f * p for f, p in enumerate(row)) + 0.5) for row in law]


def usable_fertilities(
    fertilities: Sequence[int], law: Sequence[Sequence[float]], positions: int
) -> list[int]:
    """Cut where the sum passes 2 |x| + 4 or the positions; never empty."""
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
    """The translation that these fertilities give."""
    read = [word for word, f in zip(source, fertilities, strict=True) for _ in range(f)]
    others = torch.tensor([[i != j for j in range(len(read))] for i in range(len(read))])
    memory = model.encode(torch.tensor([list(source)]))
    logits = model.logits(model.decode(model.embed(torch.tensor([read])), memory, others))[0]
    return [4 + max(range(len(row) - 4), key=row[4:].__getitem__) for row in logits.tolist()]


def teacher_score(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> float:
    """log p of a translation and its end, token by token."""
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
    """Every translation with its probability."""
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
    """One translation."""
    run = refine(request.model, source, build(request, **knobs), rng, request.forward_log)
    for _ in run:
        pass
    return tuple(run.tokens)


def fertility_runs() -> Iterator[tuple[Seq2Seq, Seq2Seq, tuple[int, ...], dict[str, Any]]]:
    """Models, sources and settings; the second ones have few positions."""
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
    """Every outcome of every setting, by walking all fertility sequences."""
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
    """The candidates of a smaller s are the first of a larger; so the teacher's best score never
    falls.
    """
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
    """The loss moves the head's bias by (how likely each fertility is) - (how often it was the
    aligner's), per target token.
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
    """By all fertility sequences of two words beside padding: the mean gradient is that of sum_f
    p(f) cost(f).

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
    """The refiner of these parts, as the technique makes it."""

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
