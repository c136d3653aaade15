"""CALM: three measures, a threshold that decays, states copied up, and a trained classifier.

At one end of the threshold it is plain decoding, at the other every token leaves at the first exit.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import tinyspec
from tests.lm.small import LLAMA, PROMPT
from tests.lm.small import model as network
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.early_exit.calm import (
    BIAS,
    WEIGHT,
    agreement_labels,
    balanced_loss,
    classifier_confidence,
    decay_threshold,
    hidden_saturation,
    probability_gap,
    run_until_confident,
    softmax_response,
)
from tinyspec.early_exit.exits import ExitTarget
from tinyspec.errors import TinyspecError
from tinyspec.generation import start_generation
from tinyspec.laws.exit_laws import ON_TABLES, ExitSetting, exit_tables, with_classifier
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import calm as traps
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, Request, find_technique
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.technique_parts import train_exit_classifier
from tinyspec.tree import TokenTree

CARD = find_technique("calm")
GREEDY = SamplingParams(temperature=0.0)
M = network(LLAMA)
L, V, D = LLAMA.n_layers, LLAMA.vocab_size, LLAMA.d_model


def make_decoder(
    model: Any = M,
    sampling: SamplingParams = GREEDY,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    forward_log: list[ForwardRecord] = []
    request = Request(
        model.session(forward_log),
        sampling=sampling,
        stop=stop or StoppingCriteria(max_new_tokens=9),
        forward_log=forward_log,
    )
    return CARD.make(request, **knobs)


def layers(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Finish the text: after how many layers each of its words was read."""
    decoder.extend(prompt)
    found = []
    while not decoder.finished:
        found += decoder.step(Seeded(decoder.rounds)).scores.layers
    return found


def plain(model: Any = M, stop: StoppingCriteria | None = None) -> list[int]:
    decoder = Decoder(
        model.session(),
        BaseDrafter(),
        verify_tree,
        sampling=GREEDY,
        stop=stop or StoppingCriteria(max_new_tokens=9),
    )
    layers(decoder, PROMPT)
    return decoder.new


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


def test_trap_the_confidence_is_the_gap_and_not_the_greatest_probability() -> None:
    """Two words of 0.45 are a doubt."""
    row = np.array([0.45, 0.45, 0.1])
    assert probability_gap(row) == 0 < row.max()
    assert float(softmax_response(torch.tensor(row).log())) == pytest.approx(0, abs=1e-12)
    assert probability_gap([1, 0, 0]) == 1 and probability_gap(np.array([1.0])) == 1.0
    assert float(probability_gap(np.array([0.2, 0.5, 0.3]))) == pytest.approx(0.2)


def test_thresholds_fall_over_the_tokens_that_the_text_can_get() -> None:
    """N is the request's limit, or the rest of the context if that is less. Without both, the
    threshold does not fall.
    """

    def thresholds_of(stop: StoppingCriteria, positions: int | None) -> list[float]:
        request = Request(M.session(), sampling=GREEDY, stop=stop, positions=positions)
        decoder = CARD.make(request, threshold=1.0, tau=4.0, decay="t5x")
        decoder.extend(PROMPT)
        threshold = cast(Any, decoder.target).rule.threshold
        return [threshold(t) for t in (0, 4)]

    def fallen(n: float) -> list[float]:
        return [pytest.approx(0.9 + 0.1 * math.exp(-4 * t / n)) for t in (0, 4)]

    room = len(PROMPT) + 16
    assert thresholds_of(StoppingCriteria(max_new_tokens=8), None) == fallen(8)
    assert thresholds_of(StoppingCriteria(max_new_tokens=8), room) == fallen(8)
    assert thresholds_of(StoppingCriteria(), room) == fallen(16)
    assert thresholds_of(StoppingCriteria(max_new_tokens=64), room) == fallen(16)
    assert thresholds_of(StoppingCriteria(), None) == [1.0, 1.0]


