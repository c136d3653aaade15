r"""APAR: a model that was tuned to fork its own text writes the details of an answer in parallel.

Paper: Liu et al. 2024, arXiv 2401.06761 (auto-parallel auto-regressive decoding). The whole model
is tuned.

Idea. An answer often is a tree: titles with details, paragraphs that begin with a main sentence.
Two tokens make this tree visible. Where a detail would stand, the model writes [Fork] and goes on
with the next title. At each [Fork] a second stream begins, which reads the text up to there and the
token [Child], and writes the detail. It may fork again.

    one stream   1. Oak: a tall tree with ... \n 2. Fir: a tree that ... \n
    APAR         1. Oak:[Fork] \n 2. Fir:[Fork] \n
                        [Child] a tall tree with ...
                                        [Child] a tree that ...

Streams that are open at a time share forward passes, and a stream may join at any pass. A stream
forks with the keys and values of the text before it, which are computed once. A detail attends
neither to other details nor to later titles, and a title attends to no detail. The reader gets
root, detail, next: each detail stands where its [Fork] was written.

Rules. [Child] is put, never sampled. No [Fork] follows [Fork] or [Child] at once. After `forks`
forks, and near the end of the context, no [Fork] is sampled. At most `streams` streams run at a
time: others wait. This changes only the passes, as long as the answer has fewer than `forks` forks.

Training. From an answer with at least three pairs (root, detail), cross-entropy on

    main     question, then every root and [Fork]                             loss on the answer
    details  question, roots up to the detail's [Fork], [Child], the detail   loss after [Child]

and on as many unstructured answers, which have no [Fork]. The pairs are the items of a list "title:
detail", or paragraphs: the first sentence and the rest. Answers with code or formulas are left out.
Texts that the model wrote itself join these examples, as unstructured ones.

Guarantee: LOSSY: another answer than one stream's. At forks 0 it is plain decoding of the tuned
model without its two tokens. Each stream is plain decoding of its own text, and streams are
independent given the text that they share.
Pitfall: a [Child] that is sampled; details that see each other; a loop over the details; a loss on
the part of an example that repeats the main text, so that roots count many times; a [Fork] that is
computed in both streams.
Ablation: streams = 1. In a test it writes the same text in more passes; forks = 0 is plain
decoding. On storyteller-apar a pass yields 2.14 tokens, and 1.00 in plain decoding. But answers are
longer and take 9.2 times as long, and their quality was not measured
(tutorials/results/streams-apar.md).
Tests: tests/nonautoregressive/test_apar.py (`write_by_forks` against the code that runs; joint
distribution of main text and detail; rows and passes counted; examples by hand; a tuned model's
streams).
Left out: Medusa's heads in every stream, which the paper adds; pages of the cache that streams
share: here a fork copies keys and values; early release of a detail's cache, and the scheduling of
many requests.
Ours: streams that wait for a place; the values of both bounds; the texts of the recipe, which are
made by a grammar, and the model's own.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.streams import EditedTarget, Stream, StreamDecoder
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import Scheduler
from tinyspec.technique import (
    Guarantee,
    Knob,
    StreamRequest,
    TrainingBatch,
    TrainingExample,
    Tuned,
    Tuning,
    technique,
)

FORK, CHILD = "[Fork]", "[Child]"
FEWEST = 3  # pairs of a structured answer


# ------------------------------------------------------------------ the algorithm


def write_by_forks(
    next_token: Callable[[list[int]], int],
    text: Sequence[int],
    fork: int,
    child: int,
    ends: Iterable[int],
) -> list[int]:
    """Write an answer one stream after the other, in the order in which it is read.

    next_token  (text) -> the next token: never [Child], and no [Fork] after [Fork] or [Child]

    >>> main, detail = [7, 1, 8, 0], [5, 0]  # 1: [Fork], 2: [Child], 0: the end
    >>> write_by_forks(lambda text: (detail if 2 in text else main)[
    ...     len(text) - (4 if 2 in text else 1)], [9], 1, 2, [0])
    [7, 1, 5, 0, 8, 0]
    """
    here, answer = list(text), list[int]()
    while not answer or here[-1] not in ends:
        here.append(next_token(here))
        answer.append(here[-1])
        if here[-1] == fork:
            answer += write_by_forks(next_token, [*here, child], fork, child, ends)
    return answer


# ------------------------------------------------------------------ what is trained


class Pair(NamedTuple):
    """A part of an answer: what the main text keeps, and what its own stream writes."""

    root: str
    detail: str


def split_answer(answer: str) -> list[Pair] | None:
    r"""Return the pairs of an answer; None: too few, a part that is no pair, code or formulas.

    >>> split_answer("1. Oak: tall\n2. Fir: green\n3. Elm: old")[1]
    Pair(root='\n2. Fir:', detail=' green')
    >>> split_answer("Oaks are tall. Very.\n\nFirs are green. Yes.\n\nElms are old. Oh.")[1]
    Pair(root='\n\nFirs are green.', detail=' Yes.')
    """
    if re.search(r"```|\$|\\[(\[a-z]", answer):
        return None
    lines = re.split(r"(?=\n)", answer.strip())
    items = [re.fullmatch(r"(\n?(?:\d+\.|[-*]) [^:\n]+:)( \S.*)", line) for line in lines]
    if len(lines) >= FEWEST and all(items):
        return [Pair(*item.groups()) for item in items if item is not None]
    paragraphs = re.split(r"(?=\n\n)", answer.strip())
    parts = [re.fullmatch(r"(\n*.*?[.!?])( .*)", part, re.S) for part in paragraphs]
    if len(paragraphs) >= FEWEST and all(parts):
        return [Pair(*part.groups()) for part in parts if part is not None]
    return None


def make_examples(
    question: Sequence[int],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    fork: int,
    child: int,
    end: int,
) -> list[TrainingExample]:
    """Return the examples of an answer in token ids: the main text, then one for each detail.

    >>> for ids, first in make_examples([9], [([5], [6, 6]), ([7], [8])], 1, 2, 0):
    ...     print(ids, first)
    [9, 5, 1, 7, 1, 0] 1
    [9, 5, 1, 2, 6, 6, 0] 4
    [9, 5, 1, 7, 1, 2, 8, 0] 6
    """
    main, details = list(question), list[TrainingExample]()
    for root, detail in pairs:
        main += [*root, fork]
        details.append(TrainingExample([*main, child, *detail, end], len(main) + 1))
    return [TrainingExample([*main, end], len(question)), *details]


def apar_loss(tuning: Tuning, batch: TrainingBatch, generator: torch.Generator) -> Tensor:
    """Return the mean cross-entropy of the tokens that an example trains."""
    rows = batch.is_answer[:, :-1]
    logits = tuning.blocks.training_logits(batch.ids)[:, :-1]
    if not rows.any():
        return logits.sum() * 0
    return F.cross_entropy(logits[rows].float(), batch.ids[:, 1:][rows])


@dataclass(frozen=True)
class AparSettings:
    """The section [head] of a recipe.

    lists  structured answers that are made; there are as many unstructured ones
    seed   of the texts
    """

    lists: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.lists) is not int or not 1 <= self.lists <= 1 << 20:
            raise TinyspecError(
                f"[head] lists is {self.lists!r}: it must be a whole number from 1 to {1 << 20}"
            )
        if type(self.seed) is not int:
            raise TinyspecError(f"[head] seed is {self.seed!r}: it must be a whole number")


ANIMALS = {
    "fox": "red forest mice", "owl": "brown forest mice", "crow": "black field seeds",
    "seal": "grey sea fish", "shark": "blue sea fish", "crab": "red shore shells",
    "goat": "white mountain grass", "bear": "brown mountain honey", "hare": "grey field clover",
    "frog": "green pond flies", "duck": "white pond weeds", "camel": "yellow desert leaves",
    "snake": "yellow desert mice", "stork": "white meadow frogs", "cow": "black meadow grass",
    "wolf": "grey forest hares",
}  # fmt: skip
"""What the made texts tell: an animal's colour, where it lives, what it eats."""


