"""The second loop: rewrite a canvas.

`decode` extends a text. Here the whole target stands on the canvas from the beginning, and every
decoder pass rewrites some or all of it. A `Refiner` makes the first canvas (its length and its
tokens), rewrites it, decides when it is finished, and chooses among its candidates (lengths,
fertilities, samples), which are one batch.

The source is encoded once. Each pass is one `Pass` here, and one record in the forward log.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq, has_same_vocabulary


class Canvas(NamedTuple):
    """C candidates of up to T slots each, padded at the end.

    tokens  [C, T]
    mask    [C, T], True at slots, False at padding
    scores  [C, T] log-probabilities, as the technique keeps them
    extra   what a technique keeps beside them (the slots it masked, the decoder's input)
    """

    tokens: Tensor
    mask: Tensor
    scores: Tensor
    extra: Any = None

    def text(self, candidate: int) -> list[int]:
        """Return the tokens of one candidate."""
        return [int(token) for token in self.tokens[candidate][self.mask[candidate]]]

    def means(self) -> Tensor:
        """Return the mean log-probability of each candidate, [C]; -inf for one without slots."""
        total = self.scores.masked_fill(~self.mask, 0).sum(dim=-1)
        slots = self.mask.sum(dim=-1)
        return torch.where(slots > 0, total / slots.clamp(min=1), -torch.inf)


def blank_canvas(
    lengths: Sequence[int], token: int, device: torch.device | None = None, room: int = 1
) -> Canvas:
    """Return candidates of these lengths, every slot holding `token`, with score 0.

    room  least width: a canvas does not become narrower in a pass
    """
    room = max(*lengths, room)
    mask = torch.arange(room, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    return Canvas(
        torch.full(mask.shape, token, device=device), mask, torch.zeros(mask.shape, device=device)
    )


class Refiner(Protocol):
    """A technique that rewrites a canvas.

    One whose encoder reads more than the source also has `extend_sources`: sources [B, S], padded
    at the end -> what the encoder reads of them. One whose passes read other positions than those
    that they write also has `count_rows`: the canvases before and after a pass -> how many it read.
    """

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return the first canvas. No decoder pass is run."""
        ...

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Return the canvas after one decoder pass; iterations count from 0."""
        ...

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        """Return whether `iteration` passes are enough."""
        ...

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        """Return the candidate to keep."""
        ...


@dataclass
class PassRecord:
    """A pass as plain data.

    tokens   every candidate's tokens after the pass
    changed  every candidate's slots whose token changed
    calls    forward passes
    scores   log-probabilities, as the technique keeps them
    """

    tokens: list[list[int]]
    changed: list[list[int]]
    calls: int
    scores: list[list[float]] = field(default_factory=list)


class Pass(NamedTuple):
    """What one decoder pass did: for statistics, replay and streaming."""

    iteration: int
    before: Canvas
    after: Canvas
    calls: tuple[ForwardRecord, ...]

    def as_record(self) -> PassRecord:
        """Return the pass as plain data, without tensors."""
        width = self.before.tokens.shape[1]  # a canvas may have grown
        moved = self.after.mask.clone()
        moved[:, :width] &= self.before.tokens != self.after.tokens[:, :width]
        texts = [self.after.text(candidate) for candidate in range(len(moved))]
        scores = [
            row[slots].tolist()
            for row, slots in zip(self.after.scores, self.after.mask, strict=True)
        ]
        return PassRecord(
            texts, [row.nonzero().flatten().tolist() for row in moved], len(self.calls), scores
        )


class Refinement:
    """One request: iterate it for its passes, then read `tokens`.

    forward_log  the list that gets a record of each pass; None: the model's own
    """

    def __init__(
        self,
        model: Seq2Seq,
        source: Sequence[int],
        refiner: Refiner,
        rng: RandomSource,
        forward_log: list[ForwardRecord] | None = None,
    ):
        if not source:
            raise TinyspecError("the source is empty: give at least one token")
        logs = [log for log in (forward_log, model.forward_log) if log is not None]
        self.forward_log: list[ForwardRecord] = logs[0] if logs else []
        self.model = model.with_log(self.forward_log)
        self.source, self.refiner, self.rng = list(source), refiner, rng
        self.canvas: Canvas | None = None
        self.chosen: int | None = None

    def __iter__(self) -> Iterator[Pass]:
        refiner, rng = self.refiner, self.rng
        with torch.inference_mode():
            sources = torch.tensor([self.source], device=self.model.device)
            memory = encode_sources(self.model, refiner, sources)
            canvas = self.canvas = refiner.start(self.source, memory, rng.split("start", 0))
        iteration = 0
        while not refiner.finished(canvas, iteration):
            mark = len(self.forward_log)
            with torch.inference_mode():
                after = refiner.rewrite(canvas, memory, iteration, rng.split("rewrite", iteration))
            before, canvas, self.canvas = canvas, after, after
            yield Pass(iteration, before, after, tuple(self.forward_log[mark:]))
            iteration += 1
        with torch.inference_mode():
            self.chosen = refiner.choose(canvas, self.source, memory)

    @property
    def best(self) -> int:
        """Return the chosen candidate; before the end, the one with the highest mean score."""
        assert self.canvas is not None
        return int(self.canvas.means().argmax()) if self.chosen is None else self.chosen

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of the best candidate."""
        return [] if self.canvas is None else self.canvas.text(self.best)

    @property
    def scores(self) -> list[float]:
        """Return the log-probabilities of these tokens, as the technique keeps them."""
        if self.canvas is None:
            return []
        return [float(x) for x in self.canvas.scores[self.best][self.canvas.mask[self.best]]]


def encode_sources(model: Seq2Seq, refiner: Refiner, sources: Tensor) -> EncoderOutput:
    """Return what a refiner reads of sources [B, S], padded at the end: one encoder pass."""
    extend: Callable[[Tensor], Tensor] | None = getattr(refiner, "extend_sources", None)
    return model.encode(sources if extend is None else extend(sources))


def refine(
    model: Seq2Seq,
    source: Sequence[int],
    refiner: Refiner,
    rng: RandomSource,
    forward_log: list[ForwardRecord] | None = None,
) -> Refinement:
    """Rewrite a canvas for this source: iterate the result for its passes."""
    return Refinement(model, source, refiner, rng, forward_log)


# --- candidates that a teacher scores


def score_candidates(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> Tensor:
    """Return `token_logprobs` of the candidates of one source: one encoder and one decoder pass."""
    return token_logprobs(
        teacher, teacher.encode(torch.tensor([list(source)], device=teacher.device)), canvas
    )


def token_logprobs(teacher: Seq2Seq, memory: EncoderOutput, canvas: Canvas) -> Tensor:
    """Return log p of every token of every candidate and of its end: [C, T + 1], 0 at padding.

    memory  of one source for all candidates, or of each candidate's source

    All candidates are judged in one teacher-forced pass, whatever their lengths. Gu et al. 2018,
    arXiv 1711.02281, call it noisy parallel decoding: the teacher knows which tokens belong
    together. To write, it needs a pass for every token; to judge, one.
    """
    config, device = teacher.config, teacher.device
    tokens, mask = canvas.tokens.to(device), canvas.mask.to(device)
    teacher.check_length(tokens.shape[1] + 1, "translation")
    count, room = tokens.shape
    ends = mask.sum(dim=1)  # [C] where each candidate's end belongs
    read = torch.cat(
        (torch.full((count, 1), config.bos, device=device), tokens.masked_fill(~mask, config.pad)),
        dim=1,
    )
    causal = torch.ones(room + 1, room + 1, dtype=torch.bool, device=device).tril()
    logits = teacher.logits(teacher.decode(teacher.embed(read), memory, causal))  # [C, T + 1, V]
    spoken = torch.cat((tokens, torch.zeros_like(tokens[:, :1])), dim=1)
    places = torch.arange(room + 1, device=device)[None]
    spoken = torch.where(
        places == ends[:, None], config.eos, spoken.masked_fill(places > ends[:, None], 0)
    )
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.log_softmax(dim=-1).gather(-1, spoken[..., None])[..., 0]
    return scores.masked_fill(places > ends[:, None], 0)


def best_candidate(teacher: Seq2Seq, source: Sequence[int], canvas: Canvas) -> int:
    """Return the candidate of highest probability under the teacher; of equals, the first."""
    return int(score_candidates(teacher, source, canvas).sum(dim=1).argmax())


def check_teacher(model: Seq2Seq, teacher: Seq2Seq) -> None:
    """Raise TinyspecError unless both read the same tokens and the teacher writes left to right.

    A model with the heads of its method on its decoder does so too.
    """
    if not has_same_vocabulary(model, teacher):
        raise TinyspecError(
            f"the teacher {teacher.name} has another vocabulary than {model.name}: "
            "use the teacher it was trained with"
        )
    trained = str(teacher.config.extra.get("trained_for", "teacher"))
    heads = {name.partition("/")[0] for name in teacher.decoder_extras}
    is_causal = trained in {"teacher", "plain", "autoregressive", *heads}
    if teacher.config.positional or not is_causal:
        raise TinyspecError(
            f"{teacher.name} does not write from left to right, so it judges nothing: "
            "use its teacher"
        )
