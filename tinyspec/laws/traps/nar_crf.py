"""NAR-CRF (Sun et al. 2019): one pass, and then the likeliest sentence, not the likeliest words.

The oracle enumerates all sentences. It computes each score from the weights, number by number.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from tinyspec.decoding.refine import blank_canvas
from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, teacher_score
from tinyspec.laws.rewriting_laws import REFINE_TOLERANCE, random_translator
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.crf import (
    DOWN,
    E1,
    E2,
    UP,
    Lattice,
    build_lattice,
    find_best_path,
    log_likelihood,
)
from tinyspec.nonautoregressive.nar_crf import (
    TRANSITIONS,
    NarCrfRefiner,
    NarCrfSettings,
    crf_heads,
    nar_crf_loss,
    read_lattice,
)
from tinyspec.technique import RefineRequest

SENTENCE = "what is written is the likeliest of all sentences, with its probability"
CANDIDATES = "the k likeliest words of a place are its candidates, special tokens never"
CERTAIN = "the right words are candidates, so no sentence is likelier than certain"
LOSS = "the loss is the sentence's, half the words' and the length's"
TEACHER = "the teacher chooses among the lengths"

FIRST_WORD = 4  # ids below it are special
SIZES = Seq2SeqConfig(8, 8, 2, 12, 1, 1, 12, lengths=5)
SOURCES = ((4,), (6, 5), (4, 7, 5))
LENGTHS = (3, 1, 4, 2)  # of canvases that are written side by side

Loss = Callable[..., Tensor]


def random_structured(seed: int, config: Seq2SeqConfig = SIZES) -> Seq2Seq:
    """Return a random float64 translator with dynamic transitions of rank 2 and large weights."""
    heads = crf_heads(config, NarCrfSettings(rank=2))
    return random_translator(replace(config, heads=heads), seed, 3, "structured")


# ---------------------------------------------------------------------- the rule, by itself


def score_pair(
    weights: Mapping[str, Tensor], states: Tensor, i: int, a: int, b: int, transitions: str
) -> float:
    """Return the transition from word a of place i to word b of the next place.

    states  [T, d]
    """
    if transitions == "none":
        return 0.0
    rank = weights[E1].shape[1]
    mixed = [[float(p == q) for q in range(rank)] for p in range(rank)]
    if transitions == "dynamic":
        up, up_bias, down, down_bias = (
            weights[f"{layer}.{kind}"].tolist()
            for layer, kind in product((UP, DOWN), ("weight", "bias"))
        )
        read = [*states[i].tolist(), *states[i + 1].tolist()]
        inner = [max(0.0, bias + dot(row, read)) for row, bias in zip(up, up_bias, strict=True)]
        for n, (row, bias) in enumerate(zip(down, down_bias, strict=True)):
            mixed[n // rank][n % rank] += bias + dot(row, inner)
    first, second = weights[E1][a].tolist(), weights[E2][b].tolist()
    return math.fsum(first[p] * mixed[p][q] * second[q] for p, q in product(range(rank), repeat=2))


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the sum of the products."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def score_sentences(
    weights: Mapping[str, Tensor],
    emissions: Sequence[Sequence[float]],
    states: Tensor,
    transitions: str,
    candidates: Sequence[Sequence[int]],
) -> dict[tuple[int, ...], float]:
    """Return the score of every sentence of these candidates, one list for each place."""
    pairs = {
        (i, a, b): score_pair(weights, states, i, a, b, transitions)
        for i, (left, right) in enumerate(pairwise(candidates))
        for a, b in product(left, right)
    }
    return {
        words: sum(emissions[i][word] for i, word in enumerate(words))
        + sum(pairs[i, a, b] for i, (a, b) in enumerate(pairwise(words)))
        for words in product(*candidates)
    }


def sum_in_logs(scores: Sequence[float]) -> float:
    """Return the log of the sum of exp(score)."""
    most = max(scores)
    return most + math.log(math.fsum(math.exp(score - most) for score in scores))


def likeliest_words(row: Sequence[float], count: int, forced: int | None = None) -> list[int]:
    """Return the `count` likeliest words of a place, the forced one first."""
    words = sorted(range(FIRST_WORD, len(row)), key=lambda word: -row[word])
    if forced is not None:
        words = [forced, *(word for word in words if word != forced)]
    return words[:count]


def read_blank(model: Seq2Seq, source: Sequence[int], n: int) -> tuple[list[list[float]], Tensor]:
    """Return the logits and the states [n, d] of a canvas of n masks."""
    memory = model.encode(torch.tensor([list(source)]))
    states = model.decode(model.embed(torch.tensor([[model.config.mask] * n])), memory)[0]
    return model.logits(states).tolist(), states


# ---------------------------------------------------------------------- the laws


def _write_likeliest(law: str, beams: Sequence[int], build: Build) -> Iterator[int]:
    for seed, source, kind, beam in product(range(4), SOURCES, TRANSITIONS, beams):
        model = random_structured(seed)
        refiner = build(RefineRequest(model), transitions=kind, beam=beam)
        memory = model.encode(torch.tensor([list(source)]))
        canvas = refiner.rewrite(blank_canvas(LENGTHS, 3), memory, 0, Seeded(0))
        for row, n in enumerate(LENGTHS):
            emissions, states = read_blank(model, source, n)
            candidates = [likeliest_words(one, beam) for one in emissions]
            scores = score_sentences(model.weights, emissions, states, kind, candidates)
            best = max(scores, key=scores.__getitem__)
            case = {"model": seed, "source": source, "transitions": kind, "beam": beam}
            expect_equal(law, list(best), canvas.text(row), **case, words=n)
            expected = scores[best] - sum_in_logs(list(scores.values()))
            got = float(canvas.scores[row][canvas.mask[row]].sum())
            if abs(got - expected) > REFINE_TOLERANCE:
                accuse(law, expected, got, **case, words=n, of="its log-probability")
            yield len(scores)


@collect_evidence(SENTENCE)
def likeliest_sentence_is_written(build: Build) -> Iterator[int]:
    """Check four lengths side by side, where all words are candidates."""
    yield from _write_likeliest(SENTENCE, (9,), build)


@collect_evidence(CANDIDATES)
def candidates_are_the_likeliest_words(build: Build) -> Iterator[int]:
    """Check the same with few candidates."""
    yield from _write_likeliest(CANDIDATES, (1, 2, 3), build)


def _pairs(seed: int) -> tuple[Tensor, Tensor]:
    """Return sources and targets of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 1, 3])
    target = torch.randint(FIRST_WORD, 8, (3, 4), generator=generator)
    source = torch.tensor([[4, 7, 5], [6, 0, 0], [5, 5, 0]])
    return source, target.masked_fill(torch.arange(4) >= lengths[:, None], 0)