@pytest.mark.parametrize("setting", ON_TABLES, ids=str)
def test_printed_algorithm_is_what_runs(setting: ExitSetting) -> None:
    """Compares logits, layers and keys of every new token, on tables of three layers. The prompt
    runs in full.
    """
    exits = 0
    for model, seed in product(exit_tables(), range(4)):
        depth = model.config.n_layers
        stop = StoppingCriteria(max_new_tokens=setting.tokens)
        decoder = make_decoder(model, SamplingParams(), stop, **setting.knobs)
        decoder.extend([0, 1])
        caches: list[list[Any]] = [[] for _ in range(depth)]

        def run(token: int, threshold: float, caches: Any = caches, model: Any = model) -> Any:
            net, at = model.network, len(caches[0])
            return run_until_confident(
                net.embed(token),
                caches,
                lambda layer, state: net.keys(layer, state, at),
                lambda layer, state, cache: net.feed_forward(
                    layer, net.attend(layer, state, cache)
                ),
                model.head,
                lambda state: probability_gap(SamplingParams().probs(model.head(state))),
                threshold,
                setting.min_exit,
                setting.interval,
            )

        run(0, math.inf)
        while not decoder.finished:
            newest, step = decoder.context[-1], len(decoder.new)
            scores = decoder.step(Seeded(seed + 9 * step)).scores
            row, layers_run = run(newest, setting.due(step))
            assert (list(scores.logits[0]), scores.layers[0]) == (row, layers_run)
            exits += layers_run < depth
    assert exits or setting.threshold == 1.0


# ---------------------------------------------------------------------- measures


def test_saturation_is_a_cosine_from_0_to_1_and_has_no_first_layer() -> None:
    a = torch.tensor([3.0, 4.0])
    assert hidden_saturation(a, 2 * a) == pytest.approx(1)
    assert hidden_saturation(a, torch.tensor([4.0, -3.0])) == pytest.approx(0)
    assert hidden_saturation(a, -a) == 0 and hidden_saturation(a, torch.zeros(2)) == 0
    for threshold, first in ((1e-9, 2), (0.0, 1)):
        found = layers(
            make_decoder(threshold=threshold, measure="saturation", decay="constant"), PROMPT
        )
        assert min(found) >= first
        assert first > 1 or set(found) == {1}  # at 0 everybody leaves at once


def test_the_classifier_is_one_vector_for_all_layers() -> None:
    assert classifier_confidence(
        torch.tensor([1.0, 2.0]), np.array([3.0, -1.0]), 0.5
    ) == pytest.approx(1 / (1 + math.exp(-1.5)))
    assert (
        classifier_confidence(torch.tensor([-900.0]), np.array([1.0]), 0.0)
        == 0.0
        < 1.0
        == classifier_confidence(torch.tensor([900.0]), np.array([1.0]), 0.0)
    )


@pytest.mark.parametrize("measure", ["softmax", "saturation", "classifier"])
def test_on_a_fixed_text_layers_fall_with_the_threshold_from_all_to_the_first(measure: str) -> None:
    model = Model(
        LLAMA,
        M.weights,
        extras={
            WEIGHT: torch.randn(D, generator=torch.Generator().manual_seed(1)),
            BIAS: torch.zeros(()),
        },
    )
    ends = {}
    for prompt in ([3], PROMPT, [1, 2, 3, 4]):
        before = L
        for threshold in (math.inf, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
            decoder = make_decoder(model, threshold=threshold, measure=measure, decay="constant")
            decoder.extend(prompt)
            now = decoder.step(Seeded(0)).scores.layers[0]
            assert now <= before
            before = ends[threshold] = now
        assert before == 1
    assert ends[math.inf] == L


# ---------------------------------------------------------------------- the threshold


def test_both_decays_are_their_formulas_and_agree_at_one() -> None:
    for t, n in ((0, 10), (3, 10), (10, 10)):
        fade = math.exp(-4 * t / n)
        assert decay_threshold("paper", 0.6, 4.0, t, n) == pytest.approx(0.54 + 0.1 * fade)
        assert decay_threshold("t5x", 0.6, 4.0, t, n) == pytest.approx(0.6 * (0.9 + 0.1 * fade))
        assert decay_threshold("paper", 1.0, 4.0, t, n) == decay_threshold("t5x", 1.0, 4.0, t, n)
        assert decay_threshold("constant", 0.6, 4.0, t, n) == 0.6
        assert decay_threshold("paper", 0.0, 4.0, t, n) == pytest.approx(0.1 * fade)
    assert (
        decay_threshold("paper", 1.0, 0.0, 5, 9)
        == 1.0
        == decay_threshold("t5x", 1.0, 4.0, 5, math.inf)
    )
    falling = [decay_threshold("paper", 0.7, 4.0, t, 20) for t in range(20)]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1]


def test_inf_bypasses_clip_and_decay_and_one_does_not() -> None:
    """Where every gap is 1, a threshold of 1 lets everybody leave at once; inf nobody."""

    class Sure(Table):
        def row(self, context: Any) -> Any:
            return (1, 0, 0)

    for decay in ("paper", "t5x", "constant"):
        for threshold, layer in ((1.0, 1), (math.inf, 3)):
            decoder = make_decoder(Sure(0).model, threshold=threshold, decay=decay)
            assert set(layers(decoder, [0])) == {layer}
            assert len(decoder.target.rule.layers) == (0 if threshold == math.inf else 2)  # type: ignore[attr-defined]


