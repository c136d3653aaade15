"""Latent Transformer (Kaiser et al. 2018): codes from left to right, then all words in one pass.

The oracle has one text, no batch and no padding. Its convolutions are those of torch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import (
    Build,
    expect_translations,
    run_refinement,
    teacher_score,
)
from tinyspec.laws.plain_lists import position_vector, read_until_end, run_plain_pass
from tinyspec.laws.rewriting_laws import numbers_differ, random_translator
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import latent_transformer as module
from tinyspec.nonautoregressive.latent_transformer import (
    BOOK,
    COUNTS,
    PRIOR,
    SUMS,
    TABLE,
    LatentRefiner,
    LatentSettings,
    latent_config,
)
from tinyspec.technique import RefineRequest
from tinyspec.training.bitext import pad_sequences

WRITTEN = "codes are written from left to right, and all words are read off them and the source"
DRAWN = "further samples draw their codes from the prior, and the teacher chooses"
NEAREST = "every slice of a vector gets the nearest entry of its own codebook"
AVERAGED = "an entry is the moving average of the vectors that chose it"
STRAIGHT = "the gradient of a code goes to its vector as it is, and none to the codebook"
TERMS = "the loss is that of words, of codes given those before, and of the distance to the entries"

EOS = 2
SOURCES = ((4,), (6, 5), (4, 7, 5), (5, 5, 4, 6, 7))
SHAPES = (  # (c, log2 K, n_d)
    LatentSettings(1, 2, 1, 1.5),
    LatentSettings(1, 2, 2, 2.0),
    LatentSettings(2, 4, 2, 2.0),
)
PAIRS = (((4, 6), (5, 5, 6)), ((6,), (4,)), ((5, 5, 7), (6, 4)))


@cache
def random_coder(seed: int, settings: LatentSettings, positions: int = 13) -> Seq2Seq:
    """Return a random float64 translator with codes, and with large weights."""
    config = Seq2SeqConfig(9, 8, 2, 12, 1, 1, positions, stacks={PRIOR: 1}, extra=asdict(settings))
    model = random_translator(latent_config(config, settings), seed, 2, "coder")
    model.weights[COUNTS].fill_(1)
    return model


def random_rescorer(seed: int) -> Seq2Seq:
    """Return a random autoregressive model over the same words."""
    return random_translator(Seq2SeqConfig(9, 8, 2, 12, 1, 1, 24), 1000 + seed, 3, "teacher")


# ---------------------------------------------------------------------- the rule, by itself


def plain_count(settings: LatentSettings, source: int, positions: int) -> int:
    """Return how many codes the translations of a source have."""
    width = 1 << settings.halvings
    return max(1, min(math.ceil(source * settings.places / width), positions // width))


def entry_vector(model: Seq2Seq, settings: LatentSettings, code: int) -> list[float]:
    """Return the vector of a code: the entries of its digits, the first of which counts most."""
    book, found = model.weights[BOOK].tolist(), list[float]()
    rows = 2 ** (settings.bits // settings.slices)
    for j in range(settings.slices):
        digit = code // rows ** (settings.slices - 1 - j) % rows
        found += book[j * rows + digit]
    return found


def code_vectors(model: Seq2Seq, settings: LatentSettings, codes: Sequence[int]) -> Tensor:
    """Return the vectors [M, d] of codes."""
    rows = [entry_vector(model, settings, code) for code in codes]
    return torch.tensor(rows, dtype=torch.float64)


def next_code_logprobs(model: Seq2Seq, source: Sequence[int], codes: Sequence[int]) -> list[float]:
    """Return the log-probability of every code after these."""
    table = model.weights[TABLE].tolist()
    read = [table[-1], *(table[code] for code in codes)]
    inputs = [[x * math.sqrt(len(row)) for x in row] for row in read]
    state = run_plain_pass(model, source, inputs, lambda t, s: s <= t, PRIOR)[-1]
    scores = [sum(x * y for x, y in zip(state, row, strict=True)) for row in table[:-1]]
    norm = math.log(sum(math.exp(x) for x in scores))
    return [x - norm for x in scores]


def attend_plainly(model: Seq2Seq, source: Sequence[int], rows: Tensor, name: str) -> Tensor:
    """Return the cross-attention of rows [T, d] over a source, head by head."""
    w, memory = model.weights, model.encode(torch.tensor([list(source)])).states[0]
    width = rows.shape[1] // model.config.n_heads
    normed = F.layer_norm(rows, rows.shape[1:], w[f"{name}.norm.weight"], w[f"{name}.norm.bias"])
    q, kv = normed @ w[f"{name}.q.weight"].T, memory @ w[f"{name}.kv.weight"].T
    k, v = kv[:, : rows.shape[1]], kv[:, rows.shape[1] :]
    heads = []
    for h in range(model.config.n_heads):
        own = slice(h * width, (h + 1) * width)
        shares = (q[:, own] @ k[:, own].T / math.sqrt(width)).softmax(dim=-1)
        heads.append(shares @ v[:, own])
    return torch.cat(heads, dim=1) @ w[f"{name}.out.weight"].T


def rows_of_codes(
    model: Seq2Seq, settings: LatentSettings, source: Sequence[int], vectors: Tensor
) -> Tensor:
    """Return the logits of all words at every place, of vectors [M, d] in place of codes."""
    d = model.config.d_model
    x = vectors + sinusoids(len(vectors), d)
    for i in range(settings.halvings):
        x = x + attend_plainly(model, source, x, f"expand.{i}.cross")
        kernel = model.weights[f"expand.{i}.weight"].view(2, d, d).permute(2, 1, 0)  # in, out, 2
        x = F.conv_transpose1d((x.relu() if i else x).T[None], kernel, stride=2)[0].T
    memory = model.encode(torch.tensor([list(source)]))
    states = model.decode((x + sinusoids(len(x), d))[None], memory)[0]
    return states @ model.embedding.T


def sinusoids(count: int, width: int) -> Tensor:
    """Return the vectors of the first positions, [count, width]."""
    return torch.tensor([position_vector(t, width) for t in range(count)], dtype=torch.float64)


def compress_plainly(
    model: Seq2Seq, settings: LatentSettings, target: Sequence[int], n_codes: int
) -> Tensor:
    """Return the vectors [M, d] of a target with its end."""
    w, d = model.weights, model.config.d_model
    x = torch.zeros(n_codes * 2**settings.halvings, d, dtype=model.dtype)
    for t, word in enumerate([*target, EOS][: len(x)]):
        x[t] = w["embed"][word] * math.sqrt(d)
    x = x + sinusoids(len(x), d)
    normed = F.layer_norm(x, (d,), w["compress.norm.weight"], w["compress.norm.bias"]).relu()
    kernel = w["compress.near.weight"].view(d, 3, d).transpose(1, 2)
    x = x + F.conv1d(normed.T[None], kernel, padding=1)[0].T
    for i in range(settings.halvings):
        kernel = w[f"compress.{i}.weight"].view(d, 2, d).transpose(1, 2)
        x = F.conv1d(x.relu().T[None], kernel, stride=2)[0].T
    return x


def nearest_code(model: Seq2Seq, settings: LatentSettings, vector: Sequence[float]) -> int:
    """Return the code whose vector is nearest, of all K."""
    found = [entry_vector(model, settings, code) for code in range(2**settings.bits)]
    return min(range(len(found)), key=lambda code: math.dist(found[code], vector))


def text_of_codes(
    model: Seq2Seq, settings: LatentSettings, source: Sequence[int], codes: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the words that codes stand for, up to the first end, and their log-probabilities."""
    vectors = code_vectors(model, settings, codes)
    return read_until_end(model, rows_of_codes(model, settings, source, vectors).tolist())


