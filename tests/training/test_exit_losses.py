"""Exit losses and layer dropout are the published ones, and recipes with [exits] use them."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.training.test_train_lm import RECIPE, run, zoo
from tinyspec.errors import TinyspecError
from tinyspec.lm import checkpoint
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule, exit_logits
from tinyspec.training.recipe import read_recipe

__all__ = ["zoo"]

CONFIG = Config(
    vocab_size=11,
    d_model=16,
    n_layers=5,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=24,
    max_positions=16,
    tied=True,
)
KINDS = [
    ExitLosses(),
    ExitLosses("linear"),
    ExitLosses("sum", e_scale=0.2),
    ExitLosses("sum", curriculum="rotational", rotation=3),
    ExitLosses("linear", curriculum="gradual"),
]


@pytest.mark.parametrize("exits", KINDS)
@pytest.mark.parametrize("layers", [1, 2, 5, 10])
def test_the_weights_of_the_exits_sum_to_one_at_every_step(exits: ExitLosses, layers: int) -> None:
    for step in range(40):
        shares = exits.normalized_weights(layers, step, step / 40)
        assert sum(shares) == pytest.approx(1)
        assert shares[-1] > 0, "the last layer is always taught"


def test_linear_weights_are_proportional_to_the_depth() -> None:
    assert ExitLosses("linear").normalized_weights(4, 0, 0.0) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_sum_weights_are_those_of_layerskip() -> None:
    # e(l) = e_scale (0 + .. + l), and L - 1 + e_scale (0 + .. + L - 2) at the last of L = 4 layers
    assert ExitLosses("sum", e_scale=0.5).loss_weights(4) == [0.0, 0.5, 1.5, 3 + 0.5 * 3]
    assert ExitLosses("sum", e_scale=0.0).normalized_weights(4, 0, 0.0) == [0, 0, 0, 1], (
        "without a scale only the last layer counts"
    )


def test_dropout_is_zero_at_the_bottom_and_p_max_at_the_top_of_the_end() -> None:
    exits = ExitLosses(p_max=0.3)
    end = exits.dropout_rates(10, 1.0)
    assert end[0] == 0
    assert end[-1] == pytest.approx(0.3)
    assert end == sorted(end)
    assert end[3] == pytest.approx(0.3 * (math.exp(3 * math.log(2) / 9) - 1))
    assert exits.dropout_rates(10, 0.0) == [0.0] * 10, "from scratch it rises from none"
    assert ExitLosses(p_max=0.3, scratch=False).dropout_rates(10, 0.0) == end, (
        "a trained model gets all of it at once"
    )


def test_the_last_step_of_a_course_has_all_of_the_dropout() -> None:
    course = ExitLossSchedule(ExitLosses("linear", p_max=0.2), 5, steps=7)
    course.begin_step(6, 6 / 7)
    assert course.dropout_rates[-1] == pytest.approx(0.2)


def test_the_rotational_curriculum_covers_every_early_layer_equally_often() -> None:
    exits = ExitLosses("linear", curriculum="rotational", rotation=4)
    counted = [
        sum(exits.is_counted(layer, 10, step, 0.0) for step in range(4 * 5)) for layer in range(10)
    ]
    assert counted == [5] * 9 + [20]
    assert [layer for layer in range(10) if exits.is_counted(layer, 10, 5, 0.0)] == [1, 5, 9]


def test_the_gradual_curriculum_goes_down_from_the_top_and_ends_with_all_on() -> None:
    exits = ExitLosses("linear", curriculum="gradual")
    on = [
        [layer for layer in range(10) if exits.is_counted(layer, 10, step, step / 200)]
        for step in range(200)
    ]
    assert on[0] == [9]
    assert on[10] == [8, 9], "one more each T / (2 L) = 10 steps"
    assert all(layers == list(range(layers[0], 10)) for layers in on)
    assert on[100] == on[-1] == list(range(10)), "all from T / 2 on"


def test_every_exit_reads_the_one_norm_and_the_one_head() -> None:
    model = Model.random(CONFIG, scale=0.3)
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    blocks = model.torch_blocks()
    assert torch.equal(exit_logits(blocks, ids, 5), model.training_logits(ids)), (
        "the last exit is the model"
    )
    states = list(blocks.layer_states(ids))
    for layers in range(1, 6):
        short = Model(
            Config(**{**vars(CONFIG), "n_layers": layers}),
            {
                name: w
                for name, w in model.weights.items()
                if not name[0].isdigit() or int(name[0]) < layers
            },
        )
        assert torch.equal(exit_logits(blocks, ids, layers), short.training_logits(ids)), (
            "an exit is the model cut off above it"
        )
        assert torch.equal(
            blocks.compute_logits(states[layers - 1]), exit_logits(blocks, ids, layers)
        )


def test_a_dropped_layer_is_the_identity_for_its_sample_alone() -> None:
    model = Model.random(CONFIG, scale=0.3)
    ids = torch.randint(11, (64, 4), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    plain, dropped = (
        list(model.torch_blocks().layer_states(ids)),
        list(model.torch_blocks().layer_states(ids, dropped=[0, 0, 0.5, 0, 0])),
    )
    assert torch.equal(plain[1], dropped[1])
    kept = (dropped[2] == plain[2]).flatten(1).all(1)
    left = (dropped[2] == plain[1]).flatten(1).all(1)
    assert bool((kept ^ left).all()), "whole samples, neither scaled nor half"
    assert 10 < int(left.sum()) < 54


def test_the_loss_is_the_weighted_mean_of_the_exits_cross_entropies() -> None:
    model = Model.random(CONFIG, scale=0.3)
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(0))
    course = ExitLossSchedule(ExitLosses("linear"), 5, 10)
    each = [
        torch.nn.functional.cross_entropy(
            exit_logits(model.torch_blocks(), ids[:, :-1], e).flatten(0, 1), ids[:, 1:].flatten()
        )
        for e in range(1, 6)
    ]
    wanted = sum(e * loss for e, loss in enumerate(each, 1)) / 15
    assert float(course.loss(model.torch_blocks(), ids[:, :-1], ids[:, 1:])) == pytest.approx(
        float(wanted)
    )
    assert float(
        ExitLossSchedule(ExitLosses(), 5, 10).loss(model.torch_blocks(), ids[:, :-1], ids[:, 1:])
    ) == pytest.approx(float(each[-1]))


@pytest.mark.slow
def test_a_recipe_trains_its_exits_and_the_card_says_what_each_is_worth(zoo: Path) -> None:
    taught = 'weights = "linear"\ncurriculum = "rotational"\nrotation = 2\np_max = 0.1\n'
    for name, tokenizer, section in (
        ("teller", "", ""),
        ("helper", 'tokenizer = "../teller"\n', taught),
    ):
        text = RECIPE.replace(
            'name = "teller"\ndraft = "helper"\n', f'name = "{name}"\n{tokenizer}'
        )
        text = text.replace("steps = 20", "steps = 60") + f"[exits]\n{section}report = [1]\n"
        (zoo / name / "recipe.toml").write_text(text)
        assert run(zoo, name)
        last = [json.loads(line) for line in (zoo / name / "log.jsonl").read_text().splitlines()][
            -1
        ]
        assert {"valid_bits_per_byte", "exit_1"} <= set(last)
        card = (zoo / name / "README.md").read_text()
        assert "| after layer | 1 | 2 |" in card
        assert ("All" if not section else "rotational curriculum, R = 2") in card or not section
        assert checkpoint.read_checkpoint(zoo / name).config.extra.get("exits") == (
            "linear" if section else None
        )
    assert (zoo / "teller/tokenizer.json").read_bytes() == (
        zoo / "helper/tokenizer.json"
    ).read_bytes()


def test_a_trained_model_is_trained_on_with_exits(zoo: Path) -> None:
    """LayerSkip's continual pretraining: from given weights, with full dropout from step 0."""
    assert run(zoo, "teller")
    section = '[exits]\nweights = "sum"\ncurriculum = "gradual"\np_max = 0.2\nscratch = false\n'
    text = RECIPE.replace('name = "teller"', 'name = "helper"\nstart = "../teller"').replace(
        "steps = 20", "steps = 1"
    )
    (zoo / "helper/recipe.toml").write_text(text.replace("lr = 1e-2", "lr = 0.0") + section)
    assert run(zoo, "helper")
    assert (zoo / "teller/tokenizer.json").read_bytes() == (
        zoo / "helper/tokenizer.json"
    ).read_bytes()
    assert "goes on from the weights of `teller`" in (zoo / "helper/README.md").read_text()
    old, new = (checkpoint.read_checkpoint(zoo / name).weights for name in ("teller", "helper"))
    assert all(torch.equal(old[name], new[name]) for name in old), (
        "a rate of 0 leaves them where they were"
    )
    (zoo / "helper/recipe.toml").write_text(text.replace("d_ff = 32", "d_ff = 16"))
    with pytest.raises(TinyspecError, match="which has another"):
        run(zoo, "helper", restart=True)


