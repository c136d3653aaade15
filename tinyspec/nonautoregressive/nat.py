"""NAT: all target words in one pass, because every source word has said how many of them are its
own.

Gu, Bradbury, Xiong, Li, Socher, ICLR 2018, arXiv 1711.02281. A model that writes all places at once
cannot agree with itself: each place takes its likeliest word, whatever translation its neighbours
have in mind. The paper moves the choice into a latent sequence that can be written at once: the
*fertility* of each source word, how many target words it produces. The fertilities add up to the
target's length, and the decoder reads each source word as often as it is fertile. Given them, much
less is left to agree about. What makes it NAT: the fertilities (not a length and evenly spread
copies), self-attention that sees all places but its own, a positional attention block in every
decoder layer, and, in *noisy parallel decoding*, several fertility sequences at once, of whose
translations the autoregressive teacher keeps the one it finds likeliest.

Trained: everything, on the sentences as the teacher translates them (sequence-level distillation,
Kim, Rush 2016, arXiv 1606.07947: a student that sees one translation of each sentence has less to
agree about; on people's translations NAT mixes several). An aligner supplies the fertilities, here
`tinyspec/training/aligner.py`: `loss` is -log p_F(f|x) - sum_t log p(y_t|x, f). Then `finetune`:
the word-level reverse KL to the teacher, for the fertilities by REINFORCE with the average
fertilities as baseline.

Guarantee: APPROX, with s, the number of samples: its own rule is proved by an exact oracle
(laws/nonautoregressive_laws.py) that walks all fertility sequences. Tested in
tests/nonautoregressive/test_nat.py: T is the sum of the fertilities, samples of a larger s contain
those of a smaller, so that the teacher's score never falls; the gradient of fine-tuning is that of
the exact expectation. Decoder passes: one, s rows wide; for s > 1 the teacher's encoder and decoder
pass once more over all s. The weight 0.25 of fine-tuning is from memory of the paper; the authors'
released code mixes by another constant.
Left out: nothing. The paper aligned by fast_align. Candidates are compared by the teacher's
probability, without the length normalisation of the authors' code. Special tokens are never
written.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best, check_teacher
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.technique import Guarantee, Knob, RefineRequest, technique

# ---------------------------------------------------------------------- the model (section 3)


def copy_source(source: Tensor, fertilities: Tensor) -> tuple[Tensor, Tensor]:
    """source [B, S] by fertilities [B, S] -> what the decoder reads [B, T], and which places are
    slots [B, T].
    """
    places, slots = copy_by_fertility(fertilities)
    return source.gather(1, places), slots


def decode_parallel(
    model: Seq2Seq, read: Tensor, slots: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """One pass over all places: states [B, T, d]. A place attends to all others: its own copy is in
    its residual stream.
    """
    others = ~torch.eye(read.shape[1], dtype=torch.bool, device=read.device)
    return model.decode(model.embed(read), memory, others, dropout, slots)


def forbid_special_tokens(model: Seq2Seq, logits: Tensor) -> Tensor:
    """The logits [..., V] with special tokens impossible."""
    c = model.config
    return logits.index_fill(
        -1, torch.tensor([c.pad, c.bos, c.eos, c.mask], device=logits.device), -torch.inf
    )


def average_fertilities(law: Tensor) -> Tensor:
    """p_F [..., S, L] -> the expected fertilities, rounded to the nearest (halves up): [..., S]."""
    return (law @ torch.arange(law.shape[-1], dtype=law.dtype, device=law.device) + 0.5).long()


def clip_fertilities(model: Seq2Seq, source: Tensor, fertilities: Tensor, law: Tensor) -> Tensor:
    """Fertilities [B, S] of sources [B, S] that can be decoded; law [B, S, L] is p_F. Sums beyond 2
    |x| have gone astray.
    """
    mask = source != model.config.pad
    room = 2 * mask.sum(dim=1, keepdim=True) + SPARE
    room = room.clamp(max=model.config.max_positions - 1)  # the teacher also reads the beginning
    return make_decodable(
        fertilities.masked_fill(~mask, 0), (1 - law[..., 0]).masked_fill(~mask, 0), room
    )


# ---------------------------------------------------------------------- training (section 3.3, 4)


class AlignedPairs(NamedTuple):
    """What `loss` trains on: source [B, S] and target [B, T] padded at the end, fertilities [B, S],
    0 at padding.
    """

    source: Tensor
    target: Tensor
    fertilities: Tensor


def nat_loss(
    model: Seq2Seq,
    batch: AlignedPairs | tuple[Tensor, ...],
    generator: torch.Generator | None = None,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """-log p_F(f|x) - sum_t log p(y_t|x, f), per target token. `generator`: as every loss has;
    nothing is drawn here.
    """
    given = AlignedPairs(*batch)
    return _supervised(model, given, model.encode(given.source, dropout), dropout, smoothing)


def _supervised(
    model: Seq2Seq, batch: AlignedPairs, memory: EncoderOutput, dropout: float, smoothing: float
) -> Tensor:
    source, target, fertilities = batch
    read, slots = copy_source(source, fertilities)
    there = target != model.config.pad
    if not torch.equal(there.sum(dim=1), fertilities.sum(dim=1)):
        raise TinyspecError(
            "fertilities do not add up to the targets' lengths: align the same sentences anew"
        )
    said = target[:, : slots.shape[1]][slots]
    logits = model.logits(decode_parallel(model, read, slots, memory, dropout)[slots])
    tokens = F.cross_entropy(logits, said, reduction="sum", label_smoothing=smoothing)
    counts = F.cross_entropy(
        model.fertility_logits(memory)[memory.mask], fertilities[memory.mask], reduction="sum"
    )
    return (tokens + counts) / len(said)


def reverse_kl(
    model: Seq2Seq,
    teacher: Seq2Seq,
    source: Tensor,
    fertilities: Tensor,
    memory: EncoderOutput,
    heard: EncoderOutput,
) -> Tensor:
    """L_RKL(f) = sum_t sum_v p(v|x, f) log(p(v|x, f) / p_teacher(v|y_<t, x)), y being what the
    student writes given f: [B].

    heard  the teacher's own memory of the sources
    """
    read, slots = copy_source(source, fertilities)
    logits = model.logits(decode_parallel(model, read, slots, memory))
    law = logits.log_softmax(dim=-1)  # [B, T, V]
    with torch.no_grad():
        written = (
            forbid_special_tokens(model, logits)
            .argmax(dim=-1)
            .masked_fill(~slots, teacher.config.pad)
        )
        before = torch.cat(
            (torch.full_like(written[:, :1], teacher.config.bos), written[:, :-1]), dim=1
        )
        causal = torch.ones(
            read.shape[1], read.shape[1], dtype=torch.bool, device=read.device
        ).tril()
        expected = teacher.logits(teacher.decode(teacher.embed(before), heard, causal)).log_softmax(
            dim=-1
        )
    return (law.exp() * (law - expected)).sum(dim=-1).masked_fill(~slots, 0).sum(dim=-1)


def reinforce_surrogate(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    """A scalar whose gradient is, in the mean over samples, that of the expected cost: the sum of
    cost times log p_F(f|x).

    logits [B, S, L] of p_F, mask [B, S] of the source words, sampled [B, S] ~ p_F, cost [B] (a
    constant)
    """
    chosen = logits.log_softmax(dim=-1).gather(-1, sampled[..., None])[..., 0]
    return (cost.detach() * chosen.masked_fill(~mask, 0).sum(dim=-1)).sum()


def finetune_loss(
    model: Seq2Seq,
    teacher: Seq2Seq,
    batch: AlignedPairs | tuple[Tensor, ...],
    generator: torch.Generator,
    dropout: float = 0.0,
    smoothing: float = 0.0,
    share: float = 0.25,
) -> Tensor:
    """L_FT = share (E_f[L_RKL(f) - L_RKL(average f)] + L_RKL(aligner's f)) + (1 - share) loss, per
    target token.

    The first term trains the fertilities alone, by one sample a sentence; the second trains the
    rest by back-propagation.
    """
    given = AlignedPairs(*batch)
    source = given.source
    memory = model.encode(source, dropout)
    with torch.no_grad():
        heard = teacher.encode(source)
    logits = model.fertility_logits(memory)
    law = logits.detach().softmax(dim=-1)  # [B, S, L]
    sampled = torch.multinomial(law.flatten(0, 1), 1, generator=generator).view_as(source)
    with torch.no_grad():
        both = [
            clip_fertilities(model, source, f, law) for f in (sampled, average_fertilities(law))
        ]
        costs = [reverse_kl(model, teacher, source, f, memory, heard) for f in both]
    latent = reinforce_surrogate(logits, memory.mask, sampled, costs[0] - costs[1])
    rest = reverse_kl(model, teacher, source, given.fertilities, memory, heard).sum()
    supervised = _supervised(model, given, memory, dropout, smoothing)
    return (
        share * (latent + rest) / (given.target != model.config.pad).sum()
        + (1 - share) * supervised
    )


# ---------------------------------------------------------------------- decoding (section 3.2)


def translate_batch(model: Seq2Seq, source: Tensor, fertility: str = "argmax") -> list[list[int]]:
    """Translations of padded sources [B, S], each from one fertility sequence, all in one pass: as
    validation asks for them.
    """
    with torch.inference_mode():
        memory = model.encode(source)
        law = model.fertility_logits(memory).softmax(dim=-1)
        chosen = law.argmax(dim=-1) if fertility == "argmax" else average_fertilities(law)
        read, slots = copy_source(source, clip_fertilities(model, source, chosen, law))
        tokens = forbid_special_tokens(
            model, model.logits(decode_parallel(model, read, slots, memory))
        ).argmax(dim=-1)
    return [row[there].tolist() for row, there in zip(tokens, slots, strict=True)]


class NatRefiner:
    """One pass for s fertility sequences; the teacher chooses."""

    def __init__(
        self,
        model: Seq2Seq,
        teacher: Seq2Seq | None,
        fertility: str,
        samples: int,
        temperature: float,
    ):
        self.model, self.teacher = model, teacher
        self.first, self.samples, self.temperature = fertility, samples, temperature

    def propose_fertilities(self, logits: Tensor, rng: RandomSource) -> Tensor:
        """logits [S, L] -> fertility sequences [s, S]: the likeliest of each word and the average,
        then independent samples.

        Sample k has a stream of its own, so that more samples contain the fewer.
        """
        fixed = [logits.argmax(dim=-1), average_fertilities(logits.softmax(dim=-1))]
        if self.first == "average":
            fixed.reverse()
        law = (logits.double() / self.temperature).softmax(dim=-1).tolist()
        drawn = []
        for number in range(self.samples - 2):
            stream = rng.split("fertilities", number)
            drawn.append([stream.draw(row) for row in law])
        samples = torch.tensor(drawn, dtype=torch.long, device=logits.device).view(-1, len(law))
        return torch.cat((torch.stack(fixed)[: self.samples], samples))

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """The source's words, copied by each fertility sequence. `extra` keeps the fertilities [s,
        S].
        """
        logits = self.model.fertility_logits(memory)[0]
        row = torch.tensor([list(source)], device=logits.device)
        proposed = self.propose_fertilities(logits, rng)
        rows = row.expand(len(proposed), -1)
        chosen = clip_fertilities(
            self.model, rows, proposed, logits.softmax(dim=-1)[None].expand(len(rows), -1, -1)
        )
        read, slots = copy_source(rows, chosen)
        return Canvas(read, slots, logits.new_zeros(read.shape), chosen)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Every slot's likeliest word."""
        logits = self.model.logits(decode_parallel(self.model, canvas.tokens, canvas.mask, memory))
        scores, tokens = forbid_special_tokens(self.model, logits).log_softmax(dim=-1).max(dim=-1)
        return Canvas(
            tokens.masked_fill(~canvas.mask, self.model.config.pad),
            canvas.mask,
            scores,
            canvas.extra,
        )

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 1

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0 if self.teacher is None else best(self.teacher, source, canvas)


@technique(
    title="NAT: non-autoregressive translation with fertilities",
    summary="writes all words in one pass",
    paper="Gu et al., ICLR 2018, arXiv 1711.02281",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    knobs=(
        Knob(
            "samples",
            10,
            "fertility sequences decoded at once, of which the teacher chooses; 1: no teacher",
            low=1,
            small=(3, 1),
        ),
        Knob(
            "fertility",
            "argmax",
            "the first sequence: each word's likeliest, or its mean",
            choices=("argmax", "average"),
        ),
        Knob("temperature", 1.0, "of the law that fertilities are sampled from", low=1e-3),
    ),
)
def nat(request: RefineRequest, *, samples: int, fertility: str, temperature: float) -> NatRefiner:
    """Noisy parallel decoding; with one sample, one translation from one fertility sequence."""
    model, teacher = request.model, request.teacher
    if not (model.config.fertilities and model.config.positional):
        lacks = "positional attention" if model.config.fertilities else "fertility head"
        raise TinyspecError(
            f"{model.name} has no {lacks}, so it is no NAT: use a model that was trained for method nat"
        )
    if samples == 1:
        return NatRefiner(model, None, fertility, 1, temperature)
    if teacher is None:
        raise TinyspecError(
            f"{samples} samples need a teacher to choose among them: give one, or set samples to 1"
        )
    check_teacher(model, teacher)
    if teacher.config.max_positions < model.config.max_positions:
        raise TinyspecError(
            f"the teacher {teacher.name} has {teacher.config.max_positions} positions, fewer than {model.name}: "
            "use the teacher it was trained with"
        )
    return NatRefiner(model, teacher, fertility, samples, temperature)


# ---------------------------------------------------------------------- what the decoder reads (section 3.1)

SPARE = 4  # target tokens beyond two for each source token: a source of one token may be a word of several


def copy_uniformly(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [B] and [B] -> the source place that each target place copies [B, T], and which are
    slots [B, T].

    Place i of T takes the source place nearest to i (S - 1) / (T - 1): first to first, last to
    last.

    >>> copy_uniformly(torch.tensor([3]), torch.tensor([5]))[0].tolist()
    [[0, 1, 1, 2, 2]]
    """
    i = torch.arange(int(targets.max()), device=targets.device)[None]
    slots = i < targets[:, None]
    last = (targets[:, None] - 1).clamp(min=1)
    places = (2 * i * (sources[:, None] - 1) + last) // (2 * last)
    return places.masked_fill(~slots, 0), slots


def copy_by_fertility(fertilities: Tensor) -> tuple[Tensor, Tensor]:
    """Fertilities [B, S] -> the source place that each target place copies [B, T], and which are
    slots [B, T].

    Source words stand in order, each as often as its fertility says; a word with fertility 0
    vanishes.

    >>> places, slots = copy_by_fertility(torch.tensor([[2, 0, 1], [0, 1, 0]]))
    >>> places.tolist(), slots.tolist()
    ([[0, 0, 2], [1, 0, 0]], [[True, True, True], [True, False, False]])
    """
    ends = fertilities.cumsum(dim=-1)  # [B, S] where each word's copies end
    i = torch.arange(int(ends[:, -1].max()), device=ends.device).expand(len(ends), -1).contiguous()
    slots = i < ends[:, -1:]
    return torch.searchsorted(ends, i, right=True).masked_fill(~slots, 0), slots


def make_decodable(fertilities: Tensor, fertile: Tensor, max_target_length: Tensor | int) -> Tensor:
    """Return fertilities [B, S] that can be decoded: together at least 1 and at most
    `max_target_length`.

    max_target_length  target tokens: one number for all, or [B, 1]


    Words from where the running sum passes the room give nothing, as in the authors' code. Where no
    word gives anything, the one that most probably does gives one token: `fertile` [B, S] is each
    word's probability of giving any, 0 at padding.

    >>> make_decodable(torch.tensor([[1, 3, 1], [0, 0, 0]]), torch.tensor([[0.1, 0.7, 0.2]]).expand(2, 3), 2).tolist()
    [[1, 0, 0], [0, 1, 0]]
    """
    kept = fertilities.masked_fill(fertilities.cumsum(dim=-1) > max_target_length, 0)
    silent = kept.sum(dim=-1, keepdim=True) == 0
    first = torch.zeros_like(kept).scatter(-1, fertile.argmax(dim=-1, keepdim=True), 1)
    return torch.where(silent, first, kept)
