"""A teacher, its translations, and two students, from recipes to checkpoints."""

import gzip
import json
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

import tinyspec
from tinyspec.cli import main
from tinyspec.data import read_multi30k
from tinyspec.errors import TinyspecError
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive.depa import find_target_words
from tinyspec.nonautoregressive.enat import phrase_table
from tinyspec.speculative.drafting import specdec
from tinyspec.technique import RefineRequest, find_technique
from tinyspec.training import bitext, translation_tasks
from tinyspec.training.bitext import SentencePair, pad_sequences
from tinyspec.training.distilled import distill_translations
from tinyspec.training.recipe import read_translation_recipe
from tinyspec.training.train_mt import initial_model, train_mt

MODELS = Path(__file__).parents[2] / "models"
RECIPE = """
name = "NAME"
method = "METHOD"
vocab_size = 300
tokens = 120
longest = 40
dropout = 0.1
judged = 6
REST
[shape]
d_model = 16
n_heads = 2
d_ff = 24
encoder_layers = 1
decoder_layers = 1
max_positions = 64
SHAPE
[train]
steps = 8
lr = 1e-2
warmup = 2
log_every = 2
valid_every = 4
"""
STUDENT = 'teacher = "../teacher"\ninherit = ["embed", "encoder"]\n[distill]\nbeam = 1\n'
RECIPES = {
    "teacher": ("teacher", "", ""),
    "nat": ("nat", STUDENT, "positional = true\nfertilities = 24"),
    "cmlm": ("mask_predict", STUDENT, "lengths = 41"),
    "specdec": ("specdec", STUDENT + "[translator]\nk = 5\n", ""),
    "blockwise": ("blockwise", STUDENT + "[translator]\nk = 3\n", ""),
    "crf": (
        "nar_crf",
        'start = "../cmlm"\n' + STUDENT + "[translator]\nrank = 2\n",
        "lengths = 41",
    ),
    "fcl": ("fcl_nat", STUDENT + "[translator]\ncurriculum = 0.5\n", "lengths = 41"),
    "depa": ("depa", STUDENT + "[translator]\nbackward = 0.5\n", "lengths = 41"),
    "enat": ("enat", 'start = "../cmlm"\n' + STUDENT, "lengths = 41"),
    "mapped": (
        "enat",
        'start = "../cmlm"\n' + STUDENT + '[translator]\ndecoder_input = "mapping"\n',
        "lengths = 41",
    ),
    "latent": (
        "latent_transformer",
        STUDENT + "[translator]\nhalvings = 1\nbits = 4\nplaces = 8.0\n",
        "stacks = { prior = 1 }",
    ),
    "flowseq": (
        "flowseq",
        STUDENT + "[translator]\nlevels = 2\nlongest = 30\n",
        "stacks = { posterior = 1 }",
    ),
    "nagbert": ("nag_bert", STUDENT + "[translator]\nrank = 2\npretraining = 0.5\n", ""),
}


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes, and captions in two languages: the second says every word backwards."""
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    words, chance = ["the", "dog", "boy", "runs", "sees", "red"], random.Random(0)
    (tmp_path / "data/multi30k").mkdir(parents=True)
    for split, many in (("train", 60), ("val", 8)):
        english = [
            " ".join(chance.choices(words, k=chance.randint(2, 5))) + "." for _ in range(many)
        ]
        for language, texts in (("en", english), ("de", [text[::-1] for text in english])):
            content = "".join(text + "\n" for text in texts).encode()
            (tmp_path / f"data/multi30k/{split}.{language}.gz").write_bytes(gzip.compress(content))
    for name, (method, rest, shape) in RECIPES.items():
        text = RECIPE
        for key, value in (("NAME", name), ("METHOD", method), ("REST", rest), ("SHAPE", shape)):
            text = text.replace(key, value)
        if method == "nag_bert":
            text = text.replace("decoder_layers = 1", "decoder_layers = 0")
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(text)
    return tmp_path


def run(zoo: Path, name: str, **options: Any) -> bool:
    options = {"data_folder": zoo / "data", "device": "cpu", **options}
    return train_mt(zoo / name / "recipe.toml", zoo / name, **options).finished


@pytest.mark.slow
def test_a_teacher_and_its_students_are_trained_and_find_each_other(zoo: Path) -> None:
    with pytest.raises(TinyspecError, match=r"the model .* is not there: train it first"):
        run(zoo, "nat")
    for name, (method, _, _) in RECIPES.items():
        assert run(zoo, name)
        model = Seq2Seq.load(zoo / name)
        assert model.config.extra["trained_for"] == method
        assert model.config.extra.get("teacher") == (None if name == "teacher" else "teacher")
        assert model.tokenizer.same_vocabulary(Seq2Seq.load(zoo / "teacher").tokenizer)
        card = (zoo / name / "README.md").read_text()
        assert card.count("\n| ") == 2 + 4
        assert f"tinyspec train mt --recipe models/{name}/recipe.toml" in card
        assert "<polyline" in (zoo / name / "loss.svg").read_text()
        assert not (zoo / name / ".tinyspec").exists()
        log = [json.loads(line) for line in (zoo / name / "log.jsonl").read_text().splitlines()]
        assert {"missed", "valid_bleu"} <= log[-1].keys()
    assert "greedily" in card
    assert (
        len(list((zoo / "cache/distilled").iterdir())) == 1
    )  # all students read the same translations
    with pytest.raises(TinyspecError, match="already holds a trained model; --restart"):
        run(zoo, "teacher")


def test_an_interrupted_training_goes_on_to_the_same_model(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(zoo, "teacher")
    whole = Seq2Seq.load(zoo / "teacher").weights
    (zoo / "teacher/model.safetensors").unlink()
    drawn = bitext.make_batch_sampler

    def with_a_ctrl_c(*parts: Any) -> Any:
        draw, times = drawn(*parts), iter(range(100))

        def interrupted(generator: torch.Generator) -> Any:
            if next(times) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return draw(generator)

        return interrupted

    with monkeypatch.context() as patch:
        patch.setattr(bitext, "make_batch_sampler", with_a_ctrl_c)
        assert not run(zoo, "teacher")
    assert not (zoo / "teacher/model.safetensors").exists()
    assert run(zoo, "teacher")
    again = Seq2Seq.load(zoo / "teacher").weights
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_student_begins_with_the_weights_that_its_recipe_has_the_teacher_lend(zoo: Path) -> None:
    plan = read_translation_recipe(zoo / "nat/recipe.toml")
    other = read_translation_recipe(zoo / "teacher/recipe.toml", {"train.seed": "1"})
    teacher = initial_model(other, _tokenizer(zoo), None, torch.device("cpu"))
    student = initial_model(plan, teacher.tokenizer, teacher, torch.device("cpu"))
    for name, weight in student.weights.items():
        lent = name.startswith(("embed", "encoder"))
        if lent or weight.ndim > 1:  # a fresh gain or bias is the same everywhere
            assert torch.equal(weight, teacher.weights.get(name, torch.zeros(0))) == lent, name


def _tokenizer(zoo: Path) -> Any:
    return bitext.train_joint_tokenizer(["the dog runs."] * 3, 300, zoo / "tokenizer")


def test_the_teachers_loss_is_that_of_each_pair_alone_and_padding_counts_for_nothing(
    zoo: Path,
) -> None:
    plan = read_translation_recipe(zoo / "teacher/recipe.toml")
    model = Seq2Seq.create(plan.config(20), torch.Generator().manual_seed(0), torch.float64)
    pairs = [SentencePair([5, 6, 7], [8]), SentencePair([9], [10, 11, 12])]
    total = 0.0
    for source, target in pairs:
        inputs, labels = [1, *target], [*target, 2]
        causal = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril()
        states = model.decode(
            model.embed(torch.tensor([inputs])), model.encode(torch.tensor([source])), causal
        )
        total += float(
            F.cross_entropy(model.logits(states)[0], torch.tensor(labels), reduction="sum")
        )
    found = translation_tasks.teacher_forcing_loss(
        model,
        pad_sequences([pair.source for pair in pairs]),
        pad_sequences([pair.target for pair in pairs]),
    )
    assert float(found) == pytest.approx(total / 6, abs=1e-6)


def test_a_nat_is_not_taught_pairs_that_its_fertilities_cannot_say(zoo: Path) -> None:
    """And a batch holds the pairs whose numbers were drawn, although some were left out."""
    plan = read_translation_recipe(zoo / "nat/recipe.toml", {"shape.fertilities": "3"})
    pairs = [SentencePair([5], [8, 8, 8]), SentencePair([6], [9]), SentencePair([7, 7], [10, 11])]
    task = translation_tasks.make_task(plan, pairs, pairs, None)
    assert list(task.pairs) == pairs[1:]
    for number, pair in enumerate(task.pairs):
        source, target, _ = task.batch([number])
        assert (source.tolist(), target.tolist()) == ([pair.source], [pair.target])


def test_a_model_that_can_learn_no_pair_is_an_error(zoo: Path) -> None:
    plan = read_translation_recipe(zoo / "nat/recipe.toml", {"shape.fertilities": "1"})
    pairs = [SentencePair([5], [8])]
    with pytest.raises(TinyspecError, match="no pair fits the model"):
        translation_tasks.make_task(plan, pairs, pairs, None)


def test_bad_recipes_say_what_is_wrong(zoo: Path) -> None:
    path = zoo / "nat/recipe.toml"
    for old, new, message in (
        ('method = "nat"', 'method = "nut"', "method nut cannot be trained"),
        ('teacher = "../teacher"\n', "", "need a teacher: teacher = FOLDER is missing"),
        ("beam = 1", "beams = 1", r"\[distill\] beams is not known"),
        ("beam = 1", "beam = 0", "beam is 0"),
        ("longest", "longst", "longst is not known"),
        ("d_model = 16", "d_modell = 16", r"section \[shape\]"),
        (
            'inherit = ["embed", "encoder"]',
            'inherit = "embed"',
            "inherit is 'embed': it must be a list",
        ),
        ('inherit = ["embed", "encoder"]', "inherit = { embed = 3 }", "inherit must be a list"),
        ("fertilities = 24", "", r"\[shape\] fertilities is missing"),
    ):
        text = path.read_text()
        assert old in text
        other = zoo / "nat/other.toml"
        other.write_text(text.replace(old, new))
        if not (zoo / "teacher/model.safetensors").exists() and "[shape]" in message.replace(
            "\\", ""
        ):
            assert run(zoo, "teacher")
        with pytest.raises(TinyspecError, match=message):
            train_mt(other, zoo / "out", data_folder=zoo / "data", device="cpu")


def test_a_nat_is_fine_tuned_from_where_it_was(zoo: Path) -> None:
    assert run(zoo, "teacher") and run(zoo, "nat")
    text = (zoo / "nat/recipe.toml").read_text()
    (zoo / "fine").mkdir()
    (zoo / "fine/recipe.toml").write_text(
        text.replace('method = "nat"', 'method = "nat"\nfinetune = "../nat"')
    )
    plan = read_translation_recipe(zoo / "fine/recipe.toml")
    first, where = Seq2Seq.load(zoo / "nat"), torch.device("cpu")
    assert all(
        torch.equal(w, first.weights[name])
        for name, w in initial_model(plan, first.tokenizer, first, where).weights.items()
    )
    assert run(zoo, "fine")
    assert Seq2Seq.load(zoo / "fine").config.extra["trained_for"] == "nat"
    assert "`nat`, fine-tuned" in (zoo / "fine/README.md").read_text()
    (zoo / "fine/recipe.toml").write_text(
        text.replace('method = "nat"', 'method = "mask_predict"\nfinetune = "../nat"')
    )
    with pytest.raises(TinyspecError, match="method mask_predict has no second stage"):
        run(zoo, "fine")


def test_from_the_command_line(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYSPEC_DATA", str(zoo / "data"))
    out, recipe = str(zoo / "mine"), str(zoo / "teacher/recipe.toml")
    done = CliRunner().invoke(
        main, ["train", "mt", "--recipe", recipe, "--out", out, "-q", "--set", "train.steps=4"]
    )
    assert (done.exit_code, done.stdout) == (0, f"{out}\n")
    shutil.copytree(out, zoo / "teacher", dirs_exist_ok=True)
    (zoo / "elsewhere").mkdir()
    shutil.move(
        zoo / "nat/recipe.toml", zoo / "elsewhere/recipe.toml"
    )  # the teacher stands beside the student alone
    shutil.move(zoo / "elsewhere", zoo / "data/elsewhere")
    nat = [
        "train",
        "mt",
        "--recipe",
        str(zoo / "data/elsewhere/recipe.toml"),
        "--out",
        str(zoo / "student"),
        "-q",
    ]
    done = CliRunner().invoke(main, [*nat, "--distill-only"])
    assert done.exit_code == 0
    assert list(Path(done.stdout.strip()).glob("*.json"))
    assert not (zoo / "student").exists()
    done = CliRunner().invoke(main, [*nat, "--set", "train.steps"])
    assert done.exit_code == 2
    assert "write KEY=VALUE" in done.stderr
    done = CliRunner().invoke(
        main, ["train", "mt", "--recipe", recipe, "--out", out, "--distill-only", "-q"]
    )
    assert done.exit_code == 2
    assert "no section [distill]" in done.stderr


def test_a_stack_may_begin_with_the_weights_of_another(zoo: Path) -> None:
    """As a table, `inherit` says which of the teacher's weights each prefix begins with."""
    path = zoo / "cmlm/recipe.toml"
    text = path.read_text().replace("lengths = 41", "lengths = 41\nstacks = { again = 1 }")
    table = 'inherit = { embed = "embed", again = "decoder" }'
    path.write_text(text.replace('inherit = ["embed", "encoder"]', table))
    plan = read_translation_recipe(path)
    other = read_translation_recipe(zoo / "teacher/recipe.toml", {"train.seed": "1"})
    teacher = initial_model(other, _tokenizer(zoo), None, torch.device("cpu"))
    student = initial_model(plan, teacher.tokenizer, teacher, torch.device("cpu"))
    for name, weight in student.weights.items():
        theirs = teacher.weights.get(name.replace("again", "decoder"), torch.zeros(0))
        if weight.ndim > 1:
            assert torch.equal(weight, theirs) == name.startswith(("embed", "again")), name