def test_confidence_is_measured_where_min_exit_and_interval_say() -> None:
    deep = with_classifier(3)
    assert set(layers(make_decoder(threshold=0.0, min_exit=2, decay="constant"), PROMPT)) == {2}
    assert set(layers(make_decoder(threshold=0.0, min_exit=L), PROMPT)) == {L}
    for knobs, asked in (
        ({"min_exit": 1, "interval": 2}, [1]),
        ({"min_exit": 2}, [2]),
        ({}, [1, 2]),
    ):
        assert list(make_decoder(deep, threshold=1.0, **knobs).target.rule.layers) == asked  # type: ignore[attr-defined]


# ------------------------------------------------------------------ its neutral value, and the loop


@pytest.mark.parametrize("measure", ["softmax", "saturation", "classifier"])
def test_at_inf_the_text_is_the_full_models_bit_for_bit(measure: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = M.to(dtype=dtype)
        decoder, whole = make_decoder(model, threshold=math.inf, measure=measure), model.session()
        decoder.extend(PROMPT)
        whole.extend(PROMPT)
        for _ in range(4):
            round = decoder.step(Seeded(decoder.rounds))
            assert torch.equal(round.scores.logits, whole.score(round.tree).logits)
            whole.commit((), round.tokens[0])
    assert CARD.promise(threshold=math.inf) is Guarantee.EXACT
    assert CARD.promise(threshold=1.0) is CARD.promise() is Guarantee.LOSSY


def test_threshold_inf_gives_plain_decodings_joint_distribution() -> None:
    expected = exact_distribution(lambda: Decoder(Table(1), BaseDrafter(), verify_tree), 2)
    assert (
        exact_distribution(lambda: CARD.make(Request(Table(1)), threshold=math.inf), 2) == expected
    )
    assert (
        exact_distribution(lambda: CARD.make(Request(Table(1)), threshold=0.0, decay="constant"), 2)
        != expected
    )


def test_text_is_written_as_the_common_loop_does_it() -> None:
    """No tokens, one, an end of text at once and later, a prompt at the context's limit, sampling
    by the seed.
    """
    assert (
        make_decoder(threshold=0.3, stop=StoppingCriteria(max_new_tokens=0)).extend(PROMPT) is None
    )
    nothing = make_decoder(threshold=0.3, stop=StoppingCriteria(max_new_tokens=0))
    nothing.extend(PROMPT)
    assert nothing.finished == "length" and nothing.new == []
    one = make_decoder(threshold=0.3, stop=StoppingCriteria(max_new_tokens=1))
    assert len(layers(one, PROMPT)) == 1
    free = make_decoder(threshold=0.3)
    layers(free, PROMPT)
    for end in dict.fromkeys(free.new):
        ended = make_decoder(
            threshold=0.3, stop=StoppingCriteria(eos=frozenset({end}), max_new_tokens=9)
        )
        layers(ended, PROMPT)
        assert ended.new == free.new[: free.new.index(end) + 1] and ended.finished == "eos"
    limit = CARD.make(
        Request(M.session(), sampling=GREEDY, positions=LLAMA.max_positions), threshold=0.3
    )
    layers(limit, [1] * (LLAMA.max_positions - 2))
    assert len(limit.new) == 2 and limit.finished == "context"
    texts = [
        tinyspec.generate(M, PROMPT, method="calm", temperature=1.0, seed=seed).tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_prompt_in_a_batch_has_the_text_it_has_alone() -> None:
    """Rows leave at different layers, so their passes do not even have the same number."""
    model = M.to(dtype=torch.float32)
    prompts = [PROMPT, [1], [7, 8, 2]]
    both: Any = tinyspec.generate(
        model, prompts, method="calm", threshold=0.2, max_new_tokens=6, temperature=1.0
    )
    for row, prompt in enumerate(prompts):
        alone: Any = tinyspec.generate(
            model, prompt, method="calm", threshold=0.2, max_new_tokens=6, temperature=1.0, seed=row
        )
        assert (both[row].tokens, both[row].logprobs) == (alone.tokens, alone.logprobs)


def test_statistics_and_the_ledger_show_layers_fills_and_head_products() -> None:
    decoder = make_decoder(threshold=0.0, decay="constant", stop=StoppingCriteria(max_new_tokens=5))
    found = layers(decoder, PROMPT)
    assert found == [1] * 5
    calls = [call for call in decoder.forward_log if not call.prefill]
    assert sum(call.row_layers for call in calls) == 5
    assert (
        sum(call.head_rows for call in calls) == 5
    )  # the logits that the rule read are those that are used
    assert sum(call.fills for call in calls) == 4 * (L - 1)
    assert isinstance(decoder.target, ExitTarget)
    stats = start_generation(
        M, PROMPT, method="calm", threshold=0.0, decay="constant", max_new_tokens=5
    )
    assert len(list(stats)) == 5 and stats.stats.layers_per_token == 1


# ---------------------------------------------------------------------- the classifier


def test_labels_are_agreement_with_the_top_layer() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    agrees, states = agreement_labels(M, ids)
    assert agrees.shape == (2, 4, L - 1) and states.shape == (2, 4, L - 1, D)
    session = M.session()
    session.extend([1])
    rows = [
        session.run_to_layer(TokenTree.chain([2, 3, 4]), layer, head=True).logits
        for layer in range(1, L + 1)
    ]
    words = torch.stack([row.argmax(-1) for row in rows])
    assert torch.equal(agrees[0], (words[:-1] == words[-1]).T)


def test_each_kind_counts_half_in_each_layer_however_rare_it_is() -> None:
    states = torch.zeros(5, 2, 1)
    states[:, :, 0] = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    agrees = torch.tensor(
        [[True, True], [False, True], [False, True], [False, True], [False, True]]
    )
    yes = lambda x: math.log1p(math.exp(-x))  # noqa: E731
    no = lambda x: math.log1p(math.exp(x))  # noqa: E731
    first = (yes(2.0) + (3 * no(0.0) + no(1.0)) / 4) / 2
    got = balanced_loss(agrees, states, torch.tensor([1.0]), torch.tensor(0.0))
    assert float(got) == pytest.approx((first + yes(1.0)) / 2, rel=1e-6)


def test_training_lowers_the_held_out_loss_and_leaves_the_model_alone(tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in M.weights.items()}

    def crops(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randint(V, (8, 12), generator=generator),)

    settings = TrainSettings(40, lr=0.05, warmup=2, weight_decay=0.0, log_every=10, valid_every=20)
    ended, extras = train_exit_classifier(M, crops, settings, tmp_path)
    assert ended.finished and ended.best is not None and ended.best < math.log(2) - 0.005
    assert extras[WEIGHT].shape == (D,) and extras[BIAS].shape == ()
    assert all(torch.equal(weight, before[name]) for name, weight in M.weights.items())


def test_a_classifier_stands_beside_the_weights_and_is_loaded_with_them(tmp_path: Path) -> None:
    extras = {WEIGHT: torch.arange(D).float(), BIAS: torch.tensor(0.5)}
    model = Model(LLAMA, M.to(dtype=torch.float32).weights, extras=extras)
    model.save(tmp_path / "m")
    loaded = tinyspec.load(str(tmp_path / "m"))
    assert loaded.extras.keys() == extras.keys()
    assert all(torch.equal(loaded.extras[name], tensor) for name, tensor in extras.items())
    assert loaded.to(dtype=torch.float64).extras.keys() == extras.keys()
    assert tinyspec.generate(
        loaded, PROMPT, method="calm", measure="classifier", max_new_tokens=3
    ).tokens
    (tmp_path / "m" / "extras.safetensors").write_bytes(b"no")
    with pytest.raises(TinyspecError, match=r"extras\.safetensors: truncated or damaged"):
        tinyspec.load(str(tmp_path / "m"))


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("threshold", [-0.1, 1.01, 2, "x", math.nan, -math.inf])
def test_a_threshold_outside_its_range_raises_an_error(threshold: Any) -> None:
    with pytest.raises(
        TinyspecError, match=r"threshold is .*(from 0.0 to 1.0, or inf|must be a number)"
    ):
        start_generation(M, PROMPT, method="calm", threshold=threshold)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"min_exit": 0}, "min_exit is 0: it must be from 1 to 1024"),
        ({"min_exit": L + 1}, f"min_exit is {L + 1}: model has {L} layers"),
        ({"interval": 0}, "interval is 0"),
        ({"tau": -1}, "tau is -1"),
        (
            {"measure": "entropy"},
            "measure is 'entropy': it must be one of softmax, saturation, classifier",
        ),
        ({"decay": "linear"}, "decay is 'linear': it must be one of paper, t5x, constant"),
        (
            {"measure": "classifier"},
            "model has no exit classifier: `tinyspec train exits --model model` trains one",
        ),
        ({"fill": "copy"}, "no knob 'fill'"),
    ],
)
def test_bad_settings_raise_a_one_line_error(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(TinyspecError) as caught:
        start_generation(M, PROMPT, method="calm", **knobs)
    assert message in str(caught.value) and "\n" not in str(caught.value)
