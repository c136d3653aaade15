"""ENAT: let the decoder read rough target words in place of copies of the source.

Paper: Guo, Tan, He, Qin, Xu, Liu, AAAI 2019, arXiv 1812.09664 (enhanced decoder input). There is no
code of the authors.

Idea. A decoder that writes all words at once reads copies of source words: words of another
language. ENAT makes its input look like the target. It has two ways. *Phrase table*: the source is
cut into phrases, from left to right and each as long as the table knows, and each phrase is
replaced by its most frequent translation. *Embedding mapping*: a matrix W moves the embeddings of
source words to where target words are. Two losses teach W beside the translation. The mean of the
moved source is drawn to the mean of the target. And a discriminator D learns to tell moved source
words from target words, while W learns to fool it. The input is stretched to the target's length,
as copies are. Everything else is as in `parallel`.

    z          = table(first phrase) .. table(last phrase)                       `look_up_phrases`
    input at t = e(z_j(t))   or   W e(x_j(t)),       j(t) as in `parallel`
    L_align    = || mean over j of W e(x_j)  -  mean over t of e(y_t) ||
    J          = - mean over t of log D(e(y_t)) - mean over j of log(1 - D(W e(x_j)))
    D: min J,   W: min  L_parallel + mu L_align - lambda J                mu = 0.1, lambda = 1

Training. `enat_loss`, from the weights of a model that reads copies, on sentences that a teacher
translates. W begins as the identity: then the input is the copies' own. One step trains both
players, because the gradient of J is reversed on its way to W. The table is counted in the training
pairs alone: IBM alignments in both directions, made symmetric; all phrases that agree with them;
for each source phrase the target phrase of the highest relative frequency.

Guarantee: APPROX: no number of lengths gives the teacher's distribution. With W = 1 and mu = lambda
= 0 the loss and the words are those of `parallel`, bit for bit. The code that runs is compared with
a second version in plain lists.
Pitfall: a dictionary of single words under the name of a phrase table; D and W that descend the
same J; a table that has seen the test sentences.
Ablation: the source in the place of the phrase table. In a test on a dialect of 40 words the table
is far ahead after as many steps. Mapped embeddings (`decoder_input = "mapping"`) show no gain
there.
Tests: tests/nonautoregressive/test_enat.py (`look_up_phrases` inside the code that runs; all
phrases of a pair against all spans; the game's gradients against differences; the ablation on
dialects).
Left out: nothing of the method. Where the paper has a fixed offset to the source's length, and
lengths around it as candidates, the LENGTH token's likeliest lengths are taken, or with `around`
those around its likeliest one. Here both languages share one embedding, so D has less to tell
apart; in the game the embeddings are constants, and W alone plays against D. In L_align they are
not, so mu moves the shared embeddings too. Phrases are of tokens,
which may be parts of words; the paper's table is that of Moses. Phrases of several tokens that were
seen fewer than three times are left out, which keeps the table small. A token without a phrase is
copied. mu, lambda, the layers of D, the offset and the numbers of the sections are from memory of
the paper, or ours.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas
from tinyspec.decoding.rng import RandomSource
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
from tinyspec.technique import (
    AlignWords,
    Guarantee,
    Ids,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

Phrase = tuple[int, ...]
Links = set[tuple[int, int]]  # (source position, target position)
INPUTS = ("table", "mapping")
LEAST_SEEN = 3  # how often a source phrase of several tokens must occur
MAP = "enat.map"  # W
UP, UP_BIAS, DOWN = "enat_judge_up", "enat_judge_up_bias", "enat_judge_down"  # D, of two layers
PHRASES = "phrases"  # the table in config.json
ENTRY = re.compile(r"\d{1,9}( \d{1,9})*=\d{1,9}( \d{1,9})*", re.ASCII)
REMEDY = "train a model from models/multi30k-enat/recipe.toml (tinyspec train mt)"


def look_up_phrases(
    source: Sequence[int], table: Mapping[Phrase, Phrase], longest: int
) -> list[int]:
    """Return a source, translated phrase by phrase: z (section 3.1).

    table    source phrase -> target phrase
    longest  tokens of a source phrase, at most

    From the left, the longest phrase that the table has is taken. A token without one is copied.

    >>> look_up_phrases([4, 5, 6], {(4, 5): (9,), (4,): (7,), (5,): (8,)}, 3)
    [9, 6]
    """
    z, at = list[int](), 0
    while at < len(source):
        most = min(longest, len(source) - at)
        phrases = [tuple(source[at : at + n]) for n in range(most, 0, -1)]
        phrase = next((one for one in phrases if one in table), phrases[-1])
        z += table.get(phrase, phrase)
        at += len(phrase)
    return z


# ------------------------------ the phrase table (section 3.1)


def symmetrize_links(forward: Sequence[int], backward: Sequence[int]) -> Links:
    """Return the links of a pair that two alignments agree on, and those that grow from them.

    forward   for each target word the position of its source word
    backward  for each source word the position of its target word

    A link of one alignment alone is added if it touches a link, also at a corner, and if one of its
    words has no link yet (Koehn, Och, Marcu 2003: grow-diag).
    """
    one = {(i, j) for j, i in enumerate(forward)}
    other = {(i, j) for i, j in enumerate(backward)}
    links, grown = one & other, True
    while grown:
        grown = False
        for i, j in sorted((one | other) - links):
            is_new = i not in {a for a, _ in links} or j not in {b for _, b in links}
            if is_new and any(abs(a - i) <= 1 and abs(b - j) <= 1 for a, b in links):
                links.add((i, j))
                grown = True
    return links


def find_phrases(
    links: Links, source: int, target: int, longest: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield all pairs of phrases that agree with the links: spans (begin, end, begin, end).

    source, target  words of the two sentences
    longest         words of a phrase, of either side

    Every word of a phrase that has links has them inside the pair, and there is one link at least.
    """
    linked = {j for _, j in links}
    for begin in range(source):
        for end in range(begin + 1, min(begin + longest, source) + 1):
            inside = [j for i, j in links if begin <= i < end]
            if not inside:
                continue
            low, high = min(inside), max(inside) + 1
            if any(low <= j < high and not begin <= i < end for i, j in links):
                continue
            first = low
            while first >= 0 and (first == low or first not in linked):
                last = high
                while last <= target and (last == high or last - 1 not in linked):
                    if last - first <= longest:
                        yield begin, end, first, last
                    last += 1
                first -= 1


