"""Parallel decoding writes the same tokens as greedy decoding, from every start.

Every sweep is checked, and the greedy text is the only fixed point.
"""

import json
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from tests.table import Table, exact_distribution
from tests.zoo import failed, run, tiny_zoo
from tinyspec import generate, load, translate
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import sweeps as laws
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.sweeps import (
    SWEEP_PROMPT,
    begin_sweeps,
    counting_table,
    expected_sweeps,
    greedy_by_hand,
    only_fixed_point,
    sweep_block,
    sweep_tables,
)
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.jacobi import (
    JacobiDrafter,
    iterate_block,
    predict_with_target,
    solve_blocks,
    trace_sweeps,
)
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.technique import Request, find_technique

CARD = find_technique("jacobi")
GREEDY = SamplingParams(temperature=0.0)
FORMS = [
    {"form": "pj"},
    {"block": 1},
    {"block": 4},
    {"form": "hgj", "block": 3, "prefix": 7},
    {"form": "hgj", "prefix": 0},
]


def decoded(
    model: Any,
    prompt: Any = SWEEP_PROMPT,
    n: int = 14,
    forward_log: Any = None,
    eos: Any = (),
    **knobs: Any,
) -> Decoder:
    """A request at temperature 0, not begun yet but for its prompt."""
    forward_log = [] if forward_log is None else forward_log
    sampling = SamplingParams(0.0, repetition_penalty=knobs.pop("penalty", 1.0))
    limit = model.config.max_positions
    stop = StoppingCriteria(frozenset(eos), max_new_tokens=n)
    d = CARD.make(
        Request(
            model.session(forward_log),
            sampling=sampling,
            stop=stop,
            positions=limit,
            forward_log=forward_log,
        ),
        **knobs,
    )
    d.extend(prompt)
    return d


def finish(d: Decoder, seed: int = 0) -> list[int]:
    rng = Seeded(seed)
    while not d.finished:
        d.step(rng)
    return d.new


def alone(
    model: Any,
    prompt: Any = SWEEP_PROMPT,
    n: int = 14,
    forward_log: Any = None,
    eos: Any = (),
    penalty: float = 1.0,
) -> Any:
    """Plain greedy decoding."""
    forward_log = [] if forward_log is None else forward_log
    stop, sampling = (
        StoppingCriteria(frozenset(eos), max_new_tokens=n),
        SamplingParams(0.0, repetition_penalty=penalty),
    )
    d = Decoder(
        model.session(forward_log),
        BaseDrafter(),
        verify_tree,
        sampling=sampling,
        stop=stop,
        positions=model.config.max_positions,
    )
    d.extend(prompt)
    return finish(d), d


# ------------------------------------------------------------------ what makes it this technique


def test_trap_draft_is_the_last_sweeps_prediction() -> None:
    assert laws.sweeps_by_hand(CARD.make).cases > 300


def test_trap_each_sweep_fixes_a_token_at_least_and_the_worst_targets_let_it_fix_no_more() -> None:
    laws.fixes_one_at_least(CARD.make)


def test_trap_only_what_is_not_final_is_run_and_nobody_looks_at_the_answer_before() -> None:
    laws.costs_what_is_left(CARD.make)


def test_trap_iteration_as_published_ends_at_the_greedy_text_from_every_start() -> None:
    laws.solve_ends_at_greedy(solve_blocks)


# ------------------------------------------------------------------ theorems


def test_greedy_text_is_the_only_fixed_point() -> None:
    for model, n in product(sweep_tables(5), (1, 2, 4)):
        assert only_fixed_point(model, n) == [tuple(greedy_by_hand(model, SWEEP_PROMPT, n))]


def test_the_frame_and_the_published_algorithm_agree_and_only_the_latter_confirms() -> None:
    confirmed = 0
    for model, block, start in product(sweep_tables(2), (2, 4), product((0, 1), repeat=4)):
        says = lambda text, block, model=model: sweep_block(model, text, block)  # noqa: E731
        found = solve_blocks(
            says, SWEEP_PROMPT, 4, block, lambda n, text, start=start: list(start[:n])
        )
        d = begin_sweeps(CARD.make, model, start, "pgj", block, 0, 4)
        ours = list(trace_sweeps(d, Seeded(0)))
        assert d.new == found.tokens
        for states in found.blocks:
            made = passes = 0
            while made < block:  # then the frame has nothing more to ask
                sweep, guess, predicted = ours.pop(0), states[passes], states[passes + 1]
                assert (sweep.block, sweep.predicted) == (
                    tuple(guess[made:-1]),
                    tuple(predicted[made:]),
                )
                made, passes = made + sweep.n_final, passes + 1
            more = len(states) - 1 - passes
            assert more == (
                guess != predicted
            )  # a pass more, where the last sweep changed something
            confirmed += more
        assert not ours
    assert confirmed > 0


