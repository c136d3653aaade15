"""Decode several texts at once: the prompts of a batch, or the streams of one request.

Each text is decoded by its own loop, as if it were alone, and all loops share forward passes
(lm/scheduler.py). `decode_many` runs them and yields what they yield. A text may start others while
it runs; they join the next pass.

A *stream* is one of several texts that together make one answer (Skeleton-of-Thought, APAR). It
forks from a text that was computed before, so that a common prefix is computed once: the forward
log counts what was spared (`ForwardRecord.shared`). Nothing passes from one stream to another:
given the prefix, they are independent. So the answer is the same, token by token, whether its
streams run together or one after another.

`StreamDecoder` puts their texts in order. It is for these techniques what `Decoder` is for those
that extend one text, and yields rounds in the order in which a reader reads them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from queue import SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import Reason, StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import ForwardRecord, Scores
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import Event, Scheduler
from tinyspec.lm.tokenizer import Detokeniser
from tinyspec.tree import TokenTree

T = TypeVar("T")

# ------------------------------------------------------------------ several texts


class DecodingBatch(Generic[T]):
    """Texts that are decoded together.

    scheduler  what their sessions compute through
    events     what the texts yielded, and their ends
    started    how many texts were begun
    """

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.started = scheduler, 0
        self.events: SimpleQueue[Event] = SimpleQueue()

    def start(self, texts: "Sequence[DecodeText[T]]") -> None:
        """Begin texts. They join the next shared pass. A text that runs may call this."""
        with self.scheduler.together():
            self.started += len(texts)
            for text in texts:
                self.scheduler.submit(partial(self._decode, text), events=self.events)

    def _decode(self, text: "DecodeText[T]", scheduler: Scheduler) -> Iterable[T]:
        return text(self)


DecodeText: TypeAlias = Callable[[DecodingBatch[T]], Iterable[T]]
"""Decode one text of a batch: its sessions compute through `batch.scheduler`."""


def decode_many(
    texts: Sequence[DecodeText[T]], *, max_live: int | None = None
) -> Generator[tuple[int, T], None, None]:
    """Decode several texts in shared forward passes. Yield (number of the text, what it yielded).

    Closing the iterator ends them all. The first failure ends them all, and is raised here.

    max_live  how many run at once; when one ends, the next one begins
    """
    batch = DecodingBatch[T](Scheduler(max_live=max_live))
    ended = 0
    try:
        batch.start(texts)
        while ended < batch.started:
            ticket, item, is_end = batch.events.get()
            if not is_end:
                yield ticket.number, item
            elif ticket.error is not None:
                raise ticket.error
            ended += is_end
    finally:
        batch.scheduler.close()


# ------------------------------------------------------------------ text as it grows


@dataclass
class GrowingText:
    """A text in pieces that may be shown.

    A piece never ends in half a character, or inside what may become a stop string.

    pieces  decodes its ids; None: it has no tokenizer, and no text
    """

    stop: StoppingCriteria
    pieces: Detokeniser | None
    text: str = ""
    shown: int = 0

    def push(self, tokens: Iterable[int], is_finished: bool) -> str:
        """Return the piece that may be shown after further tokens."""
        if self.pieces is None:
            return ""
        piece = self.pieces.push(list(tokens))
        if is_finished:  # half a character at the end may belong to a stop string
            piece += self.pieces.flush()
        self.text = self.stop.trim(self.text + piece)
        return self._upto(len(self.text) - (0 if is_finished else self.stop.withheld(self.text)))

    def flush(self) -> str:
        """Return what is left at the end of the text."""
        if self.pieces is not None:
            self.text = self.stop.trim(self.text + self.pieces.flush())
        return self.rest()

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._upto(len(self.text))

    def _upto(self, end: int) -> str:
        piece, self.shown = self.text[self.shown : end], max(self.shown, end)
        return piece


# ------------------------------------------------------------------ several streams, one answer


@dataclass(eq=False)
class Stream:
    """One text of a request, and what stands in it so far.

    rng      noise of its own, so that no other stream draws with it
    decoder  the loop that extends it, from when it begins
    parts    its rounds; between them, texts that were not generated, and streams that forked there
    is_done  whether it has ended
    """

    rng: RandomSource
    decoder: Decoder = field(init=False)
    parts: list["Round | str | Stream"] = field(default_factory=list)
    is_done: bool = False


class EditedTarget:
    """A session whose logits are changed before a token is chosen.

    edit  (the text, logits [n + 1, V]) -> the logits that count. The text is that of the root
    """

    def __init__(self, session: Any, edit: Callable[[list[int], Tensor], Tensor]):
        self.session, self.edit = session, edit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the changed scores of the newest token and of every node."""
        scores: Scores = self.session.score(tree, hidden_layers)
        return scores._replace(logits=self.edit(self.session.text, scores.logits))


