"""SAT: write K words per pass, from left to right between groups and at once within a group.

Paper: Wang, Zhang, Chen, EMNLP 2018, arXiv 1808.08583 (semi-autoregressive translation).

Idea. A translation is cut into groups of K words. The groups are written from left to right, as an
autoregressive model writes words; the K words of a group are written in one pass and do not know
of each other. Two changes of the transformer make this possible. Its input is shifted by K
positions instead of one: position t reads the word y_(t-K), after K start symbols. And its mask is
relaxed: a position sees all words of earlier groups, as before, and all inputs of its own group.
With K = 1 it is the autoregressive transformer; with K beyond the target's length it writes all
words at once.

    p(y | x)  = product over groups g of  product over t in g of p(y_t | y_before g, x)
    M[t, s]   = 1  if  s < (floor(t / K) + 1) K,  else 0        who sees whom, counted from 0
    passes    = ceil((T + 1) / K)                               the end is a word too

*Beam search* keeps the likeliest texts. The K words of a group come from one pass, but they are
added one after another, and after each the likeliest texts are selected. So two words that do not
know of each other in the pass are still compared as a pair.

Training. Cross-entropy, from the teacher's weights, on the sentences as the teacher translates
them (sequence-level distillation). The target with its end is padded to a multiple of K; padding
has no label.

Guarantee: APPROX, but for K = 1: there its text is greedy decoding's and its loss the teacher's,
bit for bit. The code that runs is compared with a second version in plain lists, and beam search
with an enumeration of all texts.
Pitfall: a causal mask inside a group, which hides words that are known; K heads on one state,
which is blockwise decoding; looking for the end only in the last word of a group.
Ablation: a causal mask inside groups too. Then a word that repeats the last input of its group is
not learnt (a test).
Tests: tests/nonautoregressive/test_sat.py (`translate_in_groups` against the code that runs; K = 1
against the teacher; the mask; the cache against dense passes for every K; ends and limits inside a
group; beam search against all texts).
Ours: beam search chooses the text with the best mean log-probability, as it does for the teacher
(decoding/beam.py). It keeps a position for the end. So at the limit of positions, if K does not
divide it, its text has one word less than in greedy search.
Left out: the authors' length penalty. No model is trained without the teacher's weights, or on
people's translations alone.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.beam import BeamSearch
from tinyspec.decoding.refine import Canvas, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import EncoderOutput, Lockstep, Seq2Seq
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    check_ranges,
    technique,
)
from tinyspec.translation import limit_lengths


def translate_in_groups(
    predict: Callable[[list[int]], list[int]], k: int, bos: int, eos: int, limit: int
) -> list[int]:
    """Return a translation, written k words at a time (section 3).

    predict  the decoder's inputs, a multiple of k -> the likeliest word of each position
    limit    most words

    `SatRefiner` keeps the keys and values of earlier groups. A test compares the two.
    """
    text = list[int]()
    while True:
        group = predict([bos] * k + text)[-k:]
        for word in group:
            if word == eos:
                return text
            text.append(word)
            if len(text) == limit:
                return text


# ------------------------------ training (section 3.2, 3.3)


def group_mask(length: int, k: int, device: torch.device | None = None) -> Tensor:
    """Return M [T, T]: a position sees all before the end of its own group.

    >>> group_mask(4, 2).int().tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    group = torch.arange(length, device=device) // k
    return group[:, None] >= group


