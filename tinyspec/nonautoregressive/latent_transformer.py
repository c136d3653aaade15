"""Latent Transformer: write a few discrete codes from left to right, then all words at once.

Paper: Kaiser, Roy, Vaswani, Parmar, Bengio, Uszkoreit, Shazeer, ICML 2018, arXiv 1803.03382. What
is said of their training was read in the authors' code (github.com/tensorflow/tensor2tensor,
models/research/transformer_vae.py, commit 00d3863).

Idea. A model that writes all words at once mixes translations, because no word knows the others.
Here the words are first decided together, in a short sequence of discrete codes: one code for every
2^c words. An autoencoder learns what a code means. Its *compressor* reads the target and halves its
length c times; a bottleneck turns each remaining vector into a code; the *decompressor* doubles the
length c times, and a decoder reads all words off in one pass. A third part, the *prior*, learns to
write the codes of a translation from left to right, from the source alone.

    z           = compressor(y)                        [M, d], M = places / 2^c
    k_ij        = argmin over k of |z_ij - e_jk|^2     slice j of n_d, by a codebook of its own
    p(y | x)    = sum over codes of  prod over i of p(k_i | k_<i, x)  p(y | k, x)
    L           = - log p(y | k, x) - log p(k | x) + beta |z - sg(e)|^2
    e_jk       <- EMA of the z_ij that chose it        the codebook has no gradient

*Decomposed vector quantization*: n_d slices of K^(1/n_d) entries each make K codes. So each entry
is chosen often, and codes do not die out. The gradient of e goes to z as it is (straight through).

Training. On people's translations or a teacher's. In the first part of the training (`startup`)
sentences pass the bottleneck as vectors, fewer and fewer of them, and the prior is not trained.

Guarantee: APPROX: no number of samples gives a teacher's distribution. The code that runs is
compared with a second version in plain lists, which also walks every sequence of codes.
Pitfall: a codebook that is learnt by gradients, of which one code is used; codes that are written
in parallel, so that they are mixed in place of the words; a decompressor without the source.
Ablation: codes of other sentences, or codes that are each drawn without those before. Then far
fewer translations of dialects are right (a test).
Tests: tests/nonautoregressive/test_latent_transformer.py (`translate_through_codes` and
`quantize_slices` against the code that runs; the moving averages; four dialects; codes that are
shuffled).
Ours: the prior reads a table of its own, tied to its output (in the code it reads the codebook);
beta has its full weight from the first step (in the code it is multiplied by the share of texts
that are quantized, as the prior's loss is); the codebook begins as vectors of the first batch; c
and K are smaller (paper: 3 and 2^14), and so is the decay of the averages where a recipe says so
(paper: .999). The first end closes the text, and what stands after it has no label.
Left out: the warm-up in which the decoder also sees true words, the shuffled words that the
compressor reads, the convolutions between two doublings, and the causal mask of the output decoder;
projected slices, semantic hashing and Gumbel softmax, which the paper compares with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best_candidate, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.blocks import drop_out
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.ops import linear
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.nar_crf import score_words
from tinyspec.nonautoregressive.nat import require_teacher, write_until_end
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    check_ranges,
    read_trained_settings,
    technique,
)

PRIOR = "prior"  # the stack that writes codes
BOOK, COUNTS, SUMS = "codebook", "codebook_counts", "codebook_sums"
TABLE = "code_table"  # embeddings of the codes, then of the start: input and head of the prior
COMMITMENT = 0.25  # beta
EPSILON = 1e-5  # of Laplace, so that an entry that nobody chooses divides by more than 0
REMEDY = "train a model from models/multi30k-latent/recipe.toml (tinyspec train mt)"


def translate_through_codes(
    predict_code: Callable[[list[int]], int],
    read_words: Callable[[list[int]], list[int]],
    n_codes: int,
    eos: int,
) -> list[int]:
    """Return a translation (section 3).

    predict_code  codes so far -> the next one
    read_words    all codes -> 2^c words for each of them, in one pass

    `LatentRefiner` does this for several samples in one batch. A test compares the two.
    """
    codes = list[int]()
    for _ in range(n_codes):
        codes.append(predict_code(codes))
    words = read_words(codes)
    return words[: words.index(eos)] if eos in words else words


def quantize_slices(vector: Sequence[float], books: Sequence[Sequence[Sequence[float]]]) -> int:
    """Return the code of a vector: the digits of its slices, each the nearest entry of its book.

    books  [n_d][entries][d / n_d]

    >>> quantize_slices([0.9, 0.1], [[[0.0], [1.0]], [[0.0], [1.0]]])
    2
    """
    code, width = 0, len(books[0][0])
    for j, book in enumerate(books):
        own = vector[j * width : (j + 1) * width]
        far = [sum((x - e) ** 2 for x, e in zip(own, entry, strict=True)) for entry in book]
        code = code * len(book) + far.index(min(far))
    return code


# ------------------------------ the model


@dataclass(frozen=True)
class LatentSettings:
    """Section [translator] of a recipe.

    halvings  how often the compressor halves the length (c)
    bits      log2 of the number of codes (log2 K)
    slices    of a vector, each with a codebook of its own (n_d); 1: one codebook
    places    words that there is room for, as a multiple of the source's
    decay     of the moving averages that the codebooks are
    startup   share of the training in which vectors pass the bottleneck
    """

    halvings: int = 2
    bits: int = 8
    slices: int = 2
    places: float = 2.0
    decay: float = 0.999
    startup: float = 0.1

    def __post_init__(self) -> None:
        numbers = {"places": (0.5, 8), "decay": (0, 1), "startup": (0, 1)}
        check_ranges(self, {"halvings": 6, "bits": 16, "slices": 16}, numbers)
        if self.bits % self.slices:
            raise TinyspecError(
                f"{self.slices} slices do not divide {self.bits} bits: set bits to a multiple"
            )

    @property
    def entries(self) -> int:
        """Return the number of entries of each codebook."""
        return 1 << self.bits // self.slices

    def count_codes(self, sources: Tensor, positions: int) -> Tensor:
        """Return how many codes [B] the translations of sources of these lengths have.

        positions  that the decoder has

        >>> LatentSettings(halvings=2).count_codes(torch.tensor([1, 5, 9]), 16).tolist()
        [1, 3, 4]
        """
        width = 1 << self.halvings
        return (sources * self.places / width).ceil().long().clamp(1, positions // width)


def latent_config(config: Seq2SeqConfig, settings: LatentSettings) -> Seq2SeqConfig:
    """Return a config with the weights of compressor, codebooks, prior and decompressor."""
    d, rows = config.d_model, settings.slices * settings.entries
    if d % settings.slices:
        raise TinyspecError(
            f"[translator] {settings.slices} slices do not divide a width of {d}: set slices to a "
            f"divisor of {d}"
        )
    if config.max_positions <= 1 << settings.halvings:
        raise TinyspecError(
            f"[translator] a code stands for {1 << settings.halvings} words, and there are "
            f"{config.max_positions} positions, which must be more: lower halvings"
        )
    heads: dict[str, tuple[int, ...]] = {
        BOOK: (rows, d // settings.slices),
        SUMS: (rows, d // settings.slices),
        COUNTS: (rows,),
        TABLE: ((1 << settings.bits) + 1, d),
        "compress.norm.weight": (d,),
        "compress.norm.bias": (d,),
        "compress.near.weight": (d, 3 * d),
    }
    for i in range(settings.halvings):
        heads |= {
            f"compress.{i}.weight": (d, 2 * d),
            f"expand.{i}.weight": (2 * d, d),
            f"expand.{i}.cross.norm.weight": (d,),
            f"expand.{i}.cross.norm.bias": (d,),
            f"expand.{i}.cross.q.weight": (d, d),
            f"expand.{i}.cross.kv.weight": (2 * d, d),
            f"expand.{i}.cross.out.weight": (d, d),
        }
    return replace(config, heads=heads)


def compress_words(
    model: Seq2Seq, labels: Tensor, slots: Tensor, halvings: int, dropout: float = 0.0
) -> Tensor:
    """Return the vectors z [B, M, d] of texts [B, M 2^c], each of 2^c places.

    labels  words, the end, and padding after it
    slots   [B, M 2^c] False where the texts of a batch have no place
    """
    w, inside = model.weights, slots[..., None]
    read = model.embed_words(labels) * (labels != model.config.pad)[..., None]
    x = drop_out(model.place(read), dropout)
    norm = F.layer_norm(x, x.shape[-1:], w["compress.norm.weight"], w["compress.norm.bias"])
    near = F.pad(norm.relu() * inside, (0, 0, 1, 1))  # nothing stands beside the first and last
    windows = torch.cat((near[:, :-2], near[:, 1:-1], near[:, 2:]), dim=-1)
    x = x + drop_out(linear(windows, w["compress.near.weight"]), dropout)
    for i in range(halvings):
        pairs = x.relu().reshape(len(x), x.shape[1] // 2, -1)
        x = linear(pairs, w[f"compress.{i}.weight"])
    return x


def split_last(x: Tensor, parts: int) -> Tensor:
    """Return x [..., d] as [..., parts, d / parts]."""
    return x.reshape(*x.shape[:-1], parts, -1)


def expand_codes(model: Seq2Seq, vectors: Tensor, memory: EncoderOutput, halvings: int) -> Tensor:
    """Return what the decoder reads [B, M 2^c, d] of vectors [B, M, d]; each doubling sees x."""
    x = model.place(vectors)
    for i in range(halvings):
        both = linear(memory.states, model.weights[f"expand.{i}.cross.kv.weight"]).chunk(2, dim=-1)
        k, v = (split_last(part, model.config.n_heads) for part in both)
        x = x + model.attend_source(i, x, (k, v), memory.mask[:, None], "expand")
        x = linear(x.relu() if i else x, model.weights[f"expand.{i}.weight"])
        x = x.reshape(len(x), -1, model.config.d_model)
    return x


# ------------------------------ the bottleneck (section 2.2, 2.3)


def find_nearest(vectors: Tensor, book: Tensor, slices: int) -> Tensor:
    """Return the nearest entry of every slice [..., n_d] of vectors [..., d].

    book  [n_d entries, d / n_d] the entries of all codebooks
    """
    own = split_last(vectors, slices)
    books = book.view(slices, -1, book.shape[-1])
    return (books.square().sum(-1) - 2 * torch.einsum("...jw,jkw->...jk", own, books)).argmin(-1)


def look_up_entries(digits: Tensor, book: Tensor) -> Tensor:
    """Return the vectors [..., d] of digits [..., n_d]."""
    slices = digits.shape[-1]
    first = torch.arange(slices, device=digits.device) * (len(book) // slices)
    return F.embedding(digits + first, book).flatten(-2)


def join_digits(digits: Tensor, entries: int) -> Tensor:
    """Return the codes [...] of digits [..., n_d], the first of which counts most."""
    codes = torch.zeros_like(digits[..., 0])
    for digit in digits.unbind(-1):
        codes = codes * entries + digit
    return codes


def split_codes(codes: Tensor, settings: LatentSettings) -> Tensor:
    """Return the digits [..., n_d] of codes [...]."""
    powers = [settings.entries**j for j in reversed(range(settings.slices))]
    return torch.stack([codes // power % settings.entries for power in powers], dim=-1)


@torch.no_grad()
def initialize_codebook(
    weights: dict[str, Tensor], vectors: Tensor, slices: int, generator: torch.Generator
) -> None:
    """Make the entries slices of the vectors [N, d] of a batch, each as if chosen once."""
    rows = len(weights[BOOK]) // slices
    own = split_last(vectors.detach(), slices)  # [N, n_d, w]
    for j in range(slices):
        chosen = torch.randint(len(own), (rows,), generator=generator, device=own.device)
        weights[BOOK][j * rows : (j + 1) * rows] = own[chosen, j]
    weights[SUMS].copy_(weights[BOOK])
    weights[COUNTS].fill_(1.0)


@torch.no_grad()
def update_codebook(
    weights: dict[str, Tensor], vectors: Tensor, digits: Tensor, decay: float
) -> None:
    """Move every entry towards the mean of the vectors [N, d] that chose it (section 2.2).

    digits  [N, n_d]

    Counts and sums are moving averages; an entry is their quotient.
    """
    slices, rows = digits.shape[-1], len(weights[BOOK])
    hits = F.one_hot(digits, rows // slices).to(vectors.dtype)  # [N, n_d, entries]
    own = split_last(vectors.detach(), slices)
    weights[COUNTS].lerp_(hits.sum(0).flatten(), 1 - decay)
    weights[SUMS].lerp_(torch.einsum("njk,njw->jkw", hits, own).flatten(0, 1), 1 - decay)
    counts = weights[COUNTS].view(slices, -1)
    total = counts.sum(-1, keepdim=True)
    smooth = (counts + EPSILON) / (total + counts.shape[-1] * EPSILON) * total
    weights[BOOK].copy_(weights[SUMS] / smooth.flatten()[:, None])


# ------------------------------ training (section 3)


def lay_out_places(
    config: Seq2SeqConfig, target: Tensor, codes: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Return labels [B, M 2^c], each target with its end, and where a text has places.

    codes  [B] M of each text
    width  2^c
    """
    lengths = (target != config.pad).sum(dim=1, keepdim=True)
    room = int(codes.max()) * width
    longer = F.pad(target, (0, max(1, room + 1 - target.shape[1])), value=config.pad)
    labels = longer.scatter(1, lengths, config.eos)[:, :room]
    return labels, torch.arange(room, device=target.device) < codes[:, None] * width


