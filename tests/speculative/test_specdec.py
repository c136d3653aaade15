"""SpecDec: masks filled in one pass, the two conditions, the drafter's loss, and `translate`."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec import models
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.rewriting_laws import dense_logits
from tinyspec.laws.traps import GREEDY, Trap, begin_decoder, run_all_rounds
from tinyspec.laws.traps import specdec as traps
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.speculative.drafting import specdec
from tinyspec.speculative.drafting.specdec import mask_blocks, verify_top_beta
from tinyspec.technique import Guarantee, find_technique
from tinyspec.training.bitext import train_joint_tokenizer
from tinyspec.translation import TranslationStatistics

CARD = find_technique("specdec")
CONFIG = traps.TRANSLATOR
SOURCES = traps.SOURCES


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 5


# ---------------------------------------------------------------------- the conditions


@pytest.mark.parametrize("beta", [1, 2, 3, 64])
@pytest.mark.parametrize("tau", [0.0, 0.4, 1.1, 100.0])
def test_printed_algorithm_is_what_runs(beta: int, tau: float) -> None:
    for seed in range(8):
        target, draft = TableModel(seed, 4), TableModel(seed + 30, 4)
        decoder = begin_decoder(CARD.make, [target, draft], (0, 1), GREEDY, k=3, beta=beta, tau=tau)
        round = decoder.step(Seeded(0))
        block = list(round.tree.tokens)
        p = [target.row((0, 1, *block[:i])) for i in range(len(block) + 1)]
        assert list(round.tokens) == verify_top_beta(p, block, beta, tau)


def test_a_token_without_probability_is_never_accepted() -> None:
    p = [[0.0, 1.0], [0.5, 0.5]]
    assert verify_top_beta(p, [0], beta=2, tau=100.0) == [1]
    decoder = traps.forced_draft(CARD.make, 4, GREEDY, beta=64, tau=100.0)
    assert decoder.step(Seeded(0)).verdict.accepted == ()


def test_at_beta_1_the_shared_walk_verifies() -> None:
    models = [TableModel(1), TableModel(2)]
    for tau in (0.0, 50.0):
        assert begin_decoder(CARD.make, models, (0,), beta=1, tau=tau).verifier is verify_tree
    assert begin_decoder(CARD.make, models, (0,), beta=2).verifier is not verify_tree


def test_what_is_promised_depends_on_beta() -> None:
    assert CARD.promise(beta=1) is Guarantee.EXACT
    assert CARD.promise() is CARD.promise(beta=2) is Guarantee.LOSSY


def test_the_conditions_do_not_look_at_the_temperature() -> None:
    """The second likeliest token is accepted with certainty, although it is rarely drawn."""
    second = traps.WEIGHTS.index(8)
    for sampling in (SamplingParams(0.5), SamplingParams(1 / 3), SamplingParams(top_k=1)):
        for seed in range(5):
            decoder = traps.forced_draft(CARD.make, second, sampling, beta=2, tau=1.0)
            assert decoder.step(Seeded(seed)).verdict.accepted == (0,)


def test_a_token_that_is_not_allowed_leaves_the_distribution_as_it_is() -> None:
    """Above temperature 0: accepted with probability p(x), else another token by p without x."""
    p = [weight / sum(traps.WEIGHTS) for weight in traps.WEIGHTS]
    for token in range(5):
        if traps.is_allowed(traps.WEIGHTS, token, 2, 0.0):
            continue

        def first_token(rng: Any, token: int = token) -> int:
            decoder = traps.forced_draft(CARD.make, token, SamplingParams(), beta=2, tau=0.0)
            return decoder.step(rng).tokens[0]

        got = Exhaustive.distribution(first_token)
        assert [float(got.get(x, 0)) for x in range(5)] == pytest.approx(p, abs=1e-12)


# ---------------------------------------------------------------------- on translators


def greedy_translation(model: Seq2Seq, source: Any, tokens: int) -> list[int]:
    """Greedy decoding by a dense pass for every token."""
    text = [model.config.bos]
    while len(text) <= tokens and text[-1] != model.config.eos:
        text.append(int(dense_logits(model, source, text)[-1].argmax()))
    return text[1:]


@pytest.mark.parametrize("k", [1, 2, 5, 25])
def test_at_beta_1_the_text_is_the_translators_greedy_text(k: int) -> None:
    ends = frozenset({CONFIG.eos})
    for seed, source in product(range(3), SOURCES):
        pair = traps.random_pair(seed)
        decoder = traps.begin_translation(CARD.make, pair, source, eos=ends, k=k, beta=1)
        run_all_rounds(decoder)
        assert decoder.new == greedy_translation(pair[0], source, 11)


def test_a_draft_ends_with_the_end_of_the_text() -> None:
    ends = frozenset(range(CONFIG.vocab_size))
    decoder = traps.begin_translation(CARD.make, traps.random_pair(0), (4, 5), eos=ends, k=5)
    tree = decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0))
    assert len(tree.tokens) == 1


def test_no_block_reaches_beyond_the_context() -> None:
    pair = traps.random_pair(1)
    text = [4] * 19  # with bos 20 of 24 positions
    decoder = traps.begin_translation(CARD.make, pair, (4, 5), text, k=25, beta=1)
    assert len(decoder.drafter.propose(decoder.context, 9, GREEDY, Seeded(0)).tokens) == 4
    run_all_rounds(decoder)
    assert (len(decoder.context), decoder.finished) == (24, "context")


def test_where_one_token_is_wanted_no_pass_drafts() -> None:
    decoder = traps.begin_translation(CARD.make, traps.random_pair(1), (4, 5), k=5)
    assert not decoder.drafter.propose(decoder.context, 0, GREEDY, Seeded(0)).tokens
    logged = [call.model for call in decoder.forward_log]
    assert logged.count("filler") == 0 and logged.count("filler/encoder") == 1


def test_a_rewound_text_is_filled_as_a_new_one() -> None:
    pair = traps.random_pair(2)
    decoder = traps.begin_translation(CARD.make, pair, (4, 7, 5), k=4, beta=1)
    for number in range(3):
        decoder.step(Seeded(number))
    decoder.rewind(1)
    decoder.extend([6, 8])
    fresh = traps.begin_translation(CARD.make, pair, (4, 7, 5), [6, 8], k=4, beta=1)
    trees = [d.drafter.propose(d.context, 4, GREEDY, Seeded(0)) for d in (decoder, fresh)]
    assert trees[0] == trees[1]


def test_a_fitted_drafter_translates_alone_too() -> None:
    filler = traps.fit_filler(traps.SENTENCES, 3)
    source, target = (torch.tensor([pair[side] for pair in traps.SENTENCES]) for side in range(2))
    assert specdec.translate_by_blocks(filler, source, 3) == target.tolist()
    generator = torch.Generator().manual_seed(0)
    masked = mask_blocks(filler.config, target, 3, torch.Generator().manual_seed(0))
    right = specdec.count_right_tokens(filler, (source, target), 3, generator)
    assert right.tolist() == (masked.labels != 0).sum(dim=1).tolist()


# ---------------------------------------------------------------------- the loss


def test_masks_stand_behind_a_prefix_and_end_with_the_block() -> None:
    """`5 6` with its end: the prefixes are empty, `5` and `5 6`, each as often."""
    generator, seen = torch.Generator().manual_seed(0), dict[tuple[int, ...], int]()
    labels = {(3, 3): (5, 6), (5, 3, 3): (0, 6, 2), (5, 6, 3, 3): (0, 0, 2, 0)}
    for _ in range(300):
        masked = mask_blocks(CONFIG, torch.tensor([[5, 6]]), 2, generator)
        assert masked.inputs[0, 0] == CONFIG.bos and masked.labels[0, 0] == CONFIG.pad
        read = tuple(masked.inputs[0, 1:].tolist())
        assert tuple(masked.labels[0, 1:].tolist()) == labels[read]
        seen[read] = seen.get(read, 0) + 1
    assert set(seen) == set(labels) and min(seen.values()) > 70


def test_rows_of_a_batch_are_padded_behind_their_masks() -> None:
    target = torch.tensor([[5, 6, 7, 8], [5, 0, 0, 0]])
    for seed in range(20):
        masked = mask_blocks(CONFIG, target, 3, torch.Generator().manual_seed(seed))
        for row, (read, label) in enumerate(zip(*(m.tolist() for m in masked), strict=True)):
            prefix = read.index(CONFIG.mask) - 1
            whole = [*target[row][target[row] != 0].tolist(), CONFIG.eos]
            assert read == [1, *whole[:prefix], 3, 3, 3] + [0] * (len(read) - prefix - 4)
            wanted = whole[prefix : prefix + 3]
            assert label[prefix + 1 : prefix + 1 + len(wanted)] == wanted
            assert sum(token != 0 for token in label) == len(wanted)


def test_the_loss_is_the_cross_entropy_at_the_masks_of_each_sentence_alone() -> None:
    model = traps.random_filler(0)
    source, target = torch.tensor([[4, 5], [6, 0]]), torch.tensor([[5, 6, 7], [8, 0, 0]])
    loss = specdec.block_filling_loss(
        model, (source, target), 2, 0.0, torch.Generator().manual_seed(5), smoothing=0.0
    )
    masked = mask_blocks(CONFIG, target, 2, torch.Generator().manual_seed(5))
    total, count = 0.0, 0
    for row, words in enumerate(([4, 5], [6])):
        read = masked.inputs[row][masked.inputs[row] != 0][None]
        states = model.decode(model.embed(read), model.encode(torch.tensor([words])))
        label = masked.labels[row][: read.shape[1]]
        rows = model.logits(states)[0][label != 0]
        total += float(F.cross_entropy(rows, label[label != 0], reduction="sum"))
        count += len(rows)
    assert float(loss) == pytest.approx(total / count, rel=1e-6)


def test_glancing_drops_out_what_the_loss_drops_out() -> None:
    """With a share of 0 nothing is shown, so the loss is that without the pass before."""
    model, batch = traps.random_filler(1), (torch.tensor([[4, 5]]), torch.tensor([[5, 6, 7]]))
    torch.manual_seed(3)
    got = specdec.block_filling_loss(model, batch, 2, 0.0, torch.Generator().manual_seed(5), 0.5)
    torch.manual_seed(3)
    masked = mask_blocks(CONFIG, batch[1], 2, torch.Generator().manual_seed(5))
    memory = model.encode(batch[0], 0.5)
    states = specdec.block_states(model, masked.inputs, memory, 0.5)[masked.labels != 0]
    labels = masked.labels[masked.labels != 0]
    expected = F.cross_entropy(model.logits(states), labels, label_smoothing=0.1)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)


def test_glancing_shows_less_towards_the_end() -> None:
    shares = [specdec.glancing_share(step / 10) for step in range(11)]
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (0.5, pytest.approx(0.3))


# ---------------------------------------------------------------------- for a user

TEXT = "a dog runs"
LINES = ["a dog runs in the snow and sleeps", "ein hund läuft durch den schnee und schläft"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator and its drafter, both untrained, and a model that extends texts."""
    root = tmp_path_factory.mktemp("zoo")
    tokenizer = train_joint_tokenizer(LINES * 4, 300, root / "tokenizer")
    extras: dict[str, dict[str, Any]] = {
        "teacher": {"trained_for": "teacher"},
        "drafter": {"trained_for": "specdec", "teacher": "teacher", "k": 4},
    }
    for seed, (name, extra) in enumerate(extras.items()):
        config = Seq2SeqConfig(300, 16, 2, 24, 1, 2, 40, extra=extra)
        made = Seq2Seq.create(config, torch.Generator().manual_seed(seed), tokenizer=tokenizer)
        loud = {key: 3 * w if w.ndim == 2 else w for key, w in made.weights.items()}
        Seq2Seq(config, loud, tokenizer).save(root / name)
    tiny_zoo(root)
    return root