def describe_animal(name: str) -> str:
    """Return the detail of an animal.

    >>> describe_animal("fox")
    ' The fox is red, lives in the forest and eats mice.'
    """
    if name not in ANIMALS:
        raise TinyspecError(f"there is no animal {name!r}")
    colour, place, food = ANIMALS[name].split()
    where = "on the" if place in ("shore", "meadow", "mountain", "field") else "in the"
    return f" The {name} is {colour}, lives {where} {place} and eats {food}."


def make_texts(count: int, seed: int) -> list[tuple[str, str]]:
    """Return (question, answer): so many lists, and after each an unstructured answer."""
    rng, texts = random.Random(seed), list[tuple[str, str]]()
    for _ in range(count):
        names = rng.sample(sorted(ANIMALS), rng.randint(FEWEST, 6))
        asked = f"Describe these animals: {', '.join(names)}.\n"
        items = [
            f"{i}. {name.capitalize()}:{describe_animal(name)}" for i, name in enumerate(names, 1)
        ]
        texts.append((asked, "\n".join(items)))
        name = rng.choice(sorted(ANIMALS))
        texts.append((f"What is the {name} like?\n", describe_animal(name)[1:]))
    return texts


def make_training_examples(model: Model, settings: AparSettings) -> list[TrainingExample]:
    """Return the examples of a recipe, in the tokens of a model that has [Fork] and [Child]."""
    encode, examples = model.tokenizer.encode, list[TrainingExample]()
    fork, child = find_tokens(model)
    end = next(iter(model.config.eos), 0)
    for question, answer in make_texts(settings.lists, settings.seed):
        asked = [end, *encode(question)]
        pairs = split_answer(answer)
        if pairs is None:
            ids = [*asked, *encode(answer), end]
            examples.append(TrainingExample(ids, len(asked)))
            continue
        written = [(encode(root), encode(detail)) for root, detail in pairs]
        examples += make_examples(asked, written, fork, child, end)
    return examples


