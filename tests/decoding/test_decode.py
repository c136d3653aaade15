"""The common loop: counting, cutting, and taking back."""

import pytest

from tests.lm import small
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, Trace, token_origins
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.tree import TokenTree


class Always(BaseDrafter):
    """An adversary: proposes the same chain whatever the text is."""

    def __init__(self, *tokens: int):
        self.tokens = tokens

    def propose(self, context, max_draft_depth, sampling, rng):  # type: ignore[no-untyped-def]
        return TokenTree.chain(self.tokens[:max_draft_depth])


def decoder(
    drafter: BaseDrafter | None = None, stop: StoppingCriteria | None = None, **options: object
) -> Decoder:
    return Decoder(Table(1), drafter or BaseDrafter(), verify_tree, stop=stop, **options)  # type: ignore[arg-type]


def run(d: Decoder, seed: int = 0, prompt: tuple[int, ...] = (0,)) -> Decoder:
    d.extend(prompt)
    rng = Seeded(seed)
    while not d.finished:
        d.step(rng)
    return d


@pytest.mark.parametrize("wanted", range(7))
@pytest.mark.parametrize("gamma", range(5))
def test_exactly_as_many_tokens_as_asked_for(wanted: int, gamma: int) -> None:
    d = run(decoder(Always(*[0] * gamma), StoppingCriteria(max_new_tokens=wanted)))
    assert len(d.new) == wanted
    assert d.finished == "length"
    assert d.target.text == d.context  # type: ignore[attr-defined]


def test_a_draft_of_the_end_token_does_not_end_the_text() -> None:
    stop = StoppingCriteria(eos=frozenset({2}), max_new_tokens=6)
    sampling = SamplingParams(temperature=0.0)
    plain = run(Decoder(Table(5), BaseDrafter(), verify_tree, sampling=sampling, stop=stop))
    drafted = run(Decoder(Table(5), Always(2, 2, 2), verify_tree, sampling=sampling, stop=stop))
    assert drafted.new == plain.new


def test_nothing_comes_after_an_end_token_inside_a_block() -> None:
    for seed in range(30):
        d = run(
            Decoder(
                Table(seed),
                Always(1, 2, 0, 1),
                verify_tree,
                stop=StoppingCriteria(frozenset({2}), max_new_tokens=9),
            ),
            seed,
        )
        assert 2 not in d.new[:-1]


def test_the_context_limit_is_never_passed() -> None:
    d = run(
        Decoder(
            Table(1),
            Always(0, 0, 0),
            verify_tree,
            stop=StoppingCriteria(max_new_tokens=50),
            positions=8,
        )
    )
    assert len(d.context) == 8
    assert d.finished == "context"


def test_a_prompt_at_the_context_limit_ends_at_once() -> None:
    d = run(Decoder(Table(1), BaseDrafter(), verify_tree, positions=3), prompt=(0, 1, 2))
    assert d.new == []
    assert d.finished == "context"


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(TinyspecError, match="empty"):
        decoder().extend(())


def test_a_finished_text_takes_no_further_step() -> None:
    d = run(decoder(stop=StoppingCriteria(max_new_tokens=1)))
    with pytest.raises(ValueError, match="finished"):
        d.step(Seeded(0))


def test_every_adversary_keeps_the_distribution() -> None:
    plain = exact_distribution(lambda: decoder(), tokens=3)
    assert sum(plain.values()) == 1
    for tokens in ((0,), (1, 1), (2, 0, 1)):
        assert exact_distribution(lambda tokens=tokens: decoder(Always(*tokens)), tokens=3) == plain  # type: ignore[misc]


def test_plain_decoding_makes_one_token_a_forward_pass() -> None:
    d = decoder(stop=StoppingCriteria(max_new_tokens=5))
    d.extend((0,))
    stats, rng = Statistics(), Seeded(3)
    while not d.finished:
        stats.count(d.step(rng))
    assert (stats.emitted, stats.target_calls, stats.tokens_per_call) == (5, 5, 1.0)


def test_statistics_of_no_tokens_are_defined() -> None:
    assert Statistics().as_dict()["tokens_per_call"] == 0


def test_emitted_tokens_are_accepted_ones_plus_one_a_round_less_the_cut() -> None:
    d = decoder(Always(0, 1), StoppingCriteria(max_new_tokens=11))
    d.extend((0,))
    stats, rng, nexts, cut = Statistics(), Seeded(4), 0, 0
    while not d.finished:
        r = d.step(rng)
        stats.count(r)
        nexts += r.verdict.next is not None
        cut += r.truncated
        assert len(token_origins(r)) == len(r.tokens) == len(r.output_probs)
    assert stats.emitted == stats.accepted + nexts == 11
    assert stats.tokens_per_call * stats.target_calls == stats.emitted


