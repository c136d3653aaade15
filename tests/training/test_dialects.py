"""The synthetic translation task: its pairs, and its floors against enumeration of every text."""

import math
from collections import Counter
from itertools import product

import pytest

from tinyspec.errors import TinyspecError
from tinyspec.training.bitext import MASK, pad_sequences
from tinyspec.training.dialects import Dialects, entropy

TINY = {"modes": 2, "words": 4, "shortest": 2, "longest": 3}
ALL = [("lex",), ("ord",), ("fert",), ("lex", "fert"), ("ord", "fert"), ("lex", "ord", "fert")]


def translation_probs(task: Dialects, source: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """Return the distribution of the translation over all texts: an oracle that merges nothing."""
    first = MASK + 1 + task.words
    found: Counter[tuple[int, ...]] = Counter()
    for pair in task.all_translations(source):
        for text in product(range(first, first + task.tokens), repeat=len(pair.target)):
            p = 1.0
            for token, right in zip(text, pair.target, strict=True):
                p *= 1 - task.noise if token == right else task.noise / (task.tokens - 1)
            if p:
                found[text] += p / task.modes  # type: ignore[assignment]
    return dict(found)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("kinds", ALL, ids="+".join)
def test_the_floors_are_those_of_the_enumerated_distribution(
    kinds: tuple[str, ...], noise: float
) -> None:
    task = Dialects(kinds, noise=noise, modes=2, words=3, shortest=2, longest=2)
    for source in ((4, 5), (6, 4)):
        joint = translation_probs(task, source)
        assert sum(joint.values()) == pytest.approx(1)
        lengths: Counter[int] = Counter()
        for text, p in joint.items():
            lengths[len(text)] += p  # type: ignore[assignment]
        parallel = 0.0
        for length, share in lengths.items():
            for i in range(length):
                place: Counter[int] = Counter()
                for text, p in joint.items():
                    if len(text) == length:
                        place[text[i]] += p / share  # type: ignore[assignment]
                parallel += share * entropy(place.values())
        floors = task.entropy_bounds(source)
        assert floors.sequence == pytest.approx(entropy(joint.values()))
        assert floors.length == pytest.approx(entropy(lengths.values()))
        assert floors.parallel == pytest.approx(parallel)


@pytest.mark.parametrize("kind", ["lex", "ord"])
@pytest.mark.parametrize("modes", [1, 3, 5])
def test_writing_at_once_costs_the_choice_of_the_dialect_at_every_place(
    kind: str, modes: int
) -> None:
    task = Dialects((kind,), modes=modes)
    for pair in task.sample_pairs(10, seed=1):
        floors = task.entropy_bounds(pair.source)
        assert floors.length == 0
        assert floors.sequence == pytest.approx(math.log(modes))
        assert floors.parallel == pytest.approx(len(pair.source) * math.log(modes))


def test_one_dialect_without_noise_costs_nothing() -> None:
    task = Dialects(("lex", "ord", "fert"), modes=1)
    assert task.entropy_bounds(task.sample_pairs(1)[0].source) == (0, 0, 0)


def test_fertility_makes_lengths_differ_and_the_length_tells_of_the_dialect() -> None:
    task = Dialects(("fert",), modes=2)
    source = (4, 5, 7, 9, 11)  # one even word, four odd ones
    assert [len(pair.target) for pair in task.all_translations(source)] == [6, 9]
    assert task.entropy_bounds(source) == pytest.approx(
        (math.log(2), math.log(2), 0)
    )  # the length alone determines the rest
    same = (4, 5, 6, 7)  # two and two
    floors = Dialects(("fert",), modes=2, shortest=4).entropy_bounds(same)
    assert floors.length == 0
    assert floors.parallel > floors.sequence


@pytest.mark.parametrize("kinds", ALL, ids="+".join)
def test_alignments_fertilities_and_trees_show_how_a_sentence_was_made(
    kinds: tuple[str, ...],
) -> None:
    task = Dialects(kinds, modes=3)
    for pair in task.sample_pairs(60, seed=2):
        assert len(pair.alignment) == len(pair.target) == sum(pair.fertilities)
        assert [pair.alignment.count(at) for at in range(len(pair.source))] == list(
            pair.fertilities
        )
        spans = [span for phrase in pair.tree for span in phrase]
        for (begin, end), at in zip(spans, dict.fromkeys(pair.alignment), strict=True):
            assert list(pair.target[begin:end]) == task.tokens_of_word(
                pair.source[at] - MASK - 1, pair.mode
            )
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == len(pair.target)
        assert len(set(pair.target)) == len(pair.target)
        assert max(pair.target) < task.vocab_size
        assert len(pair.target) <= task.max_target_length


def test_sources_have_distinct_words_and_the_lengths_asked_for() -> None:
    task = Dialects()
    pairs = task.sample_pairs(400, seed=3)
    assert {len(pair.source) for pair in pairs} == {5, 6, 7, 8, 9}
    assert all(len(set(pair.source)) == len(pair.source) for pair in pairs)
    assert {word for pair in pairs for word in pair.source} == set(range(4, 24))


def test_dialects_are_equally_frequent_and_a_seed_gives_the_same_corpus() -> None:
    task = Dialects(modes=4)
    pairs = task.sample_pairs(100, seed=4)
    assert Counter(pair.mode for pair in pairs) == dict.fromkeys(range(4), 25)
    assert pairs == task.sample_pairs(100, seed=4) != task.sample_pairs(100, seed=5)


def test_held_out_sources_do_not_come_up() -> None:
    task = Dialects(**TINY)  # type: ignore[arg-type]
    held = {pair.source for pair in task.sample_pairs(6, seed=6)}
    assert not held & {pair.source for pair in task.sample_pairs(200, seed=7, exclude=held)}


def test_noise_replaces_a_token_by_another_one() -> None:
    task = Dialects(noise=0.3)
    pairs = task.sample_pairs(300, seed=8)
    wrong = sum(
        a != b
        for pair in pairs
        for a, b in zip(pair.target, task.translate(pair.source, pair.mode).target, strict=True)
    )
    assert abs(wrong / sum(len(pair.target) for pair in pairs) - 0.3) < 0.04
    assert all(24 <= token < task.vocab_size for pair in pairs for token in pair.target)


def test_quality_tells_mixed_dialects_from_repeated_words() -> None:
    lex, order = Dialects(modes=2), Dialects(("ord",), modes=2)
    source = (4, 5, 6, 7, 8)
    one, other = (pair.target for pair in lex.all_translations(source))
    assert lex.measure_quality([source], [one]) == (1, 1, 0)
    assert lex.measure_quality([source], [(*one[:2], *other[2:])]) == (0, 0, 0)
    assert lex.measure_quality([source], [one[::-1]]) == (0, 1, 0)
    assert lex.measure_quality([source] * 2, [other, (one[0], *one[:4])]) == (0.5, 1, 0.5)
    assert order.measure_quality([source], [(24, 25, 26, 27, 24)]) == (0, 1, 1)


def test_bad_tasks_are_rejected() -> None:
    for given, message in [
        ({"kinds": ("lax",)}, "no dialect 'lax'"),
        ({"modes": 0}, "modes is 0"),
        ({"kinds": ("ord",), "modes": 6}, "at most 5 modes"),
        ({"longest": 30}, "5 to 30 of 20 words"),
        ({"noise": 1.0}, "noise is 1.0"),
    ]:
        with pytest.raises(TinyspecError, match=message):
            Dialects(**given)  # type: ignore[arg-type]
    with pytest.raises(TinyspecError, match="no outputs"):
        Dialects().measure_quality([], [])


def test_rows_are_padded_to_the_longest() -> None:
    assert pad_sequences([(4,), (5, 6)]).tolist() == [[4, 0], [5, 6]]
    assert pad_sequences([]).shape == (0,)