def test_a_model_may_begin_as_another_and_has_weights_of_its_own(zoo: Path) -> None:
    assert run(zoo, "teacher") and run(zoo, "cmlm")
    plan = read_translation_recipe(zoo / "crf/recipe.toml")
    first = Seq2Seq.load(zoo / "cmlm")
    begun = initial_model(plan, first.tokenizer, first, torch.device("cpu"))
    assert all(torch.equal(begun.weights[name], w) for name, w in first.weights.items())
    own = begun.weights.keys() - first.weights.keys()
    assert own == begun.config.heads.keys() and "crf_from" in own
    assert run(zoo, "crf")
    trained = Seq2Seq.load(zoo / "crf")
    assert trained.config.heads == begun.config.heads
    for name in own:
        assert not torch.equal(trained.weights[name], begun.weights[name]), name
    card = (zoo / "crf/README.md").read_text()
    assert "dynamic transitions of rank 2" in card
    assert "it began as `cmlm`" in card
    with pytest.raises(TinyspecError, match="start need a teacher"):
        read_translation_recipe(zoo / "teacher/recipe.toml", {"start": '"../cmlm"'})
    with pytest.raises(TinyspecError, match=r"\[shape\] lengths is missing"):
        read_translation_recipe(zoo / "crf/recipe.toml", {"shape.lengths": "0"})


