"""FlowSeq (Ma et al. 2019): words are read off latent vectors whose prior is a normalizing flow.

The oracle has one text, and splits it where the flow masks it. Its log-determinant is that of a
Jacobian, which is measured by differences.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.rng import Seeded
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement, teacher_score
from tinyspec.laws.plain_lists import read_until_end, run_plain_pass, word_logits, word_vector
from tinyspec.laws.rewriting_laws import numbers_differ, random_translator
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.laws.traps.latent_transformer import PAIRS, SOURCES, random_rescorer
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import flowseq as module
from tinyspec.nonautoregressive.flow import Flow
from tinyspec.nonautoregressive.flowseq import (
    BEGUN,
    DIFFERENCE,
    HIDDEN_WORDS,
    LATENT,
    POSTERIOR,
    FlowSeqRefiner,
    FlowSeqSettings,
    flowseq_config,
)
from tinyspec.technique import RefineRequest
from tinyspec.training.bitext import pad_sequences

INVERTED = "latent vectors come back from their noise, in any batch"
DETERMINANT = "the log-determinant is that of the flow's Jacobian, over the text's own positions"
DEPENDENT = "the latent vector of a position depends on those of others, and on the source"
READ_OFF = "the words are read off the latent vectors that the flow makes of the noise"
CHOSEN = "the teacher chooses among lengths and samples"
RANKED = "candidates are ranked by their importance-weighted likelihood, per position"
BOUND = "the loss is the bound for one latent vector from the posterior, and the length's"

EOS, WIDTH = 2, 4
SHAPES = (
    FlowSeqSettings(1, 1, 4),
    FlowSeqSettings(1, 2, 4),
    FlowSeqSettings(2, 1, 4),
    FlowSeqSettings(3, 1, 4),
)
TOLERANCE = 1e-5  # of differences


@cache
def random_flower(seed: int, settings: FlowSeqSettings, positions: int = 13) -> Seq2Seq:
    """Return a random float64 translator with a flow, whose scales and shifts are random too."""
    config = Seq2SeqConfig(
        9, WIDTH, 2, 8, 1, 1, positions, stacks={POSTERIOR: 1}, extra=asdict(settings)
    )
    model = random_translator(flowseq_config(config, settings), seed, 2, "flower")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.weights.items():
        if name.startswith(("flow_scale", "flow_shift", "coupling")) and weight.ndim == 1:
            drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(drawn / 2)
    model.weights[BEGUN].fill_(1)
    model.weights[f"{POSTERIOR}.spread.weight"].div_(10)  # standard deviations near 1
    return model


def random_latents(seed: int, *shape: int) -> Tensor:
    """Return random float64 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def flow_of(make: type[Flow], model: Seq2Seq, source: Sequence[int], settings: Any) -> Flow:
    """Return the flow of a model over translations of a source."""
    memory = model.encode(torch.tensor([list(source)]))
    return make(model, memory, settings.levels, settings.steps)


# ---------------------------------------------------------------------- the rule, by itself