@pytest.mark.parametrize("m", [1, 2, 7])
def test_the_worst_case_is_m_sweeps_in_the_frame_and_m_plus_one_as_published(m: int) -> None:
    model = counting_table()
    says = lambda text, block: sweep_block(model, text, block)  # noqa: E731
    assert len(iterate_block(says, SWEEP_PROMPT, [1] * m)) - 1 == m + 1
    d = begin_sweeps(CARD.make, model, [1] * m, "pj", 1, 0, m)
    assert len(list(trace_sweeps(d, Seeded(0)))) == m


def test_a_wrong_start_of_one_place_is_repaired_in_one_sweep_where_no_place_reads_it() -> None:
    model = laws.position_table()
    assert len(expected_sweeps(model, (0,) * 6, "pj", 1, 0, 6)) == 2
    says = lambda text, block: sweep_block(model, text, block)  # noqa: E731
    assert (
        len(iterate_block(says, SWEEP_PROMPT, [0] * 6)) == 3
    )  # a sweep that knows all, one that confirms it


@pytest.mark.parametrize("knobs", [{"block": 1}, {"form": "hgj", "prefix": 0}], ids=str)
def test_blocks_of_one_and_a_prefix_of_none_are_plain_decoding_pass_by_pass(knobs: Any) -> None:
    model, ours, theirs = small_network(3, 5), list[Any](), list[Any]()
    assert finish(decoded(model, forward_log=ours, **knobs)) == alone(model, forward_log=theirs)[0]
    assert ours == theirs


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("init", ["pad", "random", "prompt", "last"])
@pytest.mark.parametrize("knobs", FORMS, ids=str)
def test_a_transformer_says_its_greedy_text_in_every_form_from_every_start(
    knobs: Any, init: str
) -> None:
    model = small_network(11, 6)
    for penalty, eos in ((1.0, ()), (1.4, ()), (1.0, (4,))):
        d = decoded(model, eos=eos, penalty=penalty, init=init, **knobs)
        text, other = alone(model, eos=eos, penalty=penalty)
        assert finish(d) == text and d.finished == other.finished
        assert d.rounds <= len(text)


def test_an_adversary_who_knows_the_text_cannot_change_it() -> None:
    model = small_network(11, 6)
    text = alone(model, n=8)[0]
    for wrong in range(6):
        d = decoded(model, n=8, form="pj")
        drafter: Any = d.drafter
        drafter.start = lambda n, context, rng, wrong=wrong: [(x + wrong) % 6 for x in text][:n]
        assert finish(d) == text
        assert d.rounds == 1 if wrong == 0 else d.rounds <= len(text)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
def test_the_joint_distribution_is_the_targets_at_any_temperature(sampling: SamplingParams) -> None:
    for init, block, tokens in (("pad", 3, 3), ("random", 2, 2)):
        expected = exact_distribution(
            lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), tokens
        )

        def ours(init: str = init, block: int = block) -> Decoder:
            return CARD.make(
                Request(Table(3), sampling=sampling, stop=StoppingCriteria(max_new_tokens=5)),
                block=block,
                init=init,
            )

        assert exact_distribution(ours, tokens) == expected


def test_the_penalty_is_part_of_the_system_that_is_solved() -> None:
    model = small_network(11, 6)
    sweeps = list(trace_sweeps(decoded(model, n=8, form="pj", penalty=1.7), Seeded(0)))
    text = alone(model, n=8, penalty=1.7)[0]
    assert [x for sweep in sweeps for x in sweep.predicted[: sweep.n_final]] == text
    assert text != alone(model, n=8)[0]