def test_the_drafter_of_specdec_is_trained_for_its_teacher(zoo: Path) -> None:
    assert run(zoo, "teacher") and run(zoo, "specdec")
    model = Seq2Seq.load(zoo / "specdec")
    assert model.config.extra["k"] == 5
    log = [json.loads(line) for line in (zoo / "specdec/log.jsonl").read_text().splitlines()]
    assert 0 <= log[-1]["right_tokens"] <= 5
    card = (zoo / "specdec/README.md").read_text()
    assert "fills a block of 5 masks" in card
    assert re.search(r"are right: \d\.\d\d\.", card)


def test_glancing_follows_the_progress_of_the_training(zoo: Path) -> None:
    assert run(zoo, "teacher")
    plan = read_translation_recipe(zoo / "specdec/recipe.toml")
    pairs = [SentencePair([5, 6], [8, 9, 10])] * 3
    teacher = Seq2Seq.load(zoo / "teacher")
    task = translation_tasks.make_task(plan, pairs, pairs, teacher)
    assert task.before_step is not None
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            specdec,
            "block_filling_loss",
            lambda model, batch, block, share, *rest: shares.append(share),
        )
        for step, progress in ((0, 0.0), (1, 0.5), (2, 1.0)):
            task.before_step(step, progress)
            task.loss(teacher, task.batch([0, 1]), torch.Generator())
    assert shares == pytest.approx([0.5, 0.4, 0.3])


