"""A run: arms in turns, nothing counted twice, and --resume changes no result."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.fakes import Fake, Hand, arms, jobs, noisy
from tests.bench.fakes import settings as settled
from tinyspec.bench import measure, tally
from tinyspec.bench.arms import ArmOutput, check_token_balance
from tinyspec.bench.book import Sample, SampleBook
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plan import PLAIN, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError

STAMP = {
    "command": "tinyspec bench",
    "commit": "abc",
    "date": "2026-01-01",
    "machine": {"cpu": "x", "threads": 1},
}


def begun(path: Path | None = None, rounds: int = 2, asked: list[Job] | None = None) -> SampleBook:
    book = SampleBook(settled(rounds), path, STAMP)
    book.check_prompts(asked or jobs())
    book.references = {job.key: list(range(job.tokens)) for job in asked or jobs()}
    return book


def done(
    book: SampleBook, hand: Hand, contestants: list[Fake], asked: list[Job] | None = None
) -> SampleBook:
    measure.run_turns(book, asked or jobs(), contestants, hand)
    return book


def reopened(path: Path) -> SampleBook:
    return SampleBook.open(path, lambda _: STAMP)


def test_every_arm_does_every_job_in_every_round_once() -> None:
    hand = Hand()
    contestants = arms(hand)
    book = done(begun(), hand, contestants)
    for arm in contestants:
        assert arm.runs == [(job.key, round) for round in range(2) for job in jobs()]
    assert len({sample.key for sample in book.samples}) == len(book.samples) == 2 * 3 * 3


def test_the_first_arm_rotates_and_each_is_first_equally_often() -> None:
    order: list[str] = []

    class Noting(Fake):
        def run(self, *args: Any) -> ArmOutput:
            order.append(self.label)
            return super().run(*args)

    hand = Hand()
    contestants: list[Fake] = [Noting(label, hand, noisy(label, 1.0)) for label in "abc"]
    book = SampleBook(BenchSettings(tasks=("qa",), rounds=2), None, STAMP)
    book.references = {job.key: [0] for job in jobs()}
    measure.run_turns(book, jobs(), contestants, hand)
    turns = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    for place in range(3):
        assert sorted(turn[place] for turn in turns) == ["a", "a", "b", "b", "c", "c"]
    pairs = {(turn[i], turn[i + 1]) for turn in turns for i in range(2)}
    assert len(pairs) == 6  # whoever is timed after somebody is also timed before them


def test_times_are_those_of_the_clock_and_of_nothing_else() -> None:
    hand = Hand()
    book = done(begun(), hand, [Fake(PLAIN, hand, lambda job, seed: 0.5)])
    assert {sample.prefill for sample in book.samples} == {1.0}
    assert {sample.decode for sample in book.samples} == {8 * 0.5}


def test_the_warm_up_is_short_and_not_counted() -> None:
    hand = Hand()
    contestants = arms(hand)
    measure.warm_up_arms(contestants, jobs(tokens=100)[0], hand)
    assert all(len(arm.runs) == 1 for arm in contestants)
    assert hand.now < 100


# ---------------------------------------------------------------------- resume


@settings(max_examples=40)
@given(
    st.integers(0, 17), st.integers(0, 17), st.sampled_from([0, 1, 2]), st.sampled_from([0, 1, 2])
)
def test_an_interrupted_run_ends_as_one_that_was_not(
    first: int, second: int, who: int, then: int
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        whole = done(begun(Path(folder) / "whole.json"), hand := Hand(), arms(hand))
        path = Path(folder) / "broken.json"
        begun(path).save()
        for at, arm in ((first, who), (second, then), (None, 0)):
            hand = Hand()
            hand.now = 1e6 * (at or 7)  # another sitting, another time of day
            contestants = arms(hand)
            contestants[arm].stops_at = at
            book = reopened(path)
            try:
                done(book, hand, contestants)
            except KeyboardInterrupt:
                continue
        assert [s._replace(prefill=0, decode=0) for s in book.samples] == [
            s._replace(prefill=0, decode=0) for s in whole.samples
        ]
        assert [s.decode for s in book.samples] == pytest.approx([s.decode for s in whole.samples])
        labels = [arm.label for arm in arms(hand)]
        ours, theirs = (
            json.loads(dump_json(tally.summarize_samples(b.samples, labels))) for b in (book, whole)
        )
        assert _rounded(ours) == _rounded(theirs)
        assert reopened(path).samples == book.samples


def test_a_technique_that_remembers_meets_the_whole_round_after_an_interruption() -> None:
    """What an earlier process asked in this round is asked again, and not counted."""
    book, hand = begun(), Hand()
    done(book, hand, arms(hand), jobs()[:2])
    contestants = arms(hand)
    contestants[1].persistent = True  # type: ignore[attr-defined]
    done(book, hand, contestants)
    asked = [(job.key, round) for round in range(2) for job in jobs()]
    assert contestants[1].runs == asked
    assert contestants[0].runs == [asked[2], asked[5]]
    assert len({sample.key for sample in book.samples}) == len(book.samples) == 2 * 3 * 3


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return round(value, 6) if isinstance(value, float) else value


def test_what_an_interrupted_run_leaves_is_whole_turns(tmp_path: Path) -> None:
    hand = Hand()
    contestants = arms(hand)
    contestants[1].stops_at = 4  # in the second round
    book = begun(tmp_path / "r.json")
    with pytest.raises(KeyboardInterrupt):
        done(book, hand, contestants)
    kept = reopened(tmp_path / "r.json")
    assert len(kept.samples) == 4 * 3
    assert measure.count_left(kept, jobs(), contestants) == 2 * 3


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    hand = Hand()
    done(begun(tmp_path / "r.json"), hand, arms(hand))
    before = (tmp_path / "r.json").read_text()
    contestants = arms(hand)
    book = reopened(tmp_path / "r.json")
    done(book, hand, contestants)
    assert all(arm.runs == [] for arm in contestants)
    assert json.loads(before)["samples"] == [list(s) for s in book.samples]


def test_more_rounds_add_to_the_file_and_change_nothing_in_it(tmp_path: Path) -> None:
    hand = Hand()
    first = done(begun(tmp_path / "r.json", rounds=1), hand, arms(hand)).samples
    book = reopened(tmp_path / "r.json")
    book.settings = book.settings.enlarge({"rounds": 3})
    done(book, hand, arms(hand))
    assert book.samples[: len(first)] == first
    assert sorted({s.round for s in book.samples}) == [0, 1, 2]
    assert len({s.key for s in book.samples}) == len(book.samples) == 3 * 3 * 3


def test_a_sample_is_never_entered_twice() -> None:
    hand = Hand()
    book = done(begun(), hand, arms(hand))
    before = list(book.samples)
    with pytest.raises(ValueError, match="counted twice"):
        book.add_turn([book.samples[0]])
    fresh = book.samples[0]._replace(round=9)
    with pytest.raises(ValueError, match="counted twice"):
        book.add_turn([fresh, fresh])
    assert book.samples == before
    book.add_turn([fresh])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda r: r["samples"].append(r["samples"][0]), "counted twice"),
        (lambda r: r["samples"].append([1, 2]), "damaged"),
        (lambda r: r.update(version=0), "version"),
        (lambda r: r.update(columns=["x"]), "columns"),
        (lambda r: r.update(machine={"cpu": "y", "threads": 1}), "cpu y, now x"),
        (lambda r: r["settings"].update(new=1), "another version"),
        (lambda r: r.pop("samples"), "not a result file"),
    ],
)
def test_a_file_that_cannot_be_resumed_is_an_error(tmp_path: Path, damage: Any, says: str) -> None:
    hand = Hand()
    done(begun(tmp_path / "r.json"), hand, arms(hand))
    found = json.loads((tmp_path / "r.json").read_text())
    damage(found)
    (tmp_path / "r.json").write_text(json.dumps(found))
    with pytest.raises(TinyspecError, match=says):
        reopened(tmp_path / "r.json")


def test_no_json_and_another_prompt_of_the_same_name_are_errors(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(TinyspecError, match="not a result file"):
        reopened(tmp_path / "r.json")
    book = begun()
    with pytest.raises(TinyspecError, match="another prompt now"):
        book.check_prompts([jobs()[0]._replace(ids=(9, 9))])


def test_only_rounds_may_grow() -> None:
    was = BenchSettings(rounds=3, tokens=8)
    assert was.enlarge({"rounds": 4, "tokens": 8}) == BenchSettings(rounds=4, tokens=8)
    with pytest.raises(TinyspecError, match="tokens 8, not 9"):
        was.enlarge({"tokens": 9})
    with pytest.raises(TinyspecError, match="only add"):
        was.enlarge({"rounds": 2})
    with pytest.raises(TinyspecError, match="methods"):
        was.enlarge({"methods": ("llma",)})


def test_a_file_tells_every_sitting_and_reads_back_as_it_was(tmp_path: Path) -> None:
    hand = Hand()
    book = done(begun(tmp_path / "r.json"), hand, arms(hand))
    book.rest = {"curve": {"cached": 1}, "memory": {"llma": {"peak": 1}}}
    book.skipped = ["x: y"]
    book.save()
    again = SampleBook.open(tmp_path / "r.json", lambda _: {**STAMP, "commit": "def"})
    assert [stamp["commit"] for stamp in again.stamps] == ["abc", "def"]
    assert (again.rest, again.skipped, again.settings) == (book.rest, book.skipped, book.settings)
    assert (again.samples, again.references, again.prompts) == (
        book.samples,
        book.references,
        book.prompts,
    )
    again.save()
    assert json.loads((tmp_path / "r.json").read_text())["commit"] == "def"


def test_samples_of_one_arm_have_the_same_knobs(tmp_path: Path) -> None:
    hand, path = Hand(), tmp_path / "r.json"
    book = begun(path)
    book.note_knobs({"llma": {"k": 4}})
    done(book, hand, arms(hand))
    again = reopened(path)
    again.note_knobs({"llma": {"k": 4}})
    assert again.rest["knobs"] == {"llma": {"k": 4}}
    with pytest.raises(TinyspecError, match=r"llma ran with other knobs \(k 4, now 5\)"):
        again.note_knobs({"llma": {"k": 5}})


def test_samples_that_came_without_their_knobs_are_not_added_to(tmp_path: Path) -> None:
    hand, path = Hand(), tmp_path / "r.json"
    done(begun(path), hand, arms(hand))
    old = reopened(path)
    with pytest.raises(TinyspecError, match=r"does not tell the knobs .* start anew"):
        old.note_knobs({"llma": {"k": 4}})


# ------------------------------------------------------------- books that do not balance (B41, B44)

HONEST = ArmOutput(1.0, 1.0, (1, 2, 3, 4, 5, 6), 2, 0, 8, 4, 0, 0, 2.0)
JOB = Job("qa", "0", 0, (1,), 6)


@pytest.mark.parametrize(
    "false",
    [
        HONEST._replace(accepted=6),  # the bonus is counted as accepted
        HONEST._replace(accepted=5),  # tokens that the stop cut off are counted
        HONEST._replace(calls=3),  # the prefill is counted as a pass
        HONEST._replace(calls=1),  # a round is forgotten
        HONEST._replace(silent=1),
        HONEST._replace(ids=(1, 2, 3, 4, 5)),  # another number of tokens than the other arms
        HONEST._replace(ids=(1, 2, 3, 4, 5, 6, 7)),  # the end of text is counted by one arm only
    ],
)
def test_counts_that_do_not_add_up_are_errors(false: ArmOutput) -> None:
    check_token_balance(HONEST, JOB, "x")
    with pytest.raises(RuntimeError, match="x"):
        check_token_balance(false, JOB, "x")


def test_tokens_are_counted_from_ids_by_one_counter() -> None:
    """An arm returns ids, and they are counted. Chunks or texts do not count."""
    assert not {"tokens", "text", "chunks"} & set(ArmOutput._fields)
    hand = Hand()
    for sample in done(begun(), hand, arms(hand)).samples:
        assert sample.tokens == sample.timed == 8


def test_a_peer_whose_prefill_made_tokens_is_not_credited_with_them() -> None:
    class Early(Fake):
        def run(self, *args: Any) -> ArmOutput:
            return super().run(*args)._replace(early=2)

    hand = Hand()
    sample = done(begun(), hand, [Early("transformers", hand, lambda job, seed: 0.5)]).samples[0]
    assert (sample.tokens, sample.timed) == (8, 6)
    assert tally.seconds_per_token(sample) == sample.decode / 6
    assert isinstance(sample, Sample)
