"""APAR: examples by hand, the algorithm against what runs, training, and a tuned model's streams."""

import json
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.streams import EditedTarget
from tinyspec.errors import TinyspecError
from tinyspec.generation import generate, stream
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.stream_laws import TEXT_END, text_network
from tinyspec.laws.traps import apar as traps
from tinyspec.lm.config import TUNED
from tinyspec.lm.model import Model
from tinyspec.nonautoregressive.apar import (
    ANIMALS,
    AparSettings,
    ForkingDecoder,
    apar_loss,
    describe_animal,
    find_tokens,
    make_examples,
    make_texts,
    make_training_examples,
    split_answer,
    write_by_forks,
)
from tinyspec.technique import Guarantee, StreamRequest, TrainingBatch, Tuning, find_technique

CARD = find_technique("apar")
assert CARD.tuned is not None
FORK, CHILD = TEXT_END + 1, TEXT_END + 2
RECIPE = Path(__file__).parents[2] / "models/storyteller-apar/recipe.toml"


def test_trap_child_is_never_sampled() -> None:
    assert traps.tokens_keep_apart(ForkingDecoder).cases == 6


def test_trap_each_stream_is_plain_decoding_of_its_own_text() -> None:
    evidence = traps.streams_are_plain_texts(ForkingDecoder)
    assert evidence.branches > evidence.cases  # some answers fork


def test_trap_streams_are_independent() -> None:
    assert traps.streams_are_independent(ForkingDecoder).branches > 100


def test_trap_every_token_is_computed_once() -> None:
    assert traps.tokens_are_computed_once(ForkingDecoder).branches > 12


def test_trap_bounds_hold() -> None:
    assert traps.bounds_hold(ForkingDecoder).cases == 6


def test_trap_an_example_trains_its_own_stream() -> None:
    assert traps.examples_train_their_own_stream(make_examples).cases == 3


# ---------------------------------------------------------------------- what is trained


@pytest.mark.parametrize(
    "answer",
    [
        "1. Oak: tall\n2. Fir: green",  # too few
        "1. Oak: tall\n2. Fir\n3. Elm: old",
        "Oaks are tall. Very.\n\nFirs are green.\n\nElms are old. Oh.",
        "1. Oak: `x`\n2. Fir: ```code```\n3. Elm: old",
        "1. Oak: $x$\n2. Fir: $y$\n3. Elm: $z$",
        "One sentence.",
        "",
    ],
)
def test_an_answer_without_a_tree_is_unstructured(answer: str) -> None:
    assert split_answer(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        "1. Oak: tall\n2. Fir: green: so green\n3. Elm: old",
        "- Oak: tall\n- Fir: green\n- Elm: old",
        "Oaks are tall. Very.\nIndeed.\n\nFirs are green! Yes.\n\nElms are old? Oh.",
    ],
)
def test_pairs_put_together_are_the_answer(answer: str) -> None:
    pairs = split_answer(answer)
    assert pairs is not None and len(pairs) == 3
    assert "".join(root + detail for root, detail in pairs) == answer


def test_made_texts_are_lists_and_unstructured_answers_by_turns() -> None:
    texts = make_texts(20, seed=1)
    assert texts == make_texts(20, seed=1) != make_texts(20, seed=2)
    assert len(texts) == 40
    for at, (question, answer) in enumerate(texts):
        pairs = split_answer(answer)
        assert (pairs is None) == bool(at % 2)
        for _, detail in pairs or ():
            assert detail in [describe_animal(name) for name in ANIMALS]
        assert question.endswith("\n")


def test_examples_of_a_recipe_put_together_are_the_answers() -> None:
    model = text_network().with_tokens(("[Fork]", "[Child]"))
    decode = model.tokenizer.decode
    examples = make_training_examples(model, AparSettings(lists=3))
    (asked, answer), (other, plain) = make_texts(3, 0)[:2]
    pairs = split_answer(answer)
    assert pairs is not None
    main, *details = examples[: 1 + len(pairs)]
    assert decode(main.ids[: main.first]) == asked
    roots = decode(main.ids[main.first :])
    assert roots == "".join(root for root, _ in pairs)
    assert main.ids.count(FORK) == len(pairs) and CHILD not in main.ids
    for detail, (_, text) in zip(details, pairs, strict=True):
        assert decode(detail.ids[detail.first :]) == text
        assert detail.ids[detail.first - 2 : detail.first] == [FORK, CHILD]
    unstructured = examples[1 + len(pairs)]
    assert decode(unstructured.ids) == other + plain and FORK not in unstructured.ids
    assert all(example.ids[-1] == TEXT_END for example in examples)


