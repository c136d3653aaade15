"""LLMA: copying from references beside the prompt."""

from itertools import product

import pytest

from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.forward import Scores
from tinyspec.speculative.integrated.llma import LlmaDrafter, copy_after_match
from tinyspec.technique import Request, find_technique

CARD = find_technique("llma")
GREEDY = SamplingParams(temperature=0.0)


class Reciter(Table):
    """A target that recites one text: the certain next token after each prefix."""

    def __init__(self, poem: list[int]):
        super().__init__(0, vocabulary=max(poem) + 1)
        self.poem = poem

    def row(self, context):  # type: ignore[no-untyped-def]
        at = len(context)
        token = self.poem[at] if at < len(self.poem) else 0
        return [int(i == token) for i in range(self.vocabulary)]


def finish(d: Decoder, prompt: list[int], seed: int = 0) -> Decoder:
    d.extend(prompt)
    while not d.finished:
        d.step(Seeded(seed + d.rounds))
    return d


def make_decoder(
    target: Table, references: list[list[int]], wanted: int, **knobs: object
) -> Decoder:
    request = Request(
        target, sampling=GREEDY, stop=StoppingCriteria(max_new_tokens=wanted), references=references
    )
    return CARD.make(request, **knobs)


@pytest.mark.parametrize(("n", "longest"), [(1, 1), (1, 3), (2, 3)])
def test_printed_algorithm_is_what_runs(n: int, longest: int) -> None:
    """All references of four tokens and all texts of up to four, over two tokens."""
    nothing = Scores(None, None, ())  # type: ignore[arg-type]
    for reference in product((0, 1), repeat=4):
        for text in (text for size in range(1, 5) for text in product((0, 1), repeat=size)):
            drafter = LlmaDrafter([[0, 1, 1], reference], n, longest, 2, "last", True)
            drafter.extend(text, nothing)
            expected = copy_after_match(text, [[0, 1, 1], reference], n, longest, 2)
            assert list(drafter.propose(text, 9, GREEDY, Seeded(0)).tokens) == expected


@pytest.mark.parametrize("k", [1, 3, 15])
def test_a_text_copied_whole_takes_one_target_pass_per_k_plus_one_tokens(k: int) -> None:
    poem = list(range(1, 33))
    d = finish(make_decoder(Reciter(poem), [poem], 30, k=k), poem[:2])
    assert d.new == poem[2:32]
    assert d.rounds == -(-30 // (k + 1))


def test_trap_a_reference_outside_the_prompt_is_used() -> None:
    """Prompt lookup is not LLMA: without the reference the same text takes one target pass a
    token.
    """
    poem = list(range(1, 33))
    assert finish(make_decoder(Reciter(poem), [poem], 30, k=15), poem[:2]).rounds == 2
    assert finish(make_decoder(Reciter(poem), [], 30, k=15), poem[:2]).rounds == 30


def test_the_longest_match_is_copied() -> None:
    drafter = LlmaDrafter(
        [[1, 2, 3, 7, 7], [9, 3, 8, 8]], n=1, longest=3, k=2, which="last", own=True
    )
    assert tuple(drafter.propose([1, 2, 3], 9, GREEDY, Seeded(0)).tokens) == (7, 7)
    assert tuple(drafter.propose([5, 9, 3], 9, GREEDY, Seeded(0)).tokens) == (8, 8)


def test_no_match_is_a_plain_step() -> None:
    drafter = LlmaDrafter([[1, 2, 3]], n=2, longest=3, k=2, which="last", own=True)
    assert tuple(drafter.propose([2, 1], 9, GREEDY, Seeded(0)).tokens) == ()


def test_a_copy_never_runs_past_the_end_of_a_reference_or_the_room() -> None:
    drafter = LlmaDrafter([[1, 2, 3], [4, 5]], n=1, longest=3, k=9, which="first", own=True)
    assert tuple(drafter.propose([1], 9, GREEDY, Seeded(0)).tokens) == (2, 3)
    assert tuple(drafter.propose([1], 1, GREEDY, Seeded(0)).tokens) == (2,)


def test_without_own_the_growing_text_is_no_reference() -> None:
    poem = [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]
    assert finish(make_decoder(Reciter(poem), [], 8, own=True), poem[:1]).rounds < 8
    assert finish(make_decoder(Reciter(poem), [], 8, own=False), poem[:1]).rounds == 8


def test_the_index_grows_and_is_never_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    poem = list(range(1, 33))
    d = make_decoder(Reciter(poem), [poem], 30, k=3)
    added: list[int] = []
    index = d.drafter.index

    class Counting:
        def append(self, text: int, tokens: list[int]) -> None:
            added.append(len(list(tokens)))
            index.append(text, tokens)

        def __getattr__(self, name: str) -> object:
            return getattr(index, name)

    d.drafter.index = Counting()
    finish(d, poem[:2])
    assert sum(added) == 32  # the prompt and every new token, once


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
def test_the_joint_distribution_is_the_targets_at_any_temperature(sampling: SamplingParams) -> None:
    references = [[0, 1, 2, 0, 0, 1]]

    def copying() -> Decoder:
        return CARD.make(Request(Table(3), sampling=sampling, references=references), k=2)

    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 3
    )
    assert exact_distribution(copying, 3) == plain


def test_rewinding_takes_the_text_out_of_the_index() -> None:
    d = make_decoder(Reciter(list(range(1, 9)) * 2), [], 12)
    finish(d, [1, 2])
    d.rewind(3)
    assert d.drafter.index.length(0) == 3


def test_drafting_stops_where_copies_fail_and_starts_where_they_would_hold() -> None:
    """Text that repeats its bigrams and never goes on alike: with a price hardly anything is run,
    without one all is.
    """
    poem = [token for n in range(2, 16) for token in (1, n)]

    def nodes(price: float) -> int:
        d = make_decoder(Reciter(poem), [], 20, price=price)
        d.extend(poem[:6])
        return sum(
            len(d.step(Seeded(d.rounds)).tree.tokens) for _ in iter(lambda: d.finished, "length")
        )

    assert nodes(0.0) > 12
    assert nodes(0.25) == 0
    again = [*poem[:10], *range(20, 35), *range(20, 35), 20]
    assert finish(make_decoder(Reciter(again), [], 34, price=0.25), again[:6]).rounds < 34 - 5