def test_the_section_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for section, complaint in (
        ('weights = "linar"', r"\[exits\] weights 'linar' is not known; did you mean 'linear'"),
        ('weigths = "linear"', r"\[exits\] weigths is not known; did you mean 'weights'"),
        ("p_max = 1.0", "0 <= p_max < 1"),
        ("rotation = 0", "rotation >= 1"),
    ):
        path.write_text(RECIPE + "[exits]\n" + section)
        with pytest.raises(TinyspecError, match=complaint):
            read_recipe(path)
    path.write_text(RECIPE + "[exits]\nreport = [3]")
    with pytest.raises(TinyspecError, match="report: exits are 1 to 2, not 3"):
        read_recipe(path).config()


@pytest.mark.parametrize("name", ["exits-plain", "exits-loss", "exits-layerskip"])
def test_the_exits_checkpoints_share_shape_budget_and_tokenizer(name: str) -> None:
    models = Path(__file__).parents[2] / "models"
    recipe = read_recipe(models / name / "recipe.toml", {"vocab_size": "2048"})
    plain = read_recipe(models / "exits-plain" / "recipe.toml")
    assert (recipe.shape, recipe.settings, recipe.batch) == (
        plain.shape,
        plain.settings,
        plain.batch,
    )
    assert 2 * recipe.config().parameters() < 5e6


def test_uniform_weights_are_equal_at_every_exit() -> None:
    assert ExitLosses("uniform").normalized_weights(4, 0, 0.0) == [0.25] * 4
    assert ExitLosses("uniform", e_scale=0.5).normalized_weights(3, 0, 0.0) == [0.25, 0.25, 0.5]
