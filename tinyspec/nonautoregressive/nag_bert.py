"""NAG-BERT: read the translation off the encoder itself, a masked language model, through a CRF.

Paper: Su, Cai, Wang, Vandyke, Baker, Li, Collier, EACL 2021, arXiv 2102.08220.

Idea. A masked language model already writes all positions at once. NAG-BERT has no decoder: it
feeds the source to the pre-trained encoder and reads one label off every position. The labels are
the target's words and then eos, twice, so that a linear-chain CRF learns that eos follows eos. The
first eos ends the translation, so no length is predicted. The *context-aware* loss also lowers the
probability of each neighbour's word, because words that stand twice in a row are the typical
mistake. *Ratio-first* decoding runs the CRF on the first positions alone, where the target is known
to be shorter than the source.

    labels = y + eos + eos
    L      = L_CRF + 0.5 L_CA                                            per label
    L_CA   = - sum over i of log p(y_i | h_i)
             - sum over i, j with 0 < |i - j| <= c, y_j != y_i of log(1 - p(y_j | h_i))
    places = min(N, int(alpha N) + 2)                                    of the N input positions

Training. A masked language model of our own, which is *not* BERT: in the first part of the training
the encoder fills in hidden words of both languages' sentences (`masked_word_loss`, with BERT's
shares, Devlin et al. 2019, arXiv 1810.04805). Then `nag_bert_loss`, on sentences that a teacher
translates.

Guarantee: APPROX: no ratio gives the teacher's distribution. The code that runs is compared with an
enumeration of all label sequences (laws/traps/nag_bert.py). At ratio 1 all positions are labelled.
Pitfall: one eos, so that the CRF never sees what follows it; the context-aware term left out, as in
the released training code, which has a plain cross-entropy in its place.
Ablation: no pre-training, no context-aware term, no CRF. A test has all of them: pre-training adds
right translations, and the two others lower repeats.
Tests: tests/nonautoregressive/test_nag_bert.py (`decode_ratio_first` against the code that runs;
the loss, number by number; the signs of its gradient; pre-training, and the context-aware term,
against training without them).
Left out: BERT, whose tokens and weights are others; two optimizers with warm-ups of their own.
Masks after the source make room for longer translations, up to 1.5 |x| + 13 positions: that is
ours. The window c = 3 is from memory of the paper, and so is the weight of L_CA; the released code
gives 0.5 to its cross-entropy. A translation has at least one word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.crf import (
    E1,
    build_lattice,
    find_best_path,
    log_likelihood,
    static_transition_shapes,
    word_logprobs,
)
from tinyspec.nonautoregressive.nar_crf import check_rank, decode_structured, score_words
from tinyspec.nonautoregressive.nat import forbid_marks
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)

BEAM = 256  # candidates of a position, in training and decoding
CONTEXT_WEIGHT = 0.5  # of the context-aware loss, beside the CRF's
MOST_CERTAIN = 1 - 1e-6  # a neighbour's word is taken to be no likelier: log(1 - p) stays finite
HIDDEN_SHARE = 0.15  # of the words that the masked language model fills in (BERT)
MASKED_SHARE = 0.8  # of these: replaced by the mask (BERT)
REPLACED_SHARE = 0.1  # of these: replaced by any word (BERT); the others are shown


def decode_ratio_first(
    emissions: Sequence[Sequence[float]],
    transition: Callable[[int, int, int], float],
    ratio: float,
    beam: int,
    eos: int,
) -> list[int]:
    """Return the words before the first eos among the labels of the first places (section 3.3).

    emissions   [N][V] scores of the labels of every input position; -inf: impossible
    transition  (i, a, b) -> score of label b at place i, after label a
    ratio       alpha; 1: all positions

    `NagBertRefiner` does this for a batch. A test compares the two.
    """
    n = len(emissions)
    labels = decode_structured(emissions[: min(n, int(ratio * n) + 2)], transition, beam)
    return labels[: labels.index(eos)] if eos in labels else labels


# ------------------------------ the model (section 3.1)


def count_inputs(sources: Tensor, positions: int) -> Tensor:
    """Return how many positions the encoder reads for sources of these lengths, masks included.

    positions  that the model has

    There is room for the longest text that a teacher may write, and for two ends.

    >>> count_inputs(torch.tensor([10, 4]), 20).tolist()
    [20, 19]
    """
    return (sources + sources // 2 + 13).clamp(max=positions)


def add_masks(model: Seq2Seq, sources: Tensor) -> Tensor:
    """Return sources [B, S] with masks after them, padded at the end."""
    config = model.config
    lengths = (sources != config.pad).sum(dim=1, keepdim=True)
    ends = count_inputs(lengths, config.max_positions)
    width = max(sources.shape[1], int(ends.max()))
    longer = F.pad(sources, (0, width - sources.shape[1]), value=config.pad)
    places = torch.arange(width, device=sources.device)
    return longer.masked_fill((places >= lengths) & (places < ends), config.mask)


def label_states(
    model: Seq2Seq, memory: EncoderOutput, places: int, dropout: float = 0.0
) -> Tensor:
    """Return the states [B, places, d] that labels are read off: the encoder's, normed.

    It is the pass of a decoder without layers.
    """
    return model.decode(memory.states[:, :places], memory, dropout=dropout)


# ------------------------------ training (section 3.2)


@dataclass(frozen=True)
class NagBertSettings:
    """Section [translator] of a recipe.

    rank         of the matrix of transitions
    window       neighbours on either side in the context-aware loss (c); 0: plain cross-entropy
    pretraining  share of the training in which the encoder fills in hidden words
    """

    rank: int = 64
    window: int = 3
    pretraining: float = 0.4

    def __post_init__(self) -> None:
        check_rank(self.rank)
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 0:
            raise TinyspecError(f"window is {self.window}: it must be a whole number from 0 on")
        if not (isinstance(self.pretraining, (int, float)) and 0 <= self.pretraining < 1):
            raise TinyspecError(f"pretraining is {self.pretraining}: it must be from 0 to below 1")


def masked_word_loss(
    model: Seq2Seq, texts: Tensor, generator: torch.Generator, dropout: float = 0.0
) -> Tensor:
    """Return the cross-entropy of hidden words of texts [B, S], per hidden word.

    Of every text at least one word is hidden.
    """
    config, slots = model.config, texts != model.config.pad
    draws = torch.rand(2, *texts.shape, generator=generator, device=texts.device)
    lowest = draws[0].masked_fill(~slots, torch.inf).argmin(dim=1, keepdim=True)
    hidden = ((draws[0] < HIDDEN_SHARE) & slots).scatter(1, lowest, True)
    first = max(config.pad, config.bos, config.eos, config.mask) + 1
    other = torch.randint(
        first, config.vocab_size, texts.shape, generator=generator, device=texts.device
    )
    read = texts.masked_fill(hidden & (draws[1] < MASKED_SHARE), config.mask)
    replaced = (draws[1] >= MASKED_SHARE) & (draws[1] < MASKED_SHARE + REPLACED_SHARE)
    read = torch.where(hidden & replaced, other, read)
    memory = model.encode(read, dropout)
    states = label_states(model, memory, texts.shape[1], dropout)
    return F.cross_entropy(score_words(model, states[hidden]), texts[hidden])


def append_ends(target: Tensor, pad: int, eos: int) -> Tensor:
    """Return the labels [B, T + 2] of targets [B, T]: each with eos and eos after it."""
    lengths = (target != pad).sum(dim=1, keepdim=True)
    longer = F.pad(target, (0, 2), value=pad)
    return longer.scatter(1, torch.cat((lengths, lengths + 1), dim=1), eos)


def context_aware_loss(logits: Tensor, labels: Tensor, slots: Tensor, window: int) -> Tensor:
    """Return L_CA, summed over all places.

    logits  [B, T, V]
    labels  [B, T]
    slots   [B, T] False at padding
    window  c; 0: the cross-entropy alone
    """
    logprobs = logits.log_softmax(dim=-1)
    loss = -logprobs.gather(-1, labels[..., None])[..., 0].masked_fill(~slots, 0).sum()
    for distance in range(1, min(window, labels.shape[1] - 1) + 1):
        early, late = slice(None, -distance), slice(distance, None)
        differ = (labels[:, early] != labels[:, late]) & slots[:, late]  # padding is at the end
        for here, there in ((early, late), (late, early)):
            word = labels[:, there, None]
            probs = logprobs[:, here].gather(-1, word)[..., 0].exp()
            unlikely = torch.log1p(-probs.clamp(max=MOST_CERTAIN))
            loss = loss - unlikely.masked_fill(~differ, 0).sum()
    return loss


def nag_bert_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    dropout: float = 0.0,
    window: int = 3,
    beam: int = BEAM,
) -> Tensor:
    """Return the loss L of a batch: sources [B, S] and targets [B, T], padded at the end."""
    source, target = batch
    config = model.config
    longest = int((target != config.pad).sum(dim=1).max())  # a piece of a batch may be wider
    labels = append_ends(target[:, :longest], config.pad, config.eos)
    slots = labels != config.pad
    memory = model.encode(add_masks(model, source), dropout)
    if bool((slots.sum(dim=1) > memory.mask.sum(dim=1)).any()):
        raise TinyspecError(
            f"a target with its ends is longer than the input of {model.name}: leave the pair out"
        )
    logits = score_words(model, label_states(model, memory, labels.shape[1], dropout))
    allowed = forbid_marks(model, logits)
    lattice = build_lattice(model.weights, allowed, slots, beam, forced=labels)
    structure = -log_likelihood(lattice).sum()
    context = context_aware_loss(logits, labels, slots, window)
    return (structure + CONTEXT_WEIGHT * context) / slots.sum()


def nag_bert_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return the loss of a batch of the trainer: first hidden words, then translations.

    Labels are not smoothed.
    """
    model, settings, dropout = training.model, training.settings, training.dropout
    if training.progress < settings.pretraining:
        both = [masked_word_loss(model, texts, generator, dropout) for texts in batch[:2]]
        return (both[0] + both[1]) / 2
    return nag_bert_loss(model, batch, dropout, settings.window)


