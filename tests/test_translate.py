"""tinyspec.translate and `tinyspec translate`: any technique, and the right model for it.

Errors say what to do.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec import _core, models
from tinyspec.decoding.refine import blank_canvas, score_candidates
from tinyspec.errors import BatchError, TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.technique import load_techniques
from tinyspec.training.bitext import train_joint_tokenizer
from tinyspec.translation import Translation, TranslationStatistics, start_translation

TEXT = "a dog runs"
LINES = ["a dog runs in the snow and sleeps", "ein hund läuft durch den schnee und schläft"]


class Trained(NamedTuple):
    """Three untrained translation models that say they were trained, and a model that extends
    texts, as folders.
    """

    teacher: str
    nat: str
    cmlm: str
    storyteller: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    zoo = tmp_path_factory.mktemp("zoo")
    tokenizer = train_joint_tokenizer(LINES * 4, 300, zoo / "tokenizer")
    shapes: dict[str, dict[str, Any]] = {
        "teacher": {"extra": {"trained_for": "teacher"}},
        "nat": {
            "positional": True,
            "fertilities": 4,
            "extra": {"trained_for": "nat", "teacher": "teacher"},
        },
        "mask_predict": {
            "lengths": 12,
            "extra": {"trained_for": "mask_predict", "teacher": "teacher"},
        },
    }
    for seed, (name, shape) in enumerate(shapes.items()):
        config = Seq2SeqConfig(
            300, 16, 2, 24, encoder_layers=1, decoder_layers=2, max_positions=40, **shape
        )
        made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), tokenizer=tokenizer)
        loud = {key: 3 * w if w.ndim == 2 else w for key, w in made.weights.items()}
        Seq2Seq(config, loud, tokenizer).save(zoo / name)
    return Trained(*(str(zoo / name) for name in shapes), tiny_zoo(zoo).big)


@pytest.fixture
def at_home(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The three lie where the repository's models lie."""
    monkeypatch.setattr(models, "_zoos", lambda: [Path(trained.teacher).parent])
    return trained


def one(model: Any, source: Any, **options: Any) -> Translation:
    done = tinyspec.translate(model, source, **options)
    assert isinstance(done, Translation)
    return done


def work(done: Translation) -> TranslationStatistics:
    assert isinstance(done.stats, TranslationStatistics)
    return done.stats


# ---------------------------------------------------------------------- from left to right

DECODERS = [
    name
    for name, card in load_techniques().items()
    if card.kind == "decoder"
    and not card.drafts
    and card.trained is None  # heads are trained for models that extend texts
    and not card.cyclic
    and name != "rest"  # which has nothing to retrieve from
]


def dense_greedy(model: Seq2Seq, source: list[int], tokens: int) -> list[int]:
    memory, text = model.encode(torch.tensor([source])), [model.config.bos]
    while len(text) <= tokens and text[-1] != model.config.eos:
        causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        text.append(
            int(
                model.logits(model.decode(model.embed(torch.tensor([text])), memory, causal))[
                    0, -1
                ].argmax()
            )
        )
    return text[1:]


