"""Figures: ratios within turns, medians, one meaning each; recomputed here the slow way."""

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.fakes import Hand, arms, jobs, settings
from tinyspec.bench import measure, tally
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.plan import PLAIN, ArmSpec, read_arms
from tinyspec.errors import TinyspecError


def sample(
    arm: str, decode: float, task: str = "qa", prompt: str = "0", round: int = 0, **more: object
) -> Sample:
    blank = Sample(task, prompt, 0, arm, round, 1.0, decode, 10, 10, 5, 0, 5, 5, 0, 0, 20.0, 10)
    return blank._replace(**more)  # type: ignore[arg-type]


def test_a_ratio_is_taken_within_a_turn() -> None:
    """In the second round both arms take thrice as long, and the ratio stays."""
    both = [
        sample(PLAIN, 2.0),
        sample("x", 1.0),
        sample(PLAIN, 6.0, round=1),
        sample("x", 3.0, round=1),
    ]
    assert tally.paired_ratios(both, PLAIN, "x") == {"qa/0/0": 2.0}


def test_a_ratio_is_the_median_of_ratios_and_one_outlier_does_not_move_it() -> None:
    plain = [sample(PLAIN, 2.0, round=r) for r in range(5)]
    fast = [sample("x", s, round=r) for r, s in enumerate([1.0, 1.0, 1.0, 1.0, 99.0])]
    assert tally.paired_ratios(plain + fast, PLAIN, "x") == {"qa/0/0": 2.0}


def test_only_rounds_that_both_did_are_compared() -> None:
    ragged = [sample(PLAIN, 2.0), sample("x", 1.0), sample("x", 100.0, round=1)]
    assert tally.paired_ratios(ragged, PLAIN, "x") == {"qa/0/0": 2.0}
    assert tally.paired_ratios([sample("x", 1.0)], PLAIN, "x") == {}


def test_a_slow_down_is_below_one() -> None:
    assert tally.paired_ratios([sample(PLAIN, 1.0), sample("x", 2.0)], PLAIN, "x")["qa/0/0"] == 0.5


def test_the_request_has_the_prompt_in_it_and_decode_has_not() -> None:
    pair = [sample(PLAIN, 9.0), sample("x", 4.0)]
    assert tally.paired_ratios(pair, PLAIN, "x")["qa/0/0"] == 9 / 4
    assert (
        tally.paired_ratios(pair, PLAIN, "x", tally.seconds_per_token_with_prompt)["qa/0/0"]
        == 10 / 5
    )


def test_a_task_counts_once_however_many_prompts_it_has() -> None:
    many = [sample(a, s, prompt=str(p)) for p in range(9) for a, s in ((PLAIN, 1.0), ("x", 1.0))]
    few = [sample(PLAIN, 3.0, task="edits"), sample("x", 1.0, task="edits")]
    found = tally.summarize_samples(many + few, [PLAIN, "x"])["overall"]["x"]
    assert found["mean"] == pytest.approx(2.0)
    assert found["worst"] == ["qa", pytest.approx(1.0)]


samples_of_arms = st.lists(st.floats(0.1, 10), min_size=4, max_size=4)


@given(
    st.lists(st.tuples(samples_of_arms, samples_of_arms), min_size=1, max_size=5),
    st.floats(0.5, 20),
)
def test_speedups_do_not_depend_on_the_unit_of_time_and_invert(
    table: list[tuple[list[float], list[float]]], unit: float
) -> None:
    def figures(scale: float, base: str, arm: str) -> dict[str, float]:
        made = [
            sample(a, scale * s, prompt=str(p), round=r)
            for p, (one, two) in enumerate(table)
            for a, seconds in ((PLAIN, one), ("x", two))
            for r, s in enumerate(seconds)
        ]
        return tally.paired_ratios(made, base, arm)

    assert figures(unit, PLAIN, "x") == pytest.approx(figures(1.0, PLAIN, "x"))
    for prompt, (one, two) in enumerate(table):
        slow = median(a / b for a, b in zip(one, two, strict=True))
        assert figures(1.0, PLAIN, "x")[f"qa/{prompt}/0"] == pytest.approx(slow)


def test_against_itself_every_arm_is_one() -> None:
    hand = Hand()
    book = SampleBook(settings())
    book.references = {job.key: list(range(8)) for job in jobs()}
    measure.run_turns(book, jobs(), arms(hand), hand)
    found = tally.summarize_samples(book.samples, [PLAIN, "llma", "transformers"])
    for task in found["tasks"].values():
        assert set(task[PLAIN]["speedup"].values()) == {1.0}
    assert found["against"]["transformers"]["transformers"]["mean"] == 1.0


