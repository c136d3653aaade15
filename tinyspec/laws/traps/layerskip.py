"""LayerSkip (Elhoushi et al. 2024): drafts of the model's own exit, computed once, and a training
that makes them good.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter, SharedSessionDrafter
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws import exit_laws
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.law import JOINT, exact_law
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import EXIT_WEIGHTS, LAYER_DROPOUT, ONE_HEAD
from tinyspec.laws.traps import Toy, Trap, card
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.technique import Request
from tinyspec.training.exit_losses import Course
from tinyspec.tree import TokenTree

OWN = "a draft is what the model cut off behind the exit says of the text"
ONCE = "layers below the exit run once for a row"

Build = Callable[..., Decoder]
SHAPES = [(3, 1, 1), (3, 1, 3), (3, 2, 2), (4, 3, 2), (5, 2, 3), (3, 3, 2)]
"""Layers, the exit, tokens drafted in a round."""


def joint_law_of_two_tokens(build: Build) -> Evidence:
    """Against plain decoding, sampled and greedy."""
    branches, cases = 0, 0
    for seed, sampling in product((1, 2, 3), (SamplingParams(), SamplingParams(0.0))):
        model = TableModel(seed, zeros=False)
        expected = exact_law(
            lambda model=model, sampling=sampling: Decoder(
                model.session(), BaseDrafter(), verify_tree, sampling=sampling
            ),  # type: ignore[misc]
            2,
        )
        got = exact_law(
            lambda model=model, sampling=sampling: build(  # type: ignore[misc]
                Request(model.session(), sampling=sampling), exit=1, gamma=1
            ),
            2,
        )
        branches, cases = branches + got.branches, cases + 1
        if dict(got) != dict(expected):
            told = {"model": model, "temperature": sampling.temperature, "exit": 1, "gamma": 1}
            accuse(JOINT, dict(sorted(expected.items())), dict(sorted(got.items())), **told)
    return Evidence(JOINT, cases, branches)


def _runs(build: Build) -> Iterator[tuple[dict[str, Any], list[int], Round]]:
    """Rounds of some texts: the case, the text before the round, the round."""
    for (layers, exit, gamma), seed in product(SHAPES, range(4)):
        model, forward_log = TableModel(seed, 4, layers, zeros=False), list[ForwardRecord]()
        decoder = build(
            Request(model.session(forward_log), forward_log=forward_log), exit=exit, gamma=gamma
        )
        decoder.extend((0, 1, 2))
        for _ in range(5):
            text = list(decoder.context)
            case = {"model": model, "layers": layers, "exit": exit, "gamma": gamma, "text": text}
            yield case, text, decoder.step(Seeded(seed).split("round", decoder.rounds))


def drafts_are_the_exits(build: Build) -> Evidence:
    """Each guess was drawn from the row of the first E layers after the text so far: in the first
    round and in the fifth.
    """
    seen = 0
    for case, text, round in _runs(build):
        for at, got in enumerate(round.tree.draft_probs):
            before = [*text, *round.tree.tokens[:at]]
            expected, seen = case["model"].row(before, Plan(last=case["exit"])), seen + 1
            if got != expected:
                accuse(OWN, expected, got, **{**case, "text": before})
    return Evidence(OWN, seen)


def runs_once(build: Build) -> Evidence:
    """n guesses: n E layers of a row to draft; E for the last guess and L - E for each of n + 1
    rows to verify.
    """
    seen = 0
    for case, _, round in _runs(build):
        n, exit, layers = len(round.tree.tokens), case["exit"], case["layers"]
        expected, seen = [n * exit, exit + (layers - exit) * (n + 1)], seen + 1
        got = [sum(call.row_layers for call in calls) for calls in (round.draft_calls, round.calls)]
        if got != expected:
            accuse(ONCE, expected, got, **case)
    return Evidence(ONCE, seen)


# ------------------------------------------------------------------ toys


def _early(request: Request, exit: int) -> Any:
    session: Any = request.target
    return session.view(Plan(last=exit))


def _twin(request: Request, exit: int) -> Any:
    """The first layers once more, with a cache of their own."""
    session: Any = request.target
    return type(session)(session.model, plan=Plan(last=exit), forward_log=request.forward_log)


def trusts_the_exit(request: Request, exit: int, gamma: int) -> Decoder:
    """Early exit as such: what the exit says, with no layer above to judge it."""

    def keep(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))

    return request.decoder(SharedSessionDrafter(_early(request, exit), gamma), keep)


def whole_pass(request: Request, exit: int, gamma: int) -> Decoder:
    """The cut-off model is a draft model, and the draft is verified from the first layer on."""
    return request.decoder(ModelDrafter(_twin(request, exit), gamma), verify_tree)


def early_cache_uncropped(request: Request, exit: int, gamma: int) -> Decoder:
    """Refused guesses stay in the early layers, and the text goes on behind them."""

    class Uncropped(ModelDrafter):
        def propose(
            self,
            context: Sequence[int],
            max_draft_depth: int,
            sampling: SamplingParams,
            rng: RandomSource,
        ) -> TokenTree:
            self.tree = super().propose(context, max_draft_depth, sampling, rng)
            return self.tree

        def observe(self, round: Round) -> None:
            self.model.append(self.tree.tokens)  # right: what was accepted
            self.model.append(round.tokens[-1:])

    return request.decoder(Uncropped(_twin(request, exit), gamma), verify_tree)


def head_of_its_own(request: Request, exit: int, gamma: int) -> Decoder:
    """The exit has another head, which was trained for it: here the model's, its rows in another
    order.
    """

    class Own(SharedSessionDrafter):
        def propose(
            self,
            context: Sequence[int],
            max_draft_depth: int,
            sampling: SamplingParams,
            rng: RandomSource,
        ) -> TokenTree:
            tree = TokenTree()
            for _ in range(min(self.gamma, max_draft_depth)):
                row = TargetProbs(self.model.score(tree), sampling, context, tree)[
                    len(tree.tokens) - 1
                ]
                row = [*row[1:], row[0]]
                tree = TokenTree.chain((*tree.tokens, rng.draw(row)), (*tree.draft_probs, row))
            return tree

    return request.decoder(Own(_early(request, exit), gamma), verify_tree)


class UniformDropout(Course):
    """All layers are left out alike: the last is no more used to be missed than the first."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        self.dropped = [self.exits.p_max / 2] * self.n_layers


