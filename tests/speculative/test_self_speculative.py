"""Draft & Verify: its own skipping draft, its exit, its skip sets and the search for them."""

import json
import sys
from fractions import Fraction as F
from pathlib import Path
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
from tinyspec.laws.traps import self_speculative as traps
from tinyspec.lm.forward import ForwardRecord, Plan
from tinyspec.speculative.drafting.self_speculative import (
    DraftExit,
    SkipSetSearch,
    draft_until_unsure,
    format_skip_set,
    parse_skip_set,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import TokenTree

CARD = find_technique("self_speculative")
GREEDY = SamplingParams(temperature=0.0)


def make_decoder(
    seed: int = 1,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    return CARD.make(
        Request(
            Table(seed), sampling=sampling or SamplingParams(), stop=stop or StoppingCriteria()
        ),
        **{"skip": "a1+m1", **knobs},
    )


def finish(decoder: Decoder, prompt: list[int]) -> Decoder:
    decoder.extend(prompt)
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5])
def test_printed_algorithm_is_what_runs(threshold: float) -> None:
    """`draft_until_unsure` gives every draft with the probability that it has in the decoder."""

    def q(text: list[int]) -> list[F]:
        table = Table(1)
        view: Any = table.view(Plan(skip=parse_skip_set("a1+m1", table.model.config.n_layers)))
        table.extend(text[:1])  # the prompt is computed whole, draft tokens with the skip set
        weights = view.score(TokenTree.chain(text[1:])).logits[-1]
        return [F(x) / sum(weights) for x in weights]

    def draft(rng: Exhaustive) -> tuple[int, ...]:
        decoder = make_decoder(1, gamma=3, threshold=threshold)
        decoder.extend((0,))
        return tuple(decoder.drafter.propose([0], 9, SamplingParams(), rng).tokens)

    printed = outcomes_of(lambda *given: tuple(draft_until_unsure(*given)), q, [0], threshold, 3)
    assert printed == Exhaustive.distribution(draft)


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(0.5, top_k=2)], ids=str
)
@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_the_joint_distribution_is_the_whole_models(
    sampling: SamplingParams, threshold: float
) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    assert (
        exact_distribution(lambda: make_decoder(1, sampling, gamma=2, threshold=threshold), 2)
        == plain
    )


@pytest.mark.parametrize("sampling", [SamplingParams(), GREEDY, SamplingParams(0.5)], ids=str)
def test_where_nothing_is_skipped_every_token_is_accepted(sampling: SamplingParams) -> None:
    decoder = make_decoder(
        1, sampling, StoppingCriteria(max_new_tokens=20), skip="none", threshold=0.0, gamma=4
    )
    assert finish(decoder, [0]).rounds == 4


def test_a_token_that_the_draft_was_unsure_of_stays_and_ends_the_draft() -> None:
    for threshold, length in ((0.0, 5), (1.0, 1)):
        decoder = make_decoder(threshold=threshold, gamma=5)
        decoder.extend((0,))
        assert len(decoder.step(Seeded(0)).tree.tokens) == length


def test_how_sure_it_is_does_not_depend_on_the_temperature() -> None:
    """At temperature 0 every token is certain under the sharpened distribution, so the exit reads
    the distribution before.
    """
    lengths = []
    for sampling in (GREEDY, SamplingParams(top_k=1)):
        decoder = make_decoder(1, sampling, threshold=0.5, gamma=5)
        decoder.extend((0,))
        lengths.append(len(decoder.step(Seeded(0)).tree.tokens))
    assert lengths[0] == lengths[1] < 5


def test_the_threshold_rises_where_too_little_passes_and_falls_where_enough_does() -> None:
    assert DraftExit(0.5).update(0, 4, wanted=0.9, gamma=8) == (pytest.approx(0.501), 0.0)
    assert DraftExit(0.5, acceptance=1.0).update(4, 4, wanted=0.9, gamma=8) == (
        pytest.approx(0.499),
        1.0,
    )
    assert DraftExit(0.5, acceptance=1.0).update(8, 8, wanted=0.9, gamma=8) == (
        0.5,
        1.0,
    )  # the cap ended it, not the threshold
    assert DraftExit(0.5, acceptance=0.4).update(0, 0, wanted=0.9, gamma=8) == (
        0.5,
        0.4,
    )  # nothing was drafted


