"""The exact oracle of noisy parallel decoding, on models so small that all fertility sequences can be walked.

It decodes each candidate by itself, without padding, and asks the teacher for one token after the other; what a technique does
in one batch must come to the same, with the same probability.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from tinyspec.decoding.chance import Exhaustive
from tinyspec.decoding.refine import Refiner, refine
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import RefineRequest

RULE = "the law of noisy parallel decoding"
WITHIN = 1e-9

Build = Callable[..., Refiner]


def student(seed: int, fertilities: int = 3, positions: int = 24) -> Seq2Seq:
    """A random NAT with four words (ids 4 to 7), in float64, with strong opinions."""
    shape: dict[str, Any] = {
        "vocab_size": 8,
        "d_model": 8,
        "n_heads": 2,
        "d_ff": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    config = Seq2SeqConfig(**shape, max_positions=positions, positional=True, fertilities=fertilities)
    return loud(Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64))


def teacher(seed: int, positions: int = 24) -> Seq2Seq:
    """A random autoregressive model over the same words."""
    config = replace(student(0).config, positional=False, fertilities=0, max_positions=positions)
    made = loud(Seq2Seq.create(config, torch.Generator().manual_seed(1000 + seed), torch.float64))
    return Seq2Seq(config, made.weights, name="teacher")


def loud(model: Seq2Seq) -> Seq2Seq:
    """Matrices three times as large: random choices differ, so that what is mixed up shows."""
    weights = {name: 3 * w if w.ndim == 2 else w for name, w in model.weights.items()}
    return Seq2Seq(model.config, weights, name="student")


# ---------------------------------------------------------------------- the rule, by itself


def fertility_law(model: Seq2Seq, source: Sequence[int], temperature: float = 1.0) -> list[list[float]]:
    """p_F of every source word."""
    logits = model.fertility_logits(model.encode(torch.tensor([list(source)])))[0]
    return [[float(p) for p in row] for row in (logits / temperature).softmax(dim=-1)]


def named(law: Sequence[Sequence[float]], which: str) -> list[int]:
    """Each word's likeliest fertility, or its mean."""
    if which == "argmax":
        return [max(range(len(row)), key=row.__getitem__) for row in law]
    return [int(sum(f * p for f, p in enumerate(row)) + 0.5) for row in law]


def usable(fertilities: Sequence[int], law: Sequence[Sequence[float]], positions: int) -> list[int]:
    """Cut where the sum passes 2 |x| + 4 or the positions; never empty."""
    kept, total = list[int](), 0
    for f in fertilities:
        total += f
        kept.append(f if total <= min(2 * len(fertilities) + 4, positions - 1) else 0)
    if not any(kept):
        kept[min(range(len(law)), key=lambda word: law[word][0])] = 1
    return kept


def parallel(model: Seq2Seq, source: Sequence[int], fertilities: Sequence[int]) -> list[int]:
    """The translation that these fertilities give."""
    read = [word for word, f in zip(source, fertilities, strict=True) for _ in range(f)]
    others = torch.tensor([[i != j for j in range(len(read))] for i in range(len(read))])
    memory = model.encode(torch.tensor([list(source)]))
    logits = model.logits(model.decode(model.embed(torch.tensor([read])), memory, others))[0]
    return [4 + max(range(len(row) - 4), key=row[4:].__getitem__) for row in logits.tolist()]


def judged(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> float:
    """log p of a translation and its end, token by token."""
    memory, total = model.encode(torch.tensor([list(source)])), 0.0
    for at, token in enumerate([*text, model.config.eos]):
        read = torch.tensor([[model.config.bos, *text[:at]]])
        causal = torch.ones(at + 1, at + 1, dtype=torch.bool).tril()
        row = model.logits(model.decode(model.embed(read), memory, causal))[0, -1]
        total += float(row.log_softmax(dim=-1)[token])
    return total


def expected(
    model: Seq2Seq, judge: Seq2Seq | None, source: Sequence[int], samples: int, fertility: str, temperature: float
) -> dict[tuple[int, ...], float]:
    """Every translation with its probability."""
    law, drawn = fertility_law(model, source), fertility_law(model, source, temperature)
    second = "average" if fertility == "argmax" else "argmax"
    fixed = [named(law, which) for which in (fertility, second)][:samples]
    outcomes: dict[tuple[int, ...], float] = {}
    texts: dict[tuple[int, ...], list[int]] = {}
    scores: dict[tuple[int, ...], float] = {}

    def text(sequence: Sequence[int]) -> list[int]:
        key = tuple(usable(sequence, law, model.config.max_positions))
        if key not in texts:
            texts[key] = parallel(model, source, key)
        return texts[key]

    def score(one: Sequence[int]) -> float:
        assert judge is not None
        if tuple(one) not in scores:
            scores[tuple(one)] = judged(judge, source, one)
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

CASES: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((5,), 3, {"samples": 1}),
    ((4, 6), 3, {"samples": 1, "fertility": "average"}),
    ((6, 4, 7), 3, {"samples": 2}),
    ((5, 4), 3, {"samples": 2, "fertility": "average"}),
    ((7, 5), 3, {"samples": 4}),
    ((4, 7, 5), 3, {"samples": 3, "temperature": 0.5}),
    ((6,), 9, {"samples": 3}),
    ((5, 6), 6, {"samples": 3, "temperature": 2.0}),
]


def decoded(build: Build, request: RefineRequest, source: Sequence[int], chance: Any, **knobs: Any) -> tuple[int, ...]:
    """One translation."""
    run = refine(request.model, source, build(request, **knobs), chance, request.ledger)
    for _ in run:
        pass
    return tuple(run.tokens)


def runs() -> Iterator[tuple[Seq2Seq, Seq2Seq, tuple[int, ...], dict[str, Any]]]:
    """Models, sources and settings; the second ones have few positions."""
    for seed, (source, fertilities, knobs) in product(range(2), CASES):
        positions = 5 if seed == 1 else 24
        model = student(seed, fertilities, positions)
        yield model, teacher(seed, positions), source, {"fertility": "argmax", "temperature": 1.0, **knobs}


def noisy_parallel(build: Build) -> Evidence:
    """Every outcome of every setting, by walking all fertility sequences."""
    branches = count = 0
    for model, judge, source, knobs in runs():
        want = expected(model, judge, source, **knobs)
        got: dict[tuple[int, ...], float] = {}
        with torch.inference_mode():
            for text, probability in Exhaustive.walk(
                lambda chance, model=model, judge=judge, source=source, knobs=knobs: decoded(  # type: ignore[misc]
                    build, RefineRequest(model, judge), source, chance, **knobs
                )
            ):
                got[text] = got.get(text, 0) + float(probability)
                branches += 1
        count += 1
        if any(abs(got.get(text, 0) - want.get(text, 0)) > WITHIN for text in {*got, *want}):
            shown = {"source": source, **knobs, "classes of fertility": model.config.fertilities}
            accuse(RULE, dict(sorted(want.items())), dict(sorted(got.items())), **shown)
    return Evidence(RULE, count, branches)