def likeliest_codes(model: Seq2Seq, source: Sequence[int], count: int) -> list[int]:
    """Return the codes that are likeliest one by one."""
    codes = list[int]()
    for _ in range(count):
        row = next_code_logprobs(model, source, codes)
        codes.append(row.index(max(row)))
    return codes


# ---------------------------------------------------------------------- the laws


@collect_evidence(WRITTEN)
def words_of_likeliest_codes(build: Build) -> Iterator[int]:
    """Check the words and their scores, and that there is one pass for each code and one more."""
    for seed, settings, source in product(range(4), SHAPES, SOURCES):
        model = random_coder(seed, settings)
        count = plain_count(settings, len(source), model.config.max_positions)
        expected = text_of_codes(model, settings, source, likeliest_codes(model, source, count))
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(build, request, source, samples=1)
        case = {"model": seed, "source": source, "c": settings.halvings, "n_d": settings.slices}
        expect_equal(WRITTEN, expected[0], run.tokens, **case)
        if numbers_differ(expected[1], run.scores):
            accuse(WRITTEN, expected[1], run.scores, **case, of="log-probabilities")
        passes = sum(call.model == "coder" for call in request.forward_log)
        expect_equal(WRITTEN, count + 1, passes, **case, counted="decoder passes")
        yield 0


