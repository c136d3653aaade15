"""`tinyspec bench batches`: drafts in a batch against plain decoding of the same batch."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run, tiny_zoo
from tinyspec.bench.experiments import batches
from tinyspec.bench.experiments.batches import PLAIN, BatchSample
from tinyspec.bench.harness import dump_json
from tinyspec.bench.plot import draw_chart
from tinyspec.bench.settings import BatchSettings
from tinyspec.lm.policies import Pending
from tinyspec.speculative.integrated.synergy import best_lengths

pytestmark = pytest.mark.slow  # it measures in real time

METHODS = ("speculative_decoding:gamma=2", "synergy:table=2@1+0@2", "bass")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def result(zoo: Any) -> Any:
    given = BatchSettings(zoo.big, zoo.small, METHODS, (1, 3), tokens=9, rounds=2, longest=3)
    return json.loads(dump_json(batches.measure_batches_of_arms(given, quiet=True)))


def samples_of(result: Any) -> list[BatchSample]:
    return [BatchSample(*row) for row in result["samples"]]


def test_every_arm_runs_every_batch_in_every_round(result: Any) -> None:
    found = [(s.size, s.round, s.arm) for s in samples_of(result)]
    arms = [PLAIN, *METHODS]
    assert sorted(found) == sorted((n, r, arm) for n in (1, 3) for r in (0, 1) for arm in arms)


def test_every_text_is_plain_decodings(result: Any) -> None:
    assert all(s.same == s.size and s.tokens == 9 * s.size for s in samples_of(result))


def test_the_counts_of_a_batch_add_up(result: Any) -> None:
    """A round of a request has a row for its newest token, and one for each draft token."""
    for sample in samples_of(result):
        assert sample.rows == sample.rounds + sample.drafted
        assert 0 <= sample.accepted <= sample.drafted
        assert sample.passes <= sample.rounds <= sample.tokens
        if sample.arm == PLAIN:
            assert (sample.drafted, sample.passes, sample.rounds) == (0, 9, 9 * sample.size)


def test_a_table_by_hand_decides_the_length_by_batch_size(result: Any) -> None:
    synergy = {s.size: s.drafted for s in samples_of(result) if s.arm.startswith("synergy")}
    assert synergy[1] > 0 and synergy[3] == 0


def test_a_batch_is_timed_from_when_the_target_has_read_all_prompts() -> None:
    hand = itertools.count()
    policy = batches.PromptsFirst("big", lambda: next(hand))

    def wait(*pending: tuple[str, bool]) -> None:
        policy.pick([Pending(n, m, 1, 1, p, held=0) for n, (m, p) in enumerate(pending)])

    wait(("big", True), ("big", True))
    wait(("big", False), ("big", True))  # one still reads
    assert next(hand) == 0
    wait(("big", False), ("small", True))  # a draft model's reading is its method's time
    wait(("big", False))
    assert policy.begun == 1


def test_speed_is_the_median_ratio_to_plain_decoding_of_the_same_batch() -> None:
    rows = [
        (0, PLAIN, 4.0),
        (0, "a", 2.0),
        (1, PLAIN, 9.0),
        (1, "a", 3.0),
        (2, PLAIN, 8.0),
        (2, "a", 8.0),
    ]
    samples = [BatchSample(2, r, arm, s, 10, 5, 3, 8, 6, 3, 2) for r, arm, s in rows]
    figures = batches.summarize_batches(samples)
    assert list(figures) == [PLAIN, "a"]
    assert figures["a"]["2"] == {
        "speedup": 2.0, "tokens_per_second": 30 / 13, "tau": 2.0, "rows": 8 / 3,
        "acceptance": 0.5, "same": 6, "of": 6,
    }  # fmt: skip


def test_figures_follow_from_the_samples(result: Any) -> None:
    figures = batches.summarize_batches(samples_of(result))
    assert json.loads(dump_json(figures)) == result["figures"]


def test_the_heat_map_is_the_table_of_the_measured_times(result: Any) -> None:
    costs, reach = batches.read_profile(result)
    best = batches.tabulate_batches(result)[-1].rows
    assert best[-1] == ["as measured", *map(str, best_lengths(costs, reach, costs.sizes).values())]
    assert [row[0] for row in best[:-1]] == [f"{rate:g}" for rate in batches.RATES]
    assert "best draft length" in draw_chart(batches.chart_batches(result))


def test_a_slow_down_is_named() -> None:
    samples = [
        BatchSample(2, 0, arm, s, 10, 5, 3, 8, 6, 3, 2) for arm, s in ((PLAIN, 1.0), ("a", 2.0))
    ]
    figures = batches.summarize_batches(samples)
    machine = {"cores": 2, "cpu": "x"}
    result = {"figures": figures, "machine": machine, "date": "d", "commit": "c"}
    settings = {"dtype": "float32", "tokens": 5, "rounds": 1, "prompt_tokens": 64}
    assert "a 0.50" in batches.list_batch_notes({**result, "settings": settings})[1]


def test_the_command_writes_tables_and_says_what_is_missing(zoo: Any, tmp_path: Path) -> None:
    page = tmp_path / "batches.md"
    done = run(
        "bench", "batches", "--model", zoo.big, "--draft", zoo.small, "--methods", "bass",
        "--sizes", "2", "--tokens", "6", "--rounds", "1", "--markdown", str(page), "-q",
    )  # fmt: skip
    assert done.exit_code == 0 and "times as fast as plain" in page.read_text()
    assert "name --methods and --sizes" in failed(run("bench", "batches", "--sizes", ""))
    assert "no method 'bas'" in failed(run("bench", "batches", "--methods", "bas"))
