"""NAR-CRF: write all words in one pass, then find the sentence whose neighbours fit together.

Paper: Sun, Li, Wang, He, Lin, Deng, NeurIPS 2019, arXiv 1910.11555.

Idea. A decoder that writes all positions at once mixes several translations: each position takes
its likeliest word, whatever its neighbours take. NAR-CRF keeps the one pass, but reads its logits
as the emissions of a linear-chain CRF. Transitions say which word follows which, so the likeliest
*sentence* is found by Viterbi. Two approximations make it cheap: the matrix of transitions has low
rank, and each position keeps its k likeliest words alone. Transitions may be dynamic: then they
also depend on the decoder's states at the two positions.

    p(y | x) = exp(sum over i of s(y_i, x, i) + sum over i of t(y_i-1, y_i, x, i)) / Z(x)
    t(a, b, x, i) = E1[a] (I + f([h_i-1; h_i])) E2[b]            static: without f
    L = - log p(y | x) / T - 0.5 mean over i of log p_softmax(y_i | x) - log p(T | x) / words

Training. `nar_crf_loss`, on sentences that a teacher translates, from the weights of a model that
writes in parallel. The right words are forced among the candidates (crf.py).

Guarantee: APPROX: no number of candidates gives the teacher's distribution. The code that runs is
compared with an enumeration of all sentences (laws/traps/nar_crf.py). With transitions `none` each
position takes its likeliest word.
Pitfall: transitions that do not depend on the position, under the name of dynamic ones (public
implementations have only static ones); special tokens that take places in the beam; right words
that are no candidates: then p(y | x) may exceed 1.
Ablation: the words alone, with `transitions = "none"`. Then two dialects are mixed (a test), and
translations of Multi30k are worse (tutorials/results/translation.md).
Tests: tests/nonautoregressive/test_nar_crf.py (`decode_structured` against the code that runs; the
loss, number by number; the ablation on two dialects); tests/nonautoregressive/test_crf.py (Z,
marginals and Viterbi against all sentences).
Left out: nothing of the method. f's last layer has a bias, so the identity beside f changes
nothing of what can be learnt; without f the transitions are static. Where the paper has a fixed
offset to the source's length, and lengths around it as candidates, the LENGTH token's likeliest
lengths are taken, or with `around` those around its likeliest one. The width of f, and the weight
of the length in the loss, are ours. The masks that the decoder reads stand for the paper's padding
symbols. That f has two layers, the offset and the padding symbols are from memory of the paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best_candidate, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.crf import (
    E1,
    UP,
    Lattice,
    build_lattice,
    dynamic_transition_shapes,
    find_best_path,
    log_likelihood,
    static_transition_shapes,
    word_logprobs,
)
from tinyspec.nonautoregressive.mask_predict import (
    check_length_token,
    find_likeliest_lengths,
    find_nearest_lengths,
)
from tinyspec.nonautoregressive.nat import forbid_special_tokens, require_teacher
from tinyspec.nonautoregressive.parallel import (
    AROUND,
    fits_length_token,
    ignore_generator,
    length_nll,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    technique,
)

BEAM = 64  # candidates of a position, in training and decoding
WORD_WEIGHT = 0.5  # of the words' own cross-entropy, beside the CRF's
TRANSITIONS = ("dynamic", "static", "none")
REMEDY = "train a model from models/multi30k-crf/recipe.toml (tinyspec train mt)"


def decode_structured(
    emissions: Sequence[Sequence[float]], transition: Callable[[int, int, int], float], beam: int
) -> list[int]:
    """Return the likeliest sentence of T words (section 3.2).

    emissions   [T][V] s(y, x, i); -inf: never written
    transition  (i, a, b) -> t(a, b, x, i) of word b at position i, after word a
    beam        candidates of each position (k)

    `NarCrfRefiner` does this for several lengths in one batch. A test compares the two.
    """
    candidates = [sorted(range(len(row)), key=lambda word: -row[word])[:beam] for row in emissions]
    best = {word: (emissions[0][word], [word]) for word in candidates[0]}
    for i in range(1, len(emissions)):
        longer = {}
        for word in candidates[i]:
            score, path = max(
                ((score + transition(i, path[-1], word), path) for score, path in best.values()),
                key=itemgetter(0),
            )
            longer[word] = score + emissions[i][word], [*path, word]
        best = longer
    return max(best.values(), key=itemgetter(0))[1]


# ------------------------------ the model


def decode_blank(
    model: Seq2Seq, slots: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the decoder's states [B, T, d] of one pass over nothing but masks and positions.

    slots  [B, T]

    Every position attends to all.
    """
    blank = torch.full(slots.shape, model.config.mask, device=slots.device)
    return model.decode(model.embed(blank), memory, None, dropout, slots)


def read_lattice(
    model: Seq2Seq,
    states: Tensor,
    logits: Tensor,
    slots: Tensor,
    beam: int,
    transitions: str,
    forced: Tensor | None = None,
) -> Lattice:
    """Return the lattice of the likeliest words, none of which is a special token.

    states, logits  [B, T, d], [B, T, V] of the decoder
    forced          [B, T] words that are candidate 0; None: there are none
    """
    allowed = forbid_special_tokens(model, logits)
    return build_lattice(model.weights, allowed, slots, beam, transitions, states, forced)


def score_words(model: Seq2Seq, states: Tensor) -> Tensor:
    """Return the logits [..., V] of states, in float32 at least."""
    logits = model.logits(states)
    return logits if logits.dtype == torch.float64 else logits.float()


def trained_transitions(model: Seq2Seq) -> str:
    """Return the transitions that a model was made for. Raises TinyspecError if it has none."""
    if E1 not in model.weights:
        raise TinyspecError(f"{model.name} has no transitions between words: {REMEDY}")
    return "dynamic" if f"{UP}.weight" in model.weights else "static"


