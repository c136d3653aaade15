"""Our arms on small models: as many tokens as asked for, and counts that add up."""

import time
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lm.small import LLAMA, model
from tinyspec import generation
from tinyspec.bench import arms
from tinyspec.bench.arms import TechniqueArm, check_token_balance
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.decoding.decode import BaseDrafter, Round
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.errors import TinyspecError
from tinyspec.generation import GenerationRun, start_generation
from tinyspec.laws.exact.models import add_random_head
from tinyspec.technique import find_technique, load_techniques

ENDING = replace(LLAMA, eos=tuple(range(0, 13, 2)))  # every other token ends a text
NEEDS_MORE = {
    "rest": "a datastore of texts, as tests/bench/test_chapters.py has",
    "specdec": "a translator",
    "distillspec": "a draft that was trained for it",
}
"""What a small random model cannot give."""
METHODS = [
    name
    for name, card in load_techniques().items()
    if card.kind == "decoder" and card.drafts <= 1 and name not in NEEDS_MORE
]
SLOW = ("cascade", "staged", "synergy", "smartspec")  # decoders in decoders; measured profiles
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in METHODS]


def job(*ids: int, tokens: int = 9) -> Job:
    return Job("qa", "0", 0, ids or (1, 2, 3, 1, 2), tokens)


def own(method: str, temperature: float = 0.0) -> TechniqueArm:
    # A vector is measured on texts, which this model cannot read: sequoia learns it.
    spec = ArmSpec.parse("sequoia:accepts=learnt" if method == "sequoia" else method)
    return TechniqueArm(
        spec,
        add_random_head(model(ENDING), find_technique(spec.name), 0),
        BenchSettings(temperature=temperature),
        model(ENDING, seed=1),
    )


@pytest.mark.parametrize("method", EVERY)
def test_reported_counts_add_up_at_every_length_and_temperature(method: str) -> None:
    arm = cache(partial(own, method))  # of each temperature one: some measure before they run

    @settings(max_examples=20)
    @given(
        st.lists(st.integers(0, 12), min_size=1, max_size=12),
        st.integers(1, 14),
        st.integers(0, 9),
        st.sampled_from([0.0, 0.7, 1.0]),
    )
    def check(ids: list[int], tokens: int, seed: int, temperature: float) -> None:
        asked = job(*ids, tokens=tokens)
        made = arm(temperature).run(asked, seed, time.perf_counter)
        check_token_balance(made, asked, method)
        assert made.nodes is not None
        assert made.accepted is not None
        assert made.nodes >= made.accepted
        assert made.prefill > 0
        assert made.decode > 0

    check()