def test_pairs_that_outgrow_the_drafters_positions_are_left_out(zoo: Path) -> None:
    assert run(zoo, "teacher")
    plan = read_translation_recipe(zoo / "specdec/recipe.toml")  # 64 positions, 5 of them masks
    pairs = [SentencePair([5], [8] * n) for n in (57, 58, 59)]
    teacher = Seq2Seq.load(zoo / "teacher")
    task = translation_tasks.make_task(plan, pairs, pairs[:1], teacher)
    assert task.pairs == pairs[:2]
    for seed in range(9):
        loss = task.loss(teacher, task.batch([1]), torch.Generator().manual_seed(seed))
        assert loss.isfinite()


def test_a_drafter_without_a_teacher_or_with_a_wrong_block_is_an_error(zoo: Path) -> None:
    path = zoo / "specdec/recipe.toml"
    for value in ("0", "2.5", "true", "-1"):
        with pytest.raises(TinyspecError, match=r"k is .*: it must be a whole number"):
            read_translation_recipe(path, {"translator.k": value})
    text = path.read_text().replace(STUDENT, "")
    path.write_text(text)
    with pytest.raises(TinyspecError, match=r"is judged by its teacher.*: teacher = FOLDER"):
        run(zoo, "specdec")


def test_a_teacher_is_trained_on_with_a_block_layer(zoo: Path) -> None:
    assert run(zoo, "teacher") and run(zoo, "blockwise")
    teacher, model = Seq2Seq.load(zoo / "teacher"), Seq2Seq.load(zoo / "blockwise")
    assert model.config.block == 2
    assert float(model.weights["block.out.weight"].abs().max()) > 0
    assert all(
        not torch.equal(w, model.weights[n]) for n, w in teacher.weights.items() if w.ndim > 1
    )
    log = [json.loads(line) for line in (zoo / "blockwise/log.jsonl").read_text().splitlines()]
    assert log[-1]["held_out"] > 0 and 1 <= log[-1]["accepted"] <= 3
    card = (zoo / "blockwise/README.md").read_text()
    assert "Both were trained together" in card and "mean loss of all predictors" in card
    assert re.search(r"it accepts \d\.\d\d tokens in a pass", card)


