"""Skeleton-of-Thought: write an outline, then all of its points at once.

Paper: Ning et al., ICLR 2024, arXiv 2307.15337. Nothing is trained.

Idea. Many answers are lists of points that do not need each other. So the model is asked twice. The
first prompt asks for the *skeleton*: a numbered list of three to ten points of a few words. Then
each point gets a prompt of its own, with the question, the whole skeleton and the number of the
point, and all points are expanded together in one batch. A decoder reads all its weights for every
pass, so while reading them is the bottleneck, a pass for ten points takes little longer than for
one.

    T(plain)    = prefill + N t(1)
    T(skeleton) = prefill + n_s t(1) + prefill' + max over i of n_i t(B)

N: tokens of a plain answer; n_s, n_i: of the skeleton and of point i; t(B): a pass of B streams.
Both prompts put the beginning of the answer into the model's mouth: "1." for the skeleton, "i. "
and the point's words for point i. The answer is these beginnings with what follows them, line by
line.

The prompts of the points share all but their ends. Their common part is computed once, and each
stream forks from it: the forward log counts what that spares.

Router. An answer whose steps need each other is written worse this way, so a router decides. It is
"always", "never", "prompt" or "words". "prompt" asks the model itself whether the answer is a list
of independent points (A), a list of points that depend on each other (B), or no list (C); the
letter with the highest logit decides, and A takes the skeleton. "words" is a logistic regression on
a bag of words, fitted on forty questions below that we labelled by hand. It stands in place of the
paper's trained router, a RoBERTa classifier. The paper's loss weighs a false "yes" by 0.7 and a
false "no" by 0.3, and so does ours.

Guarantee: LOSSY: another answer than plain decoding's; at router "never" it is plain decoding's,
token for token. Each point is plain decoding of its own prompt, and the points are independent
given the skeleton. If no point is found in the skeleton, or a prompt does not fit into the context,
the answer is plain decoding's.
Pitfall: a loop over the points, which saves nothing; points that read the answers of others; one
noise for all points; an empty answer where the skeleton has no points (the released code); nothing
that decides when not to.
Ablation: router = never, which is plain decoding, or a loop over the points. In a test points take
as many passes together as the longest one. On SmolLM2 a pass yields 1.27 tokens in place of 1.00.
But answers are twice as long and take 2.2 times as long, and their quality was not measured
(tutorials/results/streams.md).
Tests: tests/nonautoregressive/test_sot.py (`answer_by_skeleton` against the code that runs; joint
distribution of two points against the product; passes and rows counted; the router; no points).
Left out: the paper's demonstrations and its prompts for single models, of which we have our own
wording; the RoBERTa router; several requests whose streams share passes with each other.
Ours: at most `points` points are expanded.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.streams import Stream, StreamDecoder
from tinyspec.errors import TinyspecError
from tinyspec.technique import Guarantee, Knob, StreamRequest, technique
from tinyspec.tree import TokenTree

SKELETON = """\
Plan an answer. Write its outline only, not the answer: a numbered list of 3 to 10 points, where \
each point has 3 to 5 words.

Question: How can I sleep better?
Outline:
1. Keep regular hours
2. Avoid coffee at night
3. Darken the bedroom
4. Put screens away

Question: What does a hiker carry?
Outline:
1. Enough drinking water
2. Map and compass
3. Warm dry clothes

Question: {question}
Outline:"""

POINT = """\
Write one part of an answer.

Question: {question}
Outline of the answer:
{skeleton}

Write 1 or 2 sentences about one point alone, and nothing about the others. It is point {number}:"""

ROUTE = """\
What is the best form of the answer to this question?
A: a list of points that can be written independently of each other
B: a list of points or steps where each one needs those before it
C: no list

Question: {question}