@pytest.mark.parametrize("method", EVERY)
def test_counts_are_those_of_the_rounds(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count from the rounds: tokens, accepted, recovered or bonus, and what the stop cut off."""
    rounds: list[Round] = []

    def noting(*args: Any, **options: Any) -> GenerationRun:
        running = start_generation(*args, **options)
        step = running.decoder.step

        def noted(rng: RandomSource) -> Round:
            rounds.append(step(rng))
            return rounds[-1]

        monkeypatch.setattr(running.decoder, "step", noted)
        return running

    monkeypatch.setattr(arms, "start_generation", noting)
    made = own(method).run(job(), 3, time.perf_counter)
    assert list(made.ids) == [token for round in rounds for token in round.tokens]
    assert made.calls == len(rounds)
    assert made.accepted == sum(len(round.verdict.accepted) for round in rounds)
    assert made.silent == sum(round.verdict.next is None for round in rounds)
    assert made.truncated == sum(round.truncated for round in rounds)
    assert made.draft_calls == sum(len(round.draft_calls) for round in rounds)


def test_the_time_of_drafting_is_that_of_propose_and_observe() -> None:
    """The clock ticks when it is read: twice for each call, and two calls make a round."""
    ticks = count()
    arm = own("llma")
    made = arm.run(job(), 0, lambda: float(next(ticks)))
    assert made.drafting == 2 * made.calls
    assert made.drafting < made.decode


def test_a_drafter_that_was_timed_is_left_as_it_was() -> None:
    drafter = BaseDrafter()
    with arms.time_drafter(drafter, time.perf_counter) as spans:
        drafter.propose([1], 1, UNCHANGED, Seeded(0))
    drafter.propose([1], 1, UNCHANGED, Seeded(0))
    assert len(spans) == 1 and not vars(drafter)


def test_an_arm_tells_every_knob_that_ran_advised_ones_too() -> None:
    advising = replace(ENDING, extra={"gamma": 5})
    arm = TechniqueArm(
        ArmSpec.parse("speculative_decoding"), model(ENDING), BenchSettings(), model(advising, 1)
    )
    assert arm.knobs == {}
    arm.run(job(), 0, time.perf_counter)
    assert arm.knobs == {"gamma": 5, "lenience": 1.0}
    given = own("speculative_decoding:gamma=2")
    given.run(job(), 0, time.perf_counter)
    assert given.knobs == {"gamma": 2, "lenience": 1.0}


def test_an_end_of_text_ends_nothing_and_the_model_is_left_as_it_was() -> None:
    m = model(ENDING)
    asked = job(tokens=30)
    made = TechniqueArm(ArmSpec(PLAIN), m, BenchSettings(temperature=1.5)).run(
        asked, 0, time.perf_counter
    )
    assert len(made.ids) == 30
    assert set(made.ids) & set(ENDING.eos)
    assert m.config.eos == ENDING.eos
    assert start_generation(m, list(asked.ids), max_new_tokens=30).decoder.stop.eos == frozenset(
        ENDING.eos
    )


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if not load_techniques()[m].timed and not load_techniques()[m].persistent],
)
@pytest.mark.slow
def test_a_run_owes_nothing_to_the_runs_before_it(method: str) -> None:
    arm = own(method, 0.7)
    fresh = [own(method, 0.7).run(job(i, 2, 3), 5, time.perf_counter).ids for i in range(3)]
    again = [arm.run(job(i, 2, 3), 5, time.perf_counter).ids for i in (0, 1, 2, 0, 1, 2)]
    assert again == fresh * 2


def test_lossless_arms_write_what_plain_greedy_decoding_writes() -> None:
    known: dict[str, list[int]] = {}
    answer = arms.make_plain_decoder(model(ENDING), known)
    expected = answer(job())
    assert list(own(PLAIN).run(job(), 0, time.perf_counter).ids) == list(expected)
    assert answer(job()) is known["qa/0/0"]  # made once


def test_arms_begin_with_plain_decoding_and_wrong_ones_are_errors() -> None:
    m, draft = model(ENDING), model(ENDING, seed=1)
    made = arms.make_technique_arms(
        BenchSettings(methods=("llma:k=4", "speculative_decoding:gamma=2")), m, draft
    )
    assert [arm.label for arm in made] == [PLAIN, "llma:k=4", "speculative_decoding:gamma=2"]
    for wrong, says in (
        ("lmla", "did you mean 'llma'"),
        ("llma:kk=2", "no knob 'kk'"),
        ("llma:k=0", "k is 0"),
    ):
        with pytest.raises(TinyspecError, match=says):
            arms.make_technique_arms(BenchSettings(methods=(wrong,)), m, draft)


def test_a_persistent_technique_remembers_within_a_round_and_begins_the_next_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = (
        count()
    )  # how much auto drafts is a matter of the clock: this one says the same every time
    monkeypatch.setattr(
        generation, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    )
    for method in METHODS:
        if not load_techniques()[method].persistent:
            continue
        arm = own(method)
        first = arm.run(job(tokens=24), 0, time.perf_counter)
        again = arm.run(job(tokens=24), 0, time.perf_counter)
        fresh = arm.run(job(tokens=24), 1, time.perf_counter)
        assert again.ids == first.ids == fresh.ids
        assert again.calls <= first.calls == fresh.calls
        if first.state is not None and again.held is not None:
            assert again.held == 2 * (fresh.held or 0)


def test_sizes_of_structures_below_a_drafter_are_added() -> None:
    class Sized:
        bytes = 40

    class Drafter:
        def __init__(self, **parts: Any) -> None:
            self.__dict__.update(parts)

    Sized.__module__, Drafter.__module__ = "tinyspec._core.thing", "tinyspec.speculative.thing"
    assert arms.count_drafter_bytes(Drafter(a=Sized(), b=Drafter(c=Sized()), d=3, e=b"bytes")) == 80
    assert arms.count_drafter_bytes(Drafter(a=1)) is None
    loop = Drafter(a=Sized())
    loop.b = loop  # type: ignore[attr-defined]
    assert arms.count_drafter_bytes(loop) == 40


def test_alpha_counts_one_rejection_a_round() -> None:
    made = own("speculative_decoding:gamma=1").run(job(tokens=20), 0, time.perf_counter)
    assert made.stopped is not None and made.accepted is not None and made.nodes is not None
    assert made.accepted + made.stopped == made.nodes  # a chain of one: every draft token is tested


def test_settings_are_read_back_and_wrong_ones_are_errors() -> None:
    given = BenchSettings(
        methods=("llma:k=2",), peers=("transformers",), tasks=("qa",), threads=2, top_p=0.9
    )
    assert BenchSettings.from_dict(given.as_dict()) == given
    assert [arm.label for arm in given.arms] == [PLAIN, "llma:k=2", "transformers"]
    with pytest.raises(TinyspecError, match=r"did you mean 'llama.cpp'"):
        BenchSettings(peers=("llamacpp",))
    with pytest.raises(TinyspecError, match="rounds"):
        BenchSettings(rounds=0)


@pytest.mark.slow
def test_own_memory_is_measured_in_a_fresh_process(tmp_path: Path) -> None:
    from tests.zoo import tiny_zoo
    from tinyspec import models
    from tinyspec.bench import memory

    name = tiny_zoo(tmp_path).big
    held = memory.measure_arm_memory(
        ArmSpec("llma"),
        BenchSettings(model=name, dtype="float32"),
        models.load(name),
        job(tokens=2),
    )
    assert held["peak"] > 50 * 2**20  # torch alone is more
    assert held["device"] == 0


def test_a_failed_memory_probe_beside_transformers_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinyspec.bench import memory
    from tinyspec.bench.experiments import plain

    monkeypatch.setattr(memory.sys, "executable", "false")
    settings = BenchSettings(model="storyteller", dtype="float32")
    assert plain.measure_peak_memory(model(ENDING), settings, [1, 2], 2) is None
    warning = capsys.readouterr().err
    assert warning.startswith("warning: the memory of autoregressive was not measured")