@pytest.fixture
def at_home(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(models, "_zoos", lambda: [zoo])
    return zoo


def translate(model: Any, **options: Any) -> Any:
    return tinyspec.translate(model, TEXT, **options)


def test_translate_finds_the_drafter_of_a_teacher(at_home: Path) -> None:
    plain = translate("teacher", method="plain")
    done = translate("teacher", method="specdec", beta=1)
    assert done.tokens == plain.tokens
    stats = done.stats
    assert isinstance(stats, TranslationStatistics)
    assert stats.encoder_calls == 2
    assert 0 < stats.draft_calls <= stats.target_calls <= plain.stats.target_calls
    assert max(len(round.tokens) for round in done.trace.rounds) == 4  # its card's k
    assert "2 encoder passes" in done.figures() and "of a draft model" in done.figures()


def test_a_drafter_may_be_named_and_its_k_overruled(at_home: Path) -> None:
    drafter = tinyspec.load_translator(at_home / "drafter")
    for named in ("drafter", at_home / "drafter", drafter):
        done = translate("teacher", method="specdec", draft=named, k=2)
        assert max(len(round.tokens) for round in done.trace.rounds) == 2


def test_a_seed_gives_plain_decodings_text_at_beta_1(at_home: Path) -> None:
    for seed in range(3):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed}
        plain = translate("teacher", method="plain", **options)
        assert translate("teacher", method="specdec", beta=1, **options).tokens == plain.tokens