def test_the_published_algorithm_runs_on_a_session() -> None:
    model, forward_log = small_network(5, 6), list[Any]()
    session = model.session(forward_log)
    for block in (1, 3, 12):
        found = solve_blocks(
            predict_with_target(session), SWEEP_PROMPT, 12, block, lambda n, text: [0] * n
        )
        assert found.tokens == alone(model, n=12)[0]
        assert found.passes <= 12 + -(-12 // block)
        session.end()
        assert sum(call.rows for call in forward_log) <= len(SWEEP_PROMPT) + sum(
            len(states[0]) * (len(states) - 1) for states in found.blocks
        )
        forward_log.clear()


def test_jacobi_decoder_drafts_for_another_exactly() -> None:
    def cascade() -> Decoder:
        inner = CARD.make(Request(Table(4), stop=StoppingCriteria()), block=3)
        return Decoder(Table(3), NestedDrafter(inner, 2), verify_tree)

    assert exact_distribution(cascade, 2) == exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree), 2
    )


# ------------------------------------------------------------------ the sweeps as data


def test_the_sweeps_tell_the_whole_block_and_how_much_of_it_is_final() -> None:
    model = small_network(2, 6)
    sweeps = list(trace_sweeps(decoded(model, n=10, block=4), Seeded(0)))
    assert [x for sweep in sweeps for x in sweep.predicted[: sweep.n_final]] == alone(model, n=10)[
        0
    ]
    left = 0
    for sweep in sweeps:
        assert len(sweep.predicted) == len(sweep.block) + 1 and 1 <= sweep.n_final <= len(
            sweep.predicted
        )
        assert left in (0, len(sweep.predicted))
        left = len(sweep.predicted) - sweep.n_final
    assert (
        json.loads(json.dumps([sweep._asdict() for sweep in sweeps]))[0]["n_final"]
        == sweeps[0].n_final
    )


def test_draft_is_what_the_last_sweep_predicted() -> None:
    sweeps = list(trace_sweeps(decoded(small_network(2, 6), n=10, form="pj"), Seeded(0)))
    for before, after in pairwise(sweeps):
        assert after.block == before.predicted[before.n_final : -1]


# ------------------------------------------------------------------ starts


def begin(init: str, seed: int = 0) -> list[int]:
    return JacobiDrafter(4, None, init, vocabulary=50, pad=9).start(6, [30, 31, 32], Seeded(seed))


def test_starts_are_padding_random_tokens_the_texts_tokens_or_the_newest_one() -> None:
    assert begin("pad") == [9] * 6 and begin("last") == [32] * 6
    assert set(begin("prompt")) <= {30, 31, 32} and begin("prompt") != begin("prompt", 1)
    assert begin("random") == begin("random") != begin("random", 1)
    assert all(0 <= token < 50 for token in begin("random"))


# ------------------------------------------------------------------ edges


@pytest.mark.parametrize("knobs", FORMS, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2])
def test_few_tokens_or_none_are_those_of_greedy_decoding(knobs: Any, n: int) -> None:
    model = small_network(7, 5)
    assert finish(decoded(model, n=n, **knobs)) == alone(model, n=n)[0]


def test_no_draft_reaches_beyond_what_is_wanted_or_fits() -> None:
    model = small_network(7, 5)
    prompt = [1] * (model.config.max_positions - 3)
    for n, wanted in ((2, 2), (9, 3)):
        d = decoded(model, prompt, n=n, block=8)
        for sweep in trace_sweeps(d, Seeded(0)):
            assert len(sweep.predicted) <= wanted
        assert d.new == alone(model, prompt, n=n)[0] and len(d.new) == wanted
    d = decoded(model, [1] * model.config.max_positions, block=8)
    assert d.finished == "context" and not d.new


@pytest.mark.parametrize("at", range(5))
def test_the_end_of_text_ends_it_first_or_inside_a_block(at: int) -> None:
    poem = [3, 3, 3, 3, 3]
    poem[at] = 1
    model = TableModel(
        vocabulary=4,
        rows=lambda text: [int(x == [*poem, 2][min(len(text) - 2, 5)]) for x in range(4)],
    )
    for knobs in FORMS:
        d = decoded(model, n=12, eos=(1,), **knobs)
        assert finish(d) == poem[: at + 1] and d.finished == "eos"


