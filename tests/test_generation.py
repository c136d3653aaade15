"""generate and stream: one face for every technique."""

import gc
import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import Zoo, tiny_zoo
from tinyspec import generation
from tinyspec.decoding.decode import Decoder
from tinyspec.errors import BatchError, TinyspecError
from tinyspec.lm.model import Model
from tinyspec.pairing import drafts_for

METHODS = ["autoregressive", "speculative_decoding", "llma"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def model(zoo: Zoo) -> Model:
    return tinyspec.load(zoo.big, dtype="float64")


@pytest.fixture(scope="module")
def draft(zoo: Zoo) -> Model:
    return tinyspec.load(zoo.small, dtype="float64")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt", ["the cat", "the dog sat on the log, and"])
def test_greedy_text_is_plain_decodings_whatever_the_method(
    model: Model, draft: Model, method: str, prompt: str
) -> None:
    plain = tinyspec.generate(model, prompt, max_new_tokens=40)
    other = tinyspec.generate(model, prompt, method=method, draft=draft, max_new_tokens=40)
    assert other.tokens == plain.tokens
    assert other.text == plain.text
    assert other.finish_reason == plain.finish_reason == "length"


@pytest.mark.parametrize("ends", [2, 9, 20])
def test_a_draft_with_a_shorter_context_stops_drafting_and_the_text_goes_on(
    model: Model, draft: Model, ends: int
) -> None:
    """Also where the prompt alone is longer than the draft's context (2)."""
    short = Model(
        replace(draft.config, max_positions=ends), draft.weights, draft.tokenizer, "short"
    )
    plain = tinyspec.generate(model, "the cat sat on the", max_new_tokens=40)
    other = tinyspec.generate(
        model, "the cat sat on the", method="speculative_decoding", draft=short, max_new_tokens=40
    )
    assert (other.tokens, other.finish_reason) == (plain.tokens, plain.finish_reason)
    assert (other.stats.drafted > 0) == (ends > 2)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_in_a_batch_equals_the_prompt_alone_with_its_own_seed(
    model: Model, draft: Model, method: str
) -> None:
    prompts = ["the cat", "the dog sat on the", "and", "house"]
    options = {
        "method": method,
        "draft": draft,
        "max_new_tokens": 12,
        "temperature": 0.9,
        "top_p": 0.95,
    }
    batch = tinyspec.generate(model, prompts, seed=5, **options)
    alone = [tinyspec.generate(model, p, seed=5 + i, **options) for i, p in enumerate(prompts)]
    assert [row.tokens for row in batch] == [row.tokens for row in alone]


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_text_whatever_ran_before(
    model: Model, draft: Model, method: str
) -> None:
    options = {
        "method": method,
        "draft": draft,
        "max_new_tokens": 16,
        "temperature": 1.0,
        "seed": 3,
    }
    first = tinyspec.generate(model, "the cat", **options)
    torch.rand(7)
    tinyspec.generate(model, "something else", **options)
    assert tinyspec.generate(model, "the cat", **options).tokens == first.tokens
    assert tinyspec.generate(model, "the cat", **{**options, "seed": 4}).tokens != first.tokens


def test_global_random_state_is_untouched(model: Model, draft: Model) -> None:
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    tinyspec.generate(
        model,
        "the cat",
        method="speculative_decoding",
        draft=draft,
        temperature=1.0,
        max_new_tokens=8,
    )
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert before == after


@pytest.mark.parametrize("method", METHODS)
def test_streamed_pieces_join_to_the_text(model: Model, draft: Model, method: str) -> None:
    options = {
        "method": method,
        "draft": draft,
        "max_new_tokens": 30,
        "temperature": 1.0,
        "seed": 2,
        "stop": ["th", "q"],
    }
    whole = tinyspec.generate(model, "the cat", **options)
    assert "".join(tinyspec.stream(model, "the cat", **options)) == whole.text


def test_text_ends_before_the_stop_string_and_tokens_with_the_one_that_completed_it(
    model: Model,
) -> None:
    free = tinyspec.generate(model, "the cat", max_new_tokens=30)
    stop = free.text[len(free.text) // 2 :][:2]
    cut = tinyspec.generate(model, "the cat", max_new_tokens=30, stop=stop)
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.tokens == free.tokens[: len(cut.tokens)]
    assert stop in model.tokenizer.decode(cut.tokens)


def test_a_stop_sequence_of_ids_is_kept_whole(model: Model) -> None:
    free = tinyspec.generate(model, "the cat", max_new_tokens=30)
    cut = tinyspec.generate(model, "the cat", max_new_tokens=30, stop=[free.tokens[4:6]])
    assert cut.finish_reason == "stop"
    assert cut.tokens[-2:] == free.tokens[4:6]


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_the_targets_own(model: Model, draft: Model, method: str) -> None:
    out = tinyspec.generate(
        model, "the cat", method=method, draft=draft, max_new_tokens=10, temperature=0.7, top_k=5
    )
    prompt = model.tokenizer.encode("the cat")
    rows = model.logits([*prompt, *out.tokens]).log_softmax(-1)
    expected = [float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(out.tokens)]
    assert out.logprobs == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("wanted", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_small_budgets_give_exactly_so_many_tokens_and_defined_figures(
    model: Model, draft: Model, method: str, wanted: int
) -> None:
    out = tinyspec.generate(model, "the cat", method=method, draft=draft, max_new_tokens=wanted)
    assert len(out.tokens) == len(out.logprobs) == wanted
    assert math.isfinite(out.stats.tokens_per_call)
    assert math.isfinite(out.stats.layers_per_token)


def test_plain_decoding_runs_every_layer_once_a_token(model: Model) -> None:
    out = tinyspec.generate(model, "the cat", max_new_tokens=9)
    assert out.stats.tokens_per_call == 1
    assert out.stats.layers_per_token == model.config.n_layers
    assert (out.stats.target_calls, out.stats.draft_calls) == (9, 0)


@pytest.mark.parametrize("method", METHODS)
def test_the_context_ends_a_text(model: Model, draft: Model, method: str) -> None:
    limit = model.config.max_positions
    for length in (limit - 3, limit - 1, limit):
        out = tinyspec.generate(model, [5] * length, method=method, draft=draft, max_new_tokens=50)
        assert (len(out.tokens), out.finish_reason) == (limit - length, "context")


def test_the_cards_draft_is_taken_when_none_is_given(zoo: Zoo) -> None:
    model = tinyspec.load(zoo.big)
    assert (
        tinyspec.generate(
            model, "the cat", method="speculative_decoding", max_new_tokens=6
        ).stats.drafted
        > 0
    )


def test_messages_and_chat_go_through_the_template(model: Model) -> None:
    asked = generation.prompt_ids(model, "the cat", chat=True)
    assert asked == generation.prompt_ids(model, [{"role": "user", "content": "the cat"}])
    assert model.tokenizer.decode(asked).startswith("user: the cat")


def test_ctrl_c_keeps_the_text_so_far(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = model.forward, []

    def failing(feeds):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return real(feeds)

    monkeypatch.setattr(model, "forward", failing)
    out = tinyspec.generate(model, "the cat", max_new_tokens=30)
    assert out.finish_reason == "interrupted"
    assert 0 < len(out.tokens) < 6


def test_references_are_copied_from(model: Model) -> None:
    free = tinyspec.generate(model, "the cat", max_new_tokens=40)
    prompt = model.tokenizer.encode("the cat")
    copied = tinyspec.generate(
        model, prompt, method="llma", max_new_tokens=40, references=[[*prompt, *free.tokens]]
    )
    assert copied.tokens == free.tokens
    assert copied.stats.target_calls < 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "speculative_decodin"}, "did you mean 'speculative_decoding'"),
        ({"method": "llma", "kk": 3}, "no knob 'kk'"),
        ({"method": "speculative_decoding", "gamma": 0}, "gamma is 0: it must be from 1 to 64"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop": [""]}, "empty"),
        ({"references": ["x"]}, "copies from no references"),
    ],
)
def test_wrong_arguments_get_one_line_that_says_what_to_do(
    model: Model, draft: Model, options: dict[str, object], words: str
) -> None:
    with pytest.raises(TinyspecError, match=words.replace("(", r"\(")) as caught:
        tinyspec.generate(model, "the cat", draft=draft, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_an_error(model: Model, prompt: str | list[int]) -> None:
    with pytest.raises(TinyspecError, match="empty"):
        tinyspec.generate(model, prompt)


def test_a_prompt_beyond_the_context_is_an_error(model: Model) -> None:
    with pytest.raises(TinyspecError, match="97 tokens"):
        tinyspec.generate(model, [5] * 97)


def test_a_draft_of_another_vocabulary_says_by_how_much_and_what_else_works(
    model: Model, zoo: Zoo
) -> None:
    with pytest.raises(TinyspecError, match=r"280 tokens against 286.*llma"):
        tinyspec.generate(model, "the cat", method="speculative_decoding", draft=zoo.other)


def test_a_missing_draft_names_the_methods_that_need_none(zoo: Zoo) -> None:
    lonely = tinyspec.load(zoo.small)
    with pytest.raises(TinyspecError, match=r"needs a draft model.*autoregressive"):
        tinyspec.generate(lonely, "the cat", method="speculative_decoding")


def test_fewer_drafts_than_a_method_needs_repeat_the_last_and_of_more_the_first_are_used(
    model: Model, draft: Model, zoo: Zoo
) -> None:
    from tests.laws.hosted import card

    def shared(**traits: Any) -> list[Model]:
        return drafts_for(model, card(id, **traits), given)

    given: generation.Draft = [draft, model]
    assert shared(drafts=1) == [draft] and shared(drafts=3) == [draft, model, model]
    assert shared(drafts=1, several=True) == [draft, model]
    assert shared(drafts=0) == [] and shared(optional_draft=True) == [draft]
    given = [zoo.small, draft]
    assert [small.name for small in shared(drafts=2)] == [tinyspec.load(zoo.small).name, draft.name]
    given = draft
    assert shared(drafts=2) == [draft, draft]


def test_a_draft_that_only_the_card_names_is_read_once_and_goes_with_its_target(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.laws.hosted import card

    target = tinyspec.load(zoo.small)
    with monkeypatch.context() as patch:
        patch.setitem(target.config.extra, "draft", str(zoo.small))
        first, again = (drafts_for(target, card(id, drafts=1), None)[0] for _ in range(2))
    assert first is again, "so that what was measured of it is kept too"
    given = drafts_for(target, card(id, drafts=1), str(zoo.small))[0]
    assert given is not first, "a folder that was named may have been trained on since"
    gone = weakref.ref(first)
    del target, first, again
    gc.collect()
    assert gone() is None


def test_a_draft_advises_how_many_tokens_to_draw_and_who_asks_decides(
    model: Model, draft: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_drafted(method: str, **knobs: Any) -> int:
        rounds = generation.start_generation(
            model, "the cat", method=method, draft=draft, max_new_tokens=9, **knobs
        )
        return len(next(iter(rounds)).tree.tokens)

    assert count_drafted("speculative_decoding") == 3
    monkeypatch.setitem(draft.config.extra, "gamma", 2)
    assert count_drafted("speculative_decoding") == count_drafted("block_verification") == 2
    assert count_drafted("speculative_decoding", gamma=4) == 4
    assert count_drafted("multi_candidate", configuration="3") == 3, (
        "a method that does not ask for gamma is not told"
    )


def test_each_of_several_drafts_is_checked_for_its_vocabulary(
    model: Model, draft: Model, zoo: Zoo
) -> None:
    from tests.laws.hosted import card

    with pytest.raises(TinyspecError, match="280 tokens against 286"):
        drafts_for(model, card(id, drafts=2), [draft, zoo.other])


# ---------------------------------------------------------------------- the end of a request


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Decoder]:
    """Return the decoders whose request was ended."""
    decoders: list[Decoder] = []
    end = Decoder.end

    def noted(self: Decoder) -> None:
        decoders.append(self)
        end(self)

    monkeypatch.setattr(Decoder, "end", noted)
    return decoders


def test_a_request_that_is_over_is_closed_once_and_can_still_be_asked(
    model: Model, ended: list[Decoder]
) -> None:
    running = generation.start_generation(model, "the cat", method="llma", max_new_tokens=5)
    for _ in running:
        assert ended == []
    seconds = running.stats.seconds
    assert ended == [running.decoder] and len(running.decoder.target) == 0  # type: ignore[arg-type]
    assert running.result().tokens == tinyspec.generate(model, "the cat", max_new_tokens=5).tokens
    running.close("interrupted")
    assert (
        len(ended) == 2
        and running.result().finish_reason == "length"
        and running.stats.seconds == seconds
    )


@pytest.mark.parametrize("failure", [ZeroDivisionError, KeyboardInterrupt])
def test_a_request_that_fails_is_closed(
    model: Model,
    ended: list[Decoder],
    failure: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> Any:
        raise failure

    running = generation.start_generation(model, "the cat", max_new_tokens=5)
    rounds = iter(running)
    first = next(rounds)
    monkeypatch.setattr(running.decoder.target, "score", fails)
    with pytest.raises(failure):
        next(rounds)
    assert ended == [running.decoder] and running.result().tokens == list(first.tokens)
    assert running.result().finish_reason == "interrupted"
    monkeypatch.setattr(Decoder, "extend", fails)
    with pytest.raises(failure):
        generation.start_generation(model, "the cat")
    assert len(ended) == 2


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_stream_that_nobody_reads_to_its_end_is_closed(
    model: Model, ended: list[Decoder], pieces: int
) -> None:
    stream = tinyspec.stream(model, "the cat", max_new_tokens=40)
    for _ in range(pieces):
        next(stream)
    assert ended == []
    del stream
    gc.collect()
    assert len(ended) == 1


def test_where_one_request_of_a_batch_fails_all_are_closed(
    model: Model, ended: list[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def fails(self: Decoder, rng: Any) -> Any:
        if len(self.context) > 40:
            raise ZeroDivisionError
        return step(self, rng)

    monkeypatch.setattr(Decoder, "step", fails)
    with pytest.raises(BatchError):
        tinyspec.generate(model, [[1, 2, 3], [4] * 38], max_new_tokens=20)
    gc.collect()
    assert len({id(decoder) for decoder in ended}) == 2


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["the cat", [1] * 97], r"^prompt\[1\]: the prompt has 97 tokens"),
        (["the cat", ""], r"^prompt\[1\]: the prompt is empty"),
        (["the cat", "the", "\ud800"], r"^prompt\[2\]: this text is no valid Unicode"),
        ([[3], [2**40], [4]], r"^prompt\[1\]: "),
        ([[3], [4], [-1]], r"^prompt\[2\]: "),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named(
    model: Model, rows: list[str | list[int]], says: str
) -> None:
    with pytest.raises(TinyspecError, match=says) as error:
        tinyspec.generate(model, rows, max_new_tokens=4)
    assert "\n" not in str(error.value)


def test_a_row_that_fails_costs_no_other_row_its_text(model: Model) -> None:
    """Seven rows of eight are right, before and after the one that is too long."""
    rows: list[Any] = [[1, 2, n] for n in range(3, 10)]
    alone = [
        tinyspec.generate(model, row, max_new_tokens=6, seed=seed)
        for seed, row in zip((0, 1, 2, 4, 5, 6, 7), rows, strict=True)
    ]
    with pytest.raises(BatchError, match=r"the prompt has 97 tokens.*1 of 8 rows failed") as error:
        tinyspec.generate(model, [*rows[:3], [1] * 97, *rows[3:]], max_new_tokens=6)
    texts = error.value.results
    assert [done and done.tokens for done in texts] == [
        *(done.tokens for done in alone[:3]),
        None,
        *(done.tokens for done in alone[3:]),
    ]
    assert list(error.value.errors) == [3]


def test_a_defect_in_one_prompt_names_the_prompt_and_keeps_its_traceback(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Decoder.step

    def fails(self: Decoder, rng: Any) -> Any:
        return 1 / 0 if self.context[0] == 7 else step(self, rng)

    monkeypatch.setattr(Decoder, "step", fails)
    with pytest.raises(BatchError, match=r"^prompt\[1\]: ZeroDivisionError: division") as error:
        tinyspec.generate(model, [[1, 2], [7, 7], [3]], max_new_tokens=4)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert error.value.__cause__.__traceback__ is not None


def test_every_row_has_stops_and_references_that_can_be_read_once(model: Model) -> None:
    prompts, texts, stops = ["the cat", "the dog"], ["the dog sat on the log"], ["a", "e", "o", "t"]
    wanted, got = (
        tinyspec.generate(
            model,
            prompts,
            method="llma",
            max_new_tokens=16,
            references=read(texts),
            stop=read(stops),
        )
        for read in (list, iter)
    )
    assert [one.text for one in got] == [one.text for one in wanted]
    assert [one.finish_reason for one in got] == ["stop", "stop"]


def test_what_is_wrong_in_every_prompt_names_none(model: Model) -> None:
    for options in ({"method": "calm", "threshold": 3}, {"stop": [""]}, {"max_new_tokens": -1}):
        with pytest.raises(TinyspecError, match=r"^(threshold|stop\[0\]|max_new_tokens) is "):
            tinyspec.generate(model, ["the cat", "the dog"], **options)


def test_a_drafter_forgets_its_requests_and_keeps_the_texts(model: Model) -> None:
    """lookahead_trie keeps a model's answers over requests; of a prompt nothing may be left, nor of
    an abandoned request's.
    """
    for abandoned in (False, True):
        fresh = Model(model.config, model.weights, model.tokenizer, "fresh")
        running = generation.start_generation(
            fresh, "the mat and the house", method="lookahead_trie", max_new_tokens=6
        )
        rounds = iter(running)
        next(rounds)
        drafter: Any = running.decoder.drafter
        own, asked = drafter.own, running.decoder.context[1:2]
        assert drafter.forest.gather([(own, 9)], asked, 1, 1, 3)[0]
        if not abandoned:
            for _ in rounds:
                pass
        del rounds
        assert drafter.own != own and drafter.pieces == [] and drafter.length == 0
        assert not drafter.forest.gather([(own, 9)], asked, 1, 1, 3)[0]