def count_phrases(
    pairs: Iterable[tuple[Ids, Ids]], links: Iterable[Links], longest: int, least: int = LEAST_SEEN
) -> dict[Phrase, Phrase]:
    """Return the table: for each source phrase the target phrase of highest relative frequency.

    least  how often a source phrase of several tokens must have been seen

    Of equally frequent ones the first by its ids is taken.
    """
    counts: defaultdict[Phrase, Counter[Phrase]] = defaultdict(Counter)
    for (source, target), own in zip(pairs, links, strict=True):
        for a, b, c, d in find_phrases(own, len(source), len(target), longest):
            counts[tuple(source[a:b])][tuple(target[c:d])] += 1
    return {
        phrase: min(found, key=lambda other: (-found[other], other))
        for phrase, found in counts.items()
        if len(phrase) == 1 or found.total() >= least
    }


def format_phrases(table: Mapping[Phrase, Phrase]) -> str:
    """Return a table as one line of text.

    >>> format_phrases({(4, 5): (9,), (4,): (7, 8)})
    '4=7 8;4 5=9'
    """
    sides = (" ".join(map(str, side)) for pair in sorted(table.items()) for side in pair)
    return ";".join("=".join(pair) for pair in zip(sides, sides, strict=True))


@lru_cache(maxsize=4)
def read_table(text: str, vocab_size: int) -> dict[Phrase, Phrase]:
    """Return a table that `format_phrases` wrote. Raises ValueError for any other text."""
    table = dict[Phrase, Phrase]()
    for entry in text.split(";") if text else ():
        is_pair = ENTRY.fullmatch(entry)
        sides = [tuple(map(int, side.split())) for side in entry.split("=")] if is_pair else []
        if not is_pair or max(*sides[0], *sides[1]) >= vocab_size:
            raise ValueError(f"{entry[:40]!r} is no pair of phrases of ids below {vocab_size}")
        table[sides[0]] = sides[1]
    return table