def test_a_frozen_teacher_gets_a_layer_and_stays(zoo: Path) -> None:
    assert run(zoo, "teacher") and run(zoo, "blockwise", overrides={"translator.frozen": "true"})
    teacher, model = Seq2Seq.load(zoo / "teacher"), Seq2Seq.load(zoo / "blockwise")
    assert all(torch.equal(w, model.weights[name]) for name, w in teacher.weights.items())
    assert float(model.weights["block.out.weight"].abs().max()) > 0
    assert model.config.extra["frozen"] is True
    assert "The layer alone was trained" in (zoo / "blockwise/README.md").read_text()


def test_the_best_weights_of_a_block_layer_have_the_least_loss(zoo: Path) -> None:
    assert run(zoo, "teacher")
    done = train_mt(
        zoo / "blockwise/recipe.toml",
        zoo / "blockwise",
        data_folder=zoo / "data",
        device="cpu",
        overrides={"train.valid_every": "2"},
    )
    log = [json.loads(line) for line in (zoo / "blockwise/log.jsonl").read_text().splitlines()]
    assert done.best == min(line["held_out"] for line in log if "held_out" in line)


def test_recipes_of_a_block_layer_that_cannot_be_followed_say_why(zoo: Path) -> None:
    assert run(zoo, "teacher")
    for overrides, message in (
        ({"translator.k": "1"}, "k is 1: it must be a whole number from 2 to 64"),
        ({"translator.k": "65"}, "k is 65: it must be a whole number from 2 to 64"),
        ({"translator.k": "true"}, "k is True: it must be a whole number from 2 to 64"),
        ({"translator.frozen": "1"}, "frozen is 1: it must be true or false"),
        ({"shape.d_ff": "32"}, r"\[shape\] is not that of teacher"),
        ({"teacher": '""', "inherit": "[]"}, "need a teacher"),
    ):
        with pytest.raises(TinyspecError, match=message):
            run(zoo, "blockwise", overrides=overrides)
    with pytest.raises(TinyspecError, match=r"\[translator\] frozen is not known"):
        run(zoo, "specdec", overrides={"translator.frozen": "true"})
    path = zoo / "blockwise/recipe.toml"
    path.write_text(path.read_text().replace(STUDENT, ""))
    with pytest.raises(
        TinyspecError, match="blockwise adds weights to a teacher: teacher = FOLDER"
    ):
        run(zoo, "blockwise")