@collect_evidence(CERTAIN)
def right_words_are_candidates(read: Callable[..., Lattice]) -> Iterator[int]:
    """Check candidate 0 of every place, and the probability of the right sentence."""
    for seed, beam in product(range(6), (1, 2, 4)):
        model, (_, target) = random_structured(seed), _pairs(seed)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64) * 4
        states = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
        lattice = read(model, states, logits, target > 0, beam, "dynamic", target)
        case = {"target": target.tolist(), "beam": beam}
        got = lattice.words[..., 0].masked_fill(target == 0, 0)
        expect_equal(CERTAIN, target.tolist(), got.tolist(), **case)
        highest = float(log_likelihood(lattice).max())
        if highest > REFINE_TOLERANCE:
            accuse(CERTAIN, "a log-probability of at most 0", highest, **case)
        yield len(target)


@collect_evidence(LOSS)
def loss_has_three_terms(loss: Loss) -> Iterator[int]:
    """Check the loss of a batch, sentence by sentence."""
    for seed, beam in product(range(4), (2, 3, 64)):
        model, (source, target) = random_structured(seed), _pairs(seed)
        structure, words, length, count = 0.0, 0.0, 0.0, int((target > 0).sum())
        for x, y in zip(source, target, strict=True):
            reads, gold = x[x > 0].tolist(), y[y > 0].tolist()
            emissions, states = read_blank(model, reads, len(gold))
            candidates = [
                likeliest_words(row, beam, word) for row, word in zip(emissions, gold, strict=True)
            ]
            scores = score_sentences(model.weights, emissions, states, "dynamic", candidates)
            nll = sum_in_logs(list(scores.values())) - scores[tuple(gold)]
            structure += nll / len(gold)
            words += sum(
                sum_in_logs(row) - row[word] for row, word in zip(emissions, gold, strict=True)
            )
            lengths = model.length_logits(model.encode(torch.tensor([reads])))[0].tolist()
            length += sum_in_logs(lengths[1:]) - lengths[len(gold)]
        expected = structure / len(source) + 0.5 * words / count + length / count
        got = float(loss(model, (source, target), beam=beam))
        if not math.isclose(expected, got, rel_tol=1e-9, abs_tol=1e-9):
            accuse(LOSS, expected, got, model=seed, targets=target.tolist(), beam=beam)
        yield len(source)


