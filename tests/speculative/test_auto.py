"""auto: the target's distribution under every policy, and a policy that follows measurements."""

import random
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm import small
from tests.speculative import batches
from tests.table import Table
from tests.zoo import tiny_zoo
from tinyspec import generate, load
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict, verify_tree
from tinyspec.laws.exact.joint import Reference
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.stage import choose_every_way
from tinyspec.laws.traps.auto import POEM, Ticking, Watch, lead_astray, time_request
from tinyspec.lm.forward import Scores
from tinyspec.speculative import batched
from tinyspec.speculative.auto import (
    INITIAL_TRUST,
    INITIAL_TRUST_AFTER_SUBSTITUTION,
    LazyDrafter,
    LookupDrafter,
    best_draft_size,
    shared_cost_model,
)
from tinyspec.speculative.goodput import (
    DRAFT_MODEL,
    LOOKUP,
    MARGIN,
    PLAIN,
    Candidate,
    Choice,
    Goodput,
    LearntCosts,
)
from tinyspec.speculative.lookup import OUTPUTS
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("auto")
GREEDY = SamplingParams(temperature=0.0)
REFERENCES = [[0, 1, 1, 0, 0, 1, 0]]
NOTHING_SEEN = Scores((), (), ())  # type: ignore[arg-type]
Choose = Callable[[int, Any], int]


def request(
    choose: Choose | None, draft: bool, sampling: SamplingParams = GREEDY, tokens: int = 4
) -> Request:
    """A table model of two tokens."""
    drafts = [Table(8, 2, zeros=False)] if draft else []
    return Request(
        Table(3, 2, zeros=False),
        drafts,
        sampling,
        StoppingCriteria(max_new_tokens=tokens),
        REFERENCES,
        choose=choose,
    )


def every_policy(
    make: Callable[[Choose], Decoder], reference: Reference, tokens: int, prompt: tuple[int, ...]
) -> int:
    """Whatever has happened and whatever is chosen then, a round followed by plain decoding has the
    reference's distribution.

    By induction from the last round backwards, every policy that looks at the past, at time, or at
    its own random numbers then has the reference's distribution: the choice is a branch, and
    distributions are compared within each branch, not on average over them. The past is all that
    could be seen of it: choices, trees, rejections and texts.
    """
    distributions: dict[Any, dict[tuple[int, ...], Any]] = {}
    for rounds in range(1, tokens + 1):

        def play(rng: Exhaustive, rounds: int = rounds) -> Any:
            choices: list[int] = []

            def choose(ways: int, dice: Any) -> int:
                choices.append(choose_every_way(ways, dice))
                return choices[-1]

            decoder, past = make(choose), []
            decoder.extend(prompt)
            for _ in range(rounds):
                if decoder.finished:
                    return None
                round = decoder.step(rng)
                past.append((tuple(choices), tuple(round.tree.tokens), round.verdict, round.tokens))
            return tuple(past[:-1]), tuple(choices), past[-1][-1]

        for outcome, probability in Exhaustive.walk(play):
            if outcome is not None:
                past, choices, output = outcome
                distribution = distributions.setdefault((past, choices), {})
                distribution[output] = distribution.get(output, 0) + probability
    for (past, _), distribution in distributions.items():
        before = (*prompt, *(token for entry in past for token in entry[-1]))
        left = len(prompt) + tokens - len(before)
        mass = sum(distribution.values())
        whole: dict[tuple[int, ...], Any] = {}
        for output, probability in distribution.items():
            for rest, more in reference.distribution(
                left - len(output), (*before, *output)
            ).items():
                whole[(*output, *rest)] = whole.get((*output, *rest), 0) + probability / mass * more
        assert whole == reference.distribution(left, before)
    return len(distributions)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.5)], ids=str)
def test_the_joint_distribution_holds_under_every_policy(
    draft: bool, sampling: SamplingParams
) -> None:
    tokens = 3
    reference = Reference(Table(3, 2, zeros=False).row, sampling)
    seen = every_policy(
        lambda choose: CARD.make(request(choose, draft, sampling, tokens), k=2, gamma=2),
        reference,
        tokens,
        (0, 1),
    )
    assert seen > (50 if draft else 15)  # pairs of a past and a choice
    assert isinstance(next(iter(reference.distribution(1, (0, 1)).values())), Fraction)