def test_the_committed_recipe_of_a_block_layer_is_followed(zoo: Path) -> None:
    """A few steps of it, on a tiny teacher."""
    recipe = Path(__file__).parents[2] / "models/multi30k-blockwise/recipe.toml"
    assert run(zoo, "teacher")
    shape = {"d_model": 16, "n_heads": 2, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1,
             "max_positions": 64}  # fmt: skip
    few = {"steps": 4, "warmup": 1, "valid_every": 2, "log_every": 2}
    overrides = {
        "teacher": f'"{zoo / "teacher"}"', "tokens": "120", "judged": "6",
        **{f"shape.{name}": str(value) for name, value in shape.items()},
        **{f"train.{name}": str(value) for name, value in few.items()},
    }  # fmt: skip
    out = zoo / "mine"
    options: dict[str, Any] = {"data_folder": zoo / "data", "device": "cpu"}
    assert train_mt(recipe, out, overrides=overrides, **options).finished
    settings = read_translation_recipe(recipe).settings_of_translator()
    assert Seq2Seq.load(out).config.block == settings.k - 1


RECIPES_OF_THE_ZOO = ["parallel", "sat", "refine", "shallow", "synst", "fcl", "depa"]
TINY = {
    "shape.d_model": "16",
    "shape.n_heads": "2",
    "shape.d_ff": "24",
    "tokens": "120",
    "judged": "4",
    "distill.beam": "1",
    "train.steps": "4",
    "train.warmup": "1",
    "train.valid_every": "4",
}


