"""Online speculative decoding (Liu et al. 2024): train where the draft was wrong."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse, collect_evidence
from tinyspec.laws.exact.joint import JOINT, Reference, compare_distributions, exact_distribution
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, small_network
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, card
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import osd
from tinyspec.speculative.drafting.distillspec import kl_divergence
from tinyspec.technique import Request

GRADIENT = "the rows that drafted rejected tokens get the gradient (q - p) / n, all others none"
ONE_MODEL = "a request's drafts declare what the newest weights before it say"

REQUESTS = ((0, 1), (2, 0, 3), (1,), (3, 3, 1))
PROMPT = (0, 1)


def begin_online(build: Build, seed: int, **knobs: Any) -> tuple[Decoder, Model]:
    """Return a decoder of two small networks without a text, and its target."""
    target, draft = (small_network(2 * seed + number) for number in range(2))
    stop = StoppingCriteria(max_new_tokens=9)
    request = Request(target.session(), [draft.session()], SAMPLED, stop)
    return build(request, **knobs), target


def serve_request(decoder: Decoder, prompt: Sequence[int]) -> list[tuple[list[int], Round]]:
    """Return the rounds of a whole request, each with the text before it."""
    rounds = list[tuple[list[int], Round]]()
    decoder.extend(prompt)
    while not decoder.finished:
        text = list(decoder.context)
        rounds.append((text, decoder.step(Seeded(decoder.rounds))))
    decoder.end()
    decoder.rewind(0)
    return rounds


def find_rejected_places(rounds: Sequence[tuple[list[int], Round]]) -> dict[int, list[int]]:
    """Return the place before every rejected draft token, and the text up to there."""
    found = dict[int, list[int]]()
    for text, round in rounds:
        tested = len(round.verdict.accepted)
        is_whole = tested + 1 == len(round.tokens)  # no stop has cut the round
        if is_whole and tested < len(round.tree.tokens):
            before = [*text, *round.tokens[:tested]]
            found[len(before) - 1] = before
    return found


@collect_evidence(GRADIENT)
def trains_what_was_rejected(build: Build) -> Iterator[int]:
    """Check the gradient of the loss on the logits that the draft has along the texts."""
    for seed in range(4):
        decoder, target = begin_online(build, seed, gamma=2, interval=100)
        served = [(p, find_rejected_places(serve_request(decoder, p))) for p in REQUESTS]
        wanted = [(prompt, places) for prompt, places in served if places]
        n = sum(len(places) for _, places in wanted)
        drafter: Any = decoder.drafter
        logits = list[Tensor]()

        def draft_logits(ids: Tensor, logits: list[Tensor] = logits) -> Tensor:
            drawn = torch.randn(*ids.shape, 4, generator=torch.Generator().manual_seed(0))
            logits.append(drawn.double().requires_grad_())
            return logits[0]

        blocks: Any = SimpleNamespace(
            final_states=draft_logits, apply_head=lambda states: states, device="cpu"
        )
        loss = osd.rejection_loss(blocks, drafter.online.buffer, kl_divergence)
        loss.backward()  # type: ignore[no-untyped-call]
        got, q = logits[0].grad, logits[0].detach().softmax(-1)
        assert got is not None
        for row, (prompt, places) in enumerate(wanted):
            for place in range(got.shape[1]):
                expected, text = torch.zeros(4).double(), places.get(place)
                if text is not None:
                    expected = (q[row, place] - target.logits(text)[-1].softmax(-1)) / n
                if not torch.allclose(got[row, place], expected, rtol=0, atol=1e-9):
                    case = {"networks": seed, "request": prompt, "position": place}
                    accuse(GRADIENT, expected.tolist(), got[row, place].tolist(), **case)
                yield 1


@collect_evidence(ONE_MODEL)
def drafts_are_of_one_model(build: Build) -> Iterator[int]:
    """Check every declared distribution of a request against a dense pass of the newest model."""
    for seed in range(2):
        decoder, _ = begin_online(build, seed, gamma=3, interval=1, lr=0.1)
        drafter: Any = decoder.drafter
        for number, prompt in enumerate(REQUESTS):
            model = drafter.online.model
            for text, round in serve_request(decoder, prompt):
                for place, q in enumerate(round.tree.draft_probs):
                    before = [*text, *round.tree.tokens[:place]]
                    expected, got = model.logits(before)[-1].softmax(-1), torch.as_tensor(q)
                    if not torch.allclose(got, expected, rtol=0, atol=NETWORK_TOLERANCE):
                        case = {"networks": seed, "request": number, "text": before}
                        accuse(ONE_MODEL, expected.tolist(), got.tolist(), **case)
                    yield 1
        if drafter.online.updates < 2:
            accuse(ONE_MODEL, "at least 2 updates", drafter.online.updates, networks=seed)


def swap_draft_after_rounds(decoder: Decoder, models: Sequence[Model]) -> None:
    """Let another model draft after every round: one that the drafter did not choose."""
    drafter: Any = decoder.drafter
    observe = drafter.observe

    def observe_and_swap(round: Round) -> None:
        observe(round)
        drafter.model = models[decoder.rounds % len(models)].session()
        drafter.model.extend(decoder.context)

    drafter.observe = observe_and_swap


@collect_evidence(JOINT)
def joint_distribution_across_updates(build: Build) -> Iterator[int]:
    """Check two tokens after an update, with the draft that learned and while drafts change."""
    for seed, is_swapped in product((1, 2), (False, True)):
        # A copy of the target, so that nothing is known of it; the clock lets drafts outlive.
        target = small_network(10 * seed, 2).with_extras({})
        draft, *others = (small_network(10 * seed + number, 2) for number in (1, 2, 3))

        def begin(target: Model = target, draft: Model = draft) -> Decoder:
            request = Request(target.session(), [draft.session()], SAMPLED)
            request.clock = lambda: 0.0
            return build(request, gamma=2, interval=1, lr=1.0)

        def begin_swapped(begin: Any = begin, others: Any = others) -> Decoder:
            decoder: Decoder = begin()
            swap_draft_after_rounds(decoder, others)
            return decoder

        first = begin()
        first.extend(PROMPT)
        for number in range(4):
            first.step(Seeded(number))
        first.end()
        expected = Reference(partial(_last_row, target), SAMPLED).distribution(2, PROMPT)
        make = begin_swapped if is_swapped else begin
        got = exact_distribution(make, 2, PROMPT, merge=False)
        draft_is = "swapped" if is_swapped else "updated"
        compare_distributions(expected, got, NETWORK_TOLERANCE, networks=10 * seed, draft=draft_is)
        yield got.branches


def _last_row(model: Model, context: Sequence[int]) -> Any:
    return model.logits(context)[-1].numpy()


TRAPS = [
    Trap(GRADIENT, trains_what_was_rejected, card("osd")),
    Trap(ONE_MODEL, drafts_are_of_one_model, card("osd")),
    Trap(JOINT, joint_distribution_across_updates, card("osd")),
]

_osd = partial(Toy, technique="osd")

TOYS = [
    _osd(  # distill_trainer.py of the authors masks the row at the token, not the one before it
        "the row after a rejected token",
        "len(self.text) + len(verdict.accepted) - 1",
        "len(self.text) + len(verdict.accepted)",
        osd.OsdDrafter.observe,
        law=GRADIENT,
    ),
    _osd(  # generator.py of the authors counts the last token of every round as wrong
        "the bonus of a fully accepted draft counts as rejected",
        "verdict.rejected and verdict.next is not None",
        "verdict.next is not None",
        osd.OsdDrafter.observe,
        law=GRADIENT,
        also=(
            Patch(
                osd.OsdDrafter.observe,
                "round.tree.parents[verdict.rejected[0]]",
                "verdict.accepted[-1] if verdict.accepted else -1",
            ),
        ),
    ),
    _osd(
        "fine-tuning on the whole text",
        "return divergence(p, q).mean()",
        "rows = blocks.apply_head(states[:, :-1]).flatten(0, 1)\n"
        "return torch.nn.functional.cross_entropy(rows, ids[:, 1:].flatten())",
        osd.rejection_loss,
        law=GRADIENT,
    ),
    _osd(
        "an update that the drafter never uses",
        "self.model = self.online.model.session(self.forward_log)",
        "pass",
        osd.OsdDrafter.end,
        law=ONE_MODEL,
    ),
    _osd(
        "an update inside a request, with the keys of the old weights",
        "self.text += round.tokens",
        """self.text += round.tokens
if self.places:
    ids = self.text[: self.places[-1] + 1]
    self.online.finish_request(RejectedPlaces(ids, self.places, torch.stack(self.rows)))
    self.model.model, self.places, self.rows = self.online.model, [], []""",
        osd.OsdDrafter.observe,
        law=ONE_MODEL,
    ),
    _osd(
        "the distribution that an older draft declared for the same text",
        "draft_probs.append(q)",
        'draft_probs.append(self.online.__dict__.setdefault("old", {})'
        ".setdefault((*context, *tokens[:-1]), q))",
        ModelDrafter.propose,
        law=JOINT,
    ),
]