# ---------------------------------------------------------------------- counts (B41)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=6))
def test_tau_times_target_passes_is_tokens_and_emitted_is_accepted_plus_rounds(
    requests: list[tuple[int, int]],
) -> None:
    made = []
    for i, (rounds, accepted) in enumerate(requests):
        tokens = rounds + accepted
        made.append(
            sample(
                "x",
                1.0,
                prompt=str(i),
                tokens=tokens,
                timed=tokens,
                calls=rounds,
                accepted=accepted,
                nodes=2 * tokens,
            )
        )
    counts = tally.count_samples(made)
    tokens, calls = sum(s.tokens for s in made), sum(s.calls for s in made)
    assert counts["tau"] is not None
    assert counts["calls_per_token"] is not None
    assert counts["tau"] * calls == pytest.approx(tokens)
    assert counts["tau"] * counts["calls_per_token"] == pytest.approx(1)
    assert tokens == sum(s.accepted or 0 for s in made) + calls  # no silent round here
    assert counts["acceptance"] == pytest.approx(
        sum(s.accepted or 0 for s in made) / sum(s.nodes or 0 for s in made)
    )


def test_tau_is_of_sums_and_not_a_mean_of_ratios() -> None:
    long, short = (
        sample("x", 1.0, tokens=90, calls=30),
        sample("x", 1.0, prompt="1", tokens=1, calls=1),
    )
    assert tally.count_samples([long, short])["tau"] == 91 / 31


def test_a_count_that_an_arm_cannot_tell_is_no_figure() -> None:
    counts = tally.count_samples([sample("x", 1.0, nodes=None, accepted=None, row_layers=None)])
    assert counts["nodes_per_token"] is counts["acceptance"] is counts["layers_per_token"] is None
    assert counts["tau"] == 2.0


def test_identical_means_every_token_in_every_round() -> None:
    rounds = [
        sample("x", 1.0),
        sample("x", 1.0, round=1),
        sample("x", 1.0, prompt="1"),
        sample("x", 1.0, prompt="1", round=1),
    ]
    plain = [s._replace(arm=PLAIN) for s in rounds]
    assert tally.summarize_task(plain + rounds, "x")["identical"] == 2
    parted = [*rounds[:3], rounds[3]._replace(same=9)]
    assert tally.summarize_task(plain + parted, "x")["identical"] == 1
    assert tally.summarize_task(plain + parted, "x")["tokens_before_a_difference"] == 39 / 40
    sampled = [s._replace(same=None) for s in rounds]
    assert tally.summarize_task(plain + sampled, "x")["identical"] is None
    assert tally.summarize_samples(plain + sampled, ["x"])["overall"]["x"]["identical"] is None


def test_the_best_setting_of_a_peer_is_found_for_every_task() -> None:
    slow, fast = "transformers:lookup=3", "transformers:lookup=10"
    made = [
        *(sample(a, s) for a, s in ((PLAIN, 4.0), ("x", 2.0), (slow, 8.0), (fast, 6.0))),
        *(
            sample(a, s, task="edits")
            for a, s in ((PLAIN, 4.0), ("x", 2.0), (slow, 3.0), (fast, 6.0))
        ),
    ]
    best = tally.summarize_samples(made, [PLAIN, "x", slow, fast])["against"][
        "transformers:lookup, best setting"
    ]["x"]
    assert best == pytest.approx({"qa": 3.0, "edits": 1.5, "mean": 2.25})


def test_text_that_loops_is_noted() -> None:
    found = tally.describe_texts({"qa/0/0": [1, 2, 3, 4] * 4, "edits/a/0": [5, 0, 7, 8]}, eos=[0])
    assert found["qa"]["distinct_4grams"] == 4 / 13
    assert found["edits"]["behind_the_end"] == 0.5


# ---------------------------------------------------------------------- names of arms

words = st.text("abcxyz_", min_size=1, max_size=8)
values = st.one_of(st.integers(-99, 99), st.booleans(), st.floats(0.1, 9), words)


@given(words, st.dictionaries(words, values, max_size=3))
def test_a_label_reads_back_as_the_arm_it_names(name: str, knobs: dict[str, object]) -> None:
    spec = ArmSpec(name, tuple(knobs.items()))
    assert ArmSpec.parse(spec.label) == spec


@pytest.mark.parametrize("wrong", ["llma:k", "llma:=2", "llma:k=", "llma:k=1:k=2"])
def test_a_label_without_values_is_an_error(wrong: str) -> None:
    with pytest.raises(TinyspecError, match="llma"):
        read_arms([wrong])


def test_prompts_are_read_at_the_tokens_and_seconds_of_all_requests() -> None:
    """Ten tokens in 1 s and ninety in 3 s are 25 a second, and not the mean of 10 and 30."""
    both = [sample("x", 1.0, read=10, first=0.5), sample("x", 1.0, read=90, first=1.5, prefill=3.0)]
    assert tally.describe_prompts(both) == {"prompt_tokens_per_second": 25.0, "first_token": 1000.0}


def test_samples_that_do_not_tell_of_prompts_have_no_figure_of_them() -> None:
    assert tally.describe_prompts([sample("x", 1.0)]) == {}


def test_the_time_of_drafting_is_told_in_steps_of_plain_decoding() -> None:
    """Plain takes 2 seconds a token; four rounds draft for 6 seconds, so one for 0.75 steps."""
    plain, drafted = sample(PLAIN, 20.0), sample("llma", 12.0, calls=4, drafting=6.0)
    assert tally.measure_drafting([plain, drafted], PLAIN, "llma") == {"drafting": 0.75}
    assert tally.measure_drafting([plain, drafted._replace(drafting=None)], PLAIN, "llma") == {}