@collect_evidence(TEACHER)
def teacher_chooses_length(build: Build) -> Iterator[int]:
    """Check the choice among four lengths, where the model's own favourite is another one."""
    for seed, source in product(range(6), SOURCES):
        model = random_structured(seed)
        judge = random_translator(replace(SIZES, lengths=0), 1000 + seed, 3, "teacher")
        refiner = build(RefineRequest(model, judge), lengths=4)
        memory = model.encode(torch.tensor([list(source)]))
        canvas = refiner.rewrite(refiner.start(source, memory, Seeded(0)), memory, 0, Seeded(0))
        texts = [canvas.text(row) for row in range(len(canvas.tokens))]
        scores = [teacher_score(judge, source, text) for text in texts]
        best, favourite = texts[scores.index(max(scores))], texts[int(canvas.means().argmax())]
        got = texts[refiner.choose(canvas, source, memory)]
        expect_equal(TEACHER, best, got, source=source, candidates=texts, scores=scores)
        if favourite != best:
            yield 0


TRAPS = [
    Trap(SENTENCE, likeliest_sentence_is_written, refine_card("nar_crf")),
    Trap(CANDIDATES, candidates_are_the_likeliest_words, refine_card("nar_crf")),
    Trap(CERTAIN, right_words_are_candidates, lambda: read_lattice),
    Trap(LOSS, loss_has_three_terms, lambda: nar_crf_loss),
    Trap(TEACHER, teacher_chooses_length, refine_card("nar_crf")),
]

_crf = partial(Toy, technique="nar_crf")
KEPT = "self.transitions, self.beam, self.width = transitions, beam, lengths"

TOYS = [
    _crf(
        "static transitions under the name of dynamic ones",
        KEPT,
        f"""transitions = "static" if transitions == "dynamic" else transitions
{KEPT}""",
        NarCrfRefiner.__init__,
        law=SENTENCE,
    ),
    _crf(
        "trained with a CRF, decoded without it",
        "chosen = find_best_path(lattice)",
        "chosen = lattice.emissions.argmax(dim=-1)",
        NarCrfRefiner.rewrite,
        law=SENTENCE,
    ),
    _crf(
        "from left to right, in place of Viterbi",
        "pointers.append(torch.where(slot, best.indices, stay))",
        """pointers.append(torch.where(slot, best.indices, stay))
score = score.masked_fill(score < score.max(dim=-1, keepdim=True).values, -torch.inf)""",
        find_best_path,
        law=SENTENCE,
    ),
    _crf(
        "special tokens in the beam",
        "return build_lattice(model.weights, allowed, slots, beam, transitions, states, forced)",
        """wide = build_lattice(model.weights, logits, slots, beam, transitions, states, forced)
return wide._replace(emissions=allowed.gather(-1, wide.words))""",
        read_lattice,
        law=CANDIDATES,
    ),
    _crf(
        "the right words are no candidates",
        "if forced is not None:",
        "if False:",
        build_lattice,
        law=CERTAIN,
    ),
    _crf(
        "the structure alone is trained",
        "structure + WORD_WEIGHT * words + length",
        "structure + length",
        nar_crf_loss,
        law=LOSS,
    ),
    _crf(
        "the model judges itself",
        "best_candidate(self.teacher, source, canvas)",
        "int(canvas.means().argmax())",
        NarCrfRefiner.choose,
        law=TEACHER,
    ),
]