# ------------------------------ training


@dataclass(frozen=True)
class NarCrfSettings:
    """Section [translator] of a recipe.

    rank         of the matrix of transitions
    transitions  dynamic or static
    """

    rank: int = 32
    transitions: str = "dynamic"

    def __post_init__(self) -> None:
        check_rank(self.rank)
        if self.transitions not in TRANSITIONS[:2]:
            raise TinyspecError(
                f"transitions is {self.transitions!r}: it must be dynamic or static"
            )


def check_rank(rank: object) -> None:
    """Raise TinyspecError unless a rank is a whole number of at least 1."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TinyspecError(f"rank is {rank}: it must be a whole number of at least 1")


def crf_heads(config: Seq2SeqConfig, settings: NarCrfSettings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that the transitions need."""
    heads = static_transition_shapes(config.vocab_size, settings.rank)
    if settings.transitions == "static":
        return heads
    return heads | dynamic_transition_shapes(config.d_model, settings.rank)


def nar_crf_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    dropout: float = 0.0,
    smoothing: float = 0.0,
    beam: int = BEAM,
) -> Tensor:
    """Return the loss L of a batch: sources [B, S] and targets [B, T], padded at the end.

    smoothing  of the labels in the words' own cross-entropy
    """
    source, target = batch
    slots = target != model.config.pad
    lengths = slots.sum(dim=1)
    memory = model.encode(source, dropout)
    states = decode_blank(model, slots, memory, dropout)
    logits = score_words(model, states)
    kind = trained_transitions(model)
    lattice = read_lattice(model, states, logits, slots, beam, kind, forced=target)
    structure = -(log_likelihood(lattice) / lengths).mean()
    words = F.cross_entropy(logits[slots], target[slots], label_smoothing=smoothing)
    length = length_nll(model, target, memory) / slots.sum()
    return structure + WORD_WEIGHT * words + length


def write_likeliest_length(
    model: Seq2Seq, settings: NarCrfSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S], each of its likeliest length."""
    refiner = NarCrfRefiner(model, None, settings.transitions, BEAM, 1)
    return translate_sources(model, sources, refiner)


# ------------------------------ decoding


class NarCrfRefiner:
    """Decode several lengths in one pass, each by Viterbi; the teacher chooses.

    The canvas's scores are log p(y_i | all later words, x). Their sum is log p(y | x).
    """

    def __init__(
        self,
        model: Seq2Seq,
        teacher: Seq2Seq | None,
        transitions: str,
        beam: int,
        lengths: int,
        around: bool = False,
    ):
        self.model, self.teacher = model, teacher
        self.transitions, self.beam, self.width = transitions, beam, lengths
        self.find_lengths = find_nearest_lengths if around else find_likeliest_lengths

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas of masks, one candidate for each length."""
        config = self.model.config
        longest = config.max_positions - 1  # a teacher also reads the beginning
        lengths = self.find_lengths(self.model, memory, self.width, longest)
        return blank_canvas(lengths, config.mask, self.model.device)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the likeliest sentence of every candidate."""
        states = decode_blank(self.model, canvas.mask, memory)
        lattice = read_lattice(
            self.model,
            states,
            score_words(self.model, states),
            canvas.mask,
            self.beam,
            self.transitions,
        )
        chosen = find_best_path(lattice)
        tokens = lattice.tokens(chosen).masked_fill(~canvas.mask, self.model.config.pad)
        return Canvas(tokens, canvas.mask, word_logprobs(lattice, chosen))

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0 if self.teacher is None else best_candidate(self.teacher, source, canvas)


# ------------------------------ the card


@technique(
    title="NAR-CRF: structured decoding with a linear-chain CRF",
    summary="finds the likeliest sentence by Viterbi",
    paper="Sun et al. 2019, arXiv 1910.11555",
    reported="26.80 BLEU, 0.61 below autoregressive, WMT14 En-De (abstract)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        ignore_generator(nar_crf_loss),
        write_likeliest_length,
        "It writes all words at once, with {settings.transitions} transitions of rank "
        "{settings.rank} between neighbours (`nar_crf`). Its figure is that of one pass over the "
        "likeliest length.",
        shape={"lengths": 9},
        settings=NarCrfSettings,
        fits=fits_length_token,
        equip=lambda config, settings: replace(config, heads=crf_heads(config, settings)),
        float32=True,
    ),
    knobs=(
        Knob(
            "transitions",
            "dynamic",
            "between neighbours: by their words and states, by their words alone, or none",
            choices=TRANSITIONS,
        ),
        Knob("beam", BEAM, "candidate words of each position (k)", low=1, high=256, small=(3, 1)),
        Knob(
            "lengths",
            1,
            "target lengths tried at once, of which the teacher chooses; 1: no teacher",
            low=1,
            high=128,
            small=(1, 3),
        ),
        AROUND,
    ),
)
def nar_crf(
    request: RefineRequest, *, transitions: str, beam: int, lengths: int, around: bool
) -> NarCrfRefiner:
    """Return a refiner that finds the likeliest sentence; a teacher chooses among lengths."""
    model, teacher = request.model, request.teacher
    trained = trained_transitions(model)
    check_length_token(model, REMEDY)
    if transitions == "dynamic" and trained == "static":
        raise TinyspecError(
            f"{model.name} was trained with static transitions: set transitions to static, or "
            f"{REMEDY}"
        )
    if lengths == 1:
        return NarCrfRefiner(model, None, transitions, beam, 1)
    teacher = require_teacher(model, teacher, f"{lengths} lengths", "set lengths to 1")
    return NarCrfRefiner(model, teacher, transitions, beam, lengths, around)
