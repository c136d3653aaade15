"""Parallel (Gu et al. 2018): even copies, one pass, lengths that are predicted, a teacher that
chooses.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import (
    Build,
    likeliest_lengths,
    run_refinement,
    teacher_score,
)
from tinyspec.laws.plain_lists import (
    copy_evenly,
    find_likeliest_word,
    run_plain_pass,
    word_logits,
    word_vector,
)
from tinyspec.laws.rewriting_laws import candidate_of, numbers_differ, random_reader, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import nat, parallel
from tinyspec.nonautoregressive.parallel import ParallelRefiner
from tinyspec.technique import RefineRequest, find_technique

ONE_PASS = "every length is written in one pass over even copies (Gu et al. 2018)"
LENGTHS = "the best of the likeliest lengths, by who is asked (Gu et al. 2018)"
WORDS_AND_LENGTH = "the loss is that of the words and of the length (Gu et al. 2018)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
TOLERANCE = 1e-9
BEAMS = ((1, False), (4, False), (4, True))
"""How many lengths are tried, and whether they are those around the likeliest."""


def small_translator(seed: int) -> Seq2Seq:
    """Return a random model with a LENGTH token."""
    return reader_of(find_technique("parallel").translator, seed)


def write_from_copies(
    model: Seq2Seq, source: tuple[int, ...], count: int
) -> tuple[list[int], list[float]]:
    """Return the words of a translation of `count` words, and their log-probabilities."""
    inputs = [word_vector(model, word) for word in copy_evenly(source, count)]
    states = run_plain_pass(model, source, inputs, lambda t, s: t != s)
    best = [find_likeliest_word(model, state) for state in states]
    return [word for word, _ in best], [score for _, score in best]


def nearest_lengths(model: Seq2Seq, source: tuple[int, ...], count: int) -> list[int]:
    """Return the likeliest length, one less, one more, two less, and so on, where they exist."""
    (likeliest,), most = likeliest_lengths(model, source, 1), model.config.lengths - 1
    steps = [0, *(sign * far for far in range(1, most) for sign in (-1, 1))]
    return [likeliest + step for step in steps if 1 <= likeliest + step <= most][:count]


def tried_lengths(model: Seq2Seq, source: tuple[int, ...], count: int, around: bool) -> list[int]:
    """Return the lengths to try: the likeliest ones, or those around the likeliest."""
    return (nearest_lengths if around else likeliest_lengths)(model, source, count)


@collect_evidence(ONE_PASS)
def words_of_one_pass(build: Build) -> Iterator[int]:
    """Check the words and log-probabilities of every candidate."""
    for seed, source, lengths in product(range(3), SOURCES, (1, 4, 8)):
        request = RefineRequest(small_translator(seed))
        run = run_refinement(build, request, source, lengths=lengths, judge="self")
        assert run.canvas is not None
        for row, count in enumerate(likeliest_lengths(request.model, source, lengths)):
            expected = write_from_copies(request.model, source, count)
            got = candidate_of(run.canvas, row)
            case = {"source": source, "length": count, "beside it": lengths - 1, "reader": seed}
            expect_equal(ONE_PASS, expected[0], got[0], **case)
            if numbers_differ(expected[1], got[1]):
                accuse(ONE_PASS, expected[1], got[1], **case)
            yield 0


@collect_evidence(LENGTHS)
def best_length_is_chosen(build: Build) -> Iterator[int]:
    """Check which lengths are tried, and the choice of the teacher and of the model itself."""
    for seed, source, lengths, around in product(range(3), SOURCES, (1, 2, 5), (False, True)):
        model, judge = small_translator(seed), random_reader(9 + seed, False, 48)
        counts = tried_lengths(model, source, lengths, around)
        texts = [write_from_copies(model, source, count) for count in counts]
        for who in ("teacher", "self"):
            run = run_refinement(
                build,
                RefineRequest(model, judge),
                source,
                lengths=lengths,
                judge=who,
                around=around,
            )
            scores = [
                sum(score) / len(words) if who == "self" else teacher_score(judge, source, words)
                for words, score in texts
            ]
            assert run.canvas is not None
            case = {"source": source, "lengths": lengths, "judge": who, "reader": seed}
            case["around"] = around
            tried = run.canvas.mask.sum(dim=1).tolist()
            expect_equal(LENGTHS, counts, tried, **case, asked="which lengths are tried")
            best = texts[scores.index(max(scores))][0]
            expect_equal(LENGTHS, best, run.tokens, **case, scores=scores)
            yield 0


@collect_evidence(WORDS_AND_LENGTH)
def loss_of_words_and_length(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone."""
    source = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]])
    target = torch.tensor([[5, 8, 6, 0], [4, 4, 7, 5]])
    for seed in range(3):
        model, total = small_translator(seed), 0.0
        for x, y in zip(source.tolist(), target.tolist(), strict=True):
            words, answer = [w for w in x if w], [w for w in y if w]
            inputs = [word_vector(model, word) for word in copy_evenly(words, len(answer))]
            states = run_plain_pass(model, words, inputs, lambda t, s: t != s)
            for state, word in zip(states, answer, strict=True):
                row = torch.tensor(word_logits(model, state), dtype=torch.float64)
                total -= float(row.log_softmax(dim=-1)[word])
            lengths = model.length_logits(model.encode(torch.tensor([words])))[0]
            total -= float(lengths.log_softmax(dim=-1)[len(answer)])
        got: Any = float(loss(model, (source, target)))
        if abs(got - total / 7) > TOLERANCE:
            case = {"source": source.tolist(), "target": target.tolist(), "reader": seed}
            accuse(WORDS_AND_LENGTH, total / 7, got, **case)
        yield 0


TRAPS = [
    Trap(ONE_PASS, words_of_one_pass, refine_card("parallel")),
    Trap(LENGTHS, best_length_is_chosen, refine_card("parallel")),
    Trap(WORDS_AND_LENGTH, loss_of_words_and_length, lambda: parallel.parallel_loss),
]

_parallel = partial(Toy, technique="parallel")

TOYS = [
    _parallel(
        "the likeliest lengths under the name of those around",
        "find = find_nearest_lengths if around else find_likeliest_lengths",
        "find = find_likeliest_lengths",
        parallel.copy_to_likeliest_lengths,
        law=LENGTHS,
    ),
    _parallel(
        "masks in place of copies",
        "return Canvas(row[places], slots",
        "return Canvas(torch.full_like(row[places], model.config.mask), slots",
        parallel.copy_to_likeliest_lengths,
        law=ONE_PASS,
    ),
    _parallel(
        "a position sees its own copy",
        "memory, others,",
        "memory, None,",
        nat.decode_parallel,
        law=ONE_PASS,
    ),
    _parallel(
        "from left to right",
        "others = ~torch.eye(read.shape[1], dtype=torch.bool, device=read.device)",
        "others = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).tril(-1)",
        nat.decode_parallel,
        law=ONE_PASS,
    ),
    _parallel(
        "a single length",
        "self.width = model, teacher, lengths",
        "self.width = model, teacher, 1",
        ParallelRefiner.__init__,
        law=LENGTHS,
    ),
    _parallel(
        "the student judges itself",
        "if self.teacher is None:",
        "if True:",
        ParallelRefiner.choose,
        law=LENGTHS,
    ),
    _parallel(
        "a length that nobody learns",
        "(words + length_nll(model, target, memory))",
        "words",
        parallel.parallel_loss,
        law=WORDS_AND_LENGTH,
    ),
]
