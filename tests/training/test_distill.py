"""A draft is distilled from its target's outputs: prompts, vocabulary, loss, command, resuming."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.lm import borrowed
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.model import Model
from tinyspec.training import distill, imitation, outputs
from tinyspec.training.outputs import OutputSettings, TargetOutput, TargetPrompt
from tinyspec.training.train_lm import distillation_loss

SMALL = ["--texts", "8", "--set", "distill.tokens=12", "--set", "distill.prompt=8",
         "--set", "train.steps=30", "--set", "train.lr=1e-2", "--set", "distill.question=6",
         "--set", "train.warmup=2", "--set", "distill.batch=4"]  # fmt: skip


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


def wrote(model: Model, texts: int = 4, **more: Any) -> list[TargetOutput]:
    asking = OutputSettings(texts=texts, tokens=10, prompt=8, question=5, batch=4, **more)
    return outputs.sample_outputs(model, outputs.make_prompts(model, asking), asking, 0)


# ---------------------------------------------------------------------- the outputs


def test_an_outputs_probabilities_are_the_targets_where_it_was_sampled(zoo: Zoo) -> None:
    model = tinyspec.load(zoo.big)
    for text in wrote(model, top=6):
        rows = model.logits(text.ids.tolist())[text.positions].softmax(-1)
        best = rows.topk(6)
        assert torch.equal(best.indices.int(), text.top_ids)
        assert torch.allclose(best.values, text.top_probs.float(), atol=1e-3)
        assert len(text.ids) - 1 > int(text.positions[-1]) - 1


def test_a_chat_model_asks_itself_between_the_ids_of_its_template(zoo: Zoo) -> None:
    model = tinyspec.load(zoo.big)
    lead, closing = outputs._split_chat_template(model)
    asked = model.tokenizer.chat([{"role": "user", "content": "Zebra"}])
    assert asked[: len(lead)] == lead and asked[len(asked) - len(closing) :] == closing
    text = wrote(model)[0]
    assert text.ids[: len(lead)].tolist() == lead
    assert not set(range(len(lead) - 1)) & set(
        text.positions.tolist()
    )  # the loss does not count the template


def test_a_text_depends_on_its_number_alone_and_written_ones_are_kept(
    zoo: Zoo, tmp_path: Path
) -> None:
    model = tinyspec.load(zoo.big)
    asking = OutputSettings(texts=6, tokens=6, question=4, batch=4)
    asks = outputs.make_prompts(model, asking)
    together = outputs.sample_outputs(model, asks, asking, 0)
    alone = outputs.sample_outputs(model, asks[3:4], asking, 3)[0]
    assert torch.equal(alone.ids, together[3].ids)
    first = outputs.write_outputs(model, asks, asking, tmp_path / "o")
    assert sorted(path.name for path in (tmp_path / "o").glob("*.pt")) == ["00000.pt", "00001.pt"]
    (tmp_path / "o" / "00001.pt").unlink()
    before = (tmp_path / "o" / "00000.pt").stat().st_mtime_ns
    again = outputs.write_outputs(model, asks, asking, tmp_path / "o")
    assert (tmp_path / "o" / "00000.pt").stat().st_mtime_ns == before
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    more = OutputSettings(texts=9, tokens=6, question=4, batch=4)
    assert (
        outputs.outputs_folder(model, more)
        == outputs.outputs_folder(model, asking)
        != outputs.outputs_folder(model, OutputSettings(texts=9))
    )
    weights = {**model.weights, "norm.weight": model.weights["norm.weight"] + 1}
    tuned = Model(model.config, weights, name=model.name)  # with the same embeddings
    assert outputs.outputs_folder(tuned, asking) != outputs.outputs_folder(model, asking)
    grown = outputs.write_outputs(model, outputs.make_prompts(model, more), more, tmp_path / "o")
    assert len(grown) == 9 and all(
        torch.equal(a.ids, b.ids) for a, b in zip(first, grown, strict=False)
    )
    asks[2] = TargetPrompt([*asks[2].ids, 1])  # the data has changed
    changed = outputs.write_outputs(model, asks, asking, tmp_path / "o")
    assert changed[2].ids[: len(asks[2].ids)].tolist() == asks[2].ids
    assert torch.equal(changed[4].ids, first[4].ids)
    (tmp_path / "o" / "00000.pt").write_bytes(b"broken")
    with pytest.raises(TinyspecError, match="delete it, and it is written again"):
        outputs.write_outputs(model, asks, asking, tmp_path / "o")


def test_prompts_come_from_a_file_where_one_is_given(zoo: Zoo, tmp_path: Path) -> None:
    model, file = tinyspec.load(zoo.other), tmp_path / "p.txt"
    file.write_text("the cat\n\nthe dog\n", encoding="utf-8")
    prompts = {
        tuple(ask.ids)
        for ask in outputs.make_prompts(model, OutputSettings(texts=20, tokens=4), file)
    }
    assert prompts == {tuple(model.tokenizer.encode(text)) for text in ("the cat", "the dog")}
    file.write_text("\n\n", encoding="utf-8")
    with pytest.raises(TinyspecError, match="no prompts in it"):
        outputs.make_prompts(model, OutputSettings(), file)


def test_prompts_do_not_depend_on_how_many_there_are(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = [
        outputs.data.Book("A", "T", "\n\n".join(["the cat sat on the mat " * 12, "the dog ran"]))
    ] * 3
    sums = [outputs.data.Sum(f"the cat and {n}?", "") for n in range(9)]
    monkeypatch.setattr(
        outputs.data, "read_books", lambda split, root: books if split == "train" else []
    )
    monkeypatch.setattr(
        outputs.data, "read_gsm8k", lambda split, root: sums if split == "train" else []
    )
    for model in (tinyspec.load(zoo.big), tinyspec.load(zoo.small)):
        few, many = (
            outputs.make_prompts(model, OutputSettings(texts=n, tokens=4, prompt=20, batch=2))
            for n in (7, 20)
        )
        assert many[:7] == few
        assert len({tuple(ask.ids) for ask in many}) > 2
        assert all(len(ask.ids) <= 90 for ask in many)
        assert any(ask.closing for ask in many) == model.tokenizer.has_chat


def test_an_end_of_text_ends_a_text(zoo: Zoo) -> None:
    model = tinyspec.load(zoo.small)
    every = distill.replace(model.config, eos=tuple(range(model.config.vocab_size)))
    ending = Model(every, dict(model.weights), model.tokenizer)
    text = outputs.sample_outputs(ending, [TargetPrompt([1, 2])], OutputSettings(tokens=9), 0)[0]
    assert len(text.ids) == 3 and len(text.positions) == 1


# ---------------------------------------------------------------------- words and loss


def test_the_words_are_those_the_target_wrote_most_and_always_the_end_of_text(zoo: Zoo) -> None:
    config = distill.replace(tinyspec.load(zoo.big).config, eos=(200,))
    probs = torch.tensor([[0.5], [0.5], [0.4]]).half()
    top = torch.tensor([[7], [7], [9]], dtype=torch.int32)
    text = TargetOutput(
        torch.tensor([1, 7, 7, 9], dtype=torch.int32), torch.tensor([0, 1, 2]), top, probs
    )
    assert imitation.most_frequent_tokens([text], 2, config) == (7, 200)
    assert imitation.most_frequent_tokens([text], 3, config) == (7, 9, 200)
    assert imitation.most_frequent_tokens([text], 4, config) == (0, 7, 9, 200)
    assert len(imitation.most_frequent_tokens([text], 10**6, config)) == config.vocab_size


def test_alpha_is_the_overlap_of_whole_distributions_if_all_of_p_is_known(zoo: Zoo) -> None:
    target, small = (
        tinyspec.load(zoo.big, dtype="float32"),
        tinyspec.load(zoo.small, dtype="float32"),
    )
    text = wrote(target, top=target.config.vocab_size)[0]
    batch = imitation.make_collate_fn([text], small.config)([0], 96, torch.device("cpu"))
    blocks = Blocks(small.config, dict(small.weights))
    known = imitation.known_probabilities(blocks, *batch)
    cross, alpha = imitation.cross_entropy_and_alpha(*known)
    ids = text.ids.tolist()
    p, q = (model.logits(ids)[text.positions] for model in (target, small))
    assert float(alpha) == pytest.approx(
        float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean()), abs=2e-3
    )
    assert float(cross) == pytest.approx(
        float(-(p.softmax(-1) * q.log_softmax(-1)).sum(-1).mean()), abs=2e-2
    )
    figures = imitation.evaluate_draft(target, small, [text])
    assert figures["alpha"] == pytest.approx(float(alpha), abs=2e-3)
    assert imitation.evaluate_draft(target, target, [text]) == pytest.approx(
        {"alpha": 1, "agreement": 1, "sayable": 1}
    )
    assert float(distillation_loss(p, p)) == pytest.approx(0, abs=1e-5)


def test_lk_is_its_closed_form_on_three_tokens() -> None:
    """p = (1/2, 1/2, 0) and q = (1/4, 1/4, 1/2): CE is 2 ln 2 and alpha is 1/2."""
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    lead = math.exp(-3 / 2)
    expected = lead * 2 * math.log(2) + (1 - lead) / 2
    assert float(imitation.imitation_loss("lk", p, q.log())) == pytest.approx(expected)


def test_lk_is_least_where_the_draft_is_the_target() -> None:
    """There alpha is 1, and what is left is the entropy of p, led by exp(-3)."""
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    loss, lead = imitation.imitation_loss("lk", p, p.log()), math.exp(-3)
    assert float(loss) == pytest.approx(-lead * float((p * p.log()).sum()))
    for step in ((0.1, 0, -0.1), (-0.2, 0.1, 0.1)):
        moved = (p.log() + torch.tensor(step)).log_softmax(-1)
        assert imitation.imitation_loss("lk", p, moved) > loss


def test_of_tokens_that_the_draft_cannot_say_the_loss_sees_no_place(zoo: Zoo) -> None:
    target = tinyspec.load(zoo.big)
    text = wrote(target, top=5)[0]
    config = distill.replace(target.config, head_ids=(3, 8), tied=False)
    _, top, probs, known = imitation.make_collate_fn([text], config)([0], 96, torch.device("cpu"))
    outside = ~torch.isin(text.top_ids, torch.tensor([3, 8], dtype=torch.int32))
    assert int(known.sum()) == len(text.positions)
    assert (probs[0, text.positions][outside] == 0).all()
    assert int(top.max()) <= 1


def test_a_long_text_is_cut_on_the_left(zoo: Zoo) -> None:
    target = tinyspec.load(zoo.big)
    text = wrote(target, top=3)[0]
    inputs, _, probs, known = imitation.make_collate_fn([text], target.config)(
        [0], 6, torch.device("cpu")
    )
    assert inputs[0].tolist() == text.ids[-7:-1].tolist()
    assert torch.equal(probs[0, -1], text.top_probs[-1].float()) and known[0, -1] == 1


def test_a_draft_begins_as_its_targets_first_layers(zoo: Zoo) -> None:
    target = tinyspec.load(zoo.big, dtype="float32")
    config = distill.replace(target.config, n_layers=1)
    weights = distill.initial_draft_weights(config, target, seed=0, inherit=True)
    assert all(torch.equal(weights[name], target.weights[name]) for name in weights)
    fresh = distill.initial_draft_weights(config, target, seed=0, inherit=False)
    assert not torch.equal(fresh["embed"], target.weights["embed"])


# ---------------------------------------------------------------------- the command


def test_a_draft_with_its_own_vocabulary_is_trained_and_drafts_for_its_target(
    zoo: Zoo, tmp_path: Path
) -> None:
    out = tmp_path / "draft"
    call = [
        "train",
        "lm",
        "--distill",
        zoo.big,
        "--layers",
        "1",
        "--draft-vocab",
        "60",
        "--out",
        str(out),
        "--quiet",
    ]
    result = run(*call, *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("alpha 0.") and "agreement" in result.stdout
    draft = tinyspec.load(out)
    assert len(draft.config.head_ids) == 60 and draft.config.n_layers == 1
    assert draft.config.extra[borrowed.FROM] == "../big"
    assert not (out / "tokenizer.json").exists() and draft.tokenizer.vocab_size
    made = tinyspec.generate(
        tinyspec.load(zoo.big), [1, 2], method="speculative_decoding", draft=draft, max_new_tokens=9
    )
    assert made.tokens == tinyspec.generate(tinyspec.load(zoo.big), [1, 2], max_new_tokens=9).tokens
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "alpha = mean of sum min(p, q)" in card and "60 of" in card
    assert not (out / ".tinyspec").exists()
    recipe = (out / "recipe.toml").read_text(encoding="utf-8")
    assert (
        "draft_vocab = 60" in recipe and "steps = 30" in recipe and 'teacher = "../big"' in recipe
    )
    assert "already holds a trained model" in failed(run(*call))
    weights = dict(draft.weights)
    again = run(
        "train",
        "lm",
        "--recipe",
        str(out / "recipe.toml"),
        "--out",
        str(tmp_path / "again"),
        "--quiet",
    )
    assert again.exit_code == 0, again.output
    for name, weight in tinyspec.load(tmp_path / "again").weights.items():
        assert torch.equal(weight, weights[name])


def test_a_draft_in_the_zoo_is_used_without_being_named(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tinyspec.load(zoo.small), tinyspec.load(zoo.big)
    draft.save(tmp_path / "cache" / "models" / "made")
    with pytest.raises(TinyspecError, match="names none"):
        tinyspec.generate(target, [1, 2], method="speculative_decoding", max_new_tokens=4)
    config = json.loads((tmp_path / "cache" / "models" / "made" / "config.json").read_text())
    config["tinyspec"] = {"draft_of": target.name}
    (tmp_path / "cache" / "models" / "made" / "config.json").write_text(json.dumps(config))
    made = tinyspec.generate(target, [1, 2], method="speculative_decoding", max_new_tokens=4)
    assert made.stats.draft_calls > 0


@pytest.mark.slow
def test_distilling_brings_the_draft_nearer_to_its_target(zoo: Zoo, tmp_path: Path) -> None:
    """From random weights: 50 steps on 24 texts, and the loss falls."""
    out = tmp_path / "draft"
    call = ["train", "lm", "--distill", zoo.big, "--layers", "1", "--out", str(out), "--quiet"]
    run(*call, *SMALL[:-10], "--set", "train.steps=50", "--set", "inherit=false", "--texts", "24")
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("source", ["target", "mix", "draft"])
def test_an_interrupted_distillation_goes_on_to_the_same_draft(
    source: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that the draft wrote itself are those of before: weights and texts are the same."""

    def call(out: str) -> list[str]:
        own = [f"distill.source={json.dumps(source)}", "distill.refresh=8", "distill.fresh=4"]
        settings = [word for one in own for word in ("--set", one)]
        args = ["--distill", zoo.big, "--layers", "1", "--out", str(tmp_path / out), "--quiet"]
        return ["train", "lm", *args, *SMALL, *settings]

    assert run(*call("whole")).exit_code == 0
    steps, compared = iter(range(100)), distill.known_probabilities

    def interrupted(*batch: Any) -> Any:
        if next(steps) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return compared(*batch)

    with monkeypatch.context() as patch:
        patch.setattr(distill, "known_probabilities", interrupted)
        assert run(*call("stopped")).exit_code == 130
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    assert run(*call("stopped")).exit_code == 0
    whole, gone_on = (tinyspec.load(tmp_path / name).weights for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], gone_on[name]) for name in whole)


