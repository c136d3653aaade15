"""NAR-CRF writes the likeliest sentence of its CRF, in one pass, for several lengths at once."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.nonautoregressive_laws import teacher_score
from tinyspec.laws.rewriting_laws import random_translator
from tinyspec.laws.traps.nar_crf import (
    SIZES,
    SOURCES,
    TRAPS,
    random_structured,
    read_blank,
    score_pair,
)
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.crf import DOWN, E1, E2, UP
from tinyspec.nonautoregressive.nar_crf import (
    NarCrfRefiner,
    NarCrfSettings,
    crf_heads,
    decode_structured,
    nar_crf_loss,
    write_likeliest_length,
)
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.recipe import read_translation_recipe

RECIPE = Path(__file__).parents[2] / "models/multi30k-crf/recipe.toml"


def random_judge(seed: int) -> Seq2Seq:
    return random_translator(replace(SIZES, lengths=0), 1000 + seed, 3, "teacher")


def run(model: Seq2Seq, judge: Seq2Seq | None, source: tuple[int, ...], **knobs: Any) -> Refinement:
    request = RefineRequest(model, judge)
    refiner = find_technique("nar_crf").refiner(request, **knobs)
    made = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    assert len(list(made)) == 1
    return made


@pytest.mark.parametrize("transitions", ["none", "static", "dynamic"])
@pytest.mark.parametrize("beam", [1, 2, 64])
def test_printed_algorithm_is_what_runs(transitions: str, beam: int) -> None:
    for seed, source in product(range(4), SOURCES):
        model = random_structured(seed)
        made = run(model, None, source, transitions=transitions, beam=beam)
        emissions, states = read_blank(model, source, len(made.tokens))
        allowed = [[-float("inf")] * 4 + row[4:] for row in emissions]

        def transition(i: int, a: int, b: int, model: Any = model, states: Any = states) -> float:
            return score_pair(model.weights, states, i - 1, a, b, transitions)

        assert decode_structured(allowed, transition, beam) == made.tokens


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


def test_without_transitions_each_position_takes_its_likeliest_word() -> None:
    for seed, source in product(range(4), SOURCES):
        model = random_structured(seed)
        tokens = run(model, None, source, transitions="none").tokens
        emissions = read_blank(model, source, len(tokens))[0]
        assert tokens == [4 + max(range(4), key=row[4:].__getitem__) for row in emissions]


def test_static_transitions_are_those_without_f() -> None:
    for seed, source in product(range(4), SOURCES):
        model = random_structured(seed)
        static = {
            name: torch.zeros_like(w) if name.startswith(DOWN) else w
            for name, w in model.weights.items()
        }
        plain = Seq2Seq(model.config, static)
        assert (
            run(plain, None, source).tokens == run(model, None, source, transitions="static").tokens
        )


def test_one_encoder_pass_and_one_decoder_pass_however_many_lengths() -> None:
    made = run(random_structured(0), random_judge(0), (4, 7), lengths=3)
    assert [call.model for call in made.forward_log] == [
        "structured/encoder",
        "structured",
        "teacher/encoder",
        "teacher",
    ]
    made = run(random_structured(0), None, (4, 7))
    assert [call.model for call in made.forward_log] == ["structured/encoder", "structured"]


def test_more_lengths_contain_the_fewer_so_that_the_teachers_score_never_falls() -> None:
    for seed, source in product(range(4), SOURCES):
        model, judge, best = random_structured(seed), random_judge(seed), -float("inf")
        for lengths in (2, 3, 4):
            made = run(model, judge, source, lengths=lengths)
            score = teacher_score(judge, source, made.tokens)
            assert score >= best - 1e-9
            best = score


def test_a_batch_of_sentences_is_written_as_each_by_itself() -> None:
    model = random_structured(1)
    sources = [(4, 7, 5), (6,), (5, 4)]
    padded = pad_sequences(sources)
    alone = [run(model, None, source).tokens for source in sources]
    assert write_likeliest_length(model, NarCrfSettings(), padded) == alone
    refiner = NarCrfRefiner(model, random_judge(1), "static", 2, 3)
    knobs = {"transitions": "static", "beam": 2, "lengths": 3}
    alone = [run(model, random_judge(1), source, **knobs).tokens for source in sources]
    assert translate_sources(model, padded, refiner, [Seeded(0) for _ in sources]) == alone


def test_lengths_around_the_likeliest_one() -> None:
    """SIZES knows lengths 1 to 4."""
    orders = {1: [1, 2, 3], 2: [2, 1, 3], 3: [3, 2, 4], 4: [4, 3, 2]}
    seen = set()
    for seed, source in product(range(9), SOURCES):
        model, judge = random_structured(seed), random_judge(seed)
        likeliest = len(run(model, None, source).tokens)
        canvas = run(model, judge, source, lengths=3, around=True).canvas
        assert canvas is not None
        assert canvas.mask.sum(dim=1).tolist() == orders[likeliest]
        seen.add(likeliest)
    assert len(seen) > 1


def test_lengths_leave_a_place_for_the_teachers_beginning() -> None:
    model = random_structured(2, replace(SIZES, max_positions=4, lengths=9))
    judge = random_translator(replace(SIZES, max_positions=4, lengths=0), 3, 3, "teacher")
    canvas = run(model, judge, (4, 5), lengths=99).canvas
    assert canvas is not None
    assert sorted(canvas.mask.sum(dim=1).tolist()) == [1, 2, 3]


# ---------------------------------------------------------------------- training


def test_every_weight_of_the_transitions_has_a_gradient() -> None:
    source, target = torch.tensor([[4, 5], [6, 0]]), torch.tensor([[7, 5, 4], [6, 4, 0]])
    for transitions, names in (
        ("static", [E1, E2]),
        (
            "dynamic",
            [E1, E2, *(f"{layer}.{part}" for layer in (UP, DOWN) for part in ("weight", "bias"))],
        ),
    ):
        heads = crf_heads(SIZES, NarCrfSettings(2, transitions))
        assert list(heads) == names
        made = Seq2Seq.create(replace(SIZES, heads=heads), torch.Generator().manual_seed(0))
        for w in made.parameters():
            w.requires_grad_()
        nar_crf_loss(made, (source, target), dropout=0.1, smoothing=0.1).backward()
        for name in ("lengths", "embed", *names):
            gradient = made.weights[name].grad
            assert gradient is not None and float(gradient.abs().max()) > 0, name


def test_padding_does_not_change_the_loss() -> None:
    model = random_structured(0)
    source, target = torch.tensor([[4, 5], [6, 0]]), torch.tensor([[7, 5, 4], [6, 4, 0]])
    wider = torch.nn.functional.pad(source, (0, 2)), torch.nn.functional.pad(target, (0, 3))
    one, other = (nar_crf_loss(model, batch, beam=3) for batch in ((source, target), wider))
    assert float(one) == pytest.approx(float(other), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lex", "ord"])
def test_the_crf_keeps_to_one_of_two_dialects_and_its_emissions_alone_do_not(kind: str) -> None:
    """The paper's idea, and its ablation on the same weights. Raw data: no teacher has chosen.

    Right translations of 100, static, dynamic, and the words alone of either model. Lexicon: 100,
    100; 16, 15. Order: 77, 84; 16, 3. Half a minute of one core.
    """
    task = Dialects((kind,), modes=2, words=12, shortest=3, longest=5)
    train = task.sample_pairs(4000, 1)
    held = [p.source for p in task.sample_pairs(100, 2, {p.source for p in train})]
    config = Seq2SeqConfig(task.vocab_size, 48, 4, 96, 2, 2, 24, lengths=8)
    shares = {}
    for trained in ("static", "dynamic"):
        heads = crf_heads(config, NarCrfSettings(8, trained))
        model = Seq2Seq.create(replace(config, heads=heads), torch.Generator().manual_seed(0))
        fit(
            lambda model, batch, _: nar_crf_loss(model, batch, beam=8),
            model,
            [(p.source, p.target) for p in train],
            400,
        )
        for decoded in (trained, "none"):
            refiner = NarCrfRefiner(model, None, decoded, 8, 1)
            rngs = [Seeded(0) for _ in held]
            outputs = translate_sources(model, pad_sequences(held), refiner, rngs)
            shares[trained, decoded] = task.measure_quality(held, outputs).valid
    print(shares)
    for trained in ("static", "dynamic"):
        assert shares[trained, trained] > (0.9 if kind == "lex" else 0.6)
        assert shares[trained, "none"] < shares[trained, trained] - 0.3


def test_the_recipe_makes_a_model_of_at_most_nine_megabytes() -> None:
    plan = read_translation_recipe(RECIPE)
    config = plan.config(4800)
    assert (config.heads[E1], plan.start) == ((4800, 32), "../multi30k-parallel")
    assert 2 * config.parameters() < 9.1e6
    assert config.extra["transitions"] == "dynamic"
    static = read_translation_recipe(RECIPE, {"translator.transitions": '"static"'})
    assert list(static.config(4800).heads) == [E1, E2]


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card, model = find_technique("nar_crf"), random_structured(0)
    judge = random_judge(0)
    for message, request, knobs in (
        (
            "has no transitions between words: train a model from models/multi30k-crf/recipe.toml",
            RefineRequest(judge),
            {},
        ),
        (
            "3 lengths need a teacher to choose among them: give one, or set lengths to 1",
            RefineRequest(model),
            {"lengths": 3},
        ),
        (
            "does not write from left to right|another vocabulary",
            RefineRequest(model, Seq2Seq(replace(judge.config, vocab_size=9), judge.weights)),
            {"lengths": 3},
        ),
        (
            "transitions is 'some': it must be one of dynamic, static, none",
            RefineRequest(model),
            {"transitions": "some"},
        ),
        ("beam is 0: it must be from 1 to 256", RefineRequest(model), {"beam": 0}),
    ):
        with pytest.raises(TinyspecError, match=message):
            card.refiner(request, **knobs)
    static = replace(SIZES, heads=crf_heads(SIZES, NarCrfSettings(2, "static")))
    request = RefineRequest(Seq2Seq.create(static, torch.Generator().manual_seed(0)))
    assert card.refiner(request, transitions="static")
    with pytest.raises(TinyspecError, match="was trained with static transitions: set transitions"):
        card.refiner(request)
    silent = replace(static, lengths=0)
    request = RefineRequest(Seq2Seq.create(silent, torch.Generator().manual_seed(0)))
    with pytest.raises(TinyspecError, match="has no LENGTH token"):
        card.refiner(request, transitions="static")
    short = random_translator(replace(SIZES, max_positions=8, lengths=0), 0, 3, "short")
    with pytest.raises(TinyspecError, match="has 8 positions, fewer than structured"):
        card.refiner(RefineRequest(model, short), lengths=2)


def test_bad_settings_are_named() -> None:
    for settings, message in (
        ({"rank": 0}, "rank is 0: it must be a whole number of at least 1"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"transitions": "none"}, "transitions is 'none': it must be dynamic or static"),
    ):
        with pytest.raises(TinyspecError, match=message):
            NarCrfSettings(**settings)  # type: ignore[arg-type]


def test_the_card_says_what_it_is() -> None:
    card = find_technique("nar_crf")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, True)
    defaults = {knob.name: knob.default for knob in card.knobs}
    assert defaults == {"transitions": "dynamic", "beam": 64, "lengths": 1, "around": False}