def test_the_threshold_adapts_within_a_request_and_starts_anew_with_the_next() -> None:
    decoder = finish(
        make_decoder(1, GREEDY, StoppingCriteria(max_new_tokens=20), threshold=0.8), [0]
    )
    drafter: Any = decoder.drafter
    assert drafter.exit.threshold != 0.8
    decoder.end()
    assert drafter.exit == DraftExit(0.8)


def test_what_the_draft_ran_below_the_first_skipped_sublayer_is_not_run_again() -> None:
    """On a transformer of L layers: the first of them are shared, and the prompt is read once."""
    model, work = network(LLAMA, seed=1), {}
    n_layers = model.config.n_layers
    for skip in (f"m{n_layers - 1}", "a0"):
        forward_log: list[ForwardRecord] = []
        request = Request(model.session(forward_log), forward_log=forward_log)
        decoder = CARD.make(request, skip=skip, threshold=0.0, gamma=2)
        decoder.extend((1, 2, 3))
        decoder.step(Seeded(0))
        work[skip] = sum(call.row_layers for call in forward_log)
    top, bottom = work.values()
    assert top == n_layers * (3 + 2)  # prompt and two draft tokens: drafting was free
    assert bottom == n_layers * (3 + 2) + 2 * (
        n_layers - 0.5
    )  # nothing is shared above the first sublayer


@pytest.mark.parametrize("skip", ["default", "none", "a0", "a0-1+m1", "m0-1"])
def test_on_a_transformer_it_is_greedy_decoding(skip: str) -> None:
    stop = StoppingCriteria(max_new_tokens=20)
    model = network(LLAMA, seed=1)
    plain = finish(
        Decoder(model.session(), BaseDrafter(), verify_tree, sampling=GREEDY, stop=stop), [1, 2, 3]
    ).new
    request = Request(model.session(), sampling=GREEDY, stop=stop)
    assert finish(CARD.make(request, skip=skip), [1, 2, 3]).new == plain


@pytest.mark.parametrize("wanted", [0, 1])
def test_budgets_of_no_and_one_token_need_no_draft(wanted: int) -> None:
    decoder = finish(make_decoder(stop=StoppingCriteria(max_new_tokens=wanted)), [0])
    assert len(decoder.new) == decoder.rounds == wanted


def test_drafting_stops_at_the_end_of_text() -> None:
    decoder = finish(
        make_decoder(
            stop=StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9), threshold=0.0
        ),
        [0],
    )
    assert len(decoder.new) == 1


# ---------------------------------------------------------------------- skip sets


def test_a_skip_set_is_read_as_it_is_written() -> None:
    sets = [parse_skip_set("default", 12), parse_skip_set("a0+m3+a5-7", 12), frozenset[int]()]
    assert [parse_skip_set(format_skip_set(s), 12) for s in sets] == sets
    assert (
        parse_skip_set("a1, m2", 4)
        == parse_skip_set("a1+m2", 4)
        == parse_skip_set([2, 5], 4)
        == parse_skip_set(("a1", "m2"), 4)
        == {2, 5}
    )
    assert (
        parse_skip_set("none", 4) == parse_skip_set(None, 4) == parse_skip_set((), 4) == frozenset()
    )


def test_the_default_keeps_the_first_two_layers_and_the_last() -> None:
    for n_layers in range(1, 40):
        layers = {sublayer // 2 for sublayer in parse_skip_set("default", n_layers)}
        assert not layers & {0, 1, n_layers - 1}
        assert len(layers) >= (n_layers - 3) / 3


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("a0-2+m0-2", "all 6 sublayers"),
        (range(6), "all 6 sublayers"),
        ("a3", "layers are 0 to 2"),
        ("a2-1", "out of range"),
        ([7], "layers are 0 to 2"),
        ("b1", "no sublayer"),
        ("a1 m", "no sublayer"),
        ([1.5], "no sublayer"),
        ("missing.json", "no such file"),
    ],
)
def test_skip_set_without_a_meaning_raises_a_one_line_error(skip: Any, message: str) -> None:
    with pytest.raises(TinyspecError, match=message) as error:
        make_decoder(skip=skip)
    assert "\n" not in str(error.value)


