"""ENAT (Guo et al. 2019): phrases are translated by a table, or embeddings are mapped in a game."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement
from tinyspec.laws.plain_lists import (
    Vector,
    copy_evenly,
    find_likeliest_word,
    mix_vectors,
    multiply_vector,
    run_plain_pass,
    word_logits,
    word_vector,
)
from tinyspec.laws.rewriting_laws import numbers_differ, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.laws.traps.parallel import BEAMS, tried_lengths
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import enat
from tinyspec.nonautoregressive.enat import (
    DOWN,
    INPUTS,
    MAP,
    PHRASES,
    UP,
    UP_BIAS,
    EnatRefiner,
    EnatSettings,
    Links,
    format_phrases,
)
from tinyspec.technique import RefineRequest, find_technique

ROUGH = "the decoder reads the longest phrases' translations, or mapped words (Guo et al. 2019)"
AGREES = "a pair of phrases has all links of its words inside (Guo et al. 2019)"
FREQUENT = "the table has the most frequent translation of a phrase (Guo et al. 2019)"
GAME = "the discriminator and the mapping want opposite things (Guo et al. 2019)"
FOUR_TERMS = "the loss has words, length, alignment and the game (Guo et al. 2019)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
TABLE = {(4,): (7,), (5,): (8, 6), (4, 6): (5,), (6, 5): (4, 7, 8), (4, 6, 5): (6,), (8,): (5,)}
SOURCE = torch.tensor([[4, 6, 5, 7], [7, 5, 0, 0]])
TARGET = torch.tensor([[5, 8, 6, 0, 0], [4, 4, 7, 5, 8]])
PAIRS = [
    ([x for x in source if x], [y for y in target if y])
    for source, target in zip(SOURCE.tolist(), TARGET.tolist(), strict=True)
]
TOLERANCE = 1e-9
STEP = 1e-5  # of a difference quotient
Phrases = Mapping[tuple[int, ...], tuple[int, ...]]


def rough_reader(seed: int, kind: str) -> Seq2Seq:
    """Return a random model that reads by TABLE, or by a random mapping; D has a bias."""
    model = reader_of(find_technique("enat").translator, seed, decoder_input=kind)
    extra = {**model.config.extra, PHRASES: format_phrases(TABLE)}
    model.config = replace(model.config, extra=extra)
    if kind == "mapping":
        bias = model.weights[UP_BIAS]
        bias.copy_(torch.linspace(-1, 1, len(bias)))
    return model


def translate_phrases(source: Sequence[int], table: Phrases) -> list[int]:
    """Return a source, phrase by phrase: its longest beginning that is known, then the rest."""
    if not source:
        return []
    heads = (tuple(source[:n]) for n in range(len(source), 0, -1))
    head = next((one for one in heads if one in table), None)
    if head is None:
        return [source[0], *translate_phrases(source[1:], table)]
    return [*table[head], *translate_phrases(source[len(head) :], table)]


def rough_vectors(model: Seq2Seq, source: Sequence[int], count: int, kind: str) -> list[Vector]:
    """Return what `count` positions read, without their sinusoids."""
    if kind == "table":
        z = translate_phrases(source, TABLE)
        return [word_vector(model, word) for word in copy_evenly(z, count)]
    copies = copy_evenly(source, count)
    return [multiply_vector(model.weights[MAP], word_vector(model, word)) for word in copies]


@collect_evidence(ROUGH)
def words_of_rough_inputs(build: Build) -> Iterator[int]:
    """Check the words and log-probabilities of every candidate, for both kinds of input."""
    for seed, source, (lengths, around), kind in product(range(3), SOURCES, BEAMS, INPUTS):
        request = RefineRequest(rough_reader(seed, kind))
        model = request.model
        knobs: dict[str, Any] = {"lengths": lengths, "judge": "self", "around": around}
        run = run_refinement(build, request, source, **knobs)
        assert run.canvas is not None
        for row, count in enumerate(tried_lengths(model, source, lengths, around)):
            inputs = rough_vectors(model, source, count, kind)
            states = run_plain_pass(model, source, inputs, lambda t, s: t != s)
            best = [find_likeliest_word(model, state) for state in states]
            case = {"source": source, "length": count, "input": kind, "reader": seed, **knobs}
            expect_equal(ROUGH, [word for word, _ in best], run.canvas.text(row), **case)
            expected = [score for _, score in best]
            got = run.canvas.scores[row][run.canvas.mask[row]].tolist()
            if numbers_differ(expected, got):
                accuse(ROUGH, expected, got, **case)
            yield 0


# ---------------------------------------------------------------------- the table


def agrees(links: Links, span: tuple[int, int, int, int]) -> bool:
    """Return whether all links of the words of two spans are between them, and there is one."""
    a, b, c, d = span
    ends = [(a <= i < b, c <= j < d) for i, j in links]
    return any(map(all, ends)) and all(left == right for left, right in ends)


def random_pairs(count: int, seed: int) -> Iterator[tuple[list[int], list[int], Links]]:
    """Yield sentence pairs of one to five words, with random links."""
    chance = Random(seed)
    for _ in range(count):
        s, t = chance.randint(1, 5), chance.randint(1, 5)
        links = {(i, j) for i, j in product(range(s), range(t)) if chance.random() < 0.3}
        yield chance.choices(range(4, 7), k=s), chance.choices(range(7, 9), k=t), links


def all_phrases(links: Links, s: int, t: int, longest: int) -> list[tuple[int, int, int, int]]:
    """Return all pairs of phrases that agree with the links, by trying all spans."""
    spans = [
        [(a, b) for a in range(n) for b in range(a + 1, n + 1) if b - a <= longest] for n in (s, t)
    ]
    return sorted(one + other for one, other in product(*spans) if agrees(links, one + other))


@collect_evidence(AGREES)
def phrases_agree_with_links(find: Callable[..., Iterator[Any]]) -> Iterator[int]:
    """Check the phrases of random pairs against all pairs of spans."""
    for source, target, links in random_pairs(300, 0):
        for longest in (1, 2, 3, 5):
            expected = all_phrases(links, len(source), len(target), longest)
            got = sorted(find(links, len(source), len(target), longest))
            case = {"source": source, "target": target, "links": sorted(links), "longest": longest}
            expect_equal(AGREES, expected, got, **case)
            yield 0


@collect_evidence(FREQUENT)
def frequent_phrases_are_kept(count: Callable[..., Phrases]) -> Iterator[int]:
    """Check the table of random corpora: its phrases, and the frequency of their translations."""
    for seed, longest, least in product(range(10), (1, 3), (1, 3)):
        corpus = list(random_pairs(20, seed))
        pairs, links = [(x, y) for x, y, _ in corpus], [of for _, _, of in corpus]
        table = count(pairs, links, longest, least)
        seen, together = Counter[Any](), Counter[Any]()
        for source, target, own in corpus:
            for a, b, c, d in all_phrases(own, len(source), len(target), longest):
                seen[tuple(source[a:b])] += 1
                together[tuple(source[a:b]), tuple(target[c:d])] += 1
        known = {phrase for phrase, n in seen.items() if len(phrase) == 1 or n >= least}
        case = {"corpus": seed, "longest": longest, "least": least}
        expect_equal(FREQUENT, sorted(known), sorted(table), **case, of="source phrases")
        for phrase, translation in table.items():
            best = max(n for (one, _), n in together.items() if one == phrase)
            got = together[phrase, translation]
            expect_equal(FREQUENT, best, got, **case, phrase=phrase, translation=translation)
        yield 0


# ---------------------------------------------------------------------- the mapping


def log_sigmoid(x: float) -> float:
    """Return the log of 1 / (1 + exp(-x))."""
    return -math.log1p(math.exp(-x))


def judge_by_hand(model: Seq2Seq, vector: Vector) -> float:
    """Return the logit of the discriminator for a vector."""
    w = model.weights
    pairs = zip(multiply_vector(w[UP], vector), w[UP_BIAS].tolist(), strict=True)
    return multiply_vector(w[DOWN], [max(0.0, x + bias) for x, bias in pairs])[0]


def game_by_hand(model: Seq2Seq) -> float:
    """Return J of the pairs: how badly the discriminator tells moved words from target words."""
    e = model.embedding.tolist()
    targets = [judge_by_hand(model, e[y]) for _, target in PAIRS for y in target]
    moved = [multiply_vector(model.weights[MAP], e[x]) for source, _ in PAIRS for x in source]
    mapped = [judge_by_hand(model, vector) for vector in moved]
    right = math.fsum(map(log_sigmoid, targets)) / len(targets)
    return -right - math.fsum(log_sigmoid(-x) for x in mapped) / len(mapped)


@collect_evidence(GAME)
def players_are_opposed(play: Callable[..., Tensor]) -> Iterator[int]:
    """Check the gradient of every player against differences of J."""
    for seed, adversary in product(range(2), (1.0, 0.5)):
        model = rough_reader(seed, "mapping")
        for name, factor in ((MAP, -adversary), (UP, 1.0), (UP_BIAS, 1.0), (DOWN, 1.0)):
            weight = model.weights[name]
            with torch.enable_grad():
                weight.requires_grad_()
                value = play(model, SOURCE, TARGET, adversary)
                (slope,) = torch.autograd.grad(value, weight)
            weight.requires_grad_(False)
            flat, slopes = weight.view(-1), slope.flatten().tolist()
            for at in range(0, len(flat), 5):
                kept, sides = float(flat[at]), list[float]()
                for side in (kept + STEP, kept - STEP):
                    flat[at] = side
                    sides.append(game_by_hand(model))
                flat[at] = kept
                expected = factor * (sides[0] - sides[1]) / (2 * STEP)
                if abs(slopes[at] - expected) > 1e-6:
                    case = {"weight": name, "entry": at, "lambda": adversary, "reader": seed}
                    accuse(GAME, expected, slopes[at], **case, of="gradient")
                yield 0
        if abs(float(value.detach()) - game_by_hand(model)) > TOLERANCE:
            accuse(GAME, game_by_hand(model), float(value), reader=seed, of="J")


def distance_by_hand(model: Seq2Seq, source: list[int], target: list[int]) -> float:
    """Return how far the mean of the moved source is from the mean of the target."""
    e = model.embedding.tolist()
    moved = mix_vectors(
        [multiply_vector(model.weights[MAP], e[x]) for x in source], [0.0] * len(source)
    )
    wanted = mix_vectors([e[y] for y in target], [0.0] * len(target))
    return math.dist(moved, wanted)


@collect_evidence(FOUR_TERMS)
def loss_of_four_terms(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone."""
    for seed, kind, mu, adversary in product(
        range(2), ("table", "mapping"), (0.0, 0.3), (0.0, 1.0)
    ):
        model, total = rough_reader(seed, kind), 0.0
        for source, target in PAIRS:
            inputs = rough_vectors(model, source, len(target), kind)
            states = run_plain_pass(model, source, inputs, lambda t, s: t != s)
            for state, word in zip(states, target, strict=True):
                row = torch.tensor(word_logits(model, state), dtype=torch.float64)
                total -= float(row.log_softmax(dim=-1)[word])
            lengths = model.length_logits(model.encode(torch.tensor([source])))[0]
            total -= float(lengths.log_softmax(dim=-1)[len(target)])
        expected = total / 8
        if kind == "mapping":
            expected += mu * sum(distance_by_hand(model, *pair) for pair in PAIRS) / 2
            expected += game_by_hand(model) if adversary else 0.0
        settings = EnatSettings(kind, 3, mu, adversary)
        got: Any = float(loss(model, (SOURCE, TARGET), settings))
        if abs(got - expected) > TOLERANCE:
            accuse(FOUR_TERMS, expected, got, settings=settings, pairs=PAIRS, reader=seed)
        yield 0