def write_all_labels(model: Seq2Seq, settings: NagBertSettings, sources: Tensor) -> list[list[int]]:
    """Return translations of padded sources [B, S], from all positions."""
    refiner = NagBertRefiner(model, 1.0, BEAM)
    return translate_sources(model, sources, refiner)


def can_label(config: Seq2SeqConfig, settings: NagBertSettings, source: int, target: int) -> bool:
    """Return whether a target and its two ends fit into the input of its source."""
    return 0 < target <= int(count_inputs(torch.tensor(source), config.max_positions)) - 2


# ------------------------------ decoding (section 3.3)


class NagBertRefiner:
    """Label the first positions of a source and its masks; the first eos ends the translation.

    The canvas's scores are log p(y_i | all later labels, x).
    """

    def __init__(self, model: Seq2Seq, ratio: float, beam: int):
        self.model, self.ratio, self.beam = model, ratio, beam

    def extend_sources(self, sources: Tensor) -> Tensor:
        """Return what the encoder reads of sources [B, S]."""
        return add_masks(self.model, sources)

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas of masks, one for each position that gets a label."""
        n = memory.states.shape[1]
        places = min(n, int(self.ratio * n) + 2)
        return blank_canvas([places], self.model.config.mask, self.model.device)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the likeliest labels, up to the first eos."""
        config = self.model.config
        states = label_states(self.model, memory, canvas.mask.shape[1])
        allowed = forbid_marks(self.model, score_words(self.model, states))
        allowed[:, 0, config.eos] = -torch.inf  # a translation has at least one word
        lattice = build_lattice(self.model.weights, allowed, canvas.mask, self.beam)
        chosen = find_best_path(lattice)
        labels = lattice.tokens(chosen)
        mask = canvas.mask & ((labels == config.eos).cumsum(dim=1) == 0)
        return Canvas(
            labels.masked_fill(~mask, config.pad),
            mask,
            word_logprobs(lattice, chosen).masked_fill(~mask, 0),
        )

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0

    def finish_reason(self, canvas: Canvas) -> str:
        """Return why a translation ended: by its own eos, or because every place has a word."""
        return "length" if bool(canvas.mask[0].all()) else "eos"


