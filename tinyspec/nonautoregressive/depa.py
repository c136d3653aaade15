"""DePA: a decoder that learns both directions first, and reads mixtures of target embeddings.

Paper: Zhan, Chen, Chen, Wang, Bai, Gao, IWSLT 2023, arXiv 2203.16266 (dependency-aware decoder).
Both parts were read in the authors' code (github.com/zja-nlp/NAT_with_DAD).

Idea. Words of a target depend on each other, and a decoder that writes them all at once sees none
of them. DePA makes up for it in two ways. *Forward-backward pre-training*: the decoder is first an
autoregressive one from left to right, then one from right to left, and only then a parallel one; so
its self-attention has learnt dependencies of both directions. *Input transformation*: the decoder's
input is moved from the source's embeddings to the target's. A position first reads a mixture of
source words, by attention from its place to theirs. This mixture then attends to the embeddings of
all target words, and what the decoder reads is the mixture of these.

    s_i     = sum over j of softmax_j(W_c p_i . (e(x_j) + p_j)) e(x_j)       p: sinusoids
    a_i     = softmax over target words v of ((W_q s_i + b) . E_v)
    input_i = sum over v of a_i,v E_v + p_i                                  `transform_inputs`
    phases    from left to right | from right to left | all at once          `depa_loss`
    L       = - sum of log p(y_t | ..) - log p(T | x)     per word, in every phase

Training. `depa_loss`, on sentences that a teacher translates, from the teacher's weights: its own
training is the forward phase. In the backward phase a text is reversed within its own length, and
its end comes after its first word. E is a constant inside the attention, and target words are
those of the training targets. W_c and W_q begin as identities: position i then reads the source
words near place i, and of these the nearest target words.

Guarantee: APPROX: no number of lengths gives the teacher's distribution. With both parts off the
loss is that of `parallel`, bit for bit. The code that runs is compared with a second version in
plain lists.
Pitfall: a text that is reversed with its padding; two models, one for each direction; attention
over the source alone, which is a soft copy; attention over words of the source language; reversed
inputs beside reversed targets, so that an input shows the word to write (the authors' code can be
set to it).
Ablation: `backward = 0` and `transform = false` of section [translator]. No gain was found. With
both parts, on dialects of orders and of fertilities, it has fewer right translations than
`parallel` after training on a teacher's (tutorials/results/dialects.md). On Multi30k its lead is
within the noise (tutorials/results/translation.md). In a test a model that was trained on copies is
as good. What each part does was not measured.
Tests: tests/nonautoregressive/test_depa.py (`transform_position` against the code that runs; a text
that is reversed twice; the phases; the input transformation on a dialect).
Left out, of the authors' code: positions that are added again before every layer: our layers are
the teacher's, which did not learn them, and their residual stream keeps the first. The optimizer is
not reset between phases. There a position also attends to itself; here the mask of the last phase
is that of `parallel`. A LENGTH token tells the length, where theirs predicts its difference from
the source's. Theirs tries the lengths around that one: `around` does so. There begin and end are
positions of a text, with embeddings that are not transformed. It scales no embedding;
ours are multiplied by sqrt(d), and so is their mixture. GLAT, the second base model of the paper,
is not here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.refine import Canvas
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.ops import linear
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.nat import copy_uniformly, decode_parallel
from tinyspec.nonautoregressive.parallel import (
    LENGTH_KNOBS,
    ParallelRefiner,
    find_judge,
    fits_length_token,
    label_nll,
    length_nll,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.nonautoregressive.sat import group_mask, shift_by_group
from tinyspec.technique import (
    AlignWords,
    Guarantee,
    Ids,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

COPY, QUERY, QUERY_BIAS = "depa.copy", "depa.query", "depa_query_bias"  # W_c, W_q, b
TARGET_WORDS = "target_words"  # the list of target words in config.json
REMEDY = "train a model from models/multi30k-depa/recipe.toml (tinyspec train mt)"


Vectors = Sequence[Sequence[float]]


def transform_position(
    place: Sequence[float],
    words: Vectors,
    places: Vectors,
    targets: Vectors,
    copy: Vectors,
    query: Vectors,
    bias: Sequence[float],
) -> list[float]:
    """Return what one position reads, without its sinusoids (section 3.2).

    place    sinusoids p_i of the position
    words    [S][d] embeddings of the source words; places: their sinusoids
    targets  [V][d] embeddings E of the target words
    copy, query, bias  W_c, W_q, b

    `transform_inputs` does this for all positions of a batch. A test compares the two.
    """

    def dot(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    def attend(asking: Sequence[float], keys: Vectors, values: Vectors) -> list[float]:
        weights = [math.exp(dot(asking, key)) for key in keys]
        total = sum(weights)
        return [dot(weights, column) / total for column in zip(*values, strict=True)]

    asking = [dot(row, place) for row in copy]
    keys = [[x + p for x, p in zip(*pair, strict=True)] for pair in zip(words, places, strict=True)]
    soft = attend(asking, keys, words)
    asking = [dot(row, soft) + b for row, b in zip(query, bias, strict=True)]
    return attend(asking, targets, targets)


# ------------------------------ the input transformation (section 3.2)


def transform_inputs(model: Seq2Seq, memory: EncoderOutput, count: int) -> Tensor:
    """Return the inputs [B, T, d] of `count` positions, without sinusoids.

    memory  of the sources, with their tokens

    It costs as much as a head over the target words.
    """
    assert memory.source is not None
    w, positions = model.weights, model.positions
    model.check_length(count, "target")
    words = model.embed_words(memory.source)  # [B, S, d]
    asking = linear(positions[:count], w[COPY])
    scores = asking @ (words + positions[: words.shape[1]]).transpose(1, 2)  # [B, T, S]
    shares = scores.masked_fill(~memory.mask[:, None], -torch.inf).softmax(dim=-1)
    table = model.embedding.detach()[list(find_target_words(model))]  # [K, d]
    shares = linear(linear(shares @ words, w[QUERY], w[QUERY_BIAS]), table).softmax(dim=-1)
    return shares @ table * math.sqrt(model.config.d_model)


def find_target_words(model: Seq2Seq) -> tuple[int, ...]:
    """Return the target words of a model. Raises TinyspecError if its config.json has none."""
    text = model.config.extra.get(TARGET_WORDS)
    try:
        if not isinstance(text, str):
            raise ValueError("is missing")
        return read_words(text, model.config.vocab_size)
    except ValueError as error:
        raise TinyspecError(
            f"{model.name}: config.json: {TARGET_WORDS}: {error}: {REMEDY}"
        ) from None


@lru_cache(maxsize=4)
def read_words(text: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a text. Raises ValueError for no ids, or ids outside the vocabulary.

    >>> read_words("4 7", 9)
    (4, 7)
    """
    ids = tuple(map(int, text.split()))
    if not ids or not all(0 <= id < vocab_size for id in ids):
        raise ValueError(f"ids from 0 to {vocab_size - 1} are expected")
    return ids