@collect_evidence(DRAWN)
def further_codes_are_drawn(build: Build) -> Iterator[int]:
    """Check the distribution of the translation, by walking every sequence of codes."""
    settings = SHAPES[0]
    for seed, source, samples in product(range(2), ((4,), (6, 5), (4, 7, 5)), (2, 3)):
        if samples == 3 and len(source) > 2:
            continue  # 4^6 outcomes
        model, teacher = random_coder(seed, settings), random_rescorer(seed)
        count = plain_count(settings, len(source), model.config.max_positions)
        sequences = dict[tuple[int, ...], float]()
        for codes in product(range(4), repeat=count):
            steps = (
                next_code_logprobs(model, source, codes[:i])[code] for i, code in enumerate(codes)
            )
            sequences[codes] = math.exp(sum(steps))
        texts = {codes: text_of_codes(model, settings, source, codes)[0] for codes in sequences}
        score = {codes: teacher_score(teacher, source, text) for codes, text in texts.items()}
        first = tuple(likeliest_codes(model, source, count))
        expected = dict[tuple[int, ...], float]()
        for others in product(sequences, repeat=samples - 1):
            best = max((first, *others), key=lambda codes: score[codes])
            share = math.prod(sequences[codes] for codes in others)
            text = tuple(texts[best])
            expected[text] = expected.get(text, 0) + share
        request = RefineRequest(model, teacher)
        translate = partial(run_refinement, build, request, source, samples=samples)
        case = {"source": source, "samples": samples, "model": seed}
        yield expect_translations(DRAWN, expected, translate, **case)