@pytest.mark.parametrize("name", RECIPES_OF_THE_ZOO)
def test_a_recipe_of_the_zoo_runs(zoo: Path, name: str) -> None:
    """Its sections and its method, on tiny shapes for four steps."""
    assert run(zoo, "teacher")
    (zoo / "teacher").rename(zoo / "multi30k-teacher")
    folder = zoo / f"multi30k-{name}"
    shutil.copytree(MODELS / folder.name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert run(zoo, folder.name, overrides=TINY)
    model, plan = Seq2Seq.load(folder), read_translation_recipe(folder / "recipe.toml")
    assert model.config.extra["trained_for"] == plan.method
    assert model.config.extra["teacher"] == "multi30k-teacher"
    card = (folder / "README.md").read_text()
    about = {"parallel": "evenly", "sat": "groups of 4", "refine": "2 layers of the refiner"}
    about["synst"] = "a chunker of German function words, not from a parser"
    about |= {"fcl": "a share of 0.5", "depa": "a share of 0.3"}
    assert about.get(name, "an autoregressive student") in card
    if name != "shallow":
        assert find_technique(plan.method).refiner(RefineRequest(model))


def test_the_phrase_table_and_the_target_words_are_counted_in_the_training_pairs(
    zoo: Path,
) -> None:
    """Other valid sentences change nothing, and an interrupted training counts the same again."""
    for name in ("teacher", "cmlm", "enat", "depa"):
        assert run(zoo, name)
    folders = zoo / "enat", zoo / "depa"
    enat, depa = (Seq2Seq.load(folder) for folder in folders)
    tokenizer, pairs = enat.tokenizer, read_multi30k("train", zoo / "data")
    sources = [tokenizer.encode(english) for english, _ in pairs]
    teacher = Seq2Seq.load(zoo / "teacher")
    plan = read_translation_recipe(folders[0] / "recipe.toml")
    assert plan.distill is not None
    targets = distill_translations(teacher, sources, plan.distill)
    used = [SentencePair(x, y) for x, y in zip(sources, targets, strict=True)]
    counted = translation_tasks.count_in_pairs(plan, bitext.filter_pairs(used, plan.longest))
    assert enat.config.extra["phrases"] == counted["phrases"]
    for phrase, translation in phrase_table(enat).items():
        assert any(contains(x, phrase) and contains(y, translation) for x, y in used)
    assert find_target_words(depa) == tuple(sorted({y for _, text in used for y in text}))


def contains(text: Sequence[int], part: Sequence[int]) -> bool:
    places = range(len(text) - len(part) + 1)
    return any(tuple(text[at : at + len(part)]) == tuple(part) for at in places)


EXITS = 'decoder_layers = 3\n[exits]\nweights = "uniform"\nreport = [1, 2]'


def test_a_translators_exits_are_trained_and_reported(zoo: Path) -> None:
    path = zoo / "teacher/recipe.toml"
    path.write_text(
        path.read_text()
        .replace("decoder_layers = 1", EXITS)
        .replace("max_positions = 64", "")
        .replace("[exits]", "max_positions = 64\n[exits]")
    )
    assert run(zoo, "teacher")
    assert Seq2Seq.load(zoo / "teacher").config.extra["exits"] == "uniform"
    assert "losses weighted alike" in (zoo / "teacher/README.md").read_text()
    log = [json.loads(line) for line in (zoo / "teacher/log.jsonl").read_text().splitlines()]
    assert {"valid_loss", "valid_loss_1", "valid_loss_2"} <= log[-1].keys()


def test_the_loss_of_a_translators_exits_is_the_mean_of_its_truncated_models(zoo: Path) -> None:
    """Each exit is the decoder cut off there, with the norm and the head of the whole."""
    path = zoo / "teacher/recipe.toml"
    plan = read_translation_recipe(path, {"shape.decoder_layers": "3"})
    exits = read_translation_recipe(
        path, {"shape.decoder_layers": "3", "exits.weights": '"linear"', "dropout": "0.0"}
    )
    pairs = [SentencePair([5, 6, 7], [8, 9, 10, 11]), SentencePair([9, 8], [12])]
    source, target = (
        pad_sequences([p.source for p in pairs]),
        pad_sequences([p.target for p in pairs]),
    )
    config = plan.config(300)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(3))
    expected = 0.0
    for layers in (1, 2, 3):
        cut_config = read_translation_recipe(path, {"shape.decoder_layers": str(layers)}).config(
            300
        )
        cut = Seq2Seq(cut_config, {name: model.weights[name] for name in cut_config.shapes()})
        loss = translation_tasks.teacher_forcing_loss(cut, source, target, 0.0, exits.smoothing)
        expected += layers / 6 * float(loss)
    task = translation_tasks.make_task(exits, pairs, pairs, None)
    assert task.before_step is not None
    task.before_step(0, 0.0)
    got = task.loss(model, (source, target), torch.Generator())
    assert float(got) == pytest.approx(expected, abs=1e-6)