# ------------------------------ training (section 3.1)


@dataclass(frozen=True)
class DepaSettings:
    """Section [translator] of a recipe.

    forward    share of the training that writes from left to right; the teacher's was one
    backward   share of the training that writes from right to left, after it
    transform  whether inputs are transformed; if not, they are copies of the source
    """

    forward: float = 0.0
    backward: float = 0.3
    transform: bool = True

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            share = getattr(self, name)
            if not isinstance(share, int | float) or not 0 <= share <= 1:
                raise TinyspecError(f"{name} is {share}: it must be from 0 to 1")
        if self.forward + self.backward > 1:
            raise TinyspecError(
                f"forward + backward is {self.forward + self.backward:g}: it must be at most 1"
            )
        if not isinstance(self.transform, bool):
            raise TinyspecError(f"transform is {self.transform}: it must be true or false")


def find_phase(settings: DepaSettings, progress: float) -> str:
    """Return the phase of a training: forward, backward or parallel.

    >>> [find_phase(DepaSettings(0.25, 0.25), done) for done in (0, 0.25, 0.5)]
    ['forward', 'backward', 'parallel']
    """
    if progress < settings.forward:
        return "forward"
    return "backward" if progress < settings.forward + settings.backward else "parallel"


def reverse_words(words: Tensor, pad: int) -> Tensor:
    """Return texts [B, T] from last word to first, each within its own length.

    >>> reverse_words(torch.tensor([[4, 5, 6], [7, 8, 0]]), 0).tolist()
    [[6, 5, 4], [8, 7, 0]]
    """
    ends = (words != pad).sum(dim=1, keepdim=True)
    i = torch.arange(words.shape[1], device=words.device).expand_as(words)
    return words.gather(1, torch.where(i < ends, ends - 1 - i, i))


