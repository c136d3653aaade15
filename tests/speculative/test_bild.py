"""BiLD: fallback, rollback, and the two ends at which it is exact."""

from fractions import Fraction as F
from functools import partial
from typing import Any

import pytest

from tests.lm.small import LLAMA
from tests.lm.small import model as network
from tests.speculative.printed import outcomes_of
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import bild as traps
from tinyspec.speculative.verification.bild import rollback_verifier, write_turn
from tinyspec.technique import Guarantee, Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("bild")
GREEDY = SamplingParams(temperature=0.0)


class Fixed(Table):
    """The same distribution in every context."""

    def __init__(self, *weights: int):
        self.weights = weights
        super().__init__(0, len(weights))

    def row(self, context: Any) -> Any:
        return self.weights


class Rows(dict[int, Any]):
    """The large model's distributions by node, for a verifier alone."""

    def probs_under(self, node: int, sampling: SamplingParams) -> Any:
        return self[node]


def make_decoder(
    large: Any = 1,
    small: Any = 2,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    target, draft = (Table(model) if isinstance(model, int) else model for model in (large, small))
    return CARD.make(
        Request(
            target, [draft], sampling=sampling or SamplingParams(), stop=stop or StoppingCriteria()
        ),
        **knobs,
    )


def finish(decoder: Decoder, prompt: list[int]) -> Decoder:
    decoder.extend(prompt)
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


@pytest.mark.parametrize("fallback", [0.0, 0.4, 0.6])
@pytest.mark.parametrize("rollback", [0.0, 0.5, 1.5, 20.0])
def test_printed_algorithm_is_what_runs(fallback: float, rollback: float) -> None:
    """`write_turn` and one round of the decoder give every text with the same probability."""

    def turn(rng: Exhaustive) -> tuple[int, ...]:
        decoder = make_decoder(p, q, fallback=fallback, rollback=rollback, gamma=2)
        decoder.extend((0,))
        decoder.step(rng)
        return tuple(decoder.context)

    for p, q in ((1, 2), (3, 4), (5, 6)):
        rows = [partial(distribution, Table(seed)) for seed in (p, q)]
        printed = outcomes_of(
            lambda *given: tuple(write_turn(*given)), *rows, [0], fallback, rollback, 2
        )
        assert printed == Exhaustive.distribution(turn)


def distribution(table: Table, text: list[int]) -> list[F]:
    weights = table.row(text)
    return [F(x, sum(weights)) for x in weights]


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


def test_trap_a_token_stays_unless_it_is_bad_whatever_the_ratio() -> None:
    """p(0) = 1/5, q(0) = 1: speculative decoding keeps it one time in five, BiLD always, and at
    rollback 1 never.
    """
    for rollback, kept in ((5.0, 3), (1.0, 0)):
        decoder = make_decoder(Fixed(1, 4), Fixed(1, 0), GREEDY, rollback=rollback, gamma=3)
        decoder.extend((0,))
        assert len(decoder.step(Seeded(0)).verdict.accepted) == kept


def test_an_unsure_token_is_dropped_and_the_large_model_writes_it() -> None:
    decoder = make_decoder(
        Fixed(0, 0, 1), Fixed(2, 1, 1), GREEDY, fallback=0.5, rollback=20.0
    )  # 1/2 is not above it
    decoder.extend((0,))
    round = decoder.step(Seeded(0))
    assert (tuple(round.tree.tokens), round.tokens) == ((), (2,))


def test_how_sure_it_is_does_not_depend_on_the_temperature() -> None:
    for sampling in (SamplingParams(), GREEDY, SamplingParams(0.5), SamplingParams(top_k=1)):
        decoder = make_decoder(Fixed(1, 1, 1), Fixed(4, 3, 3), sampling, fallback=0.45)
        decoder.extend((0,))
        assert not decoder.step(Seeded(0)).tree.tokens


def test_first_bad_token_is_removed_with_all_after_it() -> None:
    good, bad = [F(1, 2), F(1, 2)], [F(1, 100), F(99, 100)]
    tree = TokenTree.chain([0, 0, 0, 0])
    p: Any = Rows({-1: good, 0: bad, 1: good, 2: bad, 3: good})
    for rule in ("paper", "safe"):
        verdict = rollback_verifier(3.0, rule)(tree, p, Seeded(1))
        assert (verdict.accepted, verdict.next, verdict.rejected) == ((0,), 1, (1,))


def test_the_safe_rollback_keeps_what_the_large_model_writes_too_and_reads_on() -> None:
    same, bad = [F(1), F(0)], [F(0), F(1)]
    p: Any = Rows({-1: same, 0: same, 1: bad, 2: same})
    p.probs_under = lambda node, sampling: (
        [F(1, 2), F(1, 2)] if node < 1 else bad
    )  # unsharpened, no token is certain
    tree = TokenTree.chain([0, 0, 0])
    assert rollback_verifier(0.0, "paper")(tree, p, Seeded(0)).accepted == ()
    verdict = rollback_verifier(0.0, "safe")(tree, p, Seeded(0))
    assert (verdict.accepted, verdict.next) == ((0, 1), 1)


@pytest.mark.parametrize("rule", ["paper", "safe"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(0.5, top_k=2)], ids=str
)
def test_rollback_0_gives_the_large_models_distribution(
    rule: str, sampling: SamplingParams
) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    assert (
        exact_distribution(
            lambda: make_decoder(sampling=sampling, rollback=0.0, rule=rule, fallback=0.0, gamma=2),
            2,
        )
        == plain
    )


def test_at_fallback_1_the_small_model_writes_nothing() -> None:
    plain = exact_distribution(lambda: Decoder(Table(1), BaseDrafter(), verify_tree), 3)
    assert (
        exact_distribution(
            lambda: make_decoder(Table(1), Fixed(0, 0, 1), fallback=1.0, rollback=20.0), 3
        )
        == plain
    )


def test_safe_and_drafted_it_is_faster_than_the_papers_rollback_at_the_exact_end() -> None:
    rounds = [
        finish(
            make_decoder(
                Fixed(2, 1),
                Fixed(2, 1),
                GREEDY,
                StoppingCriteria(max_new_tokens=24),
                rollback=0.0,
                rule=rule,
            ),
            [0],
        ).rounds
        for rule in ("safe", "paper")
    ]
    assert rounds[0] < rounds[1] == 24


@pytest.mark.parametrize("rule", ["paper", "safe"])
def test_passes_of_the_large_model_fall_as_either_threshold_is_turned(rule: str) -> None:
    """Tokens of one round, every outcome walked: on fixed texts, since in free running the text
    changes.
    """

    def tokens(seed: int, prompt: tuple[int, ...], **knobs: float) -> Any:
        def play(rng: Exhaustive) -> int:
            decoder = make_decoder(seed, seed + 1, **{"rule": rule, "gamma": 3, **knobs})
            decoder.extend(prompt)
            return len(decoder.step(rng).tokens)

        return sum(n * x for n, x in Exhaustive.walk(play))

    for seed, prompt in ((1, (0,)), (3, (1, 0)), (5, (2, 2, 1))):
        turned = [tokens(seed, prompt, fallback=f, rollback=2.0) for f in (1.0, 0.7, 0.5, 0.3, 0.0)]
        assert turned == sorted(turned) and turned[0] == 1 < turned[-1]
        turned = [
            tokens(seed, prompt, fallback=0.0, rollback=d) for d in (0.0, 0.5, 1.0, 2.0, 20.0)
        ]
        assert turned == sorted(turned) and turned[0] < turned[-1]


def test_on_transformers_the_exact_end_is_greedy_decoding() -> None:
    stop = StoppingCriteria(max_new_tokens=20)
    target, draft = network(LLAMA, seed=1), network(LLAMA, seed=2)
    plain = finish(
        Decoder(target.session(), BaseDrafter(), verify_tree, sampling=GREEDY, stop=stop), [1, 2, 3]
    ).new
    for rule in ("paper", "safe"):
        request = Request(target.session(), [draft.session()], GREEDY, stop)
        assert (
            finish(CARD.make(request, rollback=0.0, rule=rule, fallback=0.0), [1, 2, 3]).new
            == plain
        )


def test_away_from_its_neutral_value_it_promises_nothing() -> None:
    assert CARD.promise(rollback=0.0) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY


@pytest.mark.parametrize("wanted", [0, 1])
def test_budgets_of_no_and_one_token_are_the_large_models(wanted: int) -> None:
    decoder = finish(make_decoder(stop=StoppingCriteria(max_new_tokens=wanted), fallback=0.0), [0])
    assert len(decoder.new) == decoder.rounds == wanted


def test_an_end_of_text_that_the_small_model_writes_is_read_before_it_counts() -> None:
    stop = StoppingCriteria(eos=frozenset({0}), max_new_tokens=9)
    kept = finish(make_decoder(Fixed(1, 1), Fixed(1, 0), GREEDY, stop), [1])
    assert (kept.new, kept.finished, kept.rounds) == ([0], "eos", 1)
    taken_back = finish(make_decoder(Fixed(0, 1), Fixed(1, 0), GREEDY, stop), [1])
    assert taken_back.new == [1] * 9


@pytest.mark.parametrize(
    "knobs", [{"fallback": 1.1}, {"rollback": -1}, {"rule": "released"}, {"gamma": 0}, {"alpha": 1}]
)
def test_knobs_out_of_range_raise_a_named_error(knobs: dict[str, Any]) -> None:
    with pytest.raises(TinyspecError, match=next(iter(knobs))):
        make_decoder(**knobs)