TRAPS = [
    Trap(ROUGH, words_of_rough_inputs, refine_card("enat")),
    Trap(AGREES, phrases_agree_with_links, lambda: enat.find_phrases),
    Trap(FREQUENT, frequent_phrases_are_kept, lambda: enat.count_phrases),
    Trap(GAME, players_are_opposed, lambda: enat.adversarial_loss),
    Trap(FOUR_TERMS, loss_of_four_terms, lambda: enat.enat_loss),
]

_enat = partial(Toy, technique="enat")

TOYS = [
    _enat(
        "a dictionary of single words",
        "range(most, 0, -1)",
        "(1,)",
        enat.look_up_phrases,
        law=ROUGH,
    ),
    _enat(
        "copies of the source",
        'if self.settings.decoder_input == "table":',
        "if False:",
        EnatRefiner.start,
        law=ROUGH,
    ),
    _enat(
        "embeddings that are not mapped",
        "return linear(model.embed_words(words), model.weights[MAP])",
        "return model.embed_words(words)",
        enat.map_words,
        law=ROUGH,
    ),
    _enat(
        "phrases with links to words outside",
        "if any(low <= j < high and not begin <= i < end for i, j in links):",
        "if False:",
        enat.find_phrases,
        law=AGREES,
    ),
    _enat(
        "the tightest phrases alone",
        "first == low or first not in linked",
        "first == low",
        enat.find_phrases,
        law=AGREES,
    ),
    _enat(
        "the first translation that was seen",
        "min(found, key=lambda other: (-found[other], other))",
        "next(iter(found))",
        enat.count_phrases,
        law=FREQUENT,
    ),
    _enat(
        "both players descend J",
        "(moved.detach() - moved)",
        "(moved - moved.detach())",
        enat.adversarial_loss,
        law=GAME,
    ),
    _enat(
        "a discriminator that the mapping does not meet",
        "discriminator_logits(model, opposed)",
        "discriminator_logits(model, opposed.detach() + 0 * opposed)",
        enat.adversarial_loss,
        law=GAME,
    ),
    _enat(
        "no game",
        "if settings.adversary:",
        "if False:",
        enat.enat_loss,
        law=FOUR_TERMS,
    ),
    _enat(
        "sentences that are not aligned",
        "if settings.alignment:",
        "if False:",
        enat.enat_loss,
        law=FOUR_TERMS,
    ),
]