def depa_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    phase: str,
    transform: bool,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of the words and of the length, per label.

    batch      sources [B, S] and targets [B, T], padded at the end
    phase      forward, backward or parallel
    transform  whether inputs are transformed in the parallel phase
    """
    (source, target), pad = batch, model.config.pad
    memory = model.encode(source, dropout)
    places, slots = copy_uniformly((source != pad).sum(dim=1), (target != pad).sum(dim=1))
    labels = target[:, : slots.shape[1]]
    if phase == "parallel":
        copies = source.gather(1, places)
        read = transform_inputs(model, memory, slots.shape[1]) if transform else copies
        states = decode_parallel(model, read, slots, memory, dropout)
    else:
        text = labels if phase == "forward" else reverse_words(labels, pad)
        inputs, labels = shift_by_group(model.config, text, 1)
        causal = group_mask(inputs.shape[1], 1, inputs.device)
        states = model.decode(model.embed(inputs), memory, causal, dropout)
    words = label_nll(model, states, labels, smoothing)
    return (words + length_nll(model, target, memory)) / (labels != pad).sum()


def add_depa_weights(config: Seq2SeqConfig, settings: DepaSettings) -> Seq2SeqConfig:
    """Return the config with W_c, W_q and b, if inputs are transformed."""
    if not settings.transform:
        return config
    d = config.d_model
    return replace(config, heads={COPY: (d, d), QUERY: (d, d), QUERY_BIAS: (d,)})


def initialize_as_identities(weights: Mapping[str, Tensor]) -> None:
    """Make W_c and W_q identities."""
    for name in (COPY, QUERY):
        if name in weights:
            weights[name].copy_(torch.eye(len(weights[name])))


def list_target_words(
    settings: DepaSettings, pairs: Sequence[tuple[Ids, Ids]], align: AlignWords
) -> dict[str, Any]:
    """Return the words of the training targets, for config.json."""
    if not settings.transform:
        return {}
    found = sorted({word for _, target in pairs for word in target})
    return {TARGET_WORDS: " ".join(map(str, found))}


# ------------------------------ decoding


class DepaRefiner(ParallelRefiner):
    """Write all words of l lengths in one pass, from transformed inputs.

    transform  False: from copies of the source, as `parallel` does
    """

    def __init__(
        self,
        model: Seq2Seq,
        transform: bool,
        teacher: Seq2Seq | None = None,
        lengths: int = 1,
        around: bool = False,
    ):
        super().__init__(model, teacher, lengths, around)
        self.transform = transform

    def read_canvas(self, canvas: Canvas, memory: EncoderOutput) -> Tensor:
        if not self.transform:
            return canvas.tokens
        count = canvas.tokens.shape[1]
        return transform_inputs(self.model, memory, count).expand(len(canvas.tokens), -1, -1)


# ------------------------------ the card


def depa_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `depa_loss` of a batch of the trainer; nothing is drawn from the generator."""
    settings = training.settings
    phase = find_phase(settings, training.progress)
    options = settings.transform, training.dropout, training.smoothing
    return depa_loss(training.model, batch, phase, *options)


def translate_transformed(
    model: Seq2Seq, settings: DepaSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    return translate_sources(model, sources, DepaRefiner(model, settings.transform))


@technique(
    title="DePA: dependency-aware decoder",
    summary="the decoder reads mixed target embeddings",
    paper="Zhan et al. 2023, arXiv 2203.16266",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        depa_batch_loss,
        translate_transformed,
        "It writes all words at once (`depa`). For a share of {settings.backward} of its training "
        "it wrote from right to left; it reads mixtures of target embeddings: "
        "{settings.transform}. Its figure is that of the likeliest length.",
        shape={"lengths": 9},
        settings=DepaSettings,
        fits=fits_length_token,
        equip=add_depa_weights,
        initialize=initialize_as_identities,
        counts=list_target_words,
    ),
    knobs=LENGTH_KNOBS,
)
def depa(request: RefineRequest, *, lengths: int, judge: str, around: bool) -> DepaRefiner:
    """Return a refiner that writes all words in one pass, for the likeliest lengths."""
    model = request.model
    transform = model.config.extra.get("transform")
    if not isinstance(transform, bool) or (transform and COPY not in model.weights):
        raise TinyspecError(f"{model.name} was not trained for depa: {REMEDY}")
    if transform:
        find_target_words(model)
    teacher = find_judge(request, lengths, judge, REMEDY)
    return DepaRefiner(model, transform, teacher, lengths, around)