def find_tokens(model: Model) -> tuple[int, int]:
    """Return the ids of [Fork] and [Child]. Raise TinyspecError if the model has none."""
    ids = [model.tokenizer.find_id(token) for token in (FORK, CHILD)]
    if ids[0] is None or ids[1] is None:
        raise TinyspecError(
            f"{model.name} has no tokens {FORK} and {CHILD}: take a model that was tuned for apar; "
            "to tune one: tinyspec train head --recipe models/storyteller-apar/recipe.toml "
            "--out FOLDER"
        )
    return ids[0], ids[1]


# ------------------------------------------------------------------ the code that runs


class ForkingDecoder(StreamDecoder):
    """Writes an answer whose streams fork where the model says so.

    fork, child  ids of the two tokens
    forks        how many forks an answer may have;  streams: how many streams run at once
    """

    def __init__(self, request: StreamRequest, fork: int, child: int, forks: int, streams: int):
        super().__init__(
            request.model,
            sampling=request.sampling,
            stop=request.stop,
            forward_log=request.forward_log,
        )
        self.fork, self.child, self.forks, self.most = fork, child, forks, streams
        self.forked, self.begun = 0, list[Stream]()  # forks so far, and all streams so far
        self._counts: dict[Stream, int] = {}  # forks of each stream so far
        self._open: dict[Stream, tuple[Stream, int]] = {}  # by parent: its [Fork] has not run yet

    def wrap_target(self, session: object) -> EditedTarget:
        """Return the model without the tokens that may not come next."""

        def ban_tokens(text: list[int], logits: Tensor) -> Tensor:
            logits = logits.clone()
            logits[:, self.child] = -inf
            is_full = len(text) + 2 >= self.model.config.max_positions
            if self.forked >= self.forks or is_full or text[-1] in (self.fork, self.child):
                logits[:, self.fork] = -inf
            return logits

        return EditedTarget(session, ban_tokens)

    def write_answer(self, rng: RandomSource) -> Iterator[Round]:
        """Write the main text, and each detail where its [Fork] stands."""
        main = Stream(rng)

        def begin(scheduler: Scheduler) -> Sequence[Stream]:
            main.decoder = self.make_decoder(
                self.model.session([], scheduler)
            )  # its prompt runs in the first shared pass
            main.decoder.extend(self.context)
            self.begun.append(main)
            return [main]

        running = self.run_streams(begin, self.fork_after)
        yield from self.read_in_order(main, running)

    def fork_after(self, stream: Stream, round: Round, scheduler: Scheduler) -> Iterable[Stream]:
        """Return the details that begin after a round of `stream`; there may be none.

        A detail begins once `stream` has run [Fork], so that both have the keys of [Fork].
        """
        ready, decoder = list[Stream](), stream.decoder
        if stream in self._open:
            child, length = self._open.pop(stream)
            ready.append(self.begin_child(stream, child, length))
        if round.tokens[-1:] == (self.fork,):
            number = self._counts.get(stream, 0)
            self._counts[stream], self.forked = number + 1, self.forked + 1
            child = Stream(stream.rng.split("fork", number))
            stream.parts.append(child)
            if decoder.finished:  # nobody else runs [Fork]
                ready.append(self.begin_child(stream, child, len(decoder.context)))
            else:
                self._open[stream] = child, len(decoder.context)
        return ready

    def begin_child(self, parent: Stream, child: Stream, length: int) -> Stream:
        """Begin a detail after the first `length` tokens of its parent, and [Child]."""
        child.decoder = self.fork_decoder(parent.decoder, length, [self.child])
        self.begun.append(child)
        return child


# ------------------------------------------------------------------ the card


@technique(
    title="APAR: auto-parallel auto-regressive decoding",
    summary="a tuned model forks its answer",
    paper="Liu et al. 2024, arXiv 2401.06761",
    reported="up to 2x (abstract)",
    family="parallel",
    guarantee=Guarantee.LOSSY,
    lossy=("forks", 0),
    kind="streams",
    keeps="the tuned model's distribution without its two tokens",
    tuned=Tuned(
        AparSettings,
        apar_loss,
        small=AparSettings(lists=12),
        tokens=(FORK, CHILD),
        examples=make_training_examples,
    ),
    knobs=(
        Knob("forks", 64, "most forks of an answer", low=0, high=1024, small=(2, 0)),
        Knob("streams", 16, "most streams that run at once", low=1, high=1024, small=(2, 1)),
    ),
)
def apar(request: StreamRequest, *, forks: int, streams: int) -> ForkingDecoder:
    """Return a decoder that forks where the model writes [Fork]."""
    return ForkingDecoder(request, *find_tokens(request.model), forks, streams)
