"""DePA (Zhan et al. 2023): both directions first, then mixtures of target words."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement
from tinyspec.laws.plain_lists import (
    Vector,
    add_vectors,
    copy_evenly,
    find_likeliest_word,
    mix_vectors,
    multiply_vector,
    position_vector,
    run_plain_pass,
    word_logits,
    word_vector,
)
from tinyspec.laws.rewriting_laws import READER_PAIRS, numbers_differ, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.laws.traps.nar_crf import dot
from tinyspec.laws.traps.parallel import BEAMS, tried_lengths
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import depa
from tinyspec.nonautoregressive.depa import COPY, QUERY, QUERY_BIAS, DepaRefiner, DepaSettings
from tinyspec.technique import RefineRequest, find_technique

MIXED = "the decoder reads a mixture of target embeddings (Zhan et al. 2023)"
PHASES = "left to right comes first, then right to left, then all at once (Zhan et al. 2023)"
PHASE_LOSS = "every phase trains its own order of the words (Zhan et al. 2023)"
CONSTANT = "the table of target embeddings is a constant (Zhan et al. 2023)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
SOURCE = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]])
TARGET = torch.tensor([[5, 8, 6, 0, 0], [4, 4, 7, 5, 8]])
TARGET_SIDE = sorted({word for _, target in READER_PAIRS for word in target})
TOLERANCE = 1e-9


def small_mixer(seed: int, transform: bool = True) -> Seq2Seq:
    """Return a random model with W_c, W_q and b. Its lists of words are those of READER_PAIRS."""
    model = reader_of(find_technique("depa").translator, seed, transform=transform)
    if transform:
        bias = model.weights[QUERY_BIAS]
        bias.copy_(torch.linspace(-1, 1, len(bias)))
    return model


def mix_targets(model: Seq2Seq, source: Sequence[int], count: int) -> list[Vector]:
    """Return what `count` positions read, without their sinusoids."""
    w, width = model.weights, model.config.d_model
    words = [word_vector(model, word) for word in source]
    keys = [add_vectors(x, position_vector(j, width)) for j, x in enumerate(words)]
    table, made = [model.embedding[word].tolist() for word in TARGET_SIDE], list[Vector]()
    for i in range(count):
        asking = multiply_vector(w[COPY], position_vector(i, width))
        soft = mix_vectors(words, [dot(asking, key) for key in keys])
        asking = add_vectors(multiply_vector(w[QUERY], soft), w[QUERY_BIAS].tolist())
        mean = mix_vectors(table, [dot(asking, row) for row in table])
        made.append([x * math.sqrt(width) for x in mean])
    return made


@collect_evidence(MIXED)
def words_of_mixtures(build: Build) -> Iterator[int]:
    """Check the words and log-probabilities of every candidate, transformed or not."""
    cases = product(range(3), SOURCES, BEAMS, (True, False))
    for seed, source, (lengths, around), transform in cases:
        request = RefineRequest(small_mixer(seed, transform))
        model = request.model
        knobs: dict[str, Any] = {"lengths": lengths, "judge": "self", "around": around}
        run = run_refinement(build, request, source, **knobs)
        assert run.canvas is not None
        for row, count in enumerate(tried_lengths(model, source, lengths, around)):
            copies = [word_vector(model, word) for word in copy_evenly(source, count)]
            inputs = mix_targets(model, source, count) if transform else copies
            states = run_plain_pass(model, source, inputs, lambda t, s: t != s)
            best = [find_likeliest_word(model, state) for state in states]
            case = {"source": source, "length": count, "reader": seed, **knobs}
            case["transform"] = transform
            expect_equal(MIXED, [word for word, _ in best], run.canvas.text(row), **case)
            expected = [score for _, score in best]
            got = run.canvas.scores[row][run.canvas.mask[row]].tolist()
            if numbers_differ(expected, got):
                accuse(MIXED, expected, got, **case)
            yield 0


@collect_evidence(PHASES)
def phases_in_order(find: Callable[[DepaSettings, float], str]) -> Iterator[int]:
    """Check the phase at every point of a training."""
    for forward, backward in ((0.0, 0.3), (0.25, 0.5), (0.0, 0.0), (1.0, 0.0)):
        for step in range(100):
            first, second = step < 100 * forward, step < 100 * (forward + backward)
            expected = "forward" if first else "backward" if second else "parallel"
            got = find(DepaSettings(forward, backward), step / 100)
            expect_equal(PHASES, expected, got, progress=step / 100, shares=(forward, backward))
            yield 0


def nll_of_phase(
    model: Seq2Seq, source: list[int], target: list[int], phase: str, transform: bool
) -> float:
    """Return - log p of a pair's words, in the order of a phase, and of their number."""
    if phase == "parallel":
        copies = [word_vector(model, word) for word in copy_evenly(source, len(target))]
        inputs = mix_targets(model, source, len(target)) if transform else copies
        states, labels = run_plain_pass(model, source, inputs, lambda t, s: t != s), target
    else:
        text = target if phase == "forward" else target[::-1]
        inputs = [word_vector(model, word) for word in [model.config.bos, *text]]
        states = run_plain_pass(model, source, inputs, lambda t, s: s <= t)
        labels = [*text, model.config.eos]
    total = 0.0
    for state, label in zip(states, labels, strict=True):
        row = torch.tensor(word_logits(model, state), dtype=torch.float64)
        total -= float(row.log_softmax(dim=-1)[label])
    lengths = model.length_logits(model.encode(torch.tensor([source])))[0]
    return total - float(lengths.log_softmax(dim=-1)[len(target)])


