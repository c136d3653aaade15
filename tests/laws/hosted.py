"""Techniques of every shape that the suites must be able to judge, each in a few lines."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter, SharedSessionDrafter
from tinyspec.decoding.refine import Canvas, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws.parts import Siblings
from tinyspec.lm.forward import Plan, Scores
from tinyspec.lm.seq2seq import EncoderOutput, Seq2Seq
from tinyspec.speculative.integrated.speculative_contrastive import JointTarget
from tinyspec.technique import Card, Guarantee, Knob, RefineRequest, Request
from tinyspec.tree import ROOT, TokenTree


def card(build: Callable[..., Any], guarantee: Guarantee = Guarantee.EXACT, **fields: Any) -> Card:
    """A card that is not registered."""
    knobs = tuple(fields.pop("knobs", ()))
    return Card(
        build.__name__, build.__name__, "no paper", "toy", guarantee, knobs, build, **fields
    )


# ---- trees ---------------------------------------------------------------------------------------


def siblings(replace: bool) -> Card:
    """Two tokens side by side, with or without replacement."""

    def build(request: Request, *, k: int) -> Decoder:
        drafter = Siblings(request.drafts[0], k, replace, request.draft_max_length)
        return request.decoder(drafter, verify_tree)

    return card(build, drafts=1, knobs=[Knob("k", 4, "tokens side by side", low=1)])


class Merged(BaseDrafter):
    """Two models propose a token each and then one below it; equal tokens stand side by side."""

    def __init__(self, models: Sequence[Any]):
        self.models = models

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        for model in self.models:
            model.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, parents, laws = list[int](), list[int](), list[Any]()
        for model in self.models if max_draft_depth else ():
            q = TargetProbs(model.score(TokenTree()), sampling, context, TokenTree())[ROOT]
            tokens.append(rng.draw(q))
            parents.append(ROOT)
            laws.append(q)
        if max_draft_depth > 1:
            below = TokenTree.chain(tokens[:1])
            q = TargetProbs(self.models[0].score(below), sampling, context, below)[0]
            tokens.append(rng.draw(q))
            parents.append(0)
            laws.append(q)
        return TokenTree(tokens, parents, laws, (False,) * len(tokens))

    def observe(self, round: Round) -> None:
        for model in self.models:
            model.append(round.tokens)

    def rewind(self, length: int) -> None:
        for model in self.models:
            model.rewind(length)

    def end(self) -> None:
        self.rewind(0)


def two_models(request: Request) -> Decoder:
    """SpecInfer in small: the drafts of two models in one tree."""
    return request.decoder(Merged(request.drafts), verify_tree)


# ---- a decoder inside a decoder ------------------------------------------------------------------


class Inner(BaseDrafter):
    """A decoder drafts: its tokens declare the distribution under which they were committed."""

    def __init__(self, decoder: Decoder, gamma: int, truthful: bool):
        self.decoder, self.gamma, self.truthful, self.asked = decoder, gamma, truthful, 0

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.decoder.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tokens, laws = list[int](), list[Any]()
        while len(tokens) < min(self.gamma, max_draft_depth):
            round = self.decoder.step(rng)
            drawn = [self.decoder.drafter.last] * 9 if not self.truthful else round.output_probs  # type: ignore[attr-defined]
            tokens += round.tokens
            laws += drawn[: len(round.tokens)]
        kept = min(self.gamma, max_draft_depth)
        return TokenTree.chain(tokens[:kept], laws[:kept])

    def observe(self, round: Round) -> None:
        before = len(self.decoder.context) - len(self.decoder.context[self.told :])
        self.decoder.rewind(before)
        self.decoder.extend(round.tokens)

    @property
    def told(self) -> int:
        return self.decoder.start

    def rewind(self, length: int) -> None:
        self.decoder.rewind(length)

    def end(self) -> None:
        self.decoder.end()


class Remembers(ModelDrafter):
    """Declares the distribution of its last token, for the toy that takes it for the middle's."""

    last: Any = None

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.last = tree.draft_probs[0] if tree.draft_probs else None
        return tree


def cascade(truthful: bool) -> Card:
    """The smallest drafts for the middle, the middle for the target. The toy declares the
    smallest's distribution.
    """

    def build(request: Request) -> Decoder:
        if request.draft_max_lengths:  # this toy knows no limits
            return request.decoder(BaseDrafter(), verify_tree)
        middle = Decoder(
            request.drafts[0],
            Remembers(request.drafts[1], 1),
            verify_tree,
            sampling=request.sampling,
        )
        return request.decoder(Inner(middle, 2, truthful), verify_tree)

    return card(build, drafts=2)


# ---- views, exits, hidden states -----------------------------------------------------------------


class Exits:
    """A target that leaves after `layer` layers, and copies up the keys that are missing."""

    def __init__(self, session: Any, layer: int):
        self.session, self.layer = session, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        if self.layer < self.session.model.config.n_layers:
            return self.session.run_to_layer(tree, self.layer, hidden_layers, head=True)  # type: ignore[no-any-return]
        return self.session.score(tree, hidden_layers)  # type: ignore[no-any-return]

    def commit(self, path: Sequence[int], next: int | None) -> None:
        self.session.commit(path, next)
        self.session.fill_cache("copy", range(len(self.session) - 1))