def test_a_hybrid_needs_no_length_it_ends_where_the_text_does() -> None:
    model = TableModel(
        vocabulary=40, rows=lambda text: [int(x == len(text) % 40) for x in range(40)]
    )
    for prefix in (0, 4, 100):
        request = Request(model.session(), sampling=GREEDY, stop=StoppingCriteria(frozenset({19})))
        d = CARD.make(request, form="hgj", block=5, prefix=prefix)
        d.extend(SWEEP_PROMPT)
        assert finish(d) == list(range(2, 20)) and d.finished == "eos"


def test_after_a_rewind_a_block_begins_anew() -> None:
    model = small_network(2, 6)
    d = decoded(model, n=20, block=6)
    rng = Seeded(1)
    for _ in range(3):
        d.step(rng)
    d.rewind(3)
    assert d.drafter.block == []  # type: ignore[attr-defined]
    while not d.finished:
        d.step(rng)
    assert d.context[: 2 + 18] == [*SWEEP_PROMPT, *alone(model, n=18)[0]]


def test_nothing_is_left_of_a_request_that_ended() -> None:
    d = decoded(small_network(2, 6), n=20, form="pj")
    d.step(Seeded(0))
    d.end()
    drafter: Any = d.drafter
    assert drafter.block == [] and drafter.begun is None and drafter.history == []


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block": 0}, "block is 0: it must be from 1 to 1024"),
        ({"prefix": -1}, "prefix is -1: it must be from 0 to 1048576"),
        ({"form": "gauss"}, "form is 'gauss': it must be one of pgj, pj, hgj"),
        ({"init": "zero"}, "init is 'zero': it must be one of"),
        ({"form": "pj"}, "say how many"),
    ],
    ids=str,
)
def test_a_wrong_knob_raises_a_one_line_error(knobs: Any, message: str) -> None:
    with pytest.raises(TinyspecError, match=message):
        CARD.make(Request(Table(3)), **knobs)


# ------------------------------------------------------------------ for a user


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_zoo(tmp_path_factory.mktemp("zoo")).big


def test_a_user_gets_the_greedy_text_up_to_the_edge_of_the_context(folder: str) -> None:
    model = load(folder)
    plainly = generate(model, [1, 2, 3], max_new_tokens=200)
    for knobs in ({}, {"form": "pj"}, {"form": "hgj", "init": "last"}):
        ours = generate(model, [1, 2, 3], max_new_tokens=200, method="jacobi", **knobs)
        assert ours.tokens == plainly.tokens and ours.finish_reason == plainly.finish_reason
        assert ours.stats.target_calls <= plainly.stats.target_calls


def test_the_command_line_prints_the_plain_text(folder: str) -> None:
    plain = run("generate", "--model", folder, "-n", "30", "the cat")
    ours = run(
        "generate", "--model", folder, "-n", "30", "--method", "jacobi", "--block", "5", "the cat"
    )
    assert plain.exit_code == ours.exit_code == 0 and plain.stdout == ours.stdout
    assert "block is 0" in failed(
        run("generate", "--model", folder, "--method", "jacobi", "--block", "0", "the cat")
    )


# ------------------------------------------------------------- on an autoregressive encoder-decoder


def teacher(seed: int = 0, tokenizer: Any = None, vocabulary: int = 12) -> Seq2Seq:
    """A tiny random one; float64, so that no two logits are equal by rounding."""
    config = Seq2SeqConfig(
        vocabulary,
        d_model=8,
        n_heads=2,
        d_ff=12,
        encoder_layers=1,
        decoder_layers=2,
        max_positions=32,
    )
    return Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64, tokenizer)


def dense(host: Seq2Seq, source: list[int], n: int) -> list[int]:
    """Greedy translation by a dense decoder pass over the whole text for every token; no session,
    no cache.
    """
    text, memory = [host.config.bos], host.encode(torch.tensor([source]))
    while len(text) <= n and text[-1] != host.config.eos:
        ids = torch.tensor([text])
        causal = torch.ones(len(text), len(text), dtype=torch.bool).tril()
        text.append(int(host.logits(host.decode(host.embed(ids), memory, causal))[0, -1].argmax()))
    return text[1:]


SOURCES = ([5, 6, 7, 8], [9, 4], [11, 10, 9, 8, 7, 6, 5])