def test_a_choice_that_sees_the_token_being_drawn_is_detected() -> None:
    """The proof is not blind: keep a draft token only if it is 0, under its declared distribution:
    the joint distribution is another."""

    class Peeking(BaseDrafter):
        def __init__(self, draft: Any, choose: Choose):
            self.draft, self.choose = draft, choose

        def propose(
            self, context: Any, max_draft_depth: int, sampling: SamplingParams, rng: Any
        ) -> Any:
            tree = self.draft.propose(context, min(max_draft_depth, 1), sampling, rng)
            return type(tree)() if tree.tokens and tree.tokens[0] and self.choose(2, rng) else tree

        def observe(self, round: Any) -> None:
            self.draft.observe(round)

        def extend(self, tokens: Any, scores: Any) -> None:
            self.draft.extend(tokens, scores)

    def make(choose: Choose) -> Decoder:
        wanted = request(choose, True, SamplingParams(), 2)
        drafter: Any = CARD.make(wanted, k=2, gamma=2).drafter
        return wanted.decoder(Peeking(drafter.draft, choose), verify_tree)

    with pytest.raises(AssertionError):
        every_policy(make, Reference(Table(3, 2, zeros=False).row, SamplingParams()), 2, (0, 1))


# ------------------------------------------------------------------ the policy


def test_drafts_are_long_where_positions_are_free_and_absent_where_one_costs_a_token() -> None:
    free, decoder = time_request(CARD.make, POEM, [POEM], lambda rows: 1.0)
    assert decoder.rounds == free <= 10
    linear, decoder = time_request(CARD.make, POEM, [POEM], lambda rows: float(rows))
    assert linear <= 1.01 * len(POEM)
    assert decoder.rounds >= 0.9 * (len(POEM) - 2)
    assert decoder.drafter.option == PLAIN


def test_between_the_two_the_size_is_the_knee_of_the_curve() -> None:
    """Up to eight positions are free, more take three times as long: seven draft tokens."""
    _, decoder = time_request(CARD.make, POEM, [POEM], lambda rows: 1.0 if rows <= 8 else 3.0)
    curve = decoder.drafter.policy.curve
    assert max(curve.sizes, key=lambda size: (1 + size) / curve.costs()[curve.index_of[size]]) == 7
    assert curve.seconds[curve.index_of[7]] == 1.0


def test_where_acceptance_collapses_drafting_stops() -> None:
    _, decoder = time_request(CARD.make, POEM, lead_astray(48), lambda rows: 0.9 + 0.1 * rows)
    assert decoder.drafter.texts.trust.first[8] < 0.2
    assert decoder.drafter.option == PLAIN


def test_trust_comes_back_without_running_a_draft_token() -> None:
    """Draft tokens that were not run are compared with what came."""
    watch = Watch()
    wanted = Request(
        Ticking(Reciter(POEM), watch, float),
        (),
        GREEDY,
        StoppingCriteria(max_new_tokens=60),
        [POEM],
        clock=watch,
    )
    decoder = CARD.make(wanted)
    decoder.extend(POEM[:2])
    trust, curve = decoder.drafter.texts.trust, decoder.drafter.policy.curve
    trust.first[8] = 0.0
    for size in curve.sizes:
        curve.record_round(size, 1.0 + size)
    while not decoder.finished:
        assert not decoder.step(Seeded(decoder.rounds)).tree.tokens  # a position costs a pass
    assert trust.first[8] > 0.5


def test_nothing_is_drafted_before_plain_rounds_were_timed() -> None:
    policy = Goodput(LearntCosts(16), Watch())
    offers = [Candidate(LOOKUP, [0.9**n for n in range(1, 17)])]
    assert policy.choose(offers) == PLAIN
    policy.curve.record_round(0, 1.0)
    assert policy.choose(offers) == PLAIN
    policy.curve.record_round(0, 1.0)
    assert policy.choose(offers) == Choice(
        LOOKUP, 2
    )  # at most three times as wide as any round before it