@collect_evidence(PHASE_LOSS)
def loss_of_every_phase(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone."""
    pairs = [
        ([x for x in source if x], [y for y in target if y])
        for source, target in zip(SOURCE.tolist(), TARGET.tolist(), strict=True)
    ]
    kinds = ("forward", "backward", "parallel")
    for seed, phase, transform in product(range(2), kinds, (True, False)):
        model, labels = small_mixer(seed, transform), 8 if phase == "parallel" else 10
        parts = [nll_of_phase(model, *pair, phase, transform) for pair in pairs]
        got: Any = float(loss(model, (SOURCE, TARGET), phase, transform))
        if abs(got - sum(parts) / labels) > TOLERANCE:
            case = {"phase": phase, "transform": transform, "pairs": pairs, "reader": seed}
            accuse(PHASE_LOSS, sum(parts) / labels, got, **case)
        yield 0


@collect_evidence(CONSTANT)
def table_is_constant(transform: Callable[..., Tensor]) -> Iterator[int]:
    """Check that a word which is in no source gets no gradient, and that source words get one."""
    for seed in range(3):
        model = small_mixer(seed)
        source = torch.tensor([[4, 7, 5]])
        memory = model.encode(source)
        with torch.enable_grad():
            weight = model.embedding.requires_grad_()
            made = transform(model, memory, 4)
            (slope,) = torch.autograd.grad((made * made).sum(), weight)
        got = [bool(row.any()) for row in slope]
        expected = [word in (4, 5, 7) for word in range(model.config.vocab_size)]
        expect_equal(CONSTANT, expected, got, source=source.tolist(), of="words with a gradient")
        yield 0


TRAPS = [
    Trap(MIXED, words_of_mixtures, refine_card("depa")),
    Trap(PHASES, phases_in_order, lambda: depa.find_phase),
    Trap(PHASE_LOSS, loss_of_every_phase, lambda: depa.depa_loss),
    Trap(CONSTANT, table_is_constant, lambda: depa.transform_inputs),
]

_depa = partial(Toy, technique="depa")

TOYS = [
    _depa(
        "attention over the source alone: a soft copy",
        "table = model.embedding.detach()",
        "return shares @ words\ntable = model.embedding.detach()",
        depa.transform_inputs,
        law=MIXED,
    ),
    _depa(
        "words of both languages",
        "[list(find_target_words(model))]",
        "[4:]",
        depa.transform_inputs,
        law=MIXED,
    ),
    _depa(
        "copies of the source",
        "if not self.transform:",
        "if True:",
        DepaRefiner.read_canvas,
        law=MIXED,
    ),
    _depa(
        "padding reversed too",
        "torch.where(i < ends, ends - 1 - i, i)",
        "words.shape[1] - 1 - i",
        depa.reverse_words,
        law=PHASE_LOSS,
    ),
    _depa(
        "from left to right twice",
        'text = labels if phase == "forward" else reverse_words(labels, pad)',
        "text = labels",
        depa.depa_loss,
        law=PHASE_LOSS,
    ),
    _depa(
        "a backward phase that sees all words",
        "causal = group_mask(inputs.shape[1], 1, inputs.device)",
        "causal = None",
        depa.depa_loss,
        law=PHASE_LOSS,
    ),
    _depa(
        "one direction",
        'return "backward" if progress < settings.forward + settings.backward else "parallel"',
        'return "parallel"',
        depa.find_phase,
        law=PHASES,
    ),
    _depa(
        "a table that learns from its mixtures",
        "model.embedding.detach()",
        "model.embedding",
        depa.transform_inputs,
        law=CONSTANT,
    ),
]
