"""Parallel: translate all words in one pass, from even copies of the source.

Paper: Gu, Bradbury, Xiong, Li, Socher, ICLR 2018, arXiv 1711.02281. It is the model that they
compare theirs with: copies that are spread evenly over the target, in place of fertilities. The
LENGTH token is that of Ghazvininejad et al. 2019, arXiv 1904.09324.

Idea. This is the plainest model that is not autoregressive, and the base of those that improve on
it. The target's length is predicted first. The decoder then reads a copy of the source, stretched
or shrunk to that length, and every position writes its likeliest word. A position attends to all
positions but its own. No position knows what the others write, so two of them may choose words of
two different translations. *Length parallel decoding* translates with several lengths in one batch,
and the autoregressive teacher keeps the translation that it finds likeliest. The lengths are the
likeliest ones, or with `around` those around the likeliest.

    j(t)        = round(t (S - 1) / (T - 1))         the word that position t copies, from 0 on
    p(y | x, T) = product over t of p(y_t | x_j(0) .. x_j(T-1), x)              one decoder pass
    L           = - sum over t of log p(y_t | x, T) - log p(T | x)           `parallel_loss`

Training. Everything, on the sentences as the teacher translates them (sequence-level distillation,
Kim and Rush 2016, arXiv 1606.07947); the layers begin as the teacher's.

Guarantee: APPROX: no number of lengths gives the teacher's distribution. The code that runs is
compared with a second version in plain lists (laws/plain_lists.py).
Pitfall: scores with the target's true length, which no translator knows; a position that sees its
own copy; candidates that the student judges itself.
Tests: tests/nonautoregressive/test_parallel.py (`translate_from_copies` against the code that runs;
the copies, the mask and the words of every length; who chooses; the loss).
Left out: the positional attention of the paper. It belongs to the checkpoint ([shape] positional),
and our recipe has none, so that every layer begins as the teacher's. Copies run from the first word
to the last; the paper's run by round(t S / T) [from memory]. Special tokens are never written.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best_candidate
from tinyspec.decoding.rng import RandomSource
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.nonautoregressive.mask_predict import (
    check_length_token,
    find_likeliest_lengths,
    find_nearest_lengths,
)
from tinyspec.nonautoregressive.nat import (
    copy_uniformly,
    decode_parallel,
    forbid_special_tokens,
    require_teacher,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorLoss,
    TranslatorTraining,
    technique,
)


def translate_from_copies(
    source: Sequence[int],
    lengths: Sequence[int],
    predict: Callable[[list[int]], list[int]],
    score: Callable[[list[int]], float],
) -> list[int]:
    """Return the best of the translations of these lengths (section 3.1 and 3.2).

    lengths  target lengths to try, the likeliest first
    predict  copies of source words -> as many target words, in one decoder pass
    score    translation -> what the candidates are compared by

    `ParallelRefiner` translates with all lengths in one batch. A test compares the two.

    >>> translate_from_copies([7, 8, 9], [5], lambda copies: copies, len)
    [7, 8, 8, 9, 9]
    """
    candidates = list[list[int]]()
    for n_words in lengths:
        last = max(n_words - 1, 1)  # of two nearest words the later one is copied
        places = [(2 * i * (len(source) - 1) + last) // (2 * last) for i in range(n_words)]
        candidates.append(predict([source[j] for j in places]))
    return max(candidates, key=score)


# ------------------------------ training


def parallel_nll(
    model: Seq2Seq,
    source: Tensor,
    target: Tensor,
    memory: EncoderOutput,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return - sum of log p(y_t | x, T) over a batch, where T is the target's length.

    memory  of the sources
    """
    pad = model.config.pad
    places, slots = copy_uniformly((source != pad).sum(dim=1), (target != pad).sum(dim=1))
    states = decode_parallel(model, source.gather(1, places), slots, memory, dropout)
    return label_nll(model, states, target[:, : slots.shape[1]], smoothing)