def test_the_loss_is_of_the_trained_tokens_alone() -> None:
    model = small_network(0)
    tuning = Tuning(model.torch_blocks(), model, AparSettings(), {}, 0.0)
    ids = torch.tensor([[1, 2, 3, 1, 0]])
    is_answer = torch.tensor([[False, False, True, True, False]])
    empty = torch.empty(1, 5, 0)
    batch = TrainingBatch(ids, is_answer, empty, empty.long(), empty)
    rows = torch.as_tensor(model.logits([1, 2, 3, 1])).log_softmax(-1)
    expected = -(rows[2, 1] + rows[3, 0]) / 2
    got = apar_loss(tuning, batch, torch.Generator())
    torch.testing.assert_close(got.double(), expected.double(), atol=1e-5, rtol=0)
    nothing = batch._replace(is_answer=torch.zeros_like(is_answer))
    assert float(apar_loss(tuning, nothing, torch.Generator())) == 0


@pytest.mark.parametrize(("name", "value"), [("lists", 0), ("lists", 2.0), ("seed", "a")])
def test_settings_without_a_meaning_are_named(name: str, value: Any) -> None:
    with pytest.raises(TinyspecError, match=rf"\[head\] {name} is {value!r}"):
        AparSettings(**{name: value})


def test_new_tokens_begin_as_the_mean_of_the_others() -> None:
    model = text_network()
    grown = model.with_tokens(("[Fork]", "[Child]"))
    assert grown.config.vocab_size == model.config.vocab_size + 2
    assert find_tokens(grown) == (FORK, CHILD)
    assert CARD.tuned is not None and CARD.tuned.add_tokens(grown) is grown
    torch.testing.assert_close(grown.weights["embed"][-1], model.weights["embed"].mean(0))
    old, new = (torch.as_tensor(one.logits([65, 66])) for one in (model, grown))
    torch.testing.assert_close(new[:, : model.config.vocab_size], old, atol=1e-10, rtol=0)
    assert grown.tokenizer.decode([65, FORK, CHILD, 66]) == model.tokenizer.decode([65, 66])
    assert FORK not in grown.tokenizer.encode("a [Fork] that a user spells")
    assert model.tokenizer.find_id("[Fork]") is None


# ---------------------------------------------------------------------- what runs


def test_what_runs_is_the_algorithm_of_the_paper() -> None:
    """Greedy answers, which fork in both streams, against one stream after the other."""
    compared = forked = 0
    for seed, end in product((5, 10, 11, 18, 19, 30, 31), range(3)):
        model = traps.forking_network(seed)
        plain = traps.make_reference(model, SamplingParams(0.0))

        def next_token(text: list[int], plain: Any = plain) -> int:
            row: list[float] = plain.next(tuple(text))
            return row.index(max(row))

        stop = StoppingCriteria(eos=frozenset({end}), max_new_tokens=12)
        request = StreamRequest(model, sampling=SamplingParams(0.0), stop=stop)
        decoder = ForkingDecoder(request, traps.FORK_ID, traps.CHILD_ID, 20, 99)
        decoder.extend(traps.PROMPT)
        got = [token for round in decoder.run(Seeded(0)) for token in round.tokens]
        if decoder.finished == "eos" and decoder.forked < decoder.forks:  # no bound was met
            args = traps.PROMPT, traps.FORK_ID, traps.CHILD_ID, [end]
            assert got == write_by_forks(next_token, *args)
            compared, forked = compared + 1, forked + got.count(traps.FORK_ID)
    assert compared >= 7 and forked >= 3, (compared, forked)