def own_draft(plan: Plan, exact: bool = True) -> Card:
    """Drafts with a part of its own layers. The toy judges with the first layer's logits as
    well.
    """

    def build(request: Request) -> Decoder:
        session: Any = request.target
        if not exact:
            request.target = Exits(session, 1)  # type: ignore[assignment]
        return request.decoder(SharedSessionDrafter(session.view(plan), 2), verify_tree)

    return card(build)


class Feels(BaseDrafter):
    """Propose the most likely token of a linear head on the target's last hidden state."""

    hidden_layers = (2,)

    def __init__(self, vocabulary: int, width: int):
        self.head = torch.randn(
            vocabulary, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )
        self.state: Any = None

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        if scores.hidden.shape[1]:
            self.state = scores.hidden[0, -1]

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if self.state is None or max_draft_depth < 1:
            return TokenTree()
        q = sampling.probs(self.head.to(self.state) @ self.state, context)
        return TokenTree.chain([rng.draw(q)], [q])

    def observe(self, round: Round) -> None:
        self.state = round.scores.hidden[
            0, 0 if not round.verdict.accepted else round.verdict.accepted[-1] + 1
        ]

    def rewind(self, length: int) -> None:
        self.state = None

    def end(self) -> None:
        self.state = None


def feels(request: Request) -> Decoder:
    """A head on hidden states."""
    config = request.target.model.config  # type: ignore[attr-defined]
    return request.decoder(Feels(config.vocab_size, config.d_model), verify_tree)


def early(request: Request, *, layers: int) -> Decoder:
    """Early exit with a knob: all layers are neutral."""
    request.target = Exits(request.target, layers)  # type: ignore[assignment]
    return request.decoder(BaseDrafter(), verify_tree)


EARLY = card(
    early,
    Guarantee.LOSSY,
    lossy=("layers", 3),
    knobs=[Knob("layers", 2, "layers that are run", low=1, high=3)],
)


# ---- shared noise, joint targets, stores ---------------------------------------------------------


class Races(BaseDrafter):
    """Its draft races on the noise that the target will race on, so both often agree."""

    def __init__(self, model: Any, gamma: int):
        self.model, self.gamma, self.prompt = model, gamma, 0

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.model.extend(tokens)

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        tree = TokenTree()
        for _ in range(min(self.gamma, max_draft_depth)):
            q = TargetProbs(self.model.score(tree), sampling, context, tree)[len(tree.tokens) - 1]
            tree = TokenTree.chain(
                [*tree.tokens, rng.exponential_race(q, len(context) + len(tree.tokens))]
            )
        return tree

    def observe(self, round: Round) -> None:
        self.model.append(round.tokens)

    def rewind(self, length: int) -> None:
        self.model.rewind(length)

    def end(self) -> None:
        self.model.end()


def racing(shift: int) -> Card:
    """Gumbel coupling. When it verifies, the toy numbers its races by rounds in place of
    positions.
    """

    def match(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        path: tuple[int, ...] = ()
        while True:
            at = len(p.context) + len(path) if not shift else len(path) + shift
            token = rng.exponential_race(p[path[-1] if path else ROOT], at)
            if len(path) == len(tree.tokens) or tree.tokens[len(path)] != token:
                return Verdict(path, token)
            path = (*path, len(path))

    def build(request: Request) -> Decoder:
        return request.decoder(Races(request.drafts[0], 3), match)

    return card(build, drafts=1, coupled=True)


def less(rows: Sequence[Any], text: Sequence[int], path: Sequence[int]) -> Any:
    """The expert's distribution, lowered where the amateur's is high."""
    p, q = rows
    if not isinstance(p, list):
        return torch.as_tensor(p) + torch.log(2 - torch.as_tensor(q).softmax(-1))
    return [x * (Fraction(2) - y) for x, y in zip(p, q, strict=True)]


def contrast(request: Request) -> Decoder:
    """Its distribution is its own: the card says so, and the suites ask its own target."""
    request.target = JointTarget([request.target, request.drafts[0]], less)
    return request.decoder(BaseDrafter(), verify_tree)


class Store(BaseDrafter):
    """Remembers what followed each token, over requests: the card says it is persistent."""

    def __init__(self) -> None:
        self.after: dict[int, int] = {}
        self.last: int | None = None

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.learn(tokens)

    def learn(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.last is not None:
                self.after[self.last] = token
            self.last = token

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        known = self.after.get(context[-1])
        return TokenTree.chain([known] if known is not None and max_draft_depth else [])

    def observe(self, round: Round) -> None:
        self.learn(round.tokens)

    def rewind(self, length: int) -> None:
        self.last = None

    def end(self) -> None:
        self.last = None


def store(request: Request) -> Decoder:
    """Token recycling in small."""
    return request.decoder(Store(), verify_tree)


def planner(request: Request) -> Any:
    """An analysis decodes nothing."""
    raise AssertionError("nobody builds a planner")


# ---- a canvas ------------------------------------------------------------------------------------


class FillIn:
    """Two candidates, of the source's length and of one slot less; every pass writes all slots at
    once.
    """

    def __init__(self, model: Seq2Seq):
        self.model = model

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        return blank_canvas([len(source), max(len(source) - 1, 1)], self.model.config.mask)

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        states = self.model.decode(self.model.embed(canvas.tokens), memory, slots=canvas.mask)
        scores, tokens = self.model.logits(states).log_softmax(dim=-1).max(dim=-1)
        return Canvas(tokens, canvas.mask, scores)

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration == 2

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return int(canvas.means().argmax())


def fill_in(request: RefineRequest) -> FillIn:
    """Rewrites a canvas."""
    return FillIn(request.model)