def test_most_likely_tokens_of_a_tree_are_run() -> None:
    """After 1 came 2 twice and 3 once, after 2 always 4: drafted are 2, 4, and then 3."""
    texts = LookupDrafter(
        Request(Table(5), references=[[0, 1, 2, 4], [0, 1, 2, 4], [0, 1, 3]]), 16, False
    )
    no_scores: Any = None
    texts.extend([0, 1], no_scores)
    chances = texts.rank_lookups([0, 1], 16)
    tree = texts.best_tree(len(chances))
    assert tree.tokens[:3] == [2, 4, 3] and tree.parents[:3] == [ROOT, 0, ROOT]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(2 * chances[2])
    assert all(parent < node for node, parent in enumerate(tree.parents))
    texts.trust.further = dict.fromkeys(
        texts.trust.further, 0.3
    )  # what lately came second seldom held
    chances = texts.rank_lookups([0, 1], 16)
    tree = texts.best_tree(len(chances))
    assert tree.tokens[:3] == [2, 3, 4] and tree.parents[:3] == [ROOT, ROOT, 0]
    assert chances == sorted(chances, reverse=True)


@pytest.mark.parametrize(("takes", "share"), [(0.01, 1.0), (1.0, 0.25)])
def test_where_a_look_takes_longer_than_it_gains_only_every_fourth_round_is_looked_at(
    takes: float, share: float
) -> None:
    """Every copy holds, and a position costs 0.9 of a token: four draft tokens gain 0.4,
    less than the second kind of lookup takes."""
    watch, poem = Watch(), list(range(1, 299))
    target = Ticking(Reciter(poem), watch, lambda rows: 0.1 + 0.9 * rows)
    decoder = CARD.make(
        Request(target, (), GREEDY, StoppingCriteria(max_new_tokens=290), [poem], clock=watch), k=4
    )
    texts, looks = decoder.drafter.texts, list[int]()
    looked = texts.look_up_drafts

    def look(*asked: Any) -> Any:
        watch.now += takes
        looks.append(decoder.rounds)
        return looked(*asked)

    texts.look_up_drafts = look
    decoder.extend(poem[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    later = [at for at in looks if at >= 16]
    assert len(later) == pytest.approx(share * (decoder.rounds - 16), abs=1)


@given(st.lists(st.integers(0, 2), min_size=8, max_size=40), st.floats(0, 1), st.integers(1, 16))
def test_no_token_is_likelier_than_its_parent(output: list[int], further: float, size: int) -> None:
    texts = LookupDrafter(Request(Table(3), references=[output, output[::-1]]), 16, False)
    no_scores: Any = None
    texts.extend(output[:5], no_scores)
    texts.trust.further = dict.fromkeys(texts.trust.further, further)
    chances = texts.rank_lookups(output[:5], 16)
    of = dict(zip(texts.order, chances, strict=True))
    assert all(of[node] <= of.get(parent, 1.0) for node, parent in enumerate(texts.trust.parents))
    tree = texts.best_tree(min(size, len(chances)))
    assert all(parent < node for node, parent in enumerate(tree.parents))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.slow
def test_copy_continues_after_a_substituted_word(skip: bool) -> None:
    """Every eighth token of the text is another than the source's: no suffix of the text is known
    after it.
    """
    source = list(range(1, 90))
    poem = [500 + token if token % 8 == 0 else token for token in source]
    watch = Watch()
    wanted = Request(
        Ticking(Reciter(poem), watch, lambda rows: 1.0),
        (),
        GREEDY,
        StoppingCriteria(max_new_tokens=80),
        [source],
        clock=watch,
    )
    decoder = CARD.make(wanted)
    texts = decoder.drafter.texts
    if not skip:
        looks = texts.look_up_drafts
        texts.look_up_drafts = lambda *asked: looks(*asked)[:1]
    decoder.extend(poem[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert decoder.new == poem[2:82]
    assert decoder.rounds <= 16 if skip else decoder.rounds >= 20  # a round a word, or two


def test_substitution_leaves_a_single_draft_token_alone() -> None:
    texts = LookupDrafter(Request(Table(9), references=[[0, 1, 2, 3, 4]]), 16, False)
    no_scores: Any = None
    texts.extend([0, 1, 8], no_scores)
    texts.rank_lookups([0, 1, 8], 1)
    assert texts.best_tree(1).tokens == [3]


def test_each_lookup_has_its_own_trust() -> None:
    """After [0, 1] the references have 2; if 1 replaced 3, they say 4. One tree has both, and
    failures are of one look.
    """
    texts = LookupDrafter(Request(Table(9), references=[[0, 1, 2], [0, 3, 4]]), 16, False)
    no_scores: Any = None
    texts.extend([0, 1], no_scores)
    before = dict(zip(texts.rank_lookups([0, 1], 16), texts.best_tree(2).tokens, strict=True))
    assert list(before.values()) == [2, 4]
    texts.observe(Round(TokenTree(), no_scores, Verdict((), 4), (4,), ()))
    assert (
        texts.trusts[0].first[2] < INITIAL_TRUST[2]
        and texts.trusts[1].first[1] > INITIAL_TRUST_AFTER_SUBSTITUTION[1]
    )


def test_where_looks_are_dear_there_is_only_the_first() -> None:
    texts = LookupDrafter(Request(Table(9), references=[[0, 1, 2]]), 16, False)
    texts.forest.append(texts.forest.open(OUTPUTS), [0, 1, 3])
    no_scores: Any = None
    texts.extend([0, 1], no_scores)
    assert len(texts.look_up_drafts([0, 1], 16, True)) == 2
    assert texts.look_up_drafts([0, 1], 16, False) == [texts.look_up([0, 1], 16)]
    watch = Watch()
    decoder = CARD.make(
        Request(
            Ticking(Reciter(POEM), watch, lambda rows: 1.0),
            (),
            GREEDY,
            StoppingCriteria(max_new_tokens=40),
            [POEM],
            clock=watch,
        )
    )
    texts, boths = decoder.drafter.texts, list[bool]()
    looks = texts.look_up_drafts

    def dear(context: Any, max_draft_depth: int, both: bool) -> Any:
        watch.now += 0.05  # of a pass
        boths.append(both)
        return looks(context, max_draft_depth, both)

    texts.look_up_drafts = dear
    decoder.extend(POEM[:2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert boths[0] and not any(boths[6:])  # the time of a look is an average


def test_a_round_without_a_lookup_changes_no_trust() -> None:
    texts = LookupDrafter(Request(Table(9), references=[[0, 1, 2], [0, 3, 4]]), 16, False)
    no_scores: Any = None
    texts.extend([0, 1], no_scores)
    texts.rank_lookups([0, 1], 16)
    assert all(trust.tokens for trust in texts.trusts)  # each look has something to be judged by
    texts.trust.failed_lookups = 1 << 10
    assert texts.should_skip_round(16)
    before = [dict(trust.first) for trust in texts.trusts]
    texts.observe(Round(TokenTree(), no_scores, Verdict((), 7), (7,), ()))
    assert [trust.first for trust in texts.trusts] == before


def test_references_serve_the_next_text_too() -> None:
    texts = LookupDrafter(Request(Table(5), references=[[0, 1, 2, 4]]), 16, False)
    no_scores: Any = None
    for _ in range(2):
        texts.extend([0, 1], no_scores)
        texts.rank_lookups([0, 1], 16)
        assert texts.best_tree(2).tokens == [2, 4]
        texts.end()


def test_the_size_with_the_most_expected_tokens_an_expected_second_is_chosen() -> None:
    curve = LearntCosts(16)
    for _ in range(2):
        curve.record_round(0, 1.0)
    curve.widest = 16
    for slope, best in ((0.05, 3), (0.15, 2), (0.6, 0)):
        for size in curve.sizes[1:]:
            curve.seconds[curve.index_of[size]] = 1.0 + slope * size
        curve._costs = None
        chances = [0.5**n for n in range(1, 17)]
        wanted = max(
            curve.sizes, key=lambda n: (1 + sum(chances[:n])) / curve.costs()[curve.index_of[n]]
        )
        assert Goodput(curve, Watch()).choose([Candidate(LOOKUP, chances)]).size == wanted == best


# ------------------------------------------------------------------ with a draft model


def drafted(step: float, right: bool, tokens: int = 150) -> tuple[float, Any]:
    """Decode a text with a draft model, and return its time and its decoder. A forward pass
    takes 1, each further position 0.05, and a step of the draft `step`.
    """
    watch = Watch()

    def target(context: Any) -> list[int]:
        return [int(token == hash(tuple(context)) % 5) for token in range(5)]

    models = [TableModel(vocabulary=5, rows=target, positions=400)]
    models.append(
        models[0]
        if right
        else TableModel(vocabulary=5, rows=lambda context: [1] * 5, positions=400)
    )
    session = Ticking(models[0], watch, lambda rows: 0.95 + 0.05 * rows)
    draft = Ticking(models[1], watch, lambda rows: step)
    decoder = CARD.make(
        Request(
            session, [draft], SamplingParams(), StoppingCriteria(max_new_tokens=tokens), clock=watch
        ),
        k=1,
    )
    decoder.extend([0])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return watch.now, decoder


def test_a_draft_model_is_switched_on_where_its_measured_goodput_beats_plain_and_nowhere_else() -> (
    None
):
    for step, right in ((0.05, True), (0.3, True)):
        seconds, decoder = drafted(step, right)
        assert seconds < 0.85 * 150
        assert decoder.drafter.option.source == DRAFT_MODEL
    for step, right in ((2.0, True), (0.2, False)):
        seconds, _ = drafted(step, right)
        assert seconds < 1.04 * 150


def test_an_idle_draft_model_runs_nothing() -> None:
    wanted = Request(
        Table(3),
        [draft := Table(4)],
        GREEDY,
        StoppingCriteria(max_new_tokens=9),
        choose=lambda ways, rng: 0,
    )
    decoder = CARD.make(wanted)
    decoder.extend([0, 1, 2])
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    assert not draft.forward_log


@given(
    st.lists(
        st.tuples(st.sampled_from(["tell", "say", "draft", "back", "end"]), st.integers(0, 6)),
        max_size=24,
    )
)
def test_lazy_drafter_drafts_what_an_eager_one_does(
    deeds: list[tuple[str, int]],
) -> None:
    """Its distributions depend on the whole text: with one token lost, or one too many, the draft
    tokens differ.
    """
    late, soon, text = (
        LazyDrafter(Table(4), 2, frozenset(), 12),
        ModelDrafter(Table(4), 2, frozenset(), 12),
        [0],
    )
    for each in (late, soon):
        each.extend(text, NOTHING_SEEN)
    for deed, n in deeds:
        if deed == "draft":
            trees = [each.propose(text, n, GREEDY, Seeded(0)) for each in (late, soon)]
            assert trees[0].tokens == trees[1].tokens
            continue
        if deed == "end":
            text = [n % 3]
            for each in (late, soon):
                each.end()
                each.extend(text, NOTHING_SEEN)
        elif deed == "back":
            text = text[: 1 + n]
            for each in (late, soon):
                each.rewind(len(text))
        else:
            output = tuple((n + i) % 3 for i in range(n))
            text = [*text, *output]
            for each in (late, soon):
                if deed == "tell":
                    each.extend(output, NOTHING_SEEN)
                else:
                    each.observe(Round(TokenTree(), NOTHING_SEEN, Verdict((), 0), output, ()))
        assert (late.length, late.left_behind) == (soon.length, soon.left_behind)


# ------------------------------------------------------------------ requests


def test_under_a_clock_of_its_own_a_request_is_deterministic() -> None:
    one, two = (
        time_request(CARD.make, POEM, lead_astray(48), lambda rows: 0.9 + 0.1 * rows)[1]
        for _ in range(2)
    )
    assert one.new == two.new == POEM[2:]
    assert one.rounds == two.rounds
    assert one.drafter.texts.trust.first == two.drafter.texts.trust.first


def test_times_and_outputs_outlive_a_request_and_trust_does_not() -> None:
    model, watch = Table(3).model, Watch()
    wanted = Request(model.session(), clock=watch)
    assert shared_cost_model(wanted, 16) is shared_cost_model(
        Request(model.session(), clock=watch), 16
    )
    assert shared_cost_model(wanted, 16) is not shared_cost_model(
        Request(Table(3), clock=watch), 16
    )
    assert shared_cost_model(Request(model.session()), 16) is not shared_cost_model(
        Request(model.session()), 16
    )
    _, decoder = time_request(CARD.make, POEM, [POEM], lambda rows: 1.0)
    trust = decoder.drafter.texts.trust
    before = trust.first[8]
    decoder.end()
    assert trust.first[8] < before
    assert decoder.drafter.policy.curve.seconds[0] == 1.0


def test_one_disturbed_round_does_not_switch_drafting_off_for_all_requests_to_come() -> None:
    """The first round that drafts takes nine times as long as it should. The time for trials is
    saved up over requests.
    """
    watch, model, slow, calls = Watch(), Reciter(POEM), [9.0], list[int]()

    def seconds(rows: int) -> float:
        return (0.9 + 0.1 * rows) * (slow.pop() if rows > 1 and slow else 1.0)

    for _ in range(9):
        stop = StoppingCriteria(max_new_tokens=len(POEM) - 2)
        decoder = CARD.make(
            Request(Ticking(model, watch, seconds), (), GREEDY, stop, [POEM], clock=watch),
            remember=False,
        )
        decoder.extend(POEM[:2])
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        calls.append(decoder.rounds)
    assert calls[0] > 60 and calls[-1] < 30


def test_a_size_never_run_takes_the_slope_of_the_next_smaller_or_else_the_next_larger() -> None:
    curve = LearntCosts(9)
    assert curve.costs() == pytest.approx([1 + 0.1 * size for size in curve.sizes])
    for size, seconds in ((0, 10.0), (2, 11.0), (5, 15.0)):
        curve.seconds[curve.index_of[size]] = seconds
    curve._costs = None
    assert dict(zip(curve.sizes, curve.costs(), strict=True)) == pytest.approx(
        {0: 10, 1: 10.5, 2: 11, 3: 11.5, 4: 12, 5: 15, 7: 17, 9: 19}
    )


def test_of_a_machine_that_slows_down_the_shape_stays_as_it_was() -> None:
    """Twice as long for every size alike: what the sizes are to one another is known already."""
    curve = LearntCosts(4)
    for size in (*[0] * 4, *[1, 2, 3, 4] * 30):
        curve.record_round(size, 1.0 + 0.1 * size)
    before = curve.costs()
    for _ in range(20):
        curve.record_round(2, 2.4)
    after = curve.costs()
    assert [now / then for now, then in zip(after, before, strict=True)] == pytest.approx(
        [2.0] * 5, rel=0.12
    )


def test_noise_is_averaged_out_of_the_shape() -> None:
    """Rounds take up to a quarter more or less: what a size costs against plain is wrong by less
    than 4.5 % on average.
    """
    curve, noise, wrong = LearntCosts(16), random.Random(0), list[float]()
    for sweep in range(100):
        for size in curve.sizes:
            curve.record_round(size, (1.0 + 0.05 * size) * noise.uniform(0.75, 1.25))
        base, *costs = curve.costs()
        if sweep >= 20:
            wrong += [
                abs(cost / base / (1.0 + 0.05 * size) - 1)
                for size, cost in zip(curve.sizes[1:], costs, strict=True)
            ]
    assert sum(wrong) / len(wrong) < 0.045


def again(**knobs: Any) -> tuple[int, int]:
    """Rounds of a request, and of the same request made once more of the same model."""
    watch, model, rounds = Watch(), Reciter(POEM), list[int]()
    for _ in range(2):
        wanted = Request(
            Ticking(model, watch, lambda rows: 1.0),
            (),
            GREEDY,
            StoppingCriteria(max_new_tokens=len(POEM) - 2),
            clock=watch,
        )
        decoder = CARD.make(wanted, **knobs)
        decoder.extend(POEM[:2])
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        assert decoder.new == POEM[2:]
        rounds.append(decoder.rounds)
        decoder.end()
    return rounds[0], rounds[1]


def test_outputs_are_drafts_for_the_next_request_if_remembered() -> None:
    first, second = again()
    assert first == len(POEM) - 2 and second <= first / 6
    assert again(remember=False) == (first, first)


def test_greedy_text_is_plain_decodings_with_and_without_a_draft_and_the_statistics_add_up(
    tmp_path: Any,
) -> None:
    zoo = tiny_zoo(tmp_path)
    big, other = (
        load(zoo.big, dtype="float64"),
        load(zoo.other, dtype="float64"),
    )  # the card of one names a draft
    for model in (big, other):
        plain = generate(model, "the cat sat on the mat, the cat", max_new_tokens=50)
        auto: Any = generate(
            model, "the cat sat on the mat, the cat", method="auto", max_new_tokens=50
        )
        assert auto.tokens == plain.tokens  # type: ignore[union-attr]
        assert auto.stats.emitted == 50
        assert (
            auto.stats.target_calls + auto.stats.accepted >= 50
        )  # a round that was cut has no token of its own
        assert auto.stats.accepted <= auto.stats.drafted
    batch: Any = generate(big, ["the cat", "the dog sat"], method="auto", max_new_tokens=20)
    assert [g.tokens for g in batch] == [
        generate(big, prompt, max_new_tokens=20).tokens  # type: ignore[union-attr]
        for prompt in ("the cat", "the dog sat")
    ]


@given(
    st.lists(st.floats(0, 1), max_size=5).map(lambda x: sorted(x, reverse=True)),
    st.lists(st.floats(0.1, 3.0), min_size=6, max_size=6),
)
def test_printed_algorithm_is_what_runs(chances: list[float], costs: list[float]) -> None:
    """With every size measured and no trial due, `Goodput` chooses `best_draft_size`."""
    curve = LearntCosts(5)
    curve.seconds, curve.plain_rounds, curve.widest, curve.rounds = list(costs), 9, 5, 1
    offers = [Candidate(LOOKUP, chances)] if chances else []
    chosen = Goodput(curve, Watch()).choose(offers).size
    known = curve.costs()
    sizes = (chosen, best_draft_size(chances, known, MARGIN))
    one, other = ((1 + sum(chances[:size])) / known[size] for size in sizes)
    assert sizes[0] == sizes[1] or one == pytest.approx(other)


# ---------------------------------------------------------------------- in a batch


@pytest.mark.parametrize("n_requests", [1, 2, 4, 8])
def test_drafts_shrink_as_a_batch_grows(n_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pass over up to 8 rows takes 1 s, and each row beyond one more second, all requests
    together have at most 8 rows. Every draft is right, so there is no other reason to stop."""
    monkeypatch.setattr(
        batched, "find_row_seconds", lambda model, clock: {1: 1.0, 8: 1.01, 64: 57.0}
    )
    [plain], _ = batches.decode_batch("autoregressive", batches.PROMPTS[:1], n=24)
    text = [*batches.PROMPTS[0], *(token for round in plain for token in round.tokens)]
    rounds, log = batches.decode_batch(
        "auto",
        batches.PROMPTS[:1] * n_requests,
        n=24,
        references=[text] * 3,
        batch_clock=time.perf_counter,
        remember=False,
    )
    assert batches.texts_of(rounds) == [text[len(batches.PROMPTS[0]) :]] * n_requests
    widest = max(sum(one.rows) for one in log if one.model == "target" and not any(one.prefill))
    assert widest <= 8
    assert widest > n_requests or n_requests == 8  # it drafts wherever there is room


def test_passes_are_measured_once_for_a_model() -> None:
    calls = list[int]()

    def clock() -> float:
        calls.append(1)
        return float(len(calls))

    measured = small.model(seed=7)
    first = batched.find_row_seconds(measured, clock)
    assert list(first) == list(batched.ROWS) and set(first.values()) == {1.0}
    n_calls = 2 * batched.REPEATS * len(batched.ROWS)
    assert batched.find_row_seconds(measured, clock) is first and len(calls) == n_calls