LIST = "1. Oak:{}\n2. Fir:{}\n3. Elm:{}"
DETAILS = [" tall.", " green, and in the mountains.", " old."]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model that forks at each colon of a list, and then writes the detail."""
    model = text_network(1).with_tokens(("[Fork]", "[Child]"))
    tokenizer, ban = model.tokenizer, ForkingDecoder.wrap_target
    main = [*tokenizer.encode("1. Oak:"), FORK, *tokenizer.encode("\n2. Fir:"), FORK]
    main += [*tokenizer.encode("\n3. Elm:"), FORK, TEXT_END]

    def follow(self: ForkingDecoder, session: Any) -> Any:
        def edit(text: list[int], logits: torch.Tensor) -> torch.Tensor:
            new = text[len(self.context) :]
            reply = main
            if CHILD in new:
                at = new.index(CHILD)
                reply = [*new[: at + 1], *tokenizer.encode(DETAILS[new[:at].count(FORK) - 1])]
                reply.append(TEXT_END)
            sure = torch.full_like(logits, -1e4)
            sure[:, reply[len(new)]] = 0.0
            return sure

        return ban(self, EditedTarget(session, edit))

    monkeypatch.setattr(ForkingDecoder, "wrap_target", follow)
    return model


def test_details_stand_where_their_forks_are(scripted: Model) -> None:
    got: Any = generate(scripted, "Trees?", method="apar")
    assert got.text == LIST.format(*DETAILS)
    assert got.tokens.count(FORK) == 3 and CHILD not in got.tokens
    assert len(got.tokens) == len(got.logprobs) == got.stats.emitted
    # The second [Fork] is token 17 and runs in pass 18; then its detail, the longest, is written.
    assert got.stats.target_calls == 18 + len(DETAILS[1]) + 1
    assert got.finish_reason == "eos"


def test_the_answer_grows_in_the_order_of_the_text(scripted: Model) -> None:
    pieces = list(stream(scripted, "Trees?", method="apar"))
    assert "".join(pieces) == LIST.format(*DETAILS)
    assert len(pieces) > 20


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_that_wait_change_the_passes_and_not_the_text(
    scripted: Model, streams: int
) -> None:
    got: Any = generate(scripted, "Trees?", method="apar", streams=streams)
    assert got.text == LIST.format(*DETAILS)
    alone: Any = generate(scripted, "Trees?", method="apar", streams=1)
    assert (got.stats.target_calls < alone.stats.target_calls) == (streams > 1)


def test_two_requests_of_a_batch_are_the_two_alone(scripted: Model) -> None:
    rows: Any = generate(scripted, ["Trees?", "Which trees?"], method="apar")
    assert [row.text for row in rows] == [LIST.format(*DETAILS)] * 2


def test_without_forks_it_is_plain_decoding_without_the_two_tokens() -> None:
    model = text_network(3).with_tokens(("[Fork]", "[Child]"))
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        plain: Any = generate(text_network(3), "a", max_new_tokens=12, **options)
        got: Any = generate(model, "a", method="apar", forks=0, max_new_tokens=12, **options)
        assert (got.tokens, got.text) == (plain.tokens, plain.text)
    assert CARD.promise(forks=0) is Guarantee.EXACT and CARD.promise() is Guarantee.LOSSY


def test_a_full_context_forks_no_more() -> None:
    model = copy(small_network(13, 5))  # all who ask share the network
    model.config = model.config.__class__(**{**vars(model.config), "max_positions": 12})
    request = StreamRequest(model, stop=StoppingCriteria())
    decoder = ForkingDecoder(request, traps.FORK_ID, traps.CHILD_ID, 99, 99)
    decoder.extend(traps.PROMPT)
    list(decoder.run(Seeded(13)))
    assert decoder.finished == "context"
    assert max(len(stream.decoder.context) for stream in decoder.begun) == 12


def test_a_model_without_the_tokens_is_told_of_the_recipe() -> None:
    with pytest.raises(TinyspecError, match=r"models/storyteller-apar/recipe.toml") as error:
        generate(text_network(), "a", method="apar")
    assert "\n" not in str(error.value)
    with pytest.raises(TinyspecError, match="generate --method apar"):
        CARD.make(None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- training


def test_the_recipe_trains_and_the_result_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps on a tiny model: the loss falls, and the folder is used by the command."""
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    big, out = tiny_zoo(tmp_path).big, tmp_path / "mine"
    small = {
        "target": json.dumps(big), "head.lists": 12, "texts.texts": 6, "texts.tokens": 24,
        "texts.prompt": 16, "batch": 4, "context": 96, "train.steps": 12,
        "train.lr": 3e-3, "train.warmup": 2, "train.valid_every": 6, "train.log_every": 3,
    }  # fmt: skip
    words = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    done = run("train", "head", "--recipe", str(RECIPE), "--out", str(out), "--quiet", *words)
    assert done.exit_code == 0, done.output
    losses = [json.loads(line).get("loss") for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]
    model = tinyspec.load(out)
    assert isinstance(model, Model)
    assert model.config.extra[TUNED]["method"] == "apar"
    assert model.config.vocab_size == tinyspec.load(big).config.vocab_size + 2
    fork, child = find_tokens(model)
    assert child == fork + 1 == model.config.vocab_size - 1
    page = (out / "README.md").read_text()
    assert "on texts that were made for it" in page
    assert "6 texts drawn from the target at temperature 0.8" in page
    used = run("generate", "--model", str(out), "--method", "apar", "Describe", "-n", "6")
    assert used.exit_code == 0, used.output
    assert "was not tuned" not in used.stderr
    assert "has no tokens [Fork] and [Child]" in failed(
        run("generate", "--model", big, "--method", "apar", "Describe", "-n", "6")
    )