def test_a_draft_has_no_more_layers_than_its_target(zoo: Zoo, tmp_path: Path) -> None:
    call = ["train", "lm", "--distill", zoo.big, "--layers", "99", "--out", str(tmp_path / "x")]
    assert f"--layers 99: {zoo.big} has 2 layers; a draft takes its first ones" in failed(
        run(*call)
    )
    assert not (tmp_path / "x").exists()


def test_what_is_wrong_is_an_error_of_one_line(zoo: Zoo, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "x"), "--quiet"]
    lm = ["train", "lm", *out]
    assert "--recipe FILE, or --distill" in failed(run(*lm))
    assert "no such model" in failed(run(*lm, "--distill", str(tmp_path / "nothing")))
    assert "tinyspec models fetch smollm2" in failed(run(*lm, "--distill", "smollm2"))
    assert "--compile is not for drafts" in failed(run(*lm, "--distill", zoo.big, "--compile"))
    (tmp_path / "old.txt").write_bytes("déjà vu".encode("latin1"))
    prompts = ("--prompts", str(tmp_path / "old.txt"))
    assert "old.txt: not UTF-8 text" in failed(run(*lm, "--distill", zoo.big, *prompts))
    big = [*lm, "--distill", zoo.big]
    assert "did you mean 'tokens'" in failed(run(*big, "--set", "distill.tokes=3"))
    assert "temperature is 0" in failed(run(*big, "--set", "distill.temperature=0"))
    assert "d_model is 32, not 16" in failed(
        run(*big, "--draft-vocab", "9", "--set", "shape.d_model=16")
    )
    assert "drop vocab_size" in failed(run(*big, "--set", "shape.vocab_size=16"))
    assert "section [shape]" in failed(run(*big, "--set", "shape.width=16"))
