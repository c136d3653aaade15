"""SAT (Wang et al. 2018): the words of a group see all before the end of their group, K = 1 is the
teacher, an end may stand anywhere in a group, and beam search compares whole texts.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.beam import greedy_search
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement
from tinyspec.laws.plain_lists import (
    run_plain_pass,
    score_all_texts,
    search_by_rule,
    word_logits,
    word_vector,
)
from tinyspec.laws.rewriting_laws import numbers_differ, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.seq2seq import Lockstep, Seq2Seq
from tinyspec.nonautoregressive import sat
from tinyspec.nonautoregressive.sat import SatBeamRefiner, SatRefiner
from tinyspec.technique import RefineRequest, find_technique
from tinyspec.training.translation_tasks import teacher_forcing_loss

GROUPS = "a group is written in one pass, given the groups before it (Wang et al. 2018)"
TEACHER = "groups of one word are the teacher's text (Wang et al. 2018)"
RELAXED = "a position sees all before the end of its group (Wang et al. 2018)"
SEARCHED = "beam search compares the words of a group one after another (Wang et al. 2018)"
SHIFTED = "a word is learnt from the words before its group (Wang et al. 2018)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
TOLERANCE = 1e-6  # of a loss, which is summed in float32
LOUD = 2  # factor of the end's embedding: random models write it seldom


def group_writer(seed: int, k: int, positions: int = 40) -> Seq2Seq:
    """Return a random model that writes groups of k words, and often an end."""
    model = reader_of(find_technique("sat").translator, seed, positions, k=k)
    model.embedding[model.config.eos] *= LOUD
    return model


def sees_group(k: int) -> Callable[[int, int], bool]:
    """Return who sees whom: (t, s) -> M[t, s], by the paper's formula."""
    return lambda t, s: s < (t // k + 1) * k


def most_words(model: Seq2Seq, source: tuple[int, ...], k: int) -> int:
    """Return the limit of a translation: 1.5 |x| + 11 words, and what the positions hold."""
    positions = model.config.max_positions
    return min(math.floor(1.5 * len(source)) + 11, positions // k * k, positions - 1)


def write_groups(
    model: Seq2Seq, source: tuple[int, ...], k: int
) -> tuple[list[int], list[float], int]:
    """Return words, log-probabilities and passes of a translation. Every pass runs all inputs."""
    text, scores, passes, limit = list[int](), list[float](), 0, most_words(model, source, k)
    while True:
        inputs = [word_vector(model, word) for word in [model.config.bos] * k + text]
        states = run_plain_pass(model, source, inputs, sees_group(k))
        passes += 1
        for state in states[-k:]:
            row = word_logits(model, state)
            word = row.index(max(row))
            if word == model.config.eos or len(text) == limit:
                return text, scores, passes
            text.append(word)
            scores.append(max(row) - math.log(sum(map(math.exp, row))))
        if len(text) == limit:
            return text, scores, passes


@collect_evidence(GROUPS)
def groups_of_words(build: Build) -> Iterator[int]:
    """Check the words, their log-probabilities and the cost: K rows of the decoder in a pass."""
    for seed, source, k, positions in product(range(4), SOURCES, (1, 2, 3, 4, 7), (40, 10)):
        model = group_writer(seed, k, positions)
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(build, request, source)
        words, scores, passes = write_groups(model, source, k)
        case = {"source": source, "K": k, "reader": seed, "positions": positions}
        expect_equal(GROUPS, words, run.tokens, **case)
        if numbers_differ(scores, run.scores):
            accuse(GROUPS, scores, run.scores, **case)
        rows = [call.rows for call in request.forward_log if call.model == model.name]
        expect_equal(GROUPS, [k] * passes, rows, **case, counted="rows of every pass")
        yield 0


@collect_evidence(TEACHER)
def groups_of_one_word(build: Build) -> Iterator[int]:
    """Check the words and every bit of their log-probabilities against greedy search."""
    for seed, source in product(range(8), SOURCES):
        request = RefineRequest(group_writer(seed, 1))
        model, run = request.model, run_refinement(build, request, source)
        memory = model.encode(torch.tensor([list(source)]))
        limit, bos, eos = most_words(model, source, 1), model.config.bos, model.config.eos
        (text,) = greedy_search(Lockstep(model, memory, limit), bos, eos, [limit])
        case = {"source": source, "reader": seed}
        expect_equal(TEACHER, text, run.tokens, **case)
        rows = Lockstep(model, memory, limit)
        scores = list[float]()
        for before, word in zip((bos, *text), text, strict=False):
            row = rows.step(torch.tensor([before])).log_softmax(dim=-1)
            scores.append(float(row[0, word]))
        expect_equal(TEACHER, scores, run.scores, **case)
        yield 0


@collect_evidence(RELAXED)
def mask_of_groups(make: Callable[[int, int], Tensor]) -> Iterator[int]:
    """Check every entry of the mask against the formula."""
    for length, k in product(range(1, 9), range(1, 10)):
        expected = [[sees_group(k)(t, s) for s in range(length)] for t in range(length)]
        expect_equal(RELAXED, expected, make(length, k).tolist(), positions=length, K=k)
        yield 0


def score_next_words(
    model: Seq2Seq, source: tuple[int, ...], k: int, text: tuple[int, ...]
) -> list[float]:
    """Return log p of every word after a text, which reads the groups that are complete."""
    begun = text[: len(text) // k * k]
    inputs = [word_vector(model, word) for word in (*[model.config.bos] * k, *begun)]
    states = run_plain_pass(model, source, inputs, sees_group(k))
    row = torch.tensor(word_logits(model, states[len(text)]), dtype=torch.float64)
    scores: list[float] = row.log_softmax(dim=-1).tolist()
    return scores


WIDE = 128  # a beam that holds all texts of two words
SEARCHES = ((1, 3), (2, 3), (2, 5), (3, 4), (3, 7))  # K, positions


@collect_evidence(SEARCHED)
def searches_in_groups(build: Build) -> Iterator[int]:
    """Check the text that is found, its log-probabilities, and the passes.

    A beam that holds all texts finds the one of the greatest mean; a narrow one, what the rule
    finds.
    """
    for seed, source, (k, positions) in product(range(3), SOURCES[1:3], SEARCHES):
        model = group_writer(seed, k, positions)
        after = cache(partial(score_next_words, model, source, k))
        limit, eos = positions // k * k - 1, model.config.eos
        for beam in (2, 3, WIDE):
            request = RefineRequest(model, forward_log=[])
            run = run_refinement(build, request, source, beam=beam)
            case = {"source": source, "K": k, "limit": limit, "beam": beam, "reader": seed}
            if beam == WIDE and limit <= 2:
                scores = score_all_texts(after, eos, limit)
                expected = max(scores, key=scores.__getitem__)
            elif beam == WIDE:
                continue
            else:
                expected = search_by_rule(after, eos, limit, beam)
            expect_equal(SEARCHED, list(expected), run.tokens, **case)
            means = [after(expected[:at])[word] for at, word in enumerate(expected)]
            if numbers_differ(means, run.scores):
                accuse(SEARCHED, means, run.scores, **case)
            passes = [call.model for call in request.forward_log].count(model.name)
            if passes > limit // k + 1:
                accuse(SEARCHED, f"at most {limit // k + 1} passes", passes, **case)
            yield 0


@collect_evidence(SHIFTED)
def loss_of_groups(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone, and at K = 1 every bit of it."""
    source = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]])
    target = torch.tensor([[5, 8, 6, 0, 0], [4, 4, 7, 5, 8]])
    for seed, k in product(range(2), (1, 2, 3, 4, 6, 9)):
        model, total = group_writer(seed, k), 0.0
        for x, y in zip(source.tolist(), target.tolist(), strict=True):
            labels = [*(word for word in y if word), model.config.eos]
            count = math.ceil(len(labels) / k) * k
            read = ([model.config.bos] * k + labels[:-1])[:count]
            inputs = [word_vector(model, word) for word in read]
            states = run_plain_pass(model, [w for w in x if w], inputs, sees_group(k))
            for state, word in zip(states, labels, strict=False):
                row = torch.tensor(word_logits(model, state), dtype=torch.float64)
                total -= float(row.log_softmax(dim=-1)[word])
        got: Any = float(loss(model, (source, target), k))
        case = {"K": k, "reader": seed, "source": source.tolist(), "target": target.tolist()}
        if abs(got - total / 10) > TOLERANCE:
            accuse(SHIFTED, total / 10, got, **case)
        if k == 1:
            expect_equal(SHIFTED, float(teacher_forcing_loss(model, source, target)), got, **case)
        yield 0


TRAPS = [
    Trap(GROUPS, groups_of_words, refine_card("sat")),
    Trap(TEACHER, groups_of_one_word, refine_card("sat")),
    Trap(RELAXED, mask_of_groups, lambda: sat.group_mask),
    Trap(SEARCHED, searches_in_groups, refine_card("sat")),
    Trap(SHIFTED, loss_of_groups, lambda: sat.sat_loss),
]

_sat = partial(Toy, technique="sat")
WRITES = "scores, words = rows.append(state.newest).log_softmax(dim=-1).max(dim=-1)"

TOYS = [
    _sat(
        "a causal mask inside a group",
        "return group[:, None] >= group",
        "return torch.ones(length, length, dtype=torch.bool, device=device).tril()",
        sat.group_mask,
        law=RELAXED,
    ),
    _sat(
        "a cache that hides the later words of a group",
        "return attend_dense(q, keys, values, None)",
        """seen = torch.ones(q.shape[1], end, dtype=torch.bool).tril(self.length)
return attend_dense(q, keys, values, seen[None])""",
        Lockstep._attend,
        law=GROUPS,
    ),
    _sat(
        "K words off one state",
        WRITES,
        """logits = rows.append(state.newest)[:, -1:].expand(-1, self.k, -1)
scores, words = logits.log_softmax(dim=-1).topk(self.k, dim=-1)
scores, words = scores.diagonal(dim1=1, dim2=2), words.diagonal(dim1=1, dim2=2)""",
        SatRefiner.rewrite,
        law=GROUPS,
    ),
    _sat(
        "a pass for each word of a group",
        WRITES,
        """for at in range(self.k):
    logits = copy(state.rows).append(state.newest)
rows.length += self.k
scores, words = logits.log_softmax(dim=-1).max(dim=-1)""",
        SatRefiner.rewrite,
        law=GROUPS,
    ),
    _sat(
        "an end that counts in the last word alone",
        "ended = state.ended | is_end.any(dim=1)",
        "ended = state.ended | is_end[:, -1]",
        SatRefiner.rewrite,
        law=GROUPS,
    ),
    _sat(
        "special tokens are forbidden",
        WRITES,
        """logits = rows.append(state.newest)
logits[..., :2] = -torch.inf
scores, words = logits.log_softmax(dim=-1).max(dim=-1)""",
        SatRefiner.rewrite,
        law=TEACHER,
    ),
    _sat(
        "all words of a group after the text that is likeliest before it",
        "row_of = row_of[continued]",
        "row_of = 0 * continued",
        SatBeamRefiner.rewrite,
        law=SEARCHED,
    ),
    _sat(
        "a beam over first words, and the likeliest words after them",
        "search, continued, _ = search.advance(logits[row_of, place])",
        """rows_of_place = logits[row_of, place]
if place:
    best = rows_of_place.max(dim=-1, keepdim=True).values
    rows_of_place = rows_of_place - 1e6 * (rows_of_place < best)
search, continued, _ = search.advance(rows_of_place)""",
        SatBeamRefiner.rewrite,
        law=SEARCHED,
    ),
    _sat(
        "inputs shifted by one word",
        "F.pad(filled[:, : room - k], (k, 0), value=config.bos)",
        "F.pad(filled[:, : room - 1], (1, 0), value=config.bos)",
        sat.shift_by_group,
        law=SHIFTED,
    ),
]