def test_the_knob_takes_the_file_of_a_search(tmp_path: Path) -> None:
    file = tmp_path / "skip.json"
    for skip, expected in (("a1+m2", {2, 5}), ("none", set())):
        file.write_text(json.dumps({"skip": skip, "n_layers": 3}))
        assert parse_skip_set(str(file), 3) == parse_skip_set(file, 3) == expected
    with pytest.raises(TinyspecError, match="searched on 3 layers, this model has 12"):
        parse_skip_set(str(file), 12)
    for content in ("[]", "{", '{"n_layers": 3}'):
        file.write_text(content)
        with pytest.raises(TinyspecError, match="no result of `tinyspec bench skip`"):
            parse_skip_set(str(file), 3)


@pytest.mark.parametrize(
    "knobs", [{"gamma": 0}, {"threshold": 1.1}, {"wanted": -0.1}, {"layers": 3}]
)
def test_knobs_out_of_range_raise_a_named_error(knobs: dict[str, float]) -> None:
    with pytest.raises(TinyspecError, match=next(iter(knobs))):
        make_decoder(**knobs)


# ---------------------------------------------------------------------- the search


def test_a_search_never_asks_twice_nor_for_everything_and_repeats_itself() -> None:
    def suggest_sets(stop_at: int | None) -> list[Any]:
        search, found = SkipSetSearch(2, seed=3), list[Any]()
        search.tell(frozenset(), 1.0)
        for number in range(6):
            if number == stop_at:  # interrupted: another object receives the same
                old, search = search, SkipSetSearch(2, seed=3)
                for skip, speeds in old.told.items():
                    search.tell(skip, speeds[0], old.points[skip])
            found.append(search.suggest())
            search.tell(found[-1], 1.0 + 0.1 * len(found[-1]))
        return found

    whole = suggest_sets(None)
    assert whole == suggest_sets(3)
    assert len(set(whole)) == 6 and frozenset(range(4)) not in whole and frozenset() not in whole


def test_the_optimiser_receives_the_point_that_it_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the corner that the point is rounded to; both stand for the same set."""
    search, registered = SkipSetSearch(3, seed=1), list[Any]()
    whole = search.library.BayesianOptimization

    def spy(*how: Any, **more: Any) -> Any:
        optimizer = whole(*how, **more)
        register = optimizer.register
        registered.clear()

        def note(point: Any, speed: float) -> None:
            registered.append((list(point), speed))
            register(point, speed)

        optimizer.register = note
        return optimizer

    monkeypatch.setattr(search.library, "BayesianOptimization", spy)
    search.tell(frozenset({2}), 1.0)
    for number in range(8):
        search.tell(search.suggest(), 1.0 + 0.1 * number)
    search.suggest()
    tried = [(search.points[skip], speed) for skip, (speed,) in search.told.items()]
    assert registered == tried and registered[0] == ([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], 1.0)
    for skip, point in search.points.items():
        assert {bit for bit in range(6) if point[bit] > 0.5} == skip
    assert any(0 < x < 1 for point, _ in tried for x in point)


def test_a_search_of_a_model_of_one_layer_has_three_sets() -> None:
    search = SkipSetSearch(1)
    for number in range(4):
        skip = search.suggest()
        search.tell(skip, float(len(skip)))
        assert len(search.told) == min(number + 1, 3)


def test_a_set_that_is_measured_again_counts_by_its_mean() -> None:
    search = SkipSetSearch(2)
    for skip, speed in (({0}, 3.0), ({1}, 2.0), ({0}, 0.5)):
        search.tell(frozenset(skip), speed)
    assert search.best == {1}


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    with pytest.raises(TinyspecError, match=r"tinyspec\[search\]"):
        SkipSetSearch(2)