AfterRound: TypeAlias = Callable[[Stream, Round, Scheduler], Iterable[Stream]]
"""Look at a round of a stream; return the streams that forked from it."""


def fork_nothing(stream: Stream, round: Round, scheduler: Scheduler) -> Iterable[Stream]:
    """Return no streams."""
    return ()


class StreamDecoder:
    """One request whose answer is written by several streams: the base class of its techniques.

    A technique writes `write_answer`. The other methods are those of a `Decoder`: `extend` takes
    the prompt, `run` yields rounds, `new` holds the tokens that were generated, in the order in
    which they are read, and `text` the answer so far. Stops and `max_new_tokens` hold for each
    stream.

    forward_log  all passes; those of a stream are in its decoder's own log, too
    most         how many streams run at once; the others wait
    """

    most = 1 << 30

    def __init__(
        self,
        model: Model,
        *,
        sampling: SamplingParams | None = None,
        stop: StoppingCriteria | None = None,
        forward_log: list[ForwardRecord] | None = None,
    ):
        self.model, self.sampling = model, sampling or SamplingParams()
        self.stop = stop or StoppingCriteria()
        self.forward_log: list[ForwardRecord] = [] if forward_log is None else forward_log
        self.context: list[int] = []
        self.new: list[int] = []
        self.text = ""
        self.finished: Reason | None = None
        self._waiting: deque[Stream] = deque()
        self._n_running = 0
        self._last_turn = -1
        self._reason: Reason = "eos"
        self._running: Generator[Round, None, None] | None = None

    def write_answer(self, rng: RandomSource) -> Iterator[Round]:
        """Write the answer to `context`: yield rounds in the order of the text."""
        raise NotImplementedError

    def extend(self, prompt: Sequence[int]) -> None:
        """Take the prompt. Nothing is computed yet."""
        if not prompt:
            raise TinyspecError("the prompt is empty: give at least one token")
        self.context.extend(prompt)

    def run(self, rng: RandomSource) -> Generator[Round, None, None]:
        """Write the answer, and yield each round in the order of the text."""

        def run_all() -> Generator[Round, None, None]:
            for round in self.write_answer(rng):
                self.new += round.tokens
                yield round
            self.finished = self._reason

        self._running = run_all()
        return self._running

    def end(self) -> None:
        """End the request: no stream goes on."""
        if self._running is not None:
            self._running.close()

    # -------------------------------------------------------------- what a technique calls

    def open_stream(self, prompt: Sequence[int], rng: RandomSource) -> Stream:
        """Return a stream that has read a prompt. It computes alone."""
        stream = Stream(rng)
        stream.decoder = self.make_decoder(self.model.session([]))
        stream.decoder.extend(prompt)
        return stream

    def fork_decoder(
        self,
        parent: Decoder,
        length: int,
        tokens: Sequence[int],
        scheduler: Scheduler | None = None,
    ) -> Decoder:
        """Return a decoder after the first `length` tokens of another one's text, then `tokens`.

        What was computed for the common part is not computed again. The rest runs with the first
        new token, in the same pass.

        scheduler  what it computes through; None: what its parent computes through
        """
        session: Any = parent.target
        forward = None if scheduler is None else scheduler.forward_of(self.model)
        decoder = self.make_decoder(session.fork(length, forward_log=[], forward=forward))
        decoder.target.append(tokens)
        decoder.begin([*parent.context[:length], *tokens])
        return decoder

    def fork_prompts(
        self, prompts: Sequence[Sequence[int]], sources: Sequence[RandomSource], begun: list[Stream]
    ) -> Callable[[Scheduler], Sequence[Stream]]:
        """Compute the common prefix of some prompts once, and return what begins their streams.

        begun  the streams are added to it, in the order of the prompts
        """
        columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
        length = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        trunk = self.make_decoder(self.model.session([]))
        trunk.extend(prompts[0][: length + 1])  # it runs all but the last
        self.forward_log += trunk.forward_log

        def begin(scheduler: Scheduler) -> Sequence[Stream]:
            for prompt, source in zip(prompts, sources, strict=True):
                begun.append(Stream(source))
                begun[-1].decoder = self.fork_decoder(trunk, length, prompt[length:], scheduler)
            return begun

        return begin

    def make_decoder(self, session: Any) -> Decoder:
        """Return plain decoding on a session, under the settings of the request."""
        return Decoder(
            self.wrap_target(session),
            BaseDrafter(),
            verify_tree,
            sampling=self.sampling,
            stop=self.stop,
            positions=self.model.config.max_positions,
            forward_log=session.forward_log,
        )

    def wrap_target(self, session: Any) -> Any:
        """Return the target of a stream; a technique may change its distribution."""
        return session

    def run_alone(self, stream: Stream) -> Iterator[None]:
        """Run a stream by itself. Yield whenever a part was added."""
        log, logged = stream.decoder.forward_log, 0
        for round in stream.decoder.run(stream.rng):
            self.forward_log += log[logged:]
            logged = len(log)
            stream.parts.append(round)
            yield None
        stream.is_done = True

    def run_streams(
        self,
        begin: Callable[[Scheduler], Sequence[Stream]],
        after_round: AfterRound = fork_nothing,
    ) -> Iterator[None]:
        """Run streams in shared passes until all have ended. Yield whenever a part was added.

        begin        makes the first streams, whose sessions compute through the scheduler
        after_round  is asked after every round for streams that fork there
        """

        def begin_all(batch: DecodingBatch[None]) -> Iterator[None]:
            self._start(begin(batch.scheduler), batch, after_round)
            yield None

        running = decode_many([begin_all])
        try:
            for _ in running:
                yield None
        finally:
            running.close()

    def _start(
        self, streams: Iterable[Stream], batch: DecodingBatch[None], after_round: AfterRound
    ) -> None:
        """Start streams, as many as may run at once."""
        self._waiting.extend(streams)
        ready = list[DecodeText[None]]()
        while self._waiting and self._n_running < self.most:
            self._n_running += 1
            ready.append(partial(self._run_stream, self._waiting.popleft(), after_round))
        batch.start(ready)

    def _run_stream(
        self, stream: Stream, after_round: AfterRound, batch: DecodingBatch[None]
    ) -> Iterator[None]:
        decoder, passes = stream.decoder, batch.scheduler
        for round in decoder.run(stream.rng):
            is_shared = passes.turn == self._last_turn
            self._last_turn = passes.turn
            stream.parts.append(round._replace(is_shared=is_shared))
            self._start(after_round(stream, round, passes), batch, after_round)
            yield None
        self.forward_log += decoder.forward_log
        self._n_running -= 1
        stream.is_done = True
        self._start((), batch, after_round)
        yield None

    def read_in_order(self, stream: Stream, running: Iterator[None]) -> Iterator[Round]:
        """Yield the rounds of a stream in the order of its text, and add the text to the answer.

        Where the text goes on in a stream that still runs, wait for it.
        """
        has_text = self.model.has_tokenizer
        pieces = self.model.tokenizer.stream() if has_text else None
        growing, at = GrowingText(self.stop, pieces), 0
        while True:
            while at < len(stream.parts):
                part, at = stream.parts[at], at + 1
                if isinstance(part, str):
                    self.text += growing.flush() + part
                elif isinstance(part, Stream):
                    self.text += growing.flush()
                    yield from self.read_in_order(part, running)
                else:
                    self.text += growing.push(part.tokens, is_finished=False)
                    yield part
            if stream.is_done and at == len(stream.parts):
                self.text += growing.flush()
                if self._reason == "eos" and stream.decoder.finished:
                    self._reason = stream.decoder.finished
                return
            next(running, None)
