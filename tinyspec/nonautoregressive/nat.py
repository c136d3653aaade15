"""NAT: translate all words in one pass, after predicting each source word's fertility.

Paper: Gu, Bradbury, Xiong, Li, Socher, ICLR 2018, arXiv 1711.02281.

Idea. A model that writes all positions at once cannot agree with itself: each position takes its
likeliest word, whatever translation its neighbours choose. NAT moves the choice into a latent
sequence that can be predicted at once: the *fertility* of each source word, how many target words
it produces. The decoder reads each source word as often as its fertility says. Its self-attention
sees all positions but its own, and every layer has a positional attention block. In *noisy parallel
decoding* several fertility sequences are decoded at once, and the autoregressive teacher keeps the
translation that it finds likeliest.

    T            = f_1 + .. + f_S                                target words
    p(y | x, f)  = product over t of p(y_t | x copied by f)      one decoder pass
    L            = - log p_F(f | x) - sum over t of log p(y_t | x, f)            `nat_loss`

Training. Everything, on the sentences as the teacher translates them (sequence-level distillation,
Kim and Rush 2016, arXiv 1606.07947). An aligner supplies the fertilities (training/aligner.py).
Then `finetune_loss`: the word-level reverse KL to the teacher; the fertilities learn by REINFORCE
with the average fertilities as baseline.

Guarantee: APPROX: no number of samples gives the teacher's distribution. The code that runs is
compared with a second version that walks all fertility sequences (laws/nonautoregressive_laws.py).
Pitfall: a length head with evenly spread copies in place of fertilities; no positional attention;
candidates scored by the student itself.
Ablation: `parallel`, whose copies are uniform. It has fewer right translations of dialects with
fertilities of their own (tutorials/results/dialects.md). It lacks the attention over positions too,
so the gap is not the fertilities' alone.
Tests: tests/nonautoregressive/test_nat.py (`decode_noisy_parallel` against the code that runs; T is
the sum of the fertilities; samples of a larger s contain those of a smaller; the gradient of
fine-tuning is that of the exact expectation).
Left out: nothing. The paper aligned by fast_align. Candidates are compared by the teacher's
probability, without the length normalization of the authors' code. The weight 0.25 of fine-tuning
is that of their script. Their code gives REINFORCE the mean of the costs per word, centred over the
batch and times 0.1, and its reverse KL lacks the student's entropy. Here costs are sums over the
words, as in the paper's formula, so shorter texts cost less. Special tokens are never written.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.refine import Canvas, best_candidate, check_teacher
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    technique,
)


def decode_noisy_parallel(
    source: Sequence[int],
    fertility_probs: Sequence[Sequence[float]],
    predict: Callable[[list[int]], list[int]],
    teacher_score: Callable[[list[int]], float],
    samples: int,
    rng: Any,
) -> list[int]:
    """Return the translation that the teacher finds likeliest (section 3.2).

    fertility_probs  [S][L] p_F of each source word
    predict          copies of source words -> as many target words, in one decoder pass
    teacher_score    translation -> log-probability under the autoregressive teacher
    samples          fertility sequences that are decoded
    rng              a numpy.random.Generator

    `NatRefiner` decodes all sequences in one batch. A test compares the two.
    """
    likeliest = [max(range(len(row)), key=row.__getitem__) for row in fertility_probs]
    average = [int(sum(f * p for f, p in enumerate(row)) + 0.5) for row in fertility_probs]
    candidates = [likeliest, average][:samples]
    while len(candidates) < samples:
        candidates.append([int(rng.choice(len(row), p=row)) for row in fertility_probs])
    translations = list[list[int]]()
    for fertilities in candidates:
        if not any(fertilities):  # a translation has at least one word: the most fertile gives it
            none = [row[0] for row in fertility_probs]
            fertilities[none.index(min(none))] = 1
        pairs = zip(source, fertilities, strict=True)
        copies = [word for word, fertility in pairs for _ in range(fertility)]
        translations.append(predict(copies))
    return max(translations, key=teacher_score)


# ------------------------------ the model (section 3)


def copy_source(source: Tensor, fertilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the decoder reads [B, T], and which positions are slots [B, T].

    source, fertilities  [B, S]
    """
    places, slots = copy_by_fertility(fertilities)
    return source.gather(1, places), slots