def shift_by_group(config: Seq2SeqConfig, target: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return what the decoder reads and its labels, each [B, T'], for targets [B, T].

    T' is the first multiple of k that the target and its end fit into. Padding has no label.
    """
    lengths = (target != config.pad).sum(dim=1, keepdim=True)
    room = -(-(target.shape[1] + 1) // k) * k  # rounded up
    filled = F.pad(target, (0, room - target.shape[1]), value=config.pad)
    inputs = F.pad(filled[:, : room - k], (k, 0), value=config.bos)
    return inputs, filled.scatter(1, lengths, config.eos)


def sat_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    k: int,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy of the targets and their ends, each group given those before.

    batch  sources [B, S] and targets [B, T], padded at the end

    No position with a label sees padding: the last group reads the words of the group before it.
    """
    source, target = batch
    inputs, labels = shift_by_group(model.config, target, k)
    mask = group_mask(inputs.shape[1], k, target.device)
    states = model.decode(model.embed(inputs), model.encode(source, dropout), mask, dropout)
    is_token = labels != model.config.pad
    return F.cross_entropy(
        model.logits(states[is_token]), labels[is_token], label_smoothing=smoothing
    )


# ------------------------------ decoding


class GroupState(NamedTuple):
    """What is known of C texts beside their words.

    rows    their keys and values
    newest  [C, K] the words of the newest group, which the next one reads
    limits  [C] most words
    ended   [C] whether a text has its end
    """

    rows: Lockstep
    newest: Tensor
    limits: Tensor
    ended: Tensor


class SatRefiner:
    """Add a group of k words to the canvas in each pass. `extra` of its canvas is a GroupState."""

    beam = 1  # candidates of a source

    def __init__(self, model: Seq2Seq, k: int):
        self.model, self.k = model, k

    def start(self, source: object, memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas without slots."""
        empty = torch.zeros(self.beam, 0, dtype=torch.long, device=self.model.device)
        return Canvas(empty, empty.bool(), empty.to(self.model.dtype))

    def begin(self, memory: EncoderOutput) -> GroupState:
        """Return the state before the first group, whose input is k start symbols."""
        c, k = self.model.config, self.k
        limits = limit_lengths(memory, min(c.max_positions // k * k, c.max_positions - 1))
        rows = Lockstep(self.model, memory, -(-max(limits) // k) * k)
        device = self.model.device
        return GroupState(
            rows,
            torch.full((len(limits), k), c.bos, device=device),
            torch.tensor(limits, device=device),
            torch.zeros(len(limits), dtype=torch.bool, device=device),
        )

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Write the next group. A word after an end, or beyond the limit, gets no slot."""
        state: GroupState = self.begin(memory) if iteration == 0 else canvas.extra
        rows = copy(state.rows)  # its length is its own: a canvas can be rewritten again
        scores, words = rows.append(state.newest).log_softmax(dim=-1).max(dim=-1)  # [C, K]
        is_end = words == self.model.config.eos
        places = canvas.tokens.shape[1] + torch.arange(self.k, device=words.device)
        within = places < state.limits[:, None]
        is_word = within & (is_end.cumsum(dim=1) == 0) & ~state.ended[:, None]
        ended = state.ended | is_end.any(dim=1) | (places[-1] + 1 >= state.limits)
        tokens = torch.cat((canvas.tokens, words.masked_fill(~is_word, self.model.config.pad)), 1)
        return Canvas(
            tokens,
            torch.cat((canvas.mask, is_word), dim=1),
            torch.cat((canvas.scores, scores.masked_fill(~is_word, 0)), dim=1),
            GroupState(rows, words, state.limits, ended),
        )

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration > 0 and bool(canvas.extra.ended.all())

    def choose(self, canvas: Canvas, source: object, memory: EncoderOutput) -> int:
        return 0

    def finish_reason(self, canvas: Canvas) -> str:
        """Return why the first text of a canvas ended: by its own end, or by the limit."""
        is_full = canvas.mask[0].sum() == canvas.extra.limits[0]
        return "length" if bool(is_full) else "eos"


class GroupBeam(NamedTuple):
    """A beam search in groups.

    rows    keys and values of its live texts
    search  its texts
    """

    rows: Lockstep
    search: BeamSearch

    @property
    def limits(self) -> Sequence[int]:
        """Return the most words of each source."""
        return self.search.limits


class SatBeamRefiner(SatRefiner):
    """Keep the `beam` likeliest texts. `extra` of its canvas is a GroupBeam.

    The canvas has `beam` candidates of each source, the best first; one that is missing is empty.
    """

    def __init__(self, model: Seq2Seq, k: int, beam: int):
        super().__init__(model, k)
        self.beam = beam

    def begin_search(self, memory: EncoderOutput) -> GroupBeam:
        """Return the search before the first group.

        memory  of one source, or `beam` rows of each
        """
        c, memory = self.model.config, memory.select_rows(range(0, len(memory.mask), self.beam))
        limits = limit_lengths(memory, c.max_positions // self.k * self.k - 1)  # and the end
        rows = Lockstep(self.model, memory, (max(limits) // self.k + 1) * self.k)
        return GroupBeam(rows, BeamSearch.begin(c.eos, limits, self.beam))

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Add a group to every live text: its words one after another, from one pass."""
        state: GroupBeam = self.begin_search(memory) if iteration == 0 else canvas.extra
        rows, search, begin = copy(state.rows), state.search, [self.model.config.bos] * self.k
        newest = [one.text[-self.k :] if one.text else begin for one in search.live]
        logits = rows.append(torch.tensor(newest))  # [N, K, V]
        row_of = torch.arange(len(newest))  # of each live text: the row that its words come from
        for place in range(self.k):
            if search.live:
                search, continued, _ = search.advance(logits[row_of, place])
                row_of = row_of[continued]
        if search.live:
            rows.select(row_of)
        texts = search.list_candidates()
        lengths, room = [len(one.text) for one in texts], max(1, canvas.tokens.shape[1])
        blank = blank_canvas(lengths, self.model.config.pad, room=room)
        tokens, mask, scores = blank.tokens, blank.mask, blank.scores.to(self.model.dtype)
        tokens[mask] = torch.tensor([word for one in texts for word in one.text], dtype=torch.long)
        scores[mask] = torch.tensor(
            [score for one in texts for score in one.logprobs[: len(one.text)]], dtype=scores.dtype
        )
        device = self.model.device
        state = GroupBeam(rows, search)
        return Canvas(tokens.to(device), mask.to(device), scores.to(device), state)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration > 0 and not canvas.extra.search.live


# ------------------------------ the card


@dataclass(frozen=True)
class SatSettings:
    """What a model is trained for.

    k  words of a group
    """

    k: int = 2

    def __post_init__(self) -> None:
        check_ranges(self, {"k": 256})


def sat_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `sat_loss` of a batch of the trainer; nothing is drawn from the generator."""
    options = training.settings.k, training.dropout, training.smoothing
    return sat_loss(training.model, batch, *options)


def translate_batch_in_groups(
    model: Seq2Seq, settings: SatSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S]."""
    return translate_sources(model, sources, SatRefiner(model, settings.k))


def fits_groups(config: Seq2SeqConfig, settings: SatSettings, source: int, target: int) -> bool:
    """Return whether the groups of a target and its end fit into the positions."""
    return -(-(target + 1) // settings.k) * settings.k <= config.max_positions


@technique(
    title="SAT: semi-autoregressive translation",
    summary="writes K words per pass",
    paper="Wang et al. 2018, arXiv 1808.08583",
    reported="5.58x at 88% of the quality, K 6 (abstract)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    translator=TrainedTranslator(
        sat_batch_loss,
        translate_batch_in_groups,
        "It writes groups of {settings.k} words from left to right, the words of a group at once "
        "(`sat`).",
        settings=SatSettings,
        fits=fits_groups,
    ),
    knobs=(Knob("beam", 1, "texts that are kept at once; 1: greedy search", low=1, high=128),),
)
def sat(request: RefineRequest, *, beam: int) -> SatRefiner:
    """Return a refiner that adds a group of words in each pass, as many as the model learnt."""
    model = request.model
    k = model.config.extra.get("k")
    if type(k) is not int or not 1 <= k < model.config.max_positions:
        raise TinyspecError(
            f"{model.name} was not trained to write groups of words (config.json: k is {k}): "
            "train a model from models/multi30k-sat/recipe.toml (tinyspec train mt)"
        )
    if model.config.positional:
        raise TinyspecError(
            f"{model.name} attends by position over a whole target, so it cannot write from left "
            "to right: use a model that was trained for sat"
        )
    return SatRefiner(model, k) if beam == 1 else SatBeamRefiner(model, k, beam)