def test_origins_tell_recovered_from_bonus() -> None:
    kinds = set()
    d = decoder(Always(0), StoppingCriteria(max_new_tokens=40))
    d.extend((0,))
    rng = Seeded(1)
    while not d.finished:
        r = d.step(rng)
        kinds.add(token_origins(r))
        if r.verdict.next is not None and r.tree.tokens:
            assert token_origins(r)[-1] == ("recovered" if r.verdict.rejected else "bonus")
    assert {("recovered",), ("accepted", "bonus")} <= kinds


def test_a_trace_survives_json() -> None:
    d = decoder(Always(0, 1), StoppingCriteria(max_new_tokens=6))
    trace = Trace([0])
    d.extend((0,))
    while not d.finished:
        trace.add(d.step(Seeded(2 + d.rounds)))
    assert Trace.from_json(trace.to_json()) == trace
    assert len(trace.origins) == 6


def test_rewinding_and_going_on_equals_never_having_gone() -> None:
    sampling = SamplingParams(temperature=0.0)
    d = Decoder(
        Table(7),
        Always(0, 1),
        verify_tree,
        sampling=sampling,
        stop=StoppingCriteria(max_new_tokens=9),
    )
    d = run(d)
    whole = list(d.context)
    d.rewind(4)
    rng = Seeded(99)
    while not d.finished and len(d.context) < 10:
        d.step(rng)
    assert d.context[:10] == whole[:10]


def test_a_verifier_that_commits_nothing_is_an_error() -> None:
    from tinyspec.decoding.verify import Verdict

    d = Decoder(Table(1), BaseDrafter(), lambda tree, p, rng: Verdict((), None))
    d.extend((0,))
    with pytest.raises(RuntimeError, match="nothing"):
        d.step(Seeded(0))


class Keeping(BaseDrafter):
    """Keeps every round, and reads its distributions when decoding has ended."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def propose(self, context, max_draft_depth, sampling, rng):  # type: ignore[no-untyped-def]
        return TokenTree.chain([0, 1][:max_draft_depth])

    def observe(self, round: Round) -> None:
        self.rounds.append(round)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_a_rounds_distributions_are_those_of_its_moment_however_late_they_are_read(
    penalty: float,
) -> None:
    model, drafter = TableModel(seed=4, vocabulary=3, floats=True), Keeping()
    sampling = SamplingParams(temperature=0.7, repetition_penalty=penalty)
    d = run(
        Decoder(
            model.session(),
            drafter,
            verify_tree,
            sampling=sampling,
            stop=StoppingCriteria(max_new_tokens=9),
        )
    )
    text = [0]
    for round in drafter.rounds:
        assert len(round.output_probs) == len(round.tokens)
        for token, read in zip(round.tokens, round.output_probs, strict=True):
            rows = model.session()
            rows.extend(text)
            assert read.tolist() == sampling.probs(rows.score(TokenTree()).logits[0], text).tolist()
            text.append(token)
        assert [row.tolist() for row in round.output_probs[1:]] == [
            row.tolist() for row in list(round.output_probs)[1:]
        ]
    assert text == d.context


class Knowing(Keeping):
    """Proposes the text that will come, and beside each of its tokens another one."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.text = text

    def propose(self, context, max_draft_depth, sampling, rng):  # type: ignore[no-untyped-def]
        coming = self.text[len(context) :][: min(max_draft_depth, 4)]
        tokens = [token for right in coming for token in ((right + 1) % 3, right)]
        parents = [2 * depth - 1 for depth in range(len(coming)) for _ in range(2)]
        return TokenTree(tokens, parents, (None,) * len(tokens), (False,) * len(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_a_greedy_walk_penalises_what_its_own_path_says(seed: int) -> None:
    model, sampling, stop = (
        TableModel(seed=seed, vocabulary=3, floats=True),
        SamplingParams(0.0, repetition_penalty=3.0),
        StoppingCriteria(max_new_tokens=12),
    )
    plain = run(Decoder(model.session(), BaseDrafter(), verify_tree, sampling=sampling, stop=stop))
    text = [0]
    for token in plain.new:  # and plain decoding has the reference's distribution
        rows = model.session()
        rows.extend(text)
        assert token == int(sampling.probs(rows.score(TokenTree()).logits[0], text).argmax())
        text.append(token)
    drafted = run(
        Decoder(model.session(), Knowing(text), verify_tree, sampling=sampling, stop=stop)
    )
    assert drafted.context == text
    assert drafted.rounds <= 4


def test_the_distributions_of_a_round_are_those_of_its_own_text_whenever_they_are_read() -> None:
    """A penalty must see the text as it was in the round. A greedy distribution is computed only
    when it is read, and by then the text has grown.
    """
    sampling = SamplingParams(0.0, repetition_penalty=9.0)
    session = small.model().session()
    request = Decoder(
        session,
        BaseDrafter(),
        verify_tree,
        sampling=sampling,
        stop=StoppingCriteria(max_new_tokens=5),
    )
    request.extend(small.PROMPT)
    rounds = [request.step(Seeded(i)) for i in range(5)]
    for i, round in enumerate(rounds):
        expected = sampling.probs(round.scores.logits[0], request.context[: len(small.PROMPT) + i])
        assert (round.output_probs[0] == expected).all()