@pytest.mark.parametrize("knobs", FORMS, ids=str)
def test_a_teacher_translates_the_same_in_every_form_from_every_start(knobs: Any) -> None:
    for seed, init in ((0, "pad"), (1, "random"), (2, "last")):
        host, source = teacher(seed), SOURCES[seed]
        d = decoded(
            host.condition_on(source),
            [host.config.bos],
            n=12,
            eos=(host.config.eos,),
            init=init,
            **knobs,
        )
        sweeps = list(trace_sweeps(d, Seeded(seed)))
        assert d.new == dense(host, source, 12)
        assert len(sweeps) == d.rounds <= len(d.new) and all(sweep.n_final >= 1 for sweep in sweeps)


def test_a_block_begins_with_the_models_padding_and_a_language_model_takes_its_end_of_text() -> (
    None
):
    for model, pad in (
        (teacher().condition_on(SOURCES[0]), 0),
        (TableModel(vocabulary=6, eos=(4,)), 4),
        (TableModel(), 0),
    ):
        assert next(trace_sweeps(decoded(model, [1], block=3), Seeded(0))).block == (pad, pad)


def test_with_a_teacher_too_greedy_text_is_the_only_fixed_point_in_m_plus_one_sweeps() -> None:
    host = teacher(1, vocabulary=4)
    model = host.condition_on([3, 2, 3])
    for start in product(range(4), repeat=3):
        d = decoded(model, [host.config.bos], n=3, form="pj")
        drafter: Any = d.drafter
        drafter.start = lambda n, text, rng, start=start: list(start[:n])
        text = finish(d)
        states = iterate_block(predict_with_target(model.session()), [host.config.bos], list(start))
        assert states[-1] == text and len(states) - 1 <= 3 + 1
        assert (list(start) == text) == (
            len(states) == 2
        )  # nothing but the greedy text stands from the first sweep on


def test_a_sweep_on_a_teacher_runs_what_is_left_of_the_block_and_the_encoder_is_asked_once() -> (
    None
):
    forward_log: list[Any] = []
    host = teacher(2).with_log(forward_log)
    d = decoded(
        host.condition_on(SOURCES[0]), [host.config.bos], n=10, forward_log=forward_log, form="pj"
    )
    sweeps = list(trace_sweeps(d, Seeded(0)))
    assert [call.rows for call in forward_log if call.model == host.name] == [
        1 + len(sweep.block) for sweep in sweeps
    ]
    assert [call.prefill for call in forward_log].count(True) == 1
    assert d.target.cache_exact


def test_sampled_translations_follow_the_teachers_distribution() -> None:
    host = teacher(3, vocabulary=4)
    given = host.condition_on([3, 3])

    def joint(drafted: bool) -> Any:
        def make() -> Decoder:
            request = Request(
                given.session(),
                sampling=SamplingParams(top_k=2),
                stop=StoppingCriteria(max_new_tokens=3),
            )
            return (
                CARD.make(request, block=3)
                if drafted
                else request.decoder(BaseDrafter(), verify_tree)
            )

        return exact_distribution(
            make, 3, prompt=[host.config.bos], outside=lambda decoder: (given,)
        )

    ours, plainly = joint(True), joint(False)
    assert ours.keys() == plainly.keys()
    assert all(abs(ours[text] - plainly[text]) < 1e-10 for text in ours)


def test_translate_by_jacobi_says_what_plain_translation_says() -> None:
    host = teacher(5)
    for source in SOURCES:
        plainly, ours = translate(host, source), translate(host, source, method="jacobi", block=4)
        assert ours.tokens == plainly.tokens and ours.finish_reason == plainly.finish_reason
        assert 0 < ours.stats.target_calls <= plainly.stats.target_calls


def test_the_translate_command_takes_jacobi_and_its_knobs(folder: str, tmp_path: Any) -> None:
    tokenizer = load(folder).tokenizer
    teacher(5, tokenizer, tokenizer.vocab_size).save(tmp_path / "mt")
    call = ["translate", "--model", str(tmp_path / "mt"), "the cat sat", "--stats"]
    plainly, ours = run(*call), run(*call, "--method", "jacobi", "--form", "pj")
    assert plainly.exit_code == ours.exit_code == 0, ours.output
    assert ours.stdout == plainly.stdout and "1 encoder pass" in ours.stderr
    assert "form is 'x'" in failed(run(*call[:-1], "--method", "jacobi", "--form", "x"))
