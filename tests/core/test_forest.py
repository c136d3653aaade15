"""The forest of counted tries equals its twin after any history.

Its memory is bounded, and bad input is an error of one line.
"""

import random
from typing import Any

import pytest

from tinyspec import _core
from tinyspec._core import fallback
from tinyspec.errors import TinyspecError

REQUESTS = 10_000 if _core.COMPILED else 100
BOTH = pytest.mark.parametrize("core", [_core, fallback])


def play(seed: int, steps: int) -> None:
    """Any operations on kernel and twin, side by side; what they answer must agree to the bit."""
    rng = random.Random(seed)
    depth, vocabulary, size = (
        rng.randint(2, 6),
        rng.choice([1, 2, 3, 5]),
        lambda most: rng.randint(0, most),
    )
    ours, twin = _core.Forest(depth, 9), fallback.Forest(depth, 9)
    texts: dict[int, tuple[int, str]] = {}
    some = lambda most: [rng.randrange(vocabulary) for _ in range(size(most))]  # noqa: E731
    for _ in range(steps):
        step, tree = rng.choice("oaaaaarrchdggggbb"), rng.choice("ABC")
        text = rng.choice(list(texts)) if texts else -1
        if step == "o" and len(texts) < 4:
            texts[ours.open(tree)] = (twin.open(tree), tree)
        elif step == "h":
            ours.halve(tree)
            twin.halve(tree)
        elif step == "d" and rng.random() < 0.2:
            ours.drop(tree)
            twin.drop(tree)
            texts = {text: known for text, known in texts.items() if known[1] != tree}
        elif step == "g":
            asked: Any = (
                [(t, size(9)) for t in rng.sample("ABC", 2)],
                some(7),
                size(6),
                1 + size(8),
                1 + size(5),
            )
            assert ours.gather(*asked) == twin.gather(*asked)
        elif step == "b":
            asked = (
                "BA",
                some(7),
                rng.choice([0.5, 1.0, 2.5]),
                size(9),
                1 + size(5),
                rng.choice([0.0, 0.1, 0.5]),
            )
            assert ours.best(*asked) == twin.best(*asked)
        elif step == "a" and texts:
            new = some(8)
            ours.append(text, new)
            twin.append(texts[text][0], new)
        elif step == "r" and texts:
            length = max(0, twin.length(texts[text][0]) - size(6))
            ours.rewind(text, length)
            twin.rewind(texts[text][0], length)
            assert ours.length(text) == twin.length(texts[text][0]) == length
        elif step == "c" and texts and rng.random() < 0.4:
            ours.close(text)
            twin.close(texts.pop(text)[0])


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_equals_its_twin_after_any_history(seed: int) -> None:
    for run in range(25):
        play(100 * seed + run, 60 if run else 400)


def test_memory_is_bounded_over_many_requests() -> None:
    """Prompts go with their requests, outputs are halved and pruned."""
    rng, bound, most = random.Random(0), 4000, 0
    forest = _core.Forest(8, bound)
    for request in range(REQUESTS):
        prompt, output = forest.open(("prompt", request)), forest.open("outputs")
        forest.append(prompt, [rng.randrange(500) for _ in range(60)])
        forest.append(output, [int(rng.paretovariate(0.7)) % 50_000 for _ in range(120)])
        forest.close(output)
        forest.drop(("prompt", request))
        forest.prune("outputs")
        assert forest.size("outputs") <= bound
        if request == REQUESTS // 10:
            most = forest.bytes
    assert forest.bytes <= 2 * most  # pools double, they never shrink
    assert forest.bytes < 200 * bound


@pytest.mark.skipif(not _core.COMPILED, reason="the twin has a node for every window")
def test_a_text_of_new_words_costs_few_nodes_and_one_that_repeats_up_to_depth() -> None:
    forest = _core.Forest(16, 1 << 20)
    text = forest.open(0)
    forest.append(text, range(1000))
    assert forest.size(0) == 1000
    forest.append(text, range(1000))
    assert forest.size(0) > 10_000


@BOTH
def test_an_owner_is_eliminated_and_others_stay(core: Any) -> None:
    forest = core.Forest(4, 100)
    for tree in ("a", "b"):
        forest.append(forest.open(tree), [1, 2, 3])
    forest.drop("a")
    assert forest.gather([("a", 9)], [1], 3, 1, 3)[0] == []
    assert forest.gather([("b", 9)], [1], 3, 1, 3)[0] == [2, 3]
    assert (forest.size("a"), forest.drop("a")) == (0, None)


@BOTH
def test_halving_halves_counts_and_drops_what_falls_to_zero(core: Any) -> None:
    forest = core.Forest(2, 100)
    forest.append(forest.open(0), [1, 2, 1, 2, 1, 2, 1, 3, 1, 4])
    assert forest.gather([(0, 9)], [1], 1, 1, 1)[:3] == ([2, 4, 3], [-1] * 3, [3 / 5, 1 / 5, 1 / 5])
    forest.halve(0)
    assert forest.gather([(0, 9)], [1], 1, 1, 1)[:3] == ([2], [-1], [1.0])
    forest.halve(0)
    assert forest.gather([(0, 9)], [1], 1, 1, 1)[0] == []


@BOTH
def test_no_window_crosses_a_halving(core: Any) -> None:
    """It would count more than the window that it continues: 1 0 would outlive 1."""
    forest = core.Forest(4, 100)
    text = forest.open(0)
    forest.append(text, [1, 0, 1, 0, 1])
    forest.halve(0)
    forest.append(text, [0])
    forest.halve(0)
    assert forest.gather([(0, 9)], [1], 3, 1, 3)[0] == []
    assert forest.size(0) == 1


@BOTH
def test_shorter_suffixes_are_tried_until_there_is_enough(core: Any) -> None:
    forest = core.Forest(4, 100)
    forest.append(forest.open(0), [1, 2, 7])
    forest.append(forest.open(0), [5, 2, 8])
    assert forest.gather([(0, 9)], [1, 2], 3, 1, 1) == ([7], [-1], [1.0], [2])
    tokens, parents, _, matches = forest.gather([(0, 9)], [1, 2], 3, 2, 1)
    assert (tokens, parents, matches) == ([7, 8], [-1, -1], [2, 1])


@BOTH
def test_bad_input_is_one_line(core: Any) -> None:
    with pytest.raises(TinyspecError, match="depth >= 2"):
        core.Forest(1, 9)
    forest = core.Forest(3, 9)
    with pytest.raises(TinyspecError, match=r"open\(tree\)"):
        forest.append(0, [1])
    text = forest.open(0)
    forest.append(text, [1, 2])
    with pytest.raises(TinyspecError, match="cannot rewind a text of 2 tokens to 3"):
        forest.rewind(text, 3)
    forest.close(text)
    with pytest.raises(TinyspecError, match="not open"):
        forest.length(text)
