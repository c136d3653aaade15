"""The common loop: counting, cutting, and taking back."""

import pytest

from tests.lm import small
from tests.table import Table, law
from tinyspec.decoding.chance import Seeded
from tinyspec.decoding.decode import Decoder, NoDraft, Round
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.stop import Stop
from tinyspec.decoding.trace import Statistics, Trace, origins
from tinyspec.decoding.verify import walk
from tinyspec.errors import TinyspecError
from tinyspec.laws.tables import TableModel
from tinyspec.tree import TokenTree


class Always(NoDraft):
    """An adversary: proposes the same chain whatever the text is."""

    def __init__(self, *tokens: int):
        self.tokens = tokens

    def propose(self, context, room, warp, chance):  # type: ignore[no-untyped-def]
        return TokenTree.chain(self.tokens[:room])


def decoder(drafter: NoDraft | None = None, stop: Stop | None = None, **options: object) -> Decoder:
    return Decoder(Table(1), drafter or NoDraft(), walk, stop=stop, **options)  # type: ignore[arg-type]


def run(d: Decoder, seed: int = 0, prompt: tuple[int, ...] = (0,)) -> Decoder:
    d.extend(prompt)
    chance = Seeded(seed)
    while not d.finished:
        d.step(chance)
    return d


@pytest.mark.parametrize("wanted", range(7))
@pytest.mark.parametrize("gamma", range(5))
def test_exactly_as_many_tokens_as_asked_for(wanted: int, gamma: int) -> None:
    d = run(decoder(Always(*[0] * gamma), Stop(max_new_tokens=wanted)))
    assert len(d.new) == wanted
    assert d.finished == "length"
    assert d.target.text == d.context  # type: ignore[attr-defined]


def test_a_draft_of_the_end_token_does_not_end_the_text() -> None:
    stop = Stop(eos=frozenset({2}), max_new_tokens=6)
    warp = Warp(temperature=0.0)
    plain = run(Decoder(Table(5), NoDraft(), walk, warp=warp, stop=stop))
    drafted = run(Decoder(Table(5), Always(2, 2, 2), walk, warp=warp, stop=stop))
    assert drafted.new == plain.new


def test_nothing_comes_after_an_end_token_inside_a_block() -> None:
    for seed in range(30):
        d = run(
            Decoder(
                Table(seed), Always(1, 2, 0, 1), walk, stop=Stop(frozenset({2}), max_new_tokens=9)
            ),
            seed,
        )
        assert 2 not in d.new[:-1]


def test_the_context_limit_is_never_passed() -> None:
    d = run(Decoder(Table(1), Always(0, 0, 0), walk, stop=Stop(max_new_tokens=50), positions=8))
    assert len(d.context) == 8
    assert d.finished == "context"


def test_a_prompt_at_the_context_limit_ends_at_once() -> None:
    d = run(Decoder(Table(1), NoDraft(), walk, positions=3), prompt=(0, 1, 2))
    assert d.new == []
    assert d.finished == "context"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(TinyspecError, match="empty"):
        decoder().extend(())


def test_a_finished_text_takes_no_further_step() -> None:
    d = run(decoder(stop=Stop(max_new_tokens=1)))
    with pytest.raises(ValueError, match="finished"):
        d.step(Seeded(0))


def test_every_adversary_keeps_the_law() -> None:
    plain = law(lambda: decoder(), tokens=3)
    assert sum(plain.values()) == 1
    for tokens in ((0,), (1, 1), (2, 0, 1)):
        assert law(lambda tokens=tokens: decoder(Always(*tokens)), tokens=3) == plain  # type: ignore[misc]


def test_plain_decoding_makes_one_token_a_call() -> None:
    d = decoder(stop=Stop(max_new_tokens=5))
    d.extend((0,))
    stats, chance = Statistics(), Seeded(3)
    while not d.finished:
        stats.count(d.step(chance))
    assert (stats.emitted, stats.target_calls, stats.tokens_per_call) == (5, 5, 1.0)


def test_statistics_of_no_tokens_are_defined() -> None:
    assert Statistics().as_dict()["tokens_per_call"] == 0


def test_emitted_tokens_are_accepted_ones_plus_one_a_round_less_the_cut() -> None:
    d = decoder(Always(0, 1), Stop(max_new_tokens=11))
    d.extend((0,))
    stats, chance, nexts, cut = Statistics(), Seeded(4), 0, 0
    while not d.finished:
        r = d.step(chance)
        stats.count(r)
        nexts += r.verdict.next is not None
        cut += r.truncated
        assert len(origins(r)) == len(r.tokens) == len(r.laws)
    assert stats.emitted == stats.accepted + nexts == 11
    assert stats.tokens_per_call * stats.target_calls == stats.emitted