Answer with A, B or C."""

ROUTER_LETTERS = ("A", "B", "C")


# ------------------------------------------------------------------ the algorithm


class Point(NamedTuple):
    """A point of a skeleton."""

    number: str
    text: str

    @property
    def head(self) -> str:
        """Return how its part of the answer begins."""
        return f"{self.number}. {self.text}"


def parse_points(skeleton: str) -> list[Point]:
    r"""Return the numbered lines of a skeleton; of lines with the same number, the first.

    >>> [point.head for point in parse_points("1. Red\nor\n2.Green \n2. Blue\n3.\n")]
    ['1. Red', '2. Green']
    """
    points: dict[str, Point] = {}
    for number, text in re.findall(r"^[ \t]*(\d{1,3})\.[ \t]*(\S.*?)[ \t\r]*$", skeleton, re.M):
        points.setdefault(number, Point(number, text))
    return list(points.values())


Write = Callable[[Sequence[tuple[str, str]]], Sequence[str]]
"""[(prompt, beginning of the answer)] -> what follows each beginning; all are written at once."""


def answer_by_skeleton(write: Write, question: str) -> str:
    """Answer a question by its skeleton, as the paper does; plainly if the skeleton is empty."""
    [outline] = write([(SKELETON.format(question=question), "1.")])
    skeleton = "1." + outline
    points = parse_points(skeleton)
    if not points:
        [answer] = write([(question, "")])
        return answer
    asked = [
        (
            POINT.format(question=question, skeleton=skeleton.strip(), number=number),
            f"{number}. {text}",
        )
        for number, text in points
    ]
    return "\n".join(head + rest for (_, head), rest in zip(asked, write(asked), strict=True))


# ------------------------------------------------------------------ the router of words

LISTS = """\
What are the benefits of regular exercise?
Give me tips for a job interview.
How can a city reduce its traffic?
What are common causes of stress at work?
List some advantages of public transport.
Suggest ways to save money at home.
What should I consider when I buy a used car?
Describe the main features of a good teacher.
What are typical symptoms of a cold?
How do I keep my garden healthy?
What are the effects of climate change on oceans?
Name strategies to learn a foreign language.
What kinds of renewable energy are there?
Give ideas for a birthday party for children.
What makes a good leader?
Compare cats and dogs as pets.
How can I improve my writing?
What are the pros and cons of working from home?
Recommend activities for a rainy day.
What are important skills for a nurse?""".splitlines()

NO_LISTS = """\
What is 17 times 23?
Solve the equation 3x + 5 = 20.
Write a function that reverses a string in Python.
What is the capital of France?
Translate this sentence into German: the cat sleeps.
Prove that the square root of two is irrational.
A train leaves at noon at 60 miles an hour. When does it arrive after 90 miles?
Who wrote Hamlet?
Write a poem about the sea.
Fix the bug in this code.
How many apples are left if I eat 2 of 7?
Is this sentence grammatical?
Tell me a story about a dragon.
What is the probability of two heads in three throws?
Rewrite this paragraph in a formal tone.
Calculate the area of a circle with radius 4.
Pretend that you are a pirate and greet me.
What year did the war end?
Write a SQL query that counts users.
Sort these numbers: 5, 2, 9.""".splitlines()


def split_words(question: str) -> list[str]:
    """Return the words of a question; every number is the word 0.

    >>> split_words("What is 17 times 23?")
    ['what', 'is', '0', 'times', '0', '?']
    """
    return re.findall(r"[a-z']+|0|\?", re.sub(r"\d+", "0", question.lower()))


@torch.inference_mode(False)  # it needs gradients, whatever the caller's mode
def fit_word_router(lists: Sequence[str], others: Sequence[str]) -> Callable[[str], float]:
    """Fit a logistic regression on a bag of words: question -> probability that it wants a list."""
    questions = [*lists, *others]
    ids: dict[str, int] = {}
    for question in questions:
        for word in split_words(question):
            ids.setdefault(word, len(ids))

    def mark_words(question: str) -> Tensor:
        """Return 1 for each known word of a question, else 0, and then 1 for the bias."""
        row = torch.zeros(len(ids) + 1, dtype=torch.float64)
        row[[ids[word] for word in split_words(question) if word in ids]] = 1.0
        row[-1] = 1.0  # the bias
        return row

    x = torch.stack([mark_words(question) for question in questions])
    y = torch.tensor([1.0] * len(lists) + [0.0] * len(others), dtype=torch.float64)
    costs = torch.where(y > 0, 0.3, 0.7)  # of a false no, and of a false yes
    weights = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(300):  # the loss is convex, and flat enough for steps of size 1
        w = weights.requires_grad_()
        loss = F.binary_cross_entropy_with_logits(x @ w, y, costs) + 0.005 * w @ w
        (slope,) = torch.autograd.grad(loss, w)
        weights = (w - slope).detach()
    return lambda question: float(torch.sigmoid(mark_words(question) @ weights))


@lru_cache(maxsize=1)
def load_word_router() -> Callable[[str], float]:
    """Return the router that was fitted on the questions above; it takes milliseconds, once."""
    return fit_word_router(LISTS, NO_LISTS)


# ------------------------------------------------------------------ the code that runs


class SkeletonDecoder(StreamDecoder):
    """Asks for a skeleton, then expands its points in shared passes."""

    def __init__(self, request: StreamRequest, router: str, points: int):
        super().__init__(
            request.model,
            sampling=request.sampling,
            stop=request.stop,
            forward_log=request.forward_log,
        )
        self.request, self.router, self.points = request, router, points

    @property
    def question(self) -> str:
        """Return what the user asks, as a text."""
        prompt: Any = self.request.prompt
        if isinstance(prompt, str):
            return prompt
        if prompt and not isinstance(prompt[0], int):
            if prompt[-1]["role"] != "user":
                raise TinyspecError("the last message must be the user's: it is the question")
            return str(prompt[-1]["content"])
        return self.model.tokenizer.decode(self.context)

    def encode_prompt(self, message: str, beginning: str) -> list[int]:
        """Return the ids of a message in place of the user's, and of the answer's beginning."""
        prompt: Any = self.request.prompt
        is_messages = not isinstance(prompt, str) and prompt and not isinstance(prompt[0], int)
        tokenizer, config = self.model.tokenizer, self.model.config
        if is_messages or self.request.chat:
            earlier = prompt[:-1] if is_messages else []
            messages = [*earlier, {"role": "user", "content": message}]
            return tokenizer.chat(messages) + tokenizer.encode(beginning)
        bos = [config.bos] if config.add_bos and config.bos is not None else []
        return bos + tokenizer.encode(f"{message}\n{beginning}")

    def wants_skeleton(self) -> bool:
        """Return what the router decides about this question."""
        if self.router == "words":
            return load_word_router()(self.question) > 0.5
        if self.router == "prompt":
            ids = self.encode_prompt(ROUTE.format(question=self.question), "")
            if not self.has_room(ids):
                return False
            session = self.wrap_target(self.model.session(self.forward_log))
            session.extend(ids)
            row = session.score(TokenTree()).logits[0]
            letters = [self.model.tokenizer.encode(letter)[0] for letter in ROUTER_LETTERS]
            return int(row[letters].argmax()) == 0
        return self.router == "always"

    def has_room(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt leaves room for a token in the context."""
        return len(prompt) < self.model.config.max_positions

    def write_answer(self, rng: RandomSource) -> Iterator[Round]:
        """Write the skeleton, then its points; plain decoding if there are none."""
        if not self.wants_skeleton():
            yield from self.write_plain(rng)
            return
        question = self.question
        asked = self.encode_prompt(SKELETON.format(question=question), "1.")
        points = list[Point]()
        if self.has_room(asked):
            outline = self.open_stream(asked, rng.split("skeleton", 0))
            for _ in self.run_alone(outline):
                part = outline.parts[-1]
                assert isinstance(part, Round)
                yield part
            written = self.model.tokenizer.decode(outline.decoder.new)
            skeleton = "1." + self.stop.trim(written)
            points = parse_points(skeleton)[: self.points]
        prompts = [
            self.encode_prompt(
                POINT.format(question=question, skeleton=skeleton.strip(), number=point.number),
                point.head,
            )
            for point in points
        ]
        if not points or not all(map(self.has_room, prompts)):
            yield from self.write_plain(rng)
            return
        yield from self.write_points([point.head for point in points], prompts, rng)

    def write_plain(self, rng: RandomSource) -> Iterator[Round]:
        """Write the answer as plain decoding does."""
        stream = self.open_stream(self.context, rng)
        yield from self.read_in_order(stream, self.run_alone(stream))

    def write_points(
        self, heads: Sequence[str], prompts: Sequence[Sequence[int]], rng: RandomSource
    ) -> Iterator[Round]:
        """Expand all points in shared passes, and put them below each other.

        heads  how each part of the answer begins;  prompts: the ids that each stream goes on from
        """
        sources = [rng.split("point", at) for at in range(len(prompts))]
        streams = list[Stream]()
        running = self.run_streams(self.fork_prompts(prompts, sources, streams))
        next(running)  # all streams have begun
        for at, (head, stream) in enumerate(zip(heads, streams, strict=True)):
            self.text += ("\n" if at else "") + head
            yield from self.read_in_order(stream, running)


# ------------------------------------------------------------------ the card


@technique(
    title="Skeleton-of-Thought",
    summary="an outline, then its points at once",
    paper="Ning et al. 2024, arXiv 2307.15337",
    reported="up to 2.4x (survey)",
    family="streams",
    guarantee=Guarantee.LOSSY,
    lossy=("router", "never"),
    kind="streams",
    knobs=(
        Knob(
            "router",
            "always",
            "who decides on a skeleton; prompt: the model; words: a classifier of the question",
            choices=("always", "never", "prompt", "words"),
        ),
        Knob("points", 10, "most points that are expanded", low=1, high=64, small=(2, 1)),
    ),
)
def sot(request: StreamRequest, *, router: str, points: int) -> SkeletonDecoder:
    """Return a decoder that writes a skeleton and expands its points together."""
    return SkeletonDecoder(request, router, points)