@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens_or_none_are_those_of_plain_decoding(at_home: Path, n: int) -> None:
    plain = translate("teacher", method="plain", max_new_tokens=n)
    assert translate("teacher", method="specdec", beta=1, max_new_tokens=n).tokens == plain.tokens


def test_the_longest_source_is_translated_and_a_longer_one_is_an_error(at_home: Path) -> None:
    done = tinyspec.translate("teacher", [200] * 40, method="specdec")
    assert len(done.tokens) <= 40  # type: ignore[union-attr]
    with pytest.raises(TinyspecError, match="has 41 tokens"):
        tinyspec.translate("teacher", [200] * 41, method="specdec")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "drafter"}, "drafter drafts for its teacher and translates nothing by itself"),
        ({"draft": "teacher"}, "teacher was trained for teacher, and specdec drafts with a model"),
        ({"draft": "nowhere"}, "there is no translation model 'nowhere'"),
        ({"draft": 7}, "draft is 7"),
        ({"method": "jacobi", "draft": "drafter"}, "jacobi takes no draft model here"),
        ({"beta": 0}, "beta is 0: it must be from 1 to 64"),
        ({"tau": math.nan}, "tau is nan"),
        ({"teacher": "teacher"}, "specdec asks no teacher"),
    ],
    ids=str,
)
def test_what_cannot_run_is_an_error_of_one_line(
    at_home: Path, options: dict[str, Any], says: str
) -> None:
    asked = {"model": "teacher", "method": "specdec", **options}
    with pytest.raises(TinyspecError) as error:
        translate(asked.pop("model"), **asked)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_without_a_drafter_the_error_says_how_to_train_one(
    zoo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path])
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        TinyspecError, match=r"or train one: tinyspec train mt --recipe FILE .*'spe"
    ):
        translate(zoo / "teacher", method="specdec")
    train = "tinyspec train mt --recipe models/X/recipe.toml --out X"
    (tmp_path / "drafter-x").mkdir()
    recipe = tmp_path / "drafter-x" / "recipe.toml"
    recipe.write_text(f'# {train}\nmethod = "specdec"\n', encoding="utf-8")
    with pytest.raises(TinyspecError, match=f"or train one: {train}$"):
        translate(zoo / "teacher", method="specdec")
    assert translate(zoo / "teacher", method="specdec", draft=zoo / "drafter").tokens