def test_exits_are_for_the_teacher_and_without_layer_dropout(zoo: Path) -> None:
    for name, overrides in (
        ("nat", {"exits.weights": '"uniform"'}),
        ("teacher", {"exits.p_max": "0.1"}),
    ):
        with pytest.raises(TinyspecError, match=r"\[exits\] is for method teacher"):
            read_translation_recipe(zoo / name / "recipe.toml", overrides)
    plan = read_translation_recipe(zoo / "teacher/recipe.toml", {"exits.report": "[2]"})
    with pytest.raises(TinyspecError, match="exits are 1 to 1, not 2"):
        plan.config(300)


def test_the_shipped_recipe_of_the_exits_translator_is_what_its_issue_asks_for() -> None:
    models = Path(__file__).parents[2] / "models"
    plan = read_translation_recipe(models / "multi30k-exits/recipe.toml")
    config = plan.config(plan.vocab_size)
    assert (config.encoder_layers, config.decoder_layers, config.d_model, config.d_ff) == (
        3, 6, 160, 640,
    )  # fmt: skip
    assert plan.exits is not None and plan.exits.weights == "uniform"
    assert config.parameters() * 2 < 8.4e6, "bytes in bfloat16"


@pytest.mark.parametrize("method", ["depth_adaptive", "consistent_ee"])
def test_a_translator_learns_where_to_leave(zoo: Path, method: str) -> None:
    """The predictors alone are trained; the policy and the whole model take turns."""
    layers = {"shape.decoder_layers": "3"}
    assert run(zoo, "teacher", overrides=layers)
    text = RECIPE.replace("NAME", "own").replace("METHOD", method).replace("SHAPE", "")
    (zoo / "own").mkdir()
    (zoo / "own/recipe.toml").write_text(text.replace("REST", 'teacher = "../teacher"'))
    assert run(zoo, "own", overrides=layers)
    before, after = (Seq2Seq.load(zoo / name) for name in ("teacher", "own"))
    lead = f"{method}/"
    is_same = {name: torch.equal(w, after.weights[name]) for name, w in before.weights.items()}
    assert all(is_same.values()) is (method == "depth_adaptive")
    assert any(bool(w.any()) for name, w in after.weights.items() if name.startswith(lead))
    page = (zoo / "own/README.md").read_text()
    assert method in page and "layers" in page
    told: dict[str, Any] = {"max_new_tokens": 8}
    plain = tinyspec.translate(after, "the dog runs.", method="autoregressive", **told)
    at_inf = tinyspec.translate(after, "the dog runs.", method=method, threshold=math.inf, **told)
    assert list(at_inf.tokens) == list(plain.tokens)
    assert tinyspec.translate(after, "the dog runs.", **told).tokens  # what it was trained for
    with pytest.raises(TinyspecError, match="is not that of teacher"):
        run(zoo, "own", restart=True, overrides={**layers, "shape.d_ff": "48"})
    one = {"shape.decoder_layers": "1"}
    with pytest.raises(TinyspecError, match="one layer"):
        run(zoo, "own", restart=True, overrides=one)


def test_the_shipped_recipes_of_exits_begin_with_the_translator_whose_exits_are_trained() -> None:
    shape = read_translation_recipe(MODELS / "multi30k-exits/recipe.toml").shape
    for name, method in (
        ("multi30k-depth", "depth_adaptive"),
        ("multi30k-consistent", "consistent_ee"),
    ):
        plan = read_translation_recipe(MODELS / name / "recipe.toml")
        assert (plan.name, plan.method, plan.teacher) == (name, method, "../multi30k-exits")
        assert plan.shape == shape