def phrase_table(model: Seq2Seq) -> dict[Phrase, Phrase]:
    """Return the phrase table of a model. Raises TinyspecError if it has none."""
    text = model.config.extra.get(PHRASES)
    if not isinstance(text, str):
        raise TinyspecError(f"{model.name} has no phrase table: {REMEDY}")
    try:
        return read_table(text, model.config.vocab_size)
    except ValueError as error:
        raise TinyspecError(f"{model.name}: config.json: {PHRASES}: {error}: {REMEDY}") from None


# ------------------------------ training


@dataclass(frozen=True)
class EnatSettings:
    """Section [translator] of a recipe.

    decoder_input  table or mapping
    phrase         tokens of a phrase of the table, at most
    alignment      mu, weight of the alignment of sentences
    adversary      lambda, weight of the game against the discriminator; 0: there is none
    """

    decoder_input: str = "table"
    phrase: int = 3
    alignment: float = 0.1
    adversary: float = 1.0

    def __post_init__(self) -> None:
        if self.decoder_input not in INPUTS:
            known = " or ".join(INPUTS)
            raise TinyspecError(f"decoder_input is {self.decoder_input!r}: it must be {known}")
        if type(self.phrase) is not int or self.phrase < 1:
            raise TinyspecError(f"phrase is {self.phrase}: it must be a whole number of at least 1")
        for name in ("alignment", "adversary"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise TinyspecError(f"{name} is {value}: it must be a number of at least 0")


def add_enat_weights(config: Seq2SeqConfig, settings: EnatSettings) -> Seq2SeqConfig:
    """Return the config with W and D, if embeddings are mapped."""
    if settings.decoder_input == "table":
        return config
    d = config.d_model
    return replace(config, heads={MAP: (d, d), UP: (d, d), UP_BIAS: (d,), DOWN: (1, d)})


def initialize_as_copies(weights: Mapping[str, Tensor]) -> None:
    """Make W the identity."""
    if MAP in weights:
        weights[MAP].copy_(torch.eye(len(weights[MAP])))


def count_table(
    settings: EnatSettings, pairs: Sequence[tuple[Ids, Ids]], align: AlignWords
) -> dict[str, Any]:
    """Return the phrase table of the training pairs, for config.json."""
    if settings.decoder_input == "mapping":
        return {}
    sources, targets = [x for x, _ in pairs], [y for _, y in pairs]
    both = zip(align(sources, targets), align(targets, sources), strict=True)
    links = (symmetrize_links(*directions) for directions in both)
    return {PHRASES: format_phrases(count_phrases(pairs, links, settings.phrase))}


def map_words(model: Seq2Seq, words: Tensor) -> Tensor:
    """Return W e(x) of words [...], times sqrt(d): [..., d]."""
    return linear(model.embed_words(words), model.weights[MAP])


def sentence_alignment_loss(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
    """Return L_align, in the mean over a batch."""
    pad, e = model.config.pad, model.embedding
    moved, wanted = linear(e[source], model.weights[MAP]), e[target]  # [B, S, d], [B, T, d]
    means = [
        (vectors * (words != pad)[..., None]).sum(dim=1) / (words != pad).sum(dim=1, keepdim=True)
        for words, vectors in ((source, moved), (target, wanted))
    ]
    distances: Tensor = torch.linalg.vector_norm(means[0] - means[1], dim=-1)
    return distances.mean()


def discriminator_logits(model: Seq2Seq, vectors: Tensor) -> Tensor:
    """Return the logit of D for each of these vectors [N, d]: [N]."""
    inner = F.relu(linear(vectors, model.weights[UP], model.weights[UP_BIAS]))
    return linear(inner, model.weights[DOWN])[:, 0]


def adversarial_loss(model: Seq2Seq, source: Tensor, target: Tensor, adversary: float) -> Tensor:
    """Return J. Its gradient with respect to D is that of J; to W, - `adversary` times that."""
    pad, e = model.config.pad, model.embedding.detach()
    moved = linear(e[source[source != pad]], model.weights[MAP])
    opposed = moved.detach() + adversary * (moved.detach() - moved)
    real = discriminator_logits(model, e[target[target != pad]])
    return F.softplus(-real).mean() + F.softplus(discriminator_logits(model, opposed)).mean()


def read_rough_words(
    model: Seq2Seq, source: Tensor, lengths: Tensor, settings: EnatSettings
) -> tuple[Tensor, Tensor]:
    """Return what the decoder reads for targets of these lengths [B], and the slots [B, T]."""
    pad = model.config.pad
    if settings.decoder_input == "mapping":
        places, slots = copy_uniformly((source != pad).sum(dim=1), lengths)
        return map_words(model, source.gather(1, places)), slots
    table = phrase_table(model)
    rows = [
        torch.tensor(look_up_phrases([x for x in row if x != pad], table, settings.phrase))
        for row in source.tolist()
    ]
    z = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(source.device)
    counts = torch.tensor([len(row) for row in rows], device=source.device)
    places, slots = copy_uniformly(counts, lengths)
    return z.gather(1, places), slots


def enat_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    settings: EnatSettings,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of words and length per target token, and what teaches W.

    batch  sources [B, S] and targets [B, T], padded at the end
    """
    source, target = batch
    lengths = (target != model.config.pad).sum(dim=1)
    memory = model.encode(source, dropout)
    read, slots = read_rough_words(model, source, lengths, settings)
    states = decode_parallel(model, read, slots, memory, dropout)
    words = label_nll(model, states, target[:, : slots.shape[1]], smoothing)
    loss = (words + length_nll(model, target, memory)) / slots.sum()
    if settings.decoder_input == "mapping":
        if settings.alignment:
            loss = loss + settings.alignment * sentence_alignment_loss(model, source, target)
        if settings.adversary:
            loss = loss + adversarial_loss(model, source, target, settings.adversary)
    return loss


# ------------------------------ decoding


class EnatRefiner(ParallelRefiner):
    """Write all words of l lengths in one pass, from rough target words."""

    def __init__(
        self,
        model: Seq2Seq,
        settings: EnatSettings,
        teacher: Seq2Seq | None = None,
        lengths: int = 1,
        around: bool = False,
    ):
        super().__init__(model, teacher, lengths, around)
        self.settings = settings
        is_table = settings.decoder_input == "table"
        self.table = phrase_table(model) if is_table else dict[Phrase, Phrase]()

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return copies of z, or of the source, one candidate for each length."""
        if self.settings.decoder_input == "table":
            source = look_up_phrases(source, self.table, self.settings.phrase)
        return super().start(source, memory, rng)

    def read_canvas(self, canvas: Canvas, memory: EncoderOutput) -> Tensor:
        if self.settings.decoder_input == "table":
            return canvas.tokens
        return map_words(self.model, canvas.tokens)


# ------------------------------ the card


def enat_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `enat_loss` of a batch of the trainer; nothing is drawn from the generator."""
    options = training.settings, training.dropout, training.smoothing
    return enat_loss(training.model, batch, *options)


def translate_rough_words(
    model: Seq2Seq, settings: EnatSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    return translate_sources(model, sources, EnatRefiner(model, settings))


def enat_settings(model: Seq2Seq) -> EnatSettings:
    """Return what a model was trained for. Raises TinyspecError if it is no ENAT."""
    extra = model.config.extra
    kind, phrase = extra.get("decoder_input"), extra.get("phrase")
    if kind == "mapping" and MAP in model.weights:
        return EnatSettings("mapping")
    if kind == "table" and type(phrase) is int and phrase > 0:
        return EnatSettings("table", phrase)
    raise TinyspecError(
        f"{model.name} has neither a phrase table nor a mapping of its embeddings: {REMEDY}"
    )


@technique(
    title="ENAT: enhanced decoder input",
    summary="the decoder reads rough target words",
    paper="Guo et al. 2019, arXiv 1812.09664",
    reported="5.11 BLEU above NAT, WMT14 En-De (abstract)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        enat_batch_loss,
        translate_rough_words,
        "It writes all words at once, from rough target words in place of copies of the source "
        "(`enat`, by {settings.decoder_input}). Its figure is that of the likeliest length.",
        shape={"lengths": 9},
        settings=EnatSettings,
        fits=fits_length_token,
        equip=add_enat_weights,
        initialize=initialize_as_copies,
        counts=count_table,
    ),
    knobs=LENGTH_KNOBS,
)
def enat(request: RefineRequest, *, lengths: int, judge: str, around: bool) -> EnatRefiner:
    """Return a refiner that writes all words in one pass, for the likeliest lengths."""
    settings = enat_settings(request.model)
    teacher = find_judge(request, lengths, judge, REMEDY)
    return EnatRefiner(request.model, settings, teacher, lengths, around)