class OwnHeads(Course):
    """Every exit has a head of its own."""

    def loss(self, blocks: Blocks, inputs: Tensor, targets: Tensor, dropout: float = 0.0) -> Tensor:
        random, total = torch.Generator().manual_seed(0), torch.zeros((), dtype=blocks.embed.dtype)
        for share, x in zip(self.shares, blocks.stream(inputs), strict=True):
            head = torch.randn(blocks.vocabulary.shape, generator=random, dtype=x.dtype)
            total = total + share * F.cross_entropy(
                (blocks.final(x) @ head.T).flatten(0, 1), targets.flatten()
            )
        return total


class MeanOfExits(Course):
    """All exits count alike at all steps."""

    def begin(self, step: int, progress: float) -> None:
        super().begin(step, progress)
        self.shares = [1 / self.n_layers] * self.n_layers


TRAPS = [
    Trap(JOINT, joint_law_of_two_tokens, card("layerskip")),
    Trap(OWN, drafts_are_the_exits, card("layerskip")),
    Trap(ONCE, runs_once, card("layerskip")),
    Trap(LAYER_DROPOUT, exit_laws.layer_dropout, lambda: Course),
    Trap(ONE_HEAD, exit_laws.one_head, lambda: Course),
    Trap(EXIT_WEIGHTS, exit_laws.exit_loss_weights, lambda: Course),
]
TOYS = [
    Toy("early exit without verification", JOINT, trusts_the_exit),
    Toy("verification by a whole pass", ONCE, whole_pass),
    Toy("the early layers' cache is not cropped", OWN, early_cache_uncropped),
    Toy("an exit with a head of its own", OWN, head_of_its_own),
    Toy("uniform dropout", LAYER_DROPOUT, UniformDropout),
    Toy("a head for every exit", ONE_HEAD, OwnHeads),
    Toy("the plain mean of all exits", EXIT_WEIGHTS, MeanOfExits),
]