def test_plain_is_the_dense_greedy_decode(trained: Trained) -> None:
    model = tinyspec.load_translator(trained.teacher, dtype="float64")
    done = one(model, TEXT, method="plain")
    source = model.tokenizer.encode(TEXT)
    assert done.tokens == dense_greedy(model, source, len(source) + len(source) // 2 + 11)
    assert done.text == model.tokenizer.decode(done.tokens)
    assert done.source == source
    assert (work(done).encoder_calls, done.stats.target_calls) == (1, len(done.tokens))
    assert done.stats.row_layers == 2 * len(done.tokens)
    assert len(done.logprobs) == len(done.tokens)
    assert done.passes == []
    assert done.trace.rounds


@pytest.mark.parametrize("method", DECODERS)
def test_every_technique_without_a_draft_model_says_what_plain_decoding_says(
    trained: Trained, method: str
) -> None:
    model = tinyspec.load_translator(trained.teacher, dtype="float64")
    card = load_techniques()[method]
    neutral = {} if card.lossy is None else {card.lossy[0]: card.lossy[1]}
    done = one(model, TEXT, method=method, **neutral)
    assert done.tokens == one(model, TEXT, method="plain").tokens
    assert work(done).encoder_calls == 1


@pytest.mark.skipif(_core.compute is None, reason="the compiled kernels are missing")
@pytest.mark.parametrize("method", ["jacobi", "lookahead_jacobi", "llma", "layerskip"])
def test_in_float32_no_bit_of_a_distribution_depends_on_what_is_drafted(
    trained: Trained, method: str
) -> None:
    model = tinyspec.load_translator(Path(trained.teacher))
    for source in ([200], [201, 202, 203, 204], list(range(205, 235))):
        plain, drafted = (one(model, source, method=name) for name in ("plain", method))
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs


def test_jacobi_needs_fewer_passes_where_its_draft_tokens_are_accepted(trained: Trained) -> None:
    model = tinyspec.load_translator(trained.teacher)
    plain, jacobi = (one(model, TEXT, method=method) for method in ("plain", "jacobi"))
    assert jacobi.stats.target_calls <= plain.stats.target_calls


def test_sampling_is_by_seed_and_a_list_counts_seeds_up(trained: Trained) -> None:
    model = tinyspec.load_translator(trained.teacher)
    texts = ["a dog runs", "the snow", "a dog runs"]
    done = tinyspec.translate(model, texts, temperature=1.0, seed=3)
    assert isinstance(done, list)
    for row, (text, got) in enumerate(zip(texts, done, strict=True)):
        assert got.tokens == one(model, text, temperature=1.0, seed=3 + row).tokens
    assert done[0].tokens != done[2].tokens


def test_the_budget_is_kept(trained: Trained) -> None:
    model = tinyspec.load_translator(trained.teacher)
    assert len(one(model, TEXT, max_new_tokens=2).tokens) <= 2
    nothing = one(model, TEXT, max_new_tokens=0)
    assert (nothing.tokens, nothing.text, nothing.stats.target_calls) == ([], "", 0)
    longest = one(model, [200] * 40)
    assert len(longest.tokens) <= 40
    assert longest.finish_reason in ("eos", "context")


# ---------------------------------------------------------------------- on a canvas


def test_the_teacher_that_a_card_names_is_read_once(
    at_home: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = tinyspec.load_translator("nat"), list[str]()

    def load(name: str, *where: Any) -> Any:
        read.append(name)
        return tinyspec.load_translator(name)

    monkeypatch.setattr("tinyspec.translation.load_translator", load)
    for _ in range(3):
        assert (
            work(tinyspec.translate(model, [5, 6, 7], method="nat", samples=4)).teacher_calls == 2
        )
    assert read == ["teacher"]


def test_a_source_that_fails_costs_no_other_source_its_translation(at_home: Trained) -> None:
    model, sources = tinyspec.load_translator("nat"), [[5, 6], [7] * 41, [8, 9]]
    with pytest.raises(BatchError, match=r"^source\[1\]: .*1 of 3 rows failed") as error:
        tinyspec.translate(model, sources, method="nat")
    first, second, third = error.value.results
    assert second is None
    for row, done in ((0, first), (2, third)):
        assert done.tokens == one(model, sources[row], method="nat", seed=row).tokens
    with pytest.raises(TinyspecError, match=r"^samples is "):
        tinyspec.translate(model, sources, method="nat", samples=0)


def test_nat_is_one_pass_and_its_teacher_chooses(at_home: Trained) -> None:
    model = tinyspec.load_translator("nat")
    assert (
        one(model, TEXT).tokens == one(model, TEXT, method="nat", seed=0).tokens
    )  # what it was trained for
    done = one(model, TEXT, method="nat", samples=4, seed=1)
    stats = work(done)
    assert (stats.encoder_calls, stats.target_calls, stats.teacher_calls, stats.candidates) == (
        1,
        1,
        2,
        4,
    )
    assert done.finish_reason == "length"
    assert len(done.passes) == 1
    assert done.tokens in done.passes[0].tokens
    assert stats.emitted == len(done.tokens) == len(done.logprobs)
    teacher, canvas = (
        tinyspec.load_translator("teacher"),
        blank_canvas([len(text) for text in done.passes[0].tokens], 0),
    )
    for row, text in enumerate(done.passes[0].tokens):
        canvas.tokens[row, : len(text)] = torch.tensor(text)
    assert (
        done.passes[0].tokens[
            int(score_candidates(teacher, done.source, canvas).sum(dim=1).argmax())
        ]
        == done.tokens
    )
    alone = one(model, TEXT, method="nat", samples=1)
    assert work(alone).teacher_calls == 0


def test_mask_predict_makes_as_many_passes_as_its_setting_says(at_home: Trained) -> None:
    model = tinyspec.load_translator("mask_predict")
    done = one(model, TEXT, method="mask_predict", iterations=3, lengths=2)
    assert (work(done).encoder_calls, done.stats.target_calls, work(done).candidates) == (1, 3, 2)
    assert [len(written.tokens) for written in done.passes] == [2, 2, 2]
    assert done.passes[-1].tokens[0] == done.tokens or done.passes[-1].tokens[1] == done.tokens


def test_the_same_seed_gives_the_same_translation(at_home: Trained) -> None:
    model = tinyspec.load_translator("nat")
    first, again = (one(model, TEXT, method="nat", samples=8, seed=5) for _ in range(2))
    assert first.tokens == again.tokens
    assert first.passes == again.passes
    drawn = {
        tuple(map(tuple, one(model, TEXT, method="nat", samples=8, seed=s).passes[0].tokens))
        for s in range(4)
    }
    assert len(drawn) > 1


def test_a_temperature_is_the_knob_of_a_method_that_has_one(at_home: Trained) -> None:
    model = tinyspec.load_translator("nat")
    cold = one(model, TEXT, method="nat", samples=6, temperature=0.01)
    assert cold.passes[0].tokens[2:] == cold.passes[0].tokens[:1] * 4
    with pytest.raises(TinyspecError, match="temperature is 0"):
        one(model, TEXT, method="nat", temperature=0)
    with pytest.raises(
        TinyspecError, match="mask_predict rewrites a canvas and has no temperature"
    ):
        one("mask_predict", TEXT, method="mask_predict", temperature=0.5)


def test_an_interrupted_translation_returns_its_passes_so_far(at_home: Trained) -> None:
    running = start_translation("mask_predict", TEXT, method="mask_predict", iterations=5)
    next(iter(running))
    done = running.interrupted()
    assert done.finish_reason == "interrupted"
    assert (done.stats.target_calls, len(done.passes)) == (1, 1)
    assert done.tokens


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("teacher", {"source": ""}, "the source is empty: give at least one token"),
        ("teacher", {"source": []}, "the source is empty"),
        (
            "teacher",
            {"source": [200] * 41},
            "the source has 41 tokens, teacher has 40 positions: shorten it",
        ),
        (
            "nat",
            {"source": [200] * 41},
            "the source has 41 tokens, nat has 40 positions: shorten it",
        ),
        (
            "teacher",
            {"source": [300]},
            "token 300 is not in the vocabulary of teacher: ids are below 300",
        ),
        ("teacher", {"source": [5, 0]}, "the source holds teacher's padding token 0"),
        (
            "mask_predict",
            {"method": "mask_predict", "iterations": 0},
            "iterations is 0: it must be from 1 to 1024",
        ),
        ("nat", {"method": "nat", "samples": 0}, "samples is 0: it must be from 1 to 1024"),
        ("nat", {"method": "nat", "sample": 2}, "nat has no knob 'sample': did you mean 'samples'"),
        (
            "nat",
            {"method": "mask_predict"},
            "nat was trained for nat, and mask_predict needs a model trained for mask_predict",
        ),
        (
            "nat",
            {"method": "plain"},
            "nat was trained for nat, and autoregressive needs a model trained for teacher",
        ),
        (
            "teacher",
            {"method": "nat"},
            "nat needs a model trained for nat: leave out the model, or name one with --model, "
            "or train one from a recipe with method = 'nat' (tinyspec train mt)",
        ),
        (
            "teacher",
            {"method": "speculative_decoding"},
            "needs a draft model, and translation models have none",
        ),
        ("teacher", {"method": "planner"}, "planner is an analysis: it translates nothing"),
        ("teacher", {"method": "sarathi"}, "sarathi schedules requests: it translates nothing"),
        ("teacher", {"method": "nats"}, "there is no method 'nats': did you mean 'nat'"),
        ("teacher", {"teacher": "teacher"}, "autoregressive asks no teacher"),
        ("mask_predict", {"max_new_tokens": 5}, "max_new_tokens has no meaning"),
        ("nat", {"teacher": "nat"}, "nat does not write from left to right, so it judges nothing"),
        (
            "nowhere",
            {},
            "there is no translation model 'nowhere': known: mask_predict, nat, teacher",
        ),
    ],
)
def test_what_cannot_be_translated_is_an_error_of_one_line(
    at_home: Trained, model: str, options: dict[str, Any], says: str
) -> None:
    options = {"source": TEXT, **options}
    with pytest.raises(TinyspecError) as error:
        tinyspec.translate(model, options.pop("source"), **options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_techniques_that_extend_and_that_translate_are_distinguished(trained: Trained) -> None:
    story, teacher = tinyspec.load(trained.storyteller), tinyspec.load_translator(trained.teacher)
    for call, says in (
        (lambda: tinyspec.translate(story, TEXT), "extends texts and translates none"),
        (lambda: tinyspec.load_translator(trained.storyteller), "no encoder-decoder of tinyspec's"),
        (
            lambda: tinyspec.generate(teacher, TEXT),
            "an encoder-decoder, which translates: use tinyspec.translate",
        ),
        (
            lambda: tinyspec.load(trained.teacher),
            "an encoder-decoder, which translates and extends no text",
        ),
        (
            lambda: tinyspec.generate(story, TEXT, method="nat"),
            "nat rewrites a translation and extends no text",
        ),
    ):
        with pytest.raises(TinyspecError, match=says) as error:
            call()  # type: ignore[no-untyped-call]
        assert "\n" not in str(error.value)


def test_without_its_teacher_a_method_says_that_it_needs_one(trained: Trained) -> None:
    with pytest.raises(TinyspecError, match="samples need a teacher"):
        one(trained.nat, TEXT, method="nat", samples=3)
    assert one(trained.nat, TEXT, method="nat", samples=3, teacher=trained.teacher).tokens
    assert one(trained.nat, TEXT, method="nat", samples=1).tokens


# ---------------------------------------------------------------------- the command


def test_the_command_finds_the_model_of_a_method(at_home: Trained) -> None:
    for method, options in (
        ("plain", ()),
        ("jacobi", ()),
        ("nat", ("--samples", "2")),
        ("mask_predict", ("--iterations=2",)),
    ):
        result = run("translate", "--method", method, *options, TEXT, "--stats")
        assert result.exit_code == 0, result.output
        name = method if method in ("nat", "mask_predict") else "teacher"
        knobs = {key: 2 for key in ("samples", "iterations") if key in str(options)}
        assert result.stdout == one(name, TEXT, method=method, **knobs).text + "\n"
        assert "1 encoder pass, " in result.stderr
        assert "decoder passes" in result.stderr


def test_every_line_of_a_pipe_is_a_sentence(at_home: Trained) -> None:
    call, texts = ("translate", "--method", "mask_predict", "--seed", "2"), ("a\fdog", "the snow")
    wanted = [one("mask_predict", text, seed=2).text for text in texts]
    for end in ("\n", "\r\n"):
        result = run(*call, stdin="".join(text + end for text in texts))
        assert result.stdout.split("\n") == [*wanted, ""]
    assert run(*call, stdin="").stdout == ""


def test_a_blank_line_and_one_that_fails_cost_no_other_line_its_translation(
    at_home: Trained,
) -> None:
    lines, call = [TEXT, "", TEXT * 40, "the snow"], ("translate", "--method", "plain")
    result = run(*call, stdin="".join(line + "\n" for line in lines))
    assert result.exit_code == 2
    first, last = (one("teacher", line, method="plain").text for line in (TEXT, "the snow"))
    assert result.stdout.split("\n") == [first, "", "", last, ""]
    (said,) = result.stderr.splitlines()
    assert said.startswith("tinyspec: line 3: the source has ")
    found = [
        json.loads(row) for row in run(*call, "--json", stdin="\n".join(lines)).stdout.splitlines()
    ]
    assert [row.get("text") for row in found] == [first, None, None, last]
    assert found[1] == {} and "positions: shorten it" in found[2]["error"]
    assert "temperature" in failed(run(*call, "-t", "-1", stdin="\n".join(lines)))


def test_as_json_and_with_every_pass(at_home: Trained) -> None:
    result = run(
        "translate", "--method", "mask_predict", "--iterations", "3", "--json", "--trace", TEXT
    )
    report = json.loads(result.stdout)
    done = one("mask_predict", TEXT, method="mask_predict", iterations=3)
    assert report["tokens"] == done.tokens
    assert report["text"] == done.text
    assert len(report["passes"]) == report["stats"]["target_calls"] == 3
    assert report["stats"]["encoder_calls"] == 1
    assert [
        line.split()[0] for line in result.stderr.splitlines() if line.strip()[:1].isdigit()
    ] == ["1", "2", "3"]


def test_the_command_tells_errors_in_one_line(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path])
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    missing = failed(run("translate", "--method", "nat", TEXT))
    assert "no translation model for nat on this machine" in missing
    assert "clone of the repository" in missing
    assert "tinyspec train mt" in missing
    assert "no translation model for plain" in failed(run("translate", TEXT))
    for name, text in (
        ("exits", 'method = "teacher"\n[exits]\n'),
        ("nat-head", 'method = "nat"\n'),
        ("nat-model", 'method = "nat"\nteacher = "../t"\n'),
        ("shallow", 'method = "teacher"\nteacher = "../t"\n'),
        ("teacher", 'method = "teacher"\n'),
    ):
        (tmp_path / name).mkdir()
        kind = "head" if name == "nat-head" else "mt"
        command = f"# tinyspec train {kind} --recipe models/{name}/recipe.toml\n"
        (tmp_path / name / "recipe.toml").write_text(command + text, encoding="utf-8")
    for method, name in (("nat", "nat-model"), ("plain", "teacher")):
        missing = failed(run("translate", "--method", method, TEXT))
        command = f"tinyspec train mt --recipe models/{name}/recipe.toml"
        assert f"no translation model for {method} on this machine: train one: {command}" in missing
    assert "there is no translation model 'multi30k-nat'" in failed(
        run("translate", "--model", "multi30k-nat", TEXT)
    )
    assert "the source is empty" in failed(run("translate", "--model", trained.teacher, ""))
    assert "--iteration is no option" in failed(
        run(
            "translate",
            "--model",
            trained.cmlm,
            "--method",
            "mask_predict",
            "--iteration",
            "2",
            TEXT,
        )
    )
    assert "was trained for mask_predict" in failed(
        run("translate", "--model", trained.cmlm, "--method", "nat", TEXT)
    )
    assert "it cannot translate" in failed(run("translate", "--model", trained.storyteller, TEXT))


# ---------------------------------------------------------------------- the models of a clone

GERMAN = {
    "multi30k-teacher": ("jacobi", {}),
    "multi30k-nat": ("nat", {"samples": 10}),
    "multi30k-cmlm": ("mask_predict", {"iterations": 4}),
    "multi30k-exits": ("free", {}),
    "multi30k-parallel": ("parallel", {}),
    "multi30k-crf": ("nar_crf", {}),
    "multi30k-sat": ("sat", {}),
    "multi30k-refine": ("iterative_refinement", {"iterations": 4}),
}


@pytest.mark.parametrize("name", GERMAN)
def test_the_models_of_a_clone_translate(name: str) -> None:
    method, knobs = GERMAN[name]
    done = tinyspec.translate(
        Path(__file__).parent.parent / "models" / name,
        "A man is sleeping on a couch.",
        method=method,
        **knobs,
    )
    assert isinstance(done, Translation)
    assert done.text == "Ein Mann schläft auf einem Sofa."