def prior_states(
    model: Seq2Seq, codes: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the prior's states [B, M + 1, d] before every code of [B, M], and after the last."""
    start = len(model.weights[TABLE]) - 1
    read = F.pad(codes, (1, 0), value=start)
    vectors = F.embedding(read, model.weights[TABLE]) * model.config.d_model**0.5
    n = read.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool, device=codes.device).tril()
    return model.decode(model.place(vectors), memory, causal, dropout, stack=PRIOR)


def code_logits(model: Seq2Seq, states: Tensor) -> Tensor:
    """Return the logits [..., K] of the next code, in float32 at least."""
    logits = linear(states, model.weights[TABLE][:-1])
    return logits if logits.dtype == torch.float64 else logits.float()


class LatentTerms(NamedTuple):
    """The terms of the loss: means over words and ends, over codes, and over numbers of vectors."""

    words: Tensor
    codes: Tensor
    commitment: Tensor


def latent_terms(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    settings: LatentSettings,
    generator: torch.Generator,
    progress: float = 1.0,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> LatentTerms:
    """Return the terms of the loss of a batch; with gradients on, update the codebooks.

    batch     sources [B, S] and targets [B, T], padded at the end
    progress  of the training: before `startup` some sentences pass the bottleneck as vectors
    """
    source, target = batch
    config, width = model.config, 1 << settings.halvings
    memory = model.encode(source, dropout)
    counts = settings.count_codes(memory.mask.sum(dim=1), config.max_positions)
    labels, slots = lay_out_places(config, target, counts, width)
    vectors = compress_words(model, labels, slots, settings.halvings, dropout)
    has_code = slots[:, ::width]
    own = vectors[has_code]
    if torch.is_grad_enabled() and not bool(model.weights[COUNTS].any()):
        initialize_codebook(model.weights, own, settings.slices, generator)
    book = model.weights[BOOK].detach()
    digits = find_nearest(vectors.detach(), book, settings.slices)
    entries = look_up_entries(digits, book)
    if torch.is_grad_enabled():
        update_codebook(model.weights, own, digits[has_code], settings.decay)
    quantized = vectors + (entries - vectors).detach()  # the gradient goes straight through
    started = 1.0 if progress >= settings.startup else progress / settings.startup
    draws = torch.rand(len(source), generator=generator, device=source.device)
    read = torch.where((draws < started)[:, None, None], quantized, vectors)
    inputs = model.place(expand_codes(model, read, memory, settings.halvings))
    states = model.decode(inputs, memory, None, dropout, slots)
    is_word = labels != config.pad
    words = F.cross_entropy(
        score_words(model, states[is_word]), labels[is_word], label_smoothing=smoothing
    )
    commitment = F.mse_loss(own, entries[has_code])
    codes = words.new_zeros(())
    if progress >= settings.startup:
        right = join_digits(digits, settings.entries)
        before = prior_states(model, right, memory, dropout)[:, :-1]
        codes = F.cross_entropy(code_logits(model, before[has_code]), right[has_code])
    return LatentTerms(words, codes, commitment)


def latent_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return the loss of a batch of the trainer."""
    options = training.progress, training.dropout, training.smoothing
    terms = latent_terms(training.model, batch, training.settings, generator, *options)
    return terms.words + terms.codes + COMMITMENT * terms.commitment


# ------------------------------ decoding


class LatentRefiner:
    """Write codes from left to right, one in each pass, and all words in the last one.

    Sample 0 takes the likeliest codes; the others draw them, and the teacher chooses. Until the
    last pass `extra` of the canvas is the numbers of the samples [C] and their codes [C, m].
    """

    def __init__(
        self,
        model: Seq2Seq,
        settings: LatentSettings,
        teacher: Seq2Seq | None = None,
        samples: int = 1,
    ):
        self.model, self.settings = model, settings
        self.teacher, self.samples = teacher, samples

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas of masks, with the places of all codes, for every sample."""
        longest = self.model.config.max_positions - (self.teacher is not None)  # it reads bos too
        codes = int(self.settings.count_codes(torch.tensor(len(source)), longest))
        lengths = [codes << self.settings.halvings] * self.samples
        canvas = blank_canvas(lengths, self.model.config.mask, self.model.device)
        numbers = torch.arange(self.samples, device=self.model.device)
        return canvas._replace(extra=(numbers, numbers.new_empty(self.samples, 0)))

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the next code of every sample; after the last one, write the words."""
        count, device = len(canvas.tokens), canvas.tokens.device
        # For one source of a batch `extra` is not kept, and a draw is an error.
        if canvas.extra is None:
            number = torch.full((count,), min(self.samples - 1, 1), device=device)
            canvas = canvas._replace(extra=(number, number.new_empty(count, 0)))
        numbers, codes = canvas.extra
        if codes.shape[1] << self.settings.halvings < canvas.tokens.shape[1]:
            states = prior_states(self.model, codes, memory)[:, -1]
            chosen = self.choose_codes(code_logits(self.model, states), numbers, rng)
            return canvas._replace(extra=(numbers, torch.cat((codes, chosen[:, None]), dim=1)))
        digits = split_codes(codes, self.settings)
        vectors = look_up_entries(digits, self.model.weights[BOOK])
        read = expand_codes(self.model, vectors, memory, self.settings.halvings)
        states = self.model.decode(self.model.place(read), memory, slots=canvas.mask)
        return write_until_end(self.model, self.model.logits(states), canvas.mask)

    def choose_codes(self, logits: Tensor, numbers: Tensor, rng: RandomSource) -> Tensor:
        """Return a code of each sample [C]: the likeliest for sample 0, drawn for the others."""
        chosen = logits.argmax(dim=-1)
        for row, number in enumerate(numbers.tolist()):
            if number:
                probs = logits[row].double().softmax(dim=-1).tolist()
                chosen[row] = rng.split("code", number).draw(probs)
        return chosen

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration > 0 and canvas.extra is None

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0 if self.teacher is None else best_candidate(self.teacher, source, canvas)

    def count_rows(self, before: Canvas, after: Canvas) -> int:
        """Return how many positions the pass between two canvases reads."""
        if after.extra is None:  # the words are written
            return after.tokens.numel()
        codes: Tensor = after.extra[1]
        return codes.numel()


# ------------------------------ the card


def translate_by_likeliest_codes(
    model: Seq2Seq, settings: LatentSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S]."""
    return translate_sources(model, sources, LatentRefiner(model, settings))


def fits_places(config: Seq2SeqConfig, settings: LatentSettings, source: int, target: int) -> bool:
    """Return whether a target and its end fit into the places of its source."""
    codes = int(settings.count_codes(torch.tensor(source), config.max_positions))
    return 0 < target < codes << settings.halvings


@technique(
    title="LT: latent transformer with discrete codes",
    summary="writes a few codes, then all words",
    paper="Kaiser et al. 2018, arXiv 1803.03382",
    reported="up to 10x (survey)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        latent_batch_loss,
        translate_by_likeliest_codes,
        "It writes one of 2^{settings.bits} codes for every 2^{settings.halvings} places from left "
        "to right, then all words in one pass (`latent_transformer`). Its figure is that of the "
        "likeliest codes.",
        shape={"stacks": {PRIOR: 1}},
        settings=LatentSettings,
        fits=fits_places,
        equip=latent_config,
        float32=True,
    ),
    knobs=(
        Knob(
            "samples",
            1,
            "sequences of codes, of which the teacher chooses; 1: the likeliest codes, no teacher",
            low=1,
            high=128,
            small=(1, 3),
        ),
    ),
)
def latent_transformer(request: RefineRequest, *, samples: int) -> LatentRefiner:
    """Return a refiner that writes codes, then words; a teacher chooses among samples."""
    model, teacher = request.model, request.teacher
    if TABLE not in model.weights or PRIOR not in model.config.stacks:
        raise TinyspecError(f"{model.name} has no discrete codes: {REMEDY}")
    settings = read_trained_settings(model, LatentSettings, latent_config, "codes", REMEDY)
    if samples == 1:
        return LatentRefiner(model, settings)
    teacher = require_teacher(model, teacher, f"{samples} samples", "set samples to 1")
    return LatentRefiner(model, settings, teacher, samples)