def test_another_vocabulary_is_an_error(at_home: Path, tmp_path: Path) -> None:
    tokenizer = train_joint_tokenizer(LINES * 4, 290, tmp_path)
    config = Seq2SeqConfig(290, 16, 2, 24, 1, 1, 40, extra={"trained_for": "specdec"})
    other = Seq2Seq.create(config, torch.Generator().manual_seed(0), tokenizer=tokenizer)
    with pytest.raises(TinyspecError, match="has another vocabulary than teacher"):
        translate("teacher", method="specdec", draft=other)


def test_a_model_that_extends_texts_cannot_use_it(zoo: Path) -> None:
    with pytest.raises(TinyspecError, match="specdec drafts translations: use `tinyspec trans"):
        tinyspec.generate(zoo / "big", "the cat", method="specdec", draft=zoo / "small")
    assert "specdec drafts translations" in failed(
        run("generate", "--model", str(zoo / "big"), "--method", "specdec", "the cat")
    )


def test_the_command_translates_and_tells_its_passes(at_home: Path) -> None:
    plain = run("translate", TEXT)
    ours = run("translate", TEXT, "--method", "specdec", "--beta", "1", "--stats")
    assert ours.exit_code == 0, ours.output
    assert ours.stdout == plain.stdout
    assert "2 encoder passes" in ours.stderr and "of a draft model" in ours.stderr
    named = run("translate", TEXT, "--method", "specdec", "--beta", "1", "--draft", "drafter")
    assert named.stdout == plain.stdout


def test_the_card_in_full_names_the_command() -> None:
    told = run("methods", "specdec").stdout
    assert "tinyspec translate --method specdec" in told and "--draft NAME" not in told