def test_origins_tell_recovered_from_bonus() -> None:
    kinds = set()
    d = decoder(Always(0), Stop(max_new_tokens=40))
    d.extend((0,))
    chance = Seeded(1)
    while not d.finished:
        r = d.step(chance)
        kinds.add(origins(r))
        if r.verdict.next is not None and r.tree.tokens:
            assert origins(r)[-1] == ("recovered" if r.verdict.refused else "bonus")
    assert {("recovered",), ("accepted", "bonus")} <= kinds


def test_a_trace_survives_json() -> None:
    d = decoder(Always(0, 1), Stop(max_new_tokens=6))
    trace = Trace([0])
    d.extend((0,))
    while not d.finished:
        trace.add(d.step(Seeded(2 + d.rounds)))
    assert Trace.from_json(trace.to_json()) == trace
    assert len(trace.origins) == 6


def test_rewinding_and_going_on_equals_never_having_gone() -> None:
    warp = Warp(temperature=0.0)
    d = Decoder(Table(7), Always(0, 1), walk, warp=warp, stop=Stop(max_new_tokens=9))
    d = run(d)
    whole = list(d.context)
    d.rewind(4)
    chance = Seeded(99)
    while not d.finished and len(d.context) < 10:
        d.step(chance)
    assert d.context[:10] == whole[:10]


def test_a_verifier_that_commits_nothing_is_an_error() -> None:
    from tinyspec.decoding.verify import Verdict

    d = Decoder(Table(1), NoDraft(), lambda tree, p, chance: Verdict((), None))
    d.extend((0,))
    with pytest.raises(RuntimeError, match="nothing"):
        d.step(Seeded(0))


class Keeping(NoDraft):
    """Keeps every round, and reads its laws when all is over."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def propose(self, context, room, warp, chance):  # type: ignore[no-untyped-def]
        return TokenTree.chain([0, 1][:room])

    def observe(self, round: Round) -> None:
        self.rounds.append(round)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_a_rounds_laws_are_those_of_its_moment_however_late_they_are_read(penalty: float) -> None:
    model, drafter = TableModel(seed=4, vocabulary=3, floats=True), Keeping()
    warp = Warp(temperature=0.7, repetition_penalty=penalty)
    d = run(Decoder(model.session(), drafter, walk, warp=warp, stop=Stop(max_new_tokens=9)))
    text = [0]
    for round in drafter.rounds:
        assert len(round.laws) == len(round.tokens)
        for token, read in zip(round.tokens, round.laws, strict=True):
            rows = model.session()
            rows.extend(text)
            assert read.tolist() == warp(rows.score(TokenTree()).logits[0], text).tolist()
            text.append(token)
        assert [row.tolist() for row in round.laws[1:]] == [
            row.tolist() for row in list(round.laws)[1:]
        ]
    assert text == d.context


class Knowing(Keeping):
    """Proposes the text that will come, and beside each of its tokens another one."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text

    def propose(self, context, room, warp, chance):  # type: ignore[no-untyped-def]
        coming = self.text[len(context) :][: min(room, 4)]
        tokens = [token for right in coming for token in ((right + 1) % 3, right)]
        parents = [2 * depth - 1 for depth in range(len(coming)) for _ in range(2)]
        return TokenTree(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_a_greedy_walk_penalises_what_its_own_path_says(seed: int) -> None:
    model, warp, stop = (
        TableModel(seed=seed, vocabulary=3, floats=True),
        Warp(0.0, repetition_penalty=3.0),
        Stop(max_new_tokens=12),
    )
    plain = run(Decoder(model.session(), NoDraft(), walk, warp=warp, stop=stop))
    text = [0]
    for token in plain.new:  # and plain decoding is the law's
        rows = model.session()
        rows.extend(text)
        assert token == int(warp(rows.score(TokenTree()).logits[0], text).argmax())
        text.append(token)
    drafted = run(Decoder(model.session(), Knowing(text), walk, warp=warp, stop=stop))
    assert drafted.context == text
    assert drafted.rounds <= 4


def test_the_laws_of_a_round_are_those_of_its_own_text_whenever_they_are_read() -> None:
    """A penalty looks at the text as it was, and a greedy law is not made before it is read; the text has gone on since."""
    warp = Warp(0.0, repetition_penalty=9.0)
    session = small.model().session()
    request = Decoder(session, NoDraft(), walk, warp=warp, stop=Stop(max_new_tokens=5))
    request.extend(small.PROMPT)
    rounds = [request.step(Seeded(i)) for i in range(5)]
    for i, round in enumerate(rounds):
        expected = warp(round.scores.logits[0], request.context[: len(small.PROMPT) + i])
        assert (round.laws[0] == expected).all()
