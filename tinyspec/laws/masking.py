"""The exact oracle of Mask-Predict, and the law of the masks that it is trained on.

The oracle decodes one length after the other, by itself and without padding, in plain lists; what a
technique does with all lengths in one batch must come to the same words, the same kept
probabilities and the same choice, pass by pass.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas, Refinement, Refiner, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.parts import Parts
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import RefineRequest

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
    """Random conditional masked language models of 16 words in float64, loud, so that words differ;
    one of few positions.
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
    """The lengths to try, the likeliest first."""
    row = model.length_logits(model.encode(torch.tensor([list(source)])))[0].tolist()
    return sorted(
        range(1, min(len(row), model.config.max_positions + 1)), key=lambda n: (-row[n], n)
    )[:count]


def rewrite_by_rule(
    model: Seq2Seq, source: Sequence[int], n: int, passes: int
) -> list[tuple[list[int], list[float]]]:
    """Words and kept log-probabilities of a translation of n words, after each pass."""
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
    """Words and scores of every candidate after every pass."""
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
    """A translation under way."""
    request = RefineRequest(model, forward_log=[])
    return refine(
        request.model,
        source,
        build(request, iterations=passes, lengths=lengths),
        Seeded(0),
        request.forward_log,
    )


def _candidate(canvas: Canvas, row: int) -> tuple[list[int], list[float]]:
    """A candidate's words and scores; none where there is no such candidate."""
    if row >= len(canvas.tokens):
        return [], []
    return canvas.text(row), canvas.scores[row][canvas.mask[row]].tolist()


def chooses_best_length(build: Build) -> Evidence:
    """The translation, its candidates and what they cost: T decoder passes for all of them, one of
    the encoder.
    """
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
    """The frequencies of all choices of rows of 1 to 4 slots beside padding, in two batches,
    against their law (chi-square).
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