def split_places(number: int, length: int) -> list[tuple[int, int]]:
    """Return the entries (position, channel) that a coupling changes."""
    every = [(t, i) for t in range(length) for i in range(WIDTH)]
    if number % 4 < 2:  # one half of the channels
        return [(t, i) for t, i in every if (i >= WIDTH // 2) == (number % 4 == 0)]
    return [(t, i) for t, i in every if (t % 2 == 1) == (number % 4 == 2)]


def coupling_by_hand(
    model: Seq2Seq, source: Sequence[int], number: int, rows: list[list[float]]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return log scale and shift of every entry that a coupling changes."""
    places, w = split_places(number, len(rows)), model.weights
    kept = [[0.0 if (t, i) in places else x for i, x in enumerate(r)] for t, r in enumerate(rows)]
    read = torch.tensor(kept, dtype=torch.float64)
    inputs = (read @ w[f"coupling.{number}.in.weight"].T).tolist()
    states = run_plain_pass(model, source, inputs, lambda t, s: True, f"flow_{number}")
    found = {}
    for t, i in places:
        sums = []
        for row in (i, WIDTH + i):
            weight = w[f"coupling.{number}.out.weight"][row].tolist()
            bias = float(w[f"coupling.{number}.out.bias"][row])
            sums.append(bias + sum(x * y for x, y in zip(weight, states[t], strict=True)))
        found[t, i] = -math.log1p(math.exp(-(sums[0] + 2))), sums[1]
    return found


def mix_by_hand(model: Seq2Seq, step: int, row: list[float], inverse: bool) -> list[float]:
    """Return a position's channels, each head multiplied by the step's matrix."""
    h, matrix = model.config.n_heads, model.weights[f"flow_mix_{step}"]
    matrix = torch.linalg.inv(matrix) if inverse else matrix
    each, found = WIDTH // h, [0.0] * WIDTH
    for head in range(h):
        own = [head * each + j if step % 2 == 0 else j * h + head for j in range(each)]
        for j, to in enumerate(own):
            found[to] = sum(float(matrix[j, k]) * row[at] for k, at in enumerate(own))
    return found


def noise_by_hand(
    model: Seq2Seq, source: Sequence[int], settings: FlowSeqSettings, rows: Any, level: int = 0
) -> tuple[list[list[float]], float]:
    """Return the noise of latent vectors, and the sum of all log scales and determinants."""
    rows, total = [list(row) for row in rows], 0.0
    for step in range(level * settings.steps, (level + 1) * settings.steps):
        scale = model.weights[f"flow_scale_{step}"].tolist()
        shift = model.weights[f"flow_shift_{step}"].tolist()
        rows = [
            [x * math.exp(s) + b for x, s, b in zip(row, scale, shift, strict=True)] for row in rows
        ]
        rows = [mix_by_hand(model, step, row, False) for row in rows]
        matrix = model.weights[f"flow_mix_{step}"]
        determinant = math.log(abs(float(torch.linalg.det(matrix))))
        total += len(rows) * (sum(scale) + model.config.n_heads * determinant)
        for number in range(4 * step, 4 * step + 4):
            found = coupling_by_hand(model, source, number, rows)
            for (t, i), (log_scale, move) in found.items():
                rows[t][i] = rows[t][i] * math.exp(log_scale) + move
                total += log_scale
    if level + 1 == settings.levels:
        return rows, total
    half = WIDTH // 2
    rest = [rows[t][half:] + rows[t + 1][half:] for t in range(0, len(rows), 2)]
    deeper, more = noise_by_hand(model, source, settings, rest, level + 1)
    flat = [part for row in deeper for part in (row[:half], row[half:])]
    return [row[:half] + part for row, part in zip(rows, flat, strict=True)], total + more


def latents_by_hand(
    model: Seq2Seq, source: Sequence[int], settings: FlowSeqSettings, noise: Any, level: int = 0
) -> list[list[float]]:
    """Return the latent vectors of noise: all that `noise_by_hand` does, undone in turn."""
    half = WIDTH // 2
    rows: list[list[float]] = [list(row) for row in noise]
    if level + 1 < settings.levels:
        deeper = [rows[t][half:] + rows[t + 1][half:] for t in range(0, len(rows), 2)]
        rest = latents_by_hand(model, source, settings, deeper, level + 1)
        flat = [part for row in rest for part in (row[:half], row[half:])]
        rows = [row[:half] + part for row, part in zip(rows, flat, strict=True)]
    for step in reversed(range(level * settings.steps, (level + 1) * settings.steps)):
        for number in reversed(range(4 * step, 4 * step + 4)):
            found = coupling_by_hand(model, source, number, rows)
            for (t, i), (log_scale, move) in found.items():
                rows[t][i] = (rows[t][i] - move) / math.exp(log_scale)
        rows = [mix_by_hand(model, step, row, True) for row in rows]
        scale = model.weights[f"flow_scale_{step}"].tolist()
        shift = model.weights[f"flow_shift_{step}"].tolist()
        rows = [
            [(x - b) / math.exp(s) for x, s, b in zip(row, scale, shift, strict=True)]
            for row in rows
        ]
    return rows


def length_logprobs_by_hand(
    model: Seq2Seq, settings: FlowSeqSettings, source: Sequence[int]
) -> dict[int, float]:
    """Return log p(T | x) of all lengths that the levels divide."""
    mean = model.encode(torch.tensor([list(source)])).states[0].mean(dim=0)
    logits = (model.weights[DIFFERENCE] @ mean).tolist()
    known = {len(source) + i - settings.longest: x for i, x in enumerate(logits)}
    fits = {n: x for n, x in known.items() if n >= 1 and n % 2 ** (settings.levels - 1) == 0}
    total = math.log(sum(map(math.exp, fits.values())))
    return {n: x - total for n, x in fits.items()}


def lengths_by_hand(
    model: Seq2Seq, settings: FlowSeqSettings, source: Sequence[int], count: int, longest: int
) -> list[tuple[int, float]]:
    """Return the likeliest lengths, with log p(T | x)."""
    known = length_logprobs_by_hand(model, settings, source).items()
    found = sorted(known, key=lambda one: -one[1])
    return [one for one in found if one[0] <= longest][:count]


def rows_of_latents(model: Seq2Seq, source: Sequence[int], latents: Any) -> list[list[float]]:
    """Return the logits of all words at every position, given its latent vector."""
    inputs = torch.tensor(latents, dtype=torch.float64) @ model.weights[LATENT].T
    states = run_plain_pass(model, source, inputs.tolist(), lambda t, s: True)
    return [word_logits(model, state) for state in states]


def text_of_latents(model: Seq2Seq, source: Sequence[int], latents: Any) -> list[int]:
    """Return the likeliest words, up to the first end."""
    return read_until_end(model, rows_of_latents(model, source, latents))[0]


def posterior_by_hand(
    model: Seq2Seq, source: Sequence[int], read: list[list[float]]
) -> tuple[Tensor, Tensor]:
    """Return mean and log standard deviation of q(z | x, y), from what is read of y."""
    states = run_plain_pass(model, source, read, lambda t, s: True, POSTERIOR)
    rows = torch.tensor(states, dtype=torch.float64)
    mean, spread = (model.weights[f"{POSTERIOR}.{part}.weight"] for part in ("mean", "spread"))
    return rows @ mean.T, rows @ spread.T


def cost_by_hand(
    model: Seq2Seq,
    source: Sequence[int],
    settings: FlowSeqSettings,
    words: Sequence[int],
    read: list[list[float]],
    noise: Tensor,
) -> tuple[float, float]:
    """Return - log p(y | z, x) and log q(z | x, y) - log p(z | x), for z of this noise."""
    mean, log_std = posterior_by_hand(model, source, read)
    z = mean + noise * log_std.exp()
    square = (z - mean).square() / (2 * log_std.exp().square())
    log_q = -float((square + log_std + math.log(2 * math.pi) / 2).sum())
    base, logdet = noise_by_hand(model, source, settings, z.tolist())
    flat = [x for row in base for x in row]
    log_p = logdet - sum(x * x + math.log(2 * math.pi) for x in flat) / 2
    rows = torch.tensor(
        rows_of_latents(model, source, z.tolist()), dtype=torch.float64
    ).log_softmax(-1)
    cost = -sum(float(row[word]) for row, word in zip(rows, words, strict=True))
    return cost, log_q - log_p


# ---------------------------------------------------------------------- the laws


@collect_evidence(INVERTED)
def noise_is_inverted(make: type[Flow]) -> Iterator[int]:
    """Check a batch of texts with padding, and each text by the flow in plain lists."""
    for seed, settings, source in product(range(2), SHAPES, SOURCES[1:3]):
        model = random_flower(seed, settings)
        lengths = [1, 3, 4, 2] if settings.levels == 1 else [4, 8, 12, 4]
        slots = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        z = random_latents(seed, len(lengths), max(lengths), WIDTH)
        flow = flow_of(make, model, source, settings)
        noise, logdet = flow.to_noise(z, slots)
        back = flow.from_noise(noise, slots)
        case = {"model": seed, "levels": settings.levels, "steps": settings.steps}
        if float((back - z)[slots].abs().max()) > TOLERANCE or bool(noise[~slots].any()):
            accuse(INVERTED, z[slots].tolist(), back[slots].tolist(), **case)
        for row, length in enumerate(lengths):
            rows = z[row, :length].tolist()
            expected, total = noise_by_hand(model, source, settings, rows)
            got = noise[row, :length].flatten().tolist()
            flat = [x for own in expected for x in own]
            if numbers_differ(flat, got):
                accuse(INVERTED, flat, got, **case, length=length, beside=lengths)
            if numbers_differ([total], [float(logdet[row])]):
                accuse(INVERTED, total, float(logdet[row]), **case, of="log-determinants")
            yield 0


def measure_jacobian(flow: Flow, z: Tensor, step: float = 1e-5) -> Tensor:
    """Return d noise / d z of one text [T, d] by central differences: [T d, T d]."""
    size = z.numel()
    moves = step * torch.eye(size, dtype=z.dtype).view(size, *z.shape)
    slots = torch.ones(size, len(z), dtype=torch.bool)
    above, below = (flow.to_noise(z + sign * moves, slots)[0] for sign in (1, -1))
    return ((above - below) / (2 * step)).view(size, size).T


@collect_evidence(DETERMINANT)
def determinant_is_the_jacobians(make: type[Flow]) -> Iterator[int]:
    """Check texts of one to four positions, alone and beside padding."""
    for seed, settings, source in product(range(2), SHAPES, SOURCES[1:3]):
        model = random_flower(seed, settings)
        flow, multiple = flow_of(make, model, source, settings), settings.multiple
        for length in range(multiple, 5, multiple):
            z = random_latents(seed + length, length, WIDTH)
            _, expected = torch.linalg.slogdet(measure_jacobian(flow, z))
            room = length + multiple
            padded = torch.nn.functional.pad(z, (0, 0, 0, multiple), value=7.0)[None]
            slots = torch.arange(room)[None] < length
            _, got = flow.to_noise(padded, slots)
            if abs(float(expected - got[0])) > TOLERANCE * max(1, abs(float(expected))):
                case = {"model": seed, "levels": settings.levels, "length": length}
                accuse(DETERMINANT, float(expected), float(got[0]), **case)
            yield 0


@collect_evidence(DEPENDENT)
def positions_depend_on_each_other(make: type[Flow]) -> Iterator[int]:
    """Check that the density's noise of every position moves with every other, and with x."""
    for seed, settings in product(range(2), SHAPES):
        model, length = random_flower(seed, settings), 4
        z = random_latents(seed, length, WIDTH)
        flow = flow_of(make, model, SOURCES[2], settings)
        jacobian = measure_jacobian(flow, z).view(length, WIDTH, length, WIDTH)
        moved = jacobian.abs().amax(dim=(1, 3)) > TOLERANCE
        case = {"model": seed, "levels": settings.levels, "steps": settings.steps}
        expect_equal(DEPENDENT, [[True] * length] * length, moved.tolist(), **case)
        other = flow_of(make, model, SOURCES[3], settings)
        slots = torch.ones(1, length, dtype=torch.bool)
        here, there = (one.to_noise(z[None], slots)[0] for one in (flow, other))
        expect_equal(DEPENDENT, False, torch.allclose(here, there), **case, asked="another source")
        yield 0


@collect_evidence(READ_OFF)
def words_are_read_off(build: Build) -> Iterator[int]:
    """Check the words of the likeliest length, without noise and with it."""
    for seed, settings, source in product(range(2), SHAPES, SOURCES):
        model = random_flower(seed, settings)
        ((length, _),) = lengths_by_hand(model, settings, source, 1, model.config.max_positions)
        for temperature in (0.0, 0.8):
            request, rng = RefineRequest(model), Seeded(seed)
            stream = Seeded(seed).split("rewrite", 0).split("noise", 0)
            noise = [[0.0] * WIDTH] * length
            if temperature:
                drawn = torch.special.ndtri(torch.tensor(stream.uniforms(length * WIDTH)))
                noise = (temperature * drawn).view(length, WIDTH).tolist()
            expected = text_of_latents(
                model, source, latents_by_hand(model, source, settings, noise)
            )
            run = run_refinement(build, request, source, rng, temperature=temperature)
            case = {"model": seed, "source": source, "levels": settings.levels}
            expect_equal(READ_OFF, expected, run.tokens, **case, temperature=temperature)
            yield 0


def candidates_by_hand(
    model: Seq2Seq,
    settings: FlowSeqSettings,
    source: Sequence[int],
    counts: tuple[int, int],
    temperature: float,
    longest: int,
) -> list[tuple[int, float, list[int]]]:
    """Return length, log p(T | x) and words of every candidate; the first sample has no noise."""
    found, number = [], 0
    stream = Seeded(0).split("rewrite", 0)
    for length, logprob in lengths_by_hand(model, settings, source, counts[0], longest):
        for sample in range(counts[1]):
            noise = [[0.0] * WIDTH] * length
            if sample:
                own = stream.split("noise", number).uniforms(length * WIDTH)
                drawn = torch.special.ndtri(torch.tensor(own)) * temperature
                noise = drawn.view(length, WIDTH).tolist()
            latents = latents_by_hand(model, source, settings, noise)
            found.append((length, logprob, text_of_latents(model, source, latents)))
            number += 1
    return found


@collect_evidence(CHOSEN)
def teacher_chooses_candidates(build: Build) -> Iterator[int]:
    """Check all candidates, and the choice by the teacher's log p of each."""
    for seed, settings, source in product(range(2), SHAPES[:3], SOURCES[:3]):
        model, teacher = random_flower(seed, settings), random_rescorer(seed)
        longest = model.config.max_positions - 1
        found = candidates_by_hand(model, settings, source, (2, 2), 0.9, longest)
        request = RefineRequest(model, teacher)
        run = run_refinement(build, request, source, lengths=2, samples=2, temperature=0.9)
        assert run.canvas is not None
        texts = [run.canvas.text(row) for row in range(len(run.canvas.tokens))]
        case = {"model": seed, "source": source, "levels": settings.levels}
        expect_equal(CHOSEN, [text for _, _, text in found], texts, **case)
        best = max(found, key=lambda one: teacher_score(teacher, source, one[2]))[2]
        expect_equal(CHOSEN, best, run.tokens, **case)
        yield 0


@collect_evidence(RANKED)
def candidates_are_ranked(build: Build) -> Iterator[int]:
    """Check the rank of every candidate, and the choice of the highest."""
    for seed, settings, source, estimates in product(range(2), SHAPES[:3], SOURCES[1:3], (1, 2)):
        model = random_flower(seed, settings)
        found = candidates_by_hand(model, settings, source, (2, 2), 0.9, model.config.max_positions)
        ranks = list[float]()
        for number, (length, logprob, text) in enumerate(found):
            words, weights = [*text, *[EOS] * (length - len(text))], list[float]()
            for k in range(1, estimates + 1):
                stream = Seeded(0).split("rewrite", k).split("posterior", number)
                noise = torch.special.ndtri(torch.tensor(stream.uniforms(length * WIDTH)))
                read = [word_vector(model, word) for word in words]
                cost, latents = cost_by_hand(
                    model, source, settings, words, read, noise.view(length, WIDTH)
                )
                weights.append(-cost - latents)
            top = max(weights)
            mean = top + math.log(sum(math.exp(w - top) for w in weights) / estimates)
            ranks.append((mean + logprob) / length)
        request = RefineRequest(model)
        knobs = {"judge": "importance", "estimates": estimates}
        run = run_refinement(build, request, source, lengths=2, samples=2, temperature=0.9, **knobs)
        assert run.canvas is not None
        case = {"model": seed, "source": source, "levels": settings.levels, "k": estimates}
        if numbers_differ(ranks, run.canvas.extra.tolist()):
            accuse(RANKED, ranks, run.canvas.extra.tolist(), **case)
        best = ranks.index(max(ranks))
        expect_equal(RANKED, (best, found[best][2]), (run.chosen, run.tokens), **case)
        yield 0


@collect_evidence(BOUND)
def loss_is_the_bound(terms: Callable[..., Any]) -> Iterator[int]:
    """Check every term of a batch, text by text, with the same draws."""
    batch = tuple(map(pad_sequences, zip(*PAIRS, strict=True)))
    for seed, settings in product(range(3), SHAPES):
        model, multiple = random_flower(seed, settings), settings.multiple
        lengths = [-(-len(y) // multiple) * multiple for _, y in PAIRS]
        generator = torch.Generator().manual_seed(seed)
        room = max(lengths)
        hidden = torch.rand(len(PAIRS), room, generator=generator) < HIDDEN_WORDS
        noise = torch.randn(len(PAIRS), room, WIDTH, generator=generator, dtype=torch.float64)
        expected = [0.0, 0.0, 0.0]
        for row, ((x, y), length) in enumerate(zip(PAIRS, lengths, strict=True)):
            words = [*y, *[EOS] * (length - len(y))]
            read = [
                [0.0] * WIDTH if hidden[row, t] else word_vector(model, word)
                for t, word in enumerate(words)
            ]
            own = cost_by_hand(model, x, settings, words, read, noise[row, :length])
            length_cost = -length_logprobs_by_hand(model, settings, x)[length]
            for i, value in enumerate((*own, length_cost)):
                expected[i] += value
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            got = [float(x) for x in terms(model, batch, settings, generator)]
        if numbers_differ([*expected, sum(lengths)], got):
            accuse(BOUND, [*expected, sum(lengths)], got, levels=settings.levels, pairs=PAIRS)
        yield 0


TRAPS = [
    Trap(INVERTED, noise_is_inverted, lambda: Flow),
    Trap(DETERMINANT, determinant_is_the_jacobians, lambda: Flow),
    Trap(DEPENDENT, positions_depend_on_each_other, lambda: Flow),
    Trap(READ_OFF, words_are_read_off, refine_card("flowseq")),
    Trap(CHOSEN, teacher_chooses_candidates, refine_card("flowseq")),
    Trap(RANKED, candidates_are_ranked, refine_card("flowseq")),
    Trap(BOUND, loss_is_the_bound, lambda: module.flowseq_terms),
]

_flowseq = partial(Toy, technique="flowseq")

TOYS = [
    _flowseq(
        "a flow of one diagonal scaling and mixes",
        "for n in range(COUPLINGS * k, COUPLINGS * (k + 1)):",
        "for n in range(0):",
        Flow.to_noise,
        also=(
            Patch(
                Flow.from_noise,
                "for n in reversed(range(COUPLINGS * k, COUPLINGS * (k + 1))):",
                "for n in range(0):",
            ),
        ),
        law=DEPENDENT,
    ),
    _flowseq(
        "a log-determinant that counts padding",
        "slots.sum(dim=1)",
        "torch.full((len(x),), x.shape[1])",
        Flow.to_noise,
        law=DETERMINANT,
    ),
    _flowseq(
        "a log-determinant of one head",
        "self.model.config.n_heads * volume",
        "volume",
        Flow.to_noise,
        law=DETERMINANT,
    ),
    _flowseq(
        "a coupling whose padding counts",
        "changed = ~kept & slots[..., None]",
        "changed = (~kept).expand_as(x)",
        Flow.to_noise,
        law=DETERMINANT,
    ),
    _flowseq(
        "a coupling that reads what it changes",
        "x.masked_fill(~kept, 0)",
        "x",
        Flow._run_coupling,
        law=INVERTED,
    ),
    _flowseq(
        "noise in place of latent vectors",
        "z = flow.from_noise(noise.to(self.model.device, self.model.dtype), slots)",
        "z = noise.to(self.model.device, self.model.dtype)",
        FlowSeqRefiner.write_words,
        law=READ_OFF,
    ),
    _flowseq(
        "a standard normal prior",
        "noise, logdet = self.to_noise(z, slots)",
        "noise, logdet = z, z.new_zeros(len(z))",
        Flow.log_density,
        law=BOUND,
    ),
    _flowseq(
        "an autoencoder without a cost of its latent vectors",
        "latents = (log_q - flow.log_density(z, slots)).sum()",
        "latents = 0 * log_q.sum()",
        module.flowseq_terms,
        law=BOUND,
    ),
    _flowseq(
        "candidates by how likely their length is",
        "rank = estimates.logsumexp(dim=1) - log(max(1, self.estimates)) + logprobs",
        "rank = 0 * estimates.sum(dim=1) + logprobs",
        FlowSeqRefiner.cut_at_end,
        law=RANKED,
    ),
    _flowseq(
        "the model judges in place of the teacher",
        "best_candidate(self.teacher, source, canvas)",
        "int(canvas.means().argmax())",
        FlowSeqRefiner.choose,
        law=CHOSEN,
    ),
]