def label_nll(model: Seq2Seq, states: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return - sum of log p(label) over states [B, T, d] and labels [B, T], not at padding."""
    is_label = labels != model.config.pad
    logits = model.logits(states[is_label])
    return F.cross_entropy(logits, labels[is_label], reduction="sum", label_smoothing=smoothing)


def length_nll(model: Seq2Seq, target: Tensor, memory: EncoderOutput) -> Tensor:
    """Return - sum of log p(T | x) over a batch of targets [B, T]."""
    lengths = (target != model.config.pad).sum(dim=1)
    return F.cross_entropy(model.length_logits(memory), lengths, reduction="sum")


def parallel_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return - log p(T|x) - sum over t of log p(y_t|x, T), per target token."""
    source, target = batch
    memory = model.encode(source, dropout)
    words = parallel_nll(model, source, target, memory, dropout, smoothing)
    return (words + length_nll(model, target, memory)) / (target != model.config.pad).sum()


# ------------------------------ decoding


def copy_to_likeliest_lengths(
    model: Seq2Seq,
    source: Sequence[int],
    memory: EncoderOutput,
    count: int,
    longest: int,
    around: bool = False,
) -> Canvas:
    """Return even copies of a source, one candidate for each of its `count` likeliest lengths.

    around  take the likeliest length and those nearest to it
    """
    find = find_nearest_lengths if around else find_likeliest_lengths
    found = find(model, memory, count, longest)
    lengths, row = (torch.tensor(ids, device=model.device) for ids in (found, list(source)))
    places, slots = copy_uniformly(torch.full_like(lengths, len(row)), lengths)
    return Canvas(row[places], slots, memory.states.new_zeros(slots.shape))


class ParallelRefiner:
    """Write all words of l lengths in one pass; the best translation is chosen.

    teacher  chooses; None: the candidate with the best mean log-probability is chosen
    around   the lengths are those around the likeliest; else the likeliest ones
    """

    def __init__(
        self,
        model: Seq2Seq,
        teacher: Seq2Seq | None = None,
        lengths: int = 1,
        around: bool = False,
    ):
        self.model, self.teacher, self.width = model, teacher, lengths
        self.around = around

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return copies of the source, one candidate for each length."""
        longest = self.model.config.max_positions - (self.teacher is not None)  # it reads bos too
        return copy_to_likeliest_lengths(
            self.model, source, memory, self.width, longest, self.around
        )

    def read_canvas(self, canvas: Canvas, memory: EncoderOutput) -> Tensor:
        """Return what the decoder reads: words [C, T], or vectors [C, T, d] in their place."""
        return canvas.tokens

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the likeliest word of every position."""
        read = self.read_canvas(canvas, memory)
        logits = self.model.logits(decode_parallel(self.model, read, canvas.mask, memory))
        scores, tokens = forbid_special_tokens(self.model, logits).log_softmax(dim=-1).max(dim=-1)
        return Canvas(tokens.masked_fill(~canvas.mask, self.model.config.pad), canvas.mask, scores)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        if self.teacher is None:
            return int(canvas.means().argmax())
        return best_candidate(self.teacher, source, canvas)


# ------------------------------ the card


def ignore_generator(loss: Callable[..., Tensor]) -> TranslatorLoss:
    """Return a loss (model, batch, dropout, smoothing), which draws nothing, for the trainer."""

    def train(
        training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
    ) -> Tensor:
        return loss(training.model, batch, training.dropout, training.smoothing)

    return train


def translate_likeliest_length(
    model: Seq2Seq, settings: object, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    return translate_sources(model, sources, ParallelRefiner(model))


def fits_length_token(config: Seq2SeqConfig, settings: object, source: int, target: int) -> bool:
    """Return whether the LENGTH token can tell the length of a target."""
    return 0 < target < config.lengths


AROUND = Knob(
    "around",
    False,
    "whether the lengths are those around the likeliest; else they are the likeliest ones",
    choices=(True, False),
)
LENGTH_KNOBS = (
    Knob("lengths", 1, "target lengths tried at once", low=1, high=1024, small=(3, 1)),
    Knob(
        "judge",
        "teacher",
        "who chooses a length: the teacher; self: the model's own mean log-probability",
        choices=("teacher", "self"),
    ),
    AROUND,
)
"""The knobs of length parallel decoding, which every technique that reads copies has."""


def find_judge(request: RefineRequest, lengths: int, judge: str, remedy: str) -> Seq2Seq | None:
    """Return who chooses among several lengths: the teacher; None: the model itself.

    Raises TinyspecError, which ends with a remedy, if the model has no LENGTH token, and if there
    is no teacher that can choose.
    """
    check_length_token(request.model, remedy)
    if lengths == 1 or judge == "self":
        return None
    return require_teacher(
        request.model, request.teacher, f"{lengths} lengths", "set judge to self"
    )


@technique(
    title="Parallel: one pass over even copies",
    summary="one pass over copies of the source",
    paper="Gu et al. 2018, arXiv 1711.02281",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        ignore_generator(parallel_loss),
        translate_likeliest_length,
        "It writes all words at once, from copies of the source that are spread evenly over a "
        "predicted length (`parallel`). Its figure is that of the likeliest length.",
        shape={"lengths": 9},
        fits=fits_length_token,
    ),
    knobs=LENGTH_KNOBS,
)
def parallel(request: RefineRequest, *, lengths: int, judge: str, around: bool) -> ParallelRefiner:
    """Return a refiner that writes all words in one pass, for the likeliest lengths."""
    remedy = "train a model from models/multi30k-parallel/recipe.toml (tinyspec train mt)"
    judged_by = find_judge(request, lengths, judge, remedy)
    return ParallelRefiner(request.model, judged_by, lengths, around)