@collect_evidence(NEAREST)
def slices_are_quantized(find: Callable[[Tensor, Tensor, int], Tensor]) -> Iterator[int]:
    """Check the digits by brute force over all codes, and that entries are their own nearest."""
    for seed, settings in product(range(3), SHAPES):
        model = random_coder(seed, settings)
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
        rows = 2 ** (settings.bits // settings.slices)
        digits = find(vectors, model.weights[BOOK], settings.slices).tolist()
        for text, own in zip(vectors.tolist(), digits, strict=True):
            for vector, found in zip(text, own, strict=True):
                code = nearest_code(model, settings, vector)
                got = sum(digit * rows**j for j, digit in enumerate(reversed(found)))
                expect_equal(NEAREST, code, got, model=seed, n_d=settings.slices, vector=vector)
                yield 0
        for code in range(2**settings.bits):
            entry = torch.tensor([entry_vector(model, settings, code)], dtype=torch.float64)
            found = find(entry, model.weights[BOOK], settings.slices)[0].tolist()
            got = sum(digit * rows**j for j, digit in enumerate(reversed(found)))
            expect_equal(NEAREST, code, got, model=seed, quantized="a code's own vector")
        yield 0


@collect_evidence(AVERAGED)
def entries_are_moving_averages(update: Callable[..., None]) -> Iterator[int]:
    """Check counts, sums and entries after three batches, in plain loops."""
    for seed, settings, decay in product(range(2), SHAPES[:2], (0.0, 0.5, 0.99)):
        model = random_coder(seed, settings)
        weights = {name: model.weights[name].clone() for name in (BOOK, COUNTS, SUMS)}
        slices, rows = settings.slices, 2 ** (settings.bits // settings.slices)
        width, random = 8 // slices, torch.Generator().manual_seed(seed)
        counts, sums = weights[COUNTS].tolist(), weights[SUMS].tolist()
        for _ in range(3):
            vectors = torch.randn(7, 8, generator=random, dtype=torch.float64)
            digits = torch.randint(rows, (7, slices), generator=random)
            update(weights, vectors, digits, decay)
            for entry in range(slices * rows):
                j, digit = divmod(entry, rows)
                own = [
                    vector[j * width : (j + 1) * width]
                    for vector, row in zip(vectors.tolist(), digits.tolist(), strict=True)
                    if row[j] == digit
                ]
                counts[entry] = decay * counts[entry] + (1 - decay) * len(own)
                for i in range(width):
                    total = sum(vector[i] for vector in own)
                    sums[entry][i] = decay * sums[entry][i] + (1 - decay) * total
        for entry in range(slices * rows):
            if counts[entry] < 0.01:
                continue  # its smoothed count decides
            expected = [x / counts[entry] for x in sums[entry]]
            got = weights[BOOK][entry].tolist()
            case = {"entry": entry, "decay": decay, "n_d": slices}
            if any(abs(a - b) > 1e-3 * max(1, abs(a)) for a, b in zip(expected, got, strict=True)):
                accuse(AVERAGED, expected, got, **case)
            yield 0
        if not bool(weights[BOOK].isfinite().all()):
            accuse(AVERAGED, "finite entries", weights[BOOK].tolist(), decay=decay)


def random_batch(seed: int, settings: LatentSettings) -> tuple[Seq2Seq, tuple[Tensor, Tensor]]:
    """Return a model whose weights are its own, which a loss may change, and the batch of PAIRS."""
    found = random_coder(seed, settings)
    weights = {name: w.clone() for name, w in found.weights.items()}
    source, target = map(pad_sequences, zip(*PAIRS, strict=True))
    return Seq2Seq(found.config, weights, name="coder"), (source, target)


def compress_pairs(model: Seq2Seq, settings: LatentSettings) -> list[tuple[Tensor, list[int]]]:
    """Return the vectors [M, d] of every target, and their codes."""
    found = []
    for x, y in PAIRS:
        count = plain_count(settings, len(x), model.config.max_positions)
        vectors = compress_plainly(model, settings, y, count)
        codes = [nearest_code(model, settings, row) for row in vectors.tolist()]
        found.append((vectors, codes))
    return found


def word_cost(model: Seq2Seq, settings: LatentSettings, vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean cost of the words and ends of all targets, given vectors [M, d] of each."""
    costs = list[Tensor]()
    for (x, y), own in zip(PAIRS, vectors, strict=True):
        rows = rows_of_codes(model, settings, x, own).log_softmax(dim=-1)
        costs += [-row[label] for row, label in zip(rows, [*y, EOS], strict=False)]
    return torch.stack(costs).mean()


@collect_evidence(TERMS)
def loss_has_its_terms(terms: Callable[..., Any]) -> Iterator[int]:
    """Check every term of a batch, text by text; before the prior is trained there are two."""
    for seed, settings in product(range(3), SHAPES):
        model, batch = random_batch(seed, settings)
        found = compress_pairs(model, settings)
        near = [code_vectors(model, settings, codes) for _, codes in found]
        codes = [
            -next_code_logprobs(model, x, own[:i])[code]
            for (x, _), (_, own) in zip(PAIRS, found, strict=True)
            for i, code in enumerate(own)
        ]
        far = torch.cat([z - e for (z, _), e in zip(found, near, strict=True)]).square().mean()
        words = float(word_cost(model, settings, near))
        expected = [words, sum(codes) / len(codes), float(far)]
        shown = {"model": seed, "c": settings.halvings, "n_d": settings.slices, "pairs": PAIRS}
        for progress in (1.0, settings.startup):
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                got = [float(x) for x in terms(model, batch, settings, generator, progress)]
            if numbers_differ(expected, got):
                accuse(TERMS, expected, got, **shown, progress=progress)
            yield 0
        with torch.no_grad():
            early = terms(model, batch, settings, torch.Generator().manual_seed(0), 0.0)
        whole = float(word_cost(model, settings, [z for z, _ in found]))
        got = [float(early.words), float(early.codes)]
        if numbers_differ([whole, 0.0], got):
            accuse(TERMS, [whole, 0.0], got, **shown, progress=0.0, asked="vectors, and no prior")


@collect_evidence(STRAIGHT)
def gradient_goes_straight(terms: Callable[..., Any]) -> Iterator[int]:
    """Check the slope in the compressor: that of the words at the entries, moved to the vectors."""
    for seed, settings in product(range(3), SHAPES):
        model, batch = random_batch(seed, settings)
        leaf, book = model.weights["compress.norm.bias"], model.weights[BOOK]
        before = book.clone()
        with torch.enable_grad():
            leaf.requires_grad_()
            found = compress_pairs(model, settings)
            near = [code_vectors(model, settings, codes).requires_grad_() for _, codes in found]
            slopes = torch.autograd.grad(word_cost(model, settings, near), near)
            vectors = [z for z, _ in found]
            expected = torch.autograd.grad(vectors, [leaf], slopes)[0].tolist()
            book.requires_grad_()
            got = terms(model, batch, settings, torch.Generator().manual_seed(0), 1.0)
            loss = got.words + 0 * got.commitment
            slope, own = torch.autograd.grad(loss, [leaf, book], allow_unused=True)
        case = {"model": seed, "c": settings.halvings, "n_d": settings.slices}
        slope_in_compressor = [0.0] * len(leaf) if slope is None else slope.tolist()
        if numbers_differ(expected, slope_in_compressor):
            accuse(STRAIGHT, expected, slope_in_compressor, **case)
        if own is not None:
            accuse(STRAIGHT, "no gradient of the codebook", own.tolist(), **case)
        if torch.equal(before, book):
            accuse(STRAIGHT, "a codebook that moved", "the codebook as it was", **case)
        yield 0


TRAPS = [
    Trap(WRITTEN, words_of_likeliest_codes, refine_card("latent_transformer")),
    Trap(DRAWN, further_codes_are_drawn, refine_card("latent_transformer")),
    Trap(NEAREST, slices_are_quantized, lambda: module.find_nearest),
    Trap(AVERAGED, entries_are_moving_averages, lambda: module.update_codebook),
    Trap(TERMS, loss_has_its_terms, lambda: module.latent_terms),
    Trap(STRAIGHT, gradient_goes_straight, lambda: module.latent_terms),
]

_latent = partial(Toy, technique="latent_transformer")

TOYS = [
    _latent(
        "all codes at once",
        "prior_states(self.model, codes, memory)",
        "prior_states(self.model, 0 * codes, memory)",
        LatentRefiner.rewrite,
        law=WRITTEN,
    ),
    _latent(
        "a decompressor without the source",
        'x = x + model.attend_source(i, x, (k, v), memory.mask[:, None], "expand")',
        "x = x",
        module.expand_codes,
        law=WRITTEN,
    ),
    _latent(
        "every sample takes the likeliest codes",
        "if number:",
        "if number < 0:",
        LatentRefiner.choose_codes,
        law=DRAWN,
    ),
    _latent(
        "the model judges its own samples",
        "best_candidate(self.teacher, source, canvas)",
        "int(canvas.means().argmax())",
        LatentRefiner.choose,
        law=DRAWN,
    ),
    _latent(
        "one codebook for all slices",
        "books = book.view(slices, -1, book.shape[-1])",
        "books = book.view(slices, -1, book.shape[-1])[:1].expand(slices, -1, -1)",
        module.find_nearest,
        law=NEAREST,
    ),
    _latent(
        "the entries of the last batch",
        "hits.sum(0).flatten(), 1 - decay",
        "hits.sum(0).flatten(), 1.0",
        module.update_codebook,
        law=AVERAGED,
    ),
    _latent(
        "a codebook that is trained by gradients",
        "book = model.weights[BOOK].detach()",
        "book = model.weights[BOOK]",
        module.latent_terms,
        law=STRAIGHT,
    ),
    _latent(
        "a compressor that the words do not train",
        "quantized = vectors + (entries - vectors).detach()",
        "quantized = entries",
        module.latent_terms,
        law=STRAIGHT,
    ),
    _latent(
        "a prior that reads the code it is to write",
        "prior_states(model, right, memory, dropout)[:, :-1]",
        "prior_states(model, right, memory, dropout)[:, 1:]",
        module.latent_terms,
        law=TERMS,
    ),
    _latent(
        "no commitment",
        "commitment = F.mse_loss(own, entries[has_code])",
        "commitment = words.new_zeros(())",
        module.latent_terms,
        law=TERMS,
    ),
]