def decode_parallel(
    model: Seq2Seq, read: Tensor, slots: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the decoder's states [B, T, d] of one pass over all positions.

    read  [B, T] words, or [B, T, d] vectors in place of their embeddings

    A position attends to all others; its own copy is in its residual stream.
    """
    inputs = model.embed(read) if read.ndim == 2 else model.place(read)
    others = ~torch.eye(read.shape[1], dtype=torch.bool, device=read.device)
    return model.decode(inputs, memory, others, dropout, slots)


def forbid_special_tokens(model: Seq2Seq, logits: Tensor) -> Tensor:
    """Return the logits [..., V] with special tokens impossible."""
    c = model.config
    return logits.index_fill(
        -1, torch.tensor([c.pad, c.bos, c.eos, c.mask], device=logits.device), -torch.inf
    )


def forbid_marks(model: Seq2Seq, logits: Tensor) -> Tensor:
    """Return the logits [..., V] with all special tokens but eos impossible."""
    c = model.config
    marks = torch.tensor([c.pad, c.bos, c.mask], device=logits.device)
    return logits.index_fill(-1, marks, -torch.inf)


def write_until_end(model: Seq2Seq, logits: Tensor, slots: Tensor) -> Canvas:
    """Return the likeliest words [C, T] of each candidate, up to its first eos: at least one word.

    logits  [C, T, V]
    slots   [C, T] False at padding
    """
    allowed = forbid_marks(model, logits)
    allowed[:, 0, model.config.eos] = -torch.inf
    scores, words = allowed.log_softmax(dim=-1).max(dim=-1)
    mask = slots & ((words == model.config.eos).cumsum(dim=1) == 0)
    return Canvas(words.masked_fill(~mask, model.config.pad), mask, scores.masked_fill(~mask, 0))


def average_fertilities(probs: Tensor) -> Tensor:
    """Return the expected fertilities of p_F [..., S, L], rounded (halves up): [..., S]."""
    counts = torch.arange(probs.shape[-1], dtype=probs.dtype, device=probs.device)
    return (probs @ counts + 0.5).long()


def clip_fertilities(model: Seq2Seq, source: Tensor, fertilities: Tensor, probs: Tensor) -> Tensor:
    """Return fertilities [B, S] of sources [B, S] that can be decoded.

    probs  [B, S, L] p_F

    A translation of more than 2 |x| + 4 words is cut, as in the authors' code.
    """
    mask = source != model.config.pad
    room = 2 * mask.sum(dim=1, keepdim=True) + SPARE
    room = room.clamp(max=model.config.max_positions - 1)  # the teacher also reads the beginning
    return make_decodable(
        fertilities.masked_fill(~mask, 0), (1 - probs[..., 0]).masked_fill(~mask, 0), room
    )


# ------------------------------ training (section 3.3, 4)


class AlignedPairs(NamedTuple):
    """A batch to train on.

    source       [B, S] padded at the end
    target       [B, T] padded at the end
    fertilities  [B, S]
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
    """Return - log p_F(f|x) - sum over t of log p(y_t|x, f), per target token.

    generator  not used: nothing is drawn here
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
    words = target[:, : slots.shape[1]][slots]
    logits = model.logits(decode_parallel(model, read, slots, memory, dropout)[slots])
    tokens = F.cross_entropy(logits, words, reduction="sum", label_smoothing=smoothing)
    counts = F.cross_entropy(
        model.fertility_logits(memory)[memory.mask], fertilities[memory.mask], reduction="sum"
    )
    return (tokens + counts) / len(words)


def reverse_kl(
    model: Seq2Seq,
    teacher: Seq2Seq,
    source: Tensor,
    fertilities: Tensor,
    memory: EncoderOutput,
    teacher_memory: EncoderOutput,
) -> Tensor:
    """Return the word-level reverse KL to the teacher, L_RKL(f): [B].

        sum over t, v of p(v|x, f) log(p(v|x, f) / p_teacher(v|y_<t, x))

    where y is what the student writes given f.

    memory, teacher_memory  the student's and the teacher's encoding of the sources
    """
    read, slots = copy_source(source, fertilities)
    logits = model.logits(decode_parallel(model, read, slots, memory))
    logprobs = logits.log_softmax(dim=-1)  # [B, T, V]
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
        states = teacher.decode(teacher.embed(before), teacher_memory, causal)
        teacher_logprobs = teacher.logits(states).log_softmax(dim=-1)
    each = logprobs.exp() * (logprobs - teacher_logprobs)
    return each.sum(dim=-1).masked_fill(~slots, 0).sum(dim=-1)


def reinforce_surrogate(logits: Tensor, mask: Tensor, sampled: Tensor, cost: Tensor) -> Tensor:
    """Return a scalar whose gradient is, in the mean over samples, that of the expected cost.

    logits   [B, S, L] of p_F
    mask     [B, S] source words, not padding
    sampled  [B, S] fertilities drawn from p_F
    cost     [B] of the sampled fertilities; a constant

    It is the sum of cost times log p_F(f|x) (REINFORCE).
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
    """Return the loss of fine-tuning, per target token (section 4.2).

        share (E_f[L_RKL(f) - L_RKL(average f)] + L_RKL(aligner's f)) + (1 - share) nat_loss

    The first term trains the fertilities alone, by one sample for each sentence. The second trains
    the rest by back-propagation. In the passes of L_RKL the decoder has no dropout: `dropout`
    reaches the encoder and nat_loss.
    """
    given = AlignedPairs(*batch)
    source = given.source
    memory = model.encode(source, dropout)
    with torch.no_grad():
        teacher_memory = teacher.encode(source)
    logits = model.fertility_logits(memory)
    probs = logits.detach().softmax(dim=-1)  # [B, S, L]
    sampled = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view_as(source)
    with torch.no_grad():
        both = [
            clip_fertilities(model, source, f, probs) for f in (sampled, average_fertilities(probs))
        ]
        costs = [reverse_kl(model, teacher, source, f, memory, teacher_memory) for f in both]
    latent = reinforce_surrogate(logits, memory.mask, sampled, costs[0] - costs[1])
    rest = reverse_kl(model, teacher, source, given.fertilities, memory, teacher_memory).sum()
    supervised = _supervised(model, given, memory, dropout, smoothing)
    return (
        share * (latent + rest) / (given.target != model.config.pad).sum()
        + (1 - share) * supervised
    )


# ------------------------------ decoding (section 3.2)


def translate_batch(model: Seq2Seq, source: Tensor, fertility: str = "argmax") -> list[list[int]]:
    """Return translations of padded sources [B, S], made in one pass.

    Each comes from one fertility sequence.
    """
    with torch.inference_mode():
        memory = model.encode(source)
        probs = model.fertility_logits(memory).softmax(dim=-1)
        chosen = probs.argmax(dim=-1) if fertility == "argmax" else average_fertilities(probs)
        read, slots = copy_source(source, clip_fertilities(model, source, chosen, probs))
        tokens = forbid_special_tokens(
            model, model.logits(decode_parallel(model, read, slots, memory))
        ).argmax(dim=-1)
    return [row[there].tolist() for row, there in zip(tokens, slots, strict=True)]


class NatRefiner:
    """Decode s fertility sequences in one pass; the teacher chooses."""

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
        """Return fertility sequences [s, S]: likeliest and average, `first` first, then samples.

        logits  [S, L] of p_F

        Sample k has a random stream of its own, so that more samples contain the fewer.
        """
        fixed = [logits.argmax(dim=-1), average_fertilities(logits.softmax(dim=-1))]
        if self.first == "average":
            fixed.reverse()
        probs = (logits.double() / self.temperature).softmax(dim=-1).tolist()
        drawn = []
        for number in range(self.samples - 2):
            stream = rng.split("fertilities", number)
            drawn.append([stream.draw(row) for row in probs])
        samples = torch.tensor(drawn, dtype=torch.long, device=logits.device).view(-1, len(probs))
        return torch.cat((torch.stack(fixed)[: self.samples], samples))

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return the source's words, copied by each fertility sequence.

        `extra` of the canvas is the fertilities [s, S].
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
        """Write every slot's likeliest word."""
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
        return 0 if self.teacher is None else best_candidate(self.teacher, source, canvas)


# ------------------------------ what the decoder reads (section 3.1)

SPARE = 4  # target tokens beyond two per source token: one source token may give several words


def copy_uniformly(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source position that each target position copies [B, T], and the slots [B, T].

    sources, targets  [B] lengths

    Position i of T copies the position nearest to i (S - 1) / (T - 1): first to first, last to
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
    """Return the source position that each target position copies [B, T], and the slots [B, T].

    fertilities  [B, S]

    Source words stand in order, each as often as its fertility says.

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

    fertile            [B, S] each word's probability of giving any token, 0 at padding
    max_target_length  target tokens: one number for all, or [B, 1]

    Words from where the running sum passes the limit give nothing, as in the authors' code. If no
    word gives anything, the most fertile one gives one token.

    >>> fertile = torch.tensor([[0.1, 0.7, 0.2]]).expand(2, 3)
    >>> make_decodable(torch.tensor([[1, 3, 1], [0, 0, 0]]), fertile, 2).tolist()
    [[1, 0, 0], [0, 1, 0]]
    """
    kept = fertilities.masked_fill(fertilities.cumsum(dim=-1) > max_target_length, 0)
    silent = kept.sum(dim=-1, keepdim=True) == 0
    first = torch.zeros_like(kept).scatter(-1, fertile.argmax(dim=-1, keepdim=True), 1)
    return torch.where(silent, first, kept)


# ------------------------------ the card


def nat_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `nat_loss` of a batch of the trainer."""
    return nat_loss(training.model, batch, generator, training.dropout, training.smoothing)


def finetuning_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `finetune_loss` of a batch of the trainer."""
    model, teacher = training.model, training.teacher
    assert teacher is not None
    return finetune_loss(model, teacher, batch, generator, training.dropout, training.smoothing)


def require_teacher(
    model: Seq2Seq, teacher: Seq2Seq | None, candidates: str, otherwise: str
) -> Seq2Seq:
    """Return the teacher that chooses among candidates.

    candidates  how many there are, and of what
    otherwise   what to do without a teacher

    Raises TinyspecError if there is none, or if it cannot read all that the model may write.
    """
    if teacher is None:
        raise TinyspecError(
            f"{candidates} need a teacher to choose among them: give one, or {otherwise}"
        )
    check_teacher(model, teacher)
    if teacher.config.max_positions < model.config.max_positions:
        raise TinyspecError(
            f"the teacher {teacher.name} has {teacher.config.max_positions} positions, fewer than "
            f"{model.name}: use the teacher it was trained with"
        )
    return teacher


@technique(
    title="NAT: non-autoregressive translation with fertilities",
    summary="writes all words in one pass",
    paper="Gu et al., ICLR 2018, arXiv 1711.02281",
    reported="over 10x lower latency (survey)",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    teacher=True,
    translator=TrainedTranslator(
        nat_batch_loss,
        lambda model, settings, sources: translate_batch(model, sources),
        "It writes all words at once, after it has predicted how many each source word gives "
        "(`nat`). Its figure is that of one pass with the most probable fertilities.",
        shape={"positional": True, "fertilities": 4},
        fits=lambda config, settings, source, target: target <= (config.fertilities - 1) * source,
        aligned=True,
        finetune=finetuning_batch_loss,
    ),
    knobs=(
        Knob(
            "samples",
            10,
            "fertility sequences decoded at once, of which the teacher chooses; 1: no teacher",
            low=1,
            high=1024,
            small=(3, 1),
        ),
        Knob(
            "fertility",
            "argmax",
            "the first sequence: each word's likeliest, or its average",
            choices=("argmax", "average"),
        ),
        Knob(
            "temperature",
            1.0,
            "of the distribution that fertilities are sampled from",
            low=1e-3,
            high=1e3,
        ),
    ),
)
def nat(request: RefineRequest, *, samples: int, fertility: str, temperature: float) -> NatRefiner:
    """Return a refiner for several fertility sequences; the teacher chooses a translation."""
    model, teacher = request.model, request.teacher
    if not (model.config.fertilities and model.config.positional):
        lacks = "positional attention" if model.config.fertilities else "fertility head"
        raise TinyspecError(
            f"{model.name} has no {lacks}, so it is no NAT: use a model that was trained for "
            "method nat"
        )
    if samples == 1:
        return NatRefiner(model, None, fertility, 1, temperature)
    teacher = require_teacher(model, teacher, f"{samples} samples", "set samples to 1")
    return NatRefiner(model, teacher, fertility, samples, temperature)
