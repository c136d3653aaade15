"""Several texts in shared passes: each is what it is alone, and a common prefix is computed once."""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.streams import (
    DecodingBatch,
    GrowingText,
    Stream,
    StreamDecoder,
    decode_many,
)
from tinyspec.decoding.trace import Statistics
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.exact.models import small_network
from tinyspec.tree import TokenTree

M = small_network(3, 6)
PREFIX, TAILS = [1, 2, 3, 4], ([5], [0, 1], [2, 2, 5])


def decode_alone(prompt: Sequence[int], rng: RandomSource, n: int, heat: float = 0.8) -> list[int]:
    """Return n new tokens of plain decoding."""
    stop, sampling = StoppingCriteria(max_new_tokens=n), SamplingParams(heat)
    decoder = Decoder(M.session(), BaseDrafter(), verify_tree, sampling=sampling, stop=stop)
    decoder.extend(prompt)
    for _ in decoder.run(rng):
        pass
    return decoder.new


def write(number: int, n: int, batch: DecodingBatch[int]) -> Iterator[int]:
    stop, sampling = StoppingCriteria(max_new_tokens=n), SamplingParams(0.8)
    session = M.session(scheduler=batch.scheduler)
    decoder = Decoder(session, BaseDrafter(), verify_tree, sampling=sampling, stop=stop)
    decoder.extend([*PREFIX, *TAILS[number % 3]])
    for round in decoder.run(Seeded(number)):
        yield from round.tokens


def test_each_text_is_what_it_is_alone() -> None:
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts = [partial(write, number, 3 + 2 * number) for number in range(3)]
    for number, token in decode_many(texts):
        got[number].append(token)
    for number, tokens in got.items():
        alone = decode_alone([*PREFIX, *TAILS[number]], Seeded(number), 3 + 2 * number)
        assert tokens == alone


def test_a_text_that_joins_shares_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, forward = list[int](), M.forward
    monkeypatch.setattr(M, "forward", lambda feeds: (widths.append(len(feeds)), forward(feeds))[1])

    def grow(batch: DecodingBatch[int]) -> Iterator[int]:
        for at, token in enumerate(write(0, 4, batch)):
            if at == 1:
                batch.start([partial(write, 1, 2)])
            yield token

    items = list(decode_many([grow]))
    assert [number for number, _ in items].count(1) == 2
    assert widths == [1, 1, 1, 2, 2, 1]  # prefill, two tokens; then the other text's prefill


def test_a_failure_ends_all_and_is_raised() -> None:
    def fail(batch: DecodingBatch[int]) -> Iterator[int]:
        yield from write(0, 2, batch)
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        list(decode_many([fail, partial(write, 1, 50)]))


def test_closing_ends_all() -> None:
    before = threading.active_count()
    running = decode_many([partial(write, number, 50) for number in range(3)])
    next(running)
    running.close()
    assert threading.active_count() == before


def test_no_texts_yield_nothing() -> None:
    assert list(decode_many([])) == []


# ---------------------------------------------------------------------- streams of one answer


class ThreeEnds(StreamDecoder):
    """An answer of three ends of one text."""

    def write_answer(self, rng: RandomSource) -> Iterator[Round]:
        sources = [rng.split("end", at) for at in range(len(TAILS))]
        streams = list[Stream]()
        begin = self.fork_prompts([[*self.context, *tail] for tail in TAILS], sources, streams)
        running = self.run_streams(begin)
        next(running)
        for stream in streams:
            yield from self.read_in_order(stream, running)


def run_ends(n: int = 4, most: int = 9) -> tuple[ThreeEnds, list[Round]]:
    decoder = ThreeEnds(M, sampling=SamplingParams(0.8), stop=StoppingCriteria(max_new_tokens=n))
    decoder.most = most
    decoder.extend(PREFIX)
    return decoder, list(decoder.run(Seeded(5)))


@pytest.mark.parametrize("most", [1, 2, 9])
def test_the_answer_does_not_depend_on_how_many_streams_run_at_once(most: int) -> None:
    decoder, _ = run_ends(most=most)
    source = Seeded(5)
    alone = [decode_alone([*PREFIX, *t], source.split("end", i), 4) for i, t in enumerate(TAILS)]
    assert decoder.new == [token for tokens in alone for token in tokens]
    assert decoder.finished == "length"


def test_a_common_prefix_is_computed_once_and_the_log_says_so() -> None:
    decoder, _ = run_ends()
    log = decoder.forward_log
    assert [record.shared for record in log if record.shared] == [len(PREFIX)] * 3
    tails = sum(len(tail) + 4 - 1 for tail in TAILS)
    assert sum(record.rows for record in log) == len(PREFIX) + tails


def test_a_shared_pass_is_one_call() -> None:
    stats = Statistics()
    for round in run_ends()[1]:
        stats.count(round)
    assert (stats.emitted, stats.target_calls) == (12, 4)
    stats = Statistics()
    for round in run_ends(most=1)[1]:
        stats.count(round)
    assert (stats.emitted, stats.target_calls) == (12, 12)


def test_ending_half_way_ends_the_streams() -> None:
    before = threading.active_count()
    decoder = ThreeEnds(M, stop=StoppingCriteria(max_new_tokens=40))
    decoder.extend(PREFIX)
    running: Any = decoder.run(Seeded(0))
    next(running)
    decoder.end()
    assert threading.active_count() == before
    assert decoder.finished is None


def test_a_fork_beyond_the_text_is_an_error() -> None:
    session = M.session()
    session.extend(PREFIX)
    with pytest.raises(ValueError, match="cannot fork at 9"):
        session.fork(9)


def test_a_fork_at_any_length_goes_on_as_a_fresh_session_would() -> None:
    for length in range(1, len(PREFIX) + 1):
        session = M.session()
        session.extend(PREFIX)
        session.score(TokenTree())
        twin, fresh = session.fork(length), M.session()
        twin.append([5])
        fresh.extend([*PREFIX[:length], 5])
        got, expected = (one.score(TokenTree()).logits for one in (twin, fresh))
        assert abs(got - expected).max() < 1e-10
        assert len(session) == len(PREFIX)


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    """A stream then ends before it, as the text that is decoded whole does."""

    class Pieces:
        def push(self, tokens: list[int]) -> str:
            return "top"

        def flush(self) -> str:
            return "\ufffd"

    growing = GrowingText(StoppingCriteria(strings=("p\ufffd",), decode=str), Pieces())  # type: ignore[arg-type]
    assert growing.push([1], is_finished=True) == "to"