# ------------------------------ the card


@technique(
    title="NAG-BERT: a masked language model as generator",
    summary="labels the source's positions with words",
    paper="Su et al. 2021, arXiv 2102.08220",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    translator=TrainedTranslator(
        nag_bert_batch_loss,
        write_all_labels,
        "It has no decoder: every position of its encoder gets a word, and a CRF of rank "
        "{settings.rank} joins them (`nag_bert`). For {settings.pretraining:.0%} of the training "
        "it was a masked language model. Its figure is that of all positions (ratio 1).",
        shape={"decoder_layers": 0},
        settings=NagBertSettings,
        fits=can_label,
        equip=lambda config, settings: replace(
            config, heads=static_transition_shapes(config.vocab_size, settings.rank)
        ),
        float32=True,
    ),
    knobs=(
        Knob(
            "ratio",
            1.0,
            "share of the input's positions that get a label (alpha)",
            low=0.0,
            high=1.0,
            small=(1.0, 0.3),
        ),
        Knob("beam", BEAM, "candidate words of each position (k)", low=1, high=512, small=(3, 1)),
    ),
)
def nag_bert(request: RefineRequest, *, ratio: float, beam: int) -> NagBertRefiner:
    """Return a refiner that labels the positions of the source."""
    model = request.model
    if model.config.decoder_layers or E1 not in model.weights:
        lacks = "a decoder" if model.config.decoder_layers else "no transitions between words"
        raise TinyspecError(
            f"{model.name} has {lacks}, so nothing is read off its encoder: train a model from "
            "models/multi30k-nagbert/recipe.toml (tinyspec train mt)"
        )
    return NagBertRefiner(model, ratio, beam)
