"""EESD (Liu et al. 2024): drafts of the first layers, as long as a sampled rate says."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.early_exit import eesd
from tinyspec.early_exit.eesd import ThompsonControl
from tinyspec.early_exit.kangaroo import KangarooDrafter
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.stage import Stage
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card, kangaroo
from tinyspec.lm.model import Model
from tinyspec.technique import find_technique

BEST = "a draft is as long as is best at the sampled rate"
SAMPLED_RATE = "the rate is sampled from what is known of it"
JUDGED = "what is known are the tokens that were accepted, and the first that was not"

DRAWS = 4000
WITHIN = 5  # standard errors


def exit_network(seed: int, vocabulary: int = 4) -> Model:
    """Return a small network with a random exit layer."""
    return add_random_head(small_network(seed, vocabulary), find_technique("eesd"), seed)


@collect_evidence(kangaroo.CONTINUED)
def rounds_go_on_from_the_exit(build: Build) -> Iterator[int]:
    """Check the layer evaluations of every round, drafting and verifying."""
    yield from kangaroo.count_layers_of_rounds(build, exit_network)


@collect_evidence(kangaroo.OF_TEXT)
def exit_drafts_depend_on_the_text(build: Build) -> Iterator[int]:
    """Check law F1 on random layers. What is learned decides the length, so that is fixed."""
    make = partial(build, gamma=3, control="fixed")
    yield feature_laws.draft_is_function_of_text(make, exit_network).branches


def check_eesd_drafts(build: Build) -> Evidence:
    """Check law F2 on random layers, for drafts of any length."""
    return feature_laws.check_random_heads(find_technique("eesd"), partial(build, gamma=3))


def fitted_exit_layer_drafts_the_text(build: Build) -> Evidence:
    """Check that a layer that its loss has fitted to a text drafts it, after every part of it."""
    return kangaroo.fitted_exit_drafts_the_text(build, "eesd", control="fixed")


@collect_evidence(JOINT)
def joint_distribution_of_every_length(build: Build) -> Iterator[int]:
    """Check the joint distribution of three tokens, whatever lengths the control chooses."""
    for seed in range(2):
        stage = Stage(
            find_technique("eesd"),
            knobs={"control": "thompson", "gamma": 2},
            sampling=SamplingParams(top_k=2),
            prompt=(0, 1),
            vocabulary=4,
            seed=seed,
            deep=True,
        )
        got = stage.distribution(3)
        stage.judge(stage.reference().distribution(3, (0, 1)), got, (0, 1), NETWORK_TOLERANCE)
        yield got.branches


@collect_evidence(BEST)
def length_is_best(choose: Callable[[float, float, int], int]) -> Iterator[int]:
    """Check the length against all lengths."""
    rates = (0.0, 0.05, 0.3, 0.5, 0.7, 0.85, 0.97, 1.0)
    for theta, c, longest in product(rates, (0.02, 0.1, 0.3, 0.5, 1.0), (1, 3, 12)):

        def gain(n: int, theta: float = theta, c: float = c) -> float:
            return sum(theta**i for i in range(n + 1)) / (1 + n * c)

        n = choose(theta, c, longest)
        best = max(map(gain, range(1, longest + 1)))
        case = {"rate": theta, "cost": c, "longest": longest, "drafted": n}
        if not (1 <= n <= longest and gain(n) >= best * (1 - 1e-12)):
            accuse(BEST, best, gain(n) if n > 0 else 0.0, **case, counted="tokens per time")
        yield 1


@collect_evidence(SAMPLED_RATE)
def rate_has_its_distribution(make: Callable[[], ThompsonControl]) -> Iterator[int]:
    """Check mean and variance of the rates of many seeds, which are always the same."""
    for accepted, rejected in ((0, 0), (3, 1), (40, 10)):
        control = make()
        control.accepted, control.rejected = accepted, rejected
        rates = [control.draw_rate(Seeded(seed)) for seed in range(DRAWS)]
        a, b = 1 + accepted, 1 + rejected
        mean, variance = a / (a + b), a * b / ((a + b) ** 2 * (a + b + 1))
        got = sum(rates) / DRAWS
        spread = sum((rate - mean) ** 2 for rate in rates) / DRAWS
        case = {"accepted": accepted, "rejected": rejected}
        if abs(got - mean) > WITHIN * (variance / DRAWS) ** 0.5:
            accuse(SAMPLED_RATE, mean, got, **case, compared="the mean")
        if abs(spread - variance) > WITHIN * variance * (3 / DRAWS) ** 0.5:
            accuse(SAMPLED_RATE, variance, spread, **case, compared="the variance")
        yield DRAWS


@collect_evidence(JUDGED)
def known_tokens_are_counted(build: Build) -> Iterator[int]:
    """Check the counts after every round."""
    for seed in range(6):
        decoder = begin_decoder(build, [exit_network(seed)], (0, 1, 2), SAMPLED, 20, gamma=3)
        drafter: eesd.EesdDrafter = decoder.drafter  # type: ignore[assignment]
        accepted = rejected = 0
        while not decoder.finished:
            round = decoder.step(Seeded(seed).split("round", decoder.rounds))
            if not round.truncated:
                accepted += len(round.verdict.accepted)
                rejected += len(round.verdict.rejected)
            assert drafter.control is not None
            got = drafter.control.accepted, drafter.control.rejected
            case = {"network": seed, "drafted": round.tree.tokens}
            expect_equal(JUDGED, (accepted, rejected), got, **case)
            yield 1


TRAPS = [
    Trap(kangaroo.PLANTED, fitted_exit_layer_drafts_the_text, card("eesd")),
    Trap(kangaroo.CONTINUED, rounds_go_on_from_the_exit, card("eesd")),
    Trap(kangaroo.OF_TEXT, exit_drafts_depend_on_the_text, card("eesd")),
    Trap(kangaroo.PLACED, check_eesd_drafts, card("eesd")),
    Trap(JOINT, joint_distribution_of_every_length, card("eesd")),
    Trap(BEST, length_is_best, lambda: eesd.choose_draft_length),
    Trap(SAMPLED_RATE, rate_has_its_distribution, lambda: ThompsonControl),
    Trap(JUDGED, known_tokens_are_counted, card("eesd")),
]

_eesd = partial(Toy, technique="eesd")

TOYS = [
    *(  # the drafts are made as there; the loss is another
        replace(toy, technique="eesd") for toy in kangaroo.TOYS if toy.law != kangaroo.PLANTED
    ),
    _eesd(
        "a layer trained on the token after the one that it drafts",
        "return batch.cross_entropy(target, 0, logits)",
        "return batch.cross_entropy(target, 1, logits)",
        eesd.eesd_loss,
        law=kangaroo.PLANTED,
    ),
    _eesd(
        "a token is taken back when it was drawn",
        "draft_probs.append(q)",
        """draft_probs.append(q)
if token == 0:
    del tokens[-1], draft_probs[-1]
    break""",
        KangarooDrafter.propose,
        law=JOINT,
    ),
    _eesd(
        "as long as the rate is above a half",
        "theta ** (n + 1) * (1 + n * c) > c * tokens",
        "theta > 0.5",
        eesd.choose_draft_length,
        law=BEST,
    ),
    _eesd(
        "the mean rate, which explores nothing",
        "return float(np.random.Generator(np.random.Philox(seed)).beta(a, b))",
        "return a / (a + b)",
        ThompsonControl.draw_rate,
        law=SAMPLED_RATE,
    ),
    _eesd(
        "tokens after a rejected one count as rejected",
        "self.rejected += n < len(round.tree.tokens)",
        "self.rejected += len(round.tree.tokens) - n",
        ThompsonControl.learn,
        law=JUDGED,
    ),
]
