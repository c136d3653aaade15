"""Online speculative decoding: what is collected, when and how the draft learns, and what stays."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinyspec
from tests.lm.small import LLAMA
from tests.lm.small import model as network
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.generation import start_generation
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.traps import GREEDY, Trap
from tinyspec.laws.traps import osd as traps
from tinyspec.lm.blocks import Blocks
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import osd
from tinyspec.speculative.drafting.distillspec import DIVERGENCES
from tinyspec.speculative.drafting.osd import OnlineDraft, RejectedPlaces
from tinyspec.technique import Request, find_technique, per_model_state

CARD = find_technique("osd")


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases >= 4


# ---------------------------------------------------------------------- what is collected


def begin(
    models: tuple[Model, Model], prompt: Any, sampling: SamplingParams = GREEDY, **knobs: Any
) -> Decoder:
    request = Request(models[0].session(), [models[1].session()], sampling)
    request.stop = StoppingCriteria(max_new_tokens=knobs.pop("tokens", 12))
    request.draft_max_lengths = [models[1].config.max_positions]
    decoder = CARD.make(request, **knobs)
    decoder.extend(prompt)
    return decoder


def pair(seed: int = 0) -> tuple[Model, Model]:
    return small_network(2 * seed, 6), small_network(2 * seed + 1, 6)


def run_to_end(decoder: Decoder) -> Any:
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder.drafter


def test_a_draft_that_is_right_is_never_trained() -> None:
    target = small_network(3, 6)
    drafter = run_to_end(begin((target, target), (0, 1), interval=1))
    drafter.end()
    assert drafter.online.updates == 0 and drafter.online.model is target


def test_the_rows_are_those_of_the_target_before_sampling_settings() -> None:
    models = pair(1)
    drafter = run_to_end(begin(models, (0, 1), SamplingParams(0.3, top_k=2), interval=9))
    text = list(drafter.text)
    assert drafter.places == sorted(set(drafter.places)) and drafter.places
    for place, row in zip(drafter.places, drafter.rows, strict=True):
        assert torch.allclose(row, models[0].logits(text[: place + 1])[-1], atol=1e-10)


def test_a_rejection_that_a_stop_has_cut_off_is_left_out() -> None:
    """The text ends in the middle of the accepted tokens, so the rejected place is not in it."""
    for tokens in range(1, 12):
        drafter = run_to_end(begin(pair(2), (0, 1), interval=9, tokens=tokens, gamma=4))
        assert all(place < len(drafter.text) - 1 for place in drafter.places)
        drafter.end()
        for rejected in drafter.online.buffer:
            assert len(rejected.ids) == rejected.places[-1] + 1


def test_a_rewound_text_loses_its_rejections() -> None:
    decoder = begin(pair(1), (0, 1), interval=9)
    drafter = run_to_end(decoder)
    last = drafter.places[-1]
    decoder.rewind(last + 1)
    assert drafter.places[-1] == last and len(drafter.text) == last + 1
    decoder.rewind(last)
    assert last not in drafter.places and len(drafter.rows) == len(drafter.places)


def test_a_text_that_outgrows_the_drafts_context_is_learned_as_far_as_it_was_drafted() -> None:
    short = Config(6, 8, 1, 2, 1, 4, 12, 10)
    draft = Model.random(short, 5, torch.float64, scale=0.6)
    drafter = run_to_end(begin((small_network(4, 6), draft), (0, 1), interval=1, tokens=30))
    assert len(drafter.text) == 32 and max(drafter.places) < 10
    drafter.end()
    assert drafter.online.updates == 1


# ---------------------------------------------------------------------- how it learns


def rejections(model: Model, seed: int = 0) -> RejectedPlaces:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (7,), generator=generator).tolist()
    logits = torch.randn(3, vocabulary, generator=generator)
    return RejectedPlaces(ids, [1, 4, 6], logits.to(torch.float64))


def test_an_update_comes_after_every_so_many_requests() -> None:
    online = OnlineDraft(small_network(1, 6), 3, 0.01, "kl")
    for number in range(1, 8):
        online.finish_request(rejections(online.model) if number != 2 else None)
        assert online.updates == number // 3
        assert len(online.buffer) == [0, 1, 1][number % 3] + (number > 3) * (number % 3 == 2)


def test_requests_without_a_rejection_update_nothing() -> None:
    first = small_network(1, 6)
    online = OnlineDraft(first, 1, 0.01, "kl")
    online.finish_request(None)
    assert online.model is first and online.updates == 0


def test_the_model_that_ran_before_is_left_as_it_was() -> None:
    first = small_network(1, 6)
    before = first.logits([0, 1, 2]).clone()
    online = OnlineDraft(first, 1, 0.1, "kl")
    for seed in range(3):
        online.finish_request(rejections(first, seed))
    assert torch.equal(first.logits([0, 1, 2]), before)
    assert not torch.allclose(online.model.logits([0, 1, 2]), before)


@pytest.mark.parametrize("loss", ["kl", "rkl", "jsd"])
def test_updates_reduce_the_loss(loss: str) -> None:
    online = OnlineDraft(small_network(2, 6), 1, 0.02, loss)
    given = rejections(online.model)

    def measure() -> float:
        blocks = Blocks(online.model.config, dict(online.model.weights))
        return float(osd.rejection_loss(blocks, [given], DIVERGENCES[loss]))

    before = measure()
    for _ in range(20):
        online.finish_request(given)
    assert online.updates == 20 and measure() < 0.7 * before


def test_small_steps_add_up_in_a_draft_of_bfloat16() -> None:
    """A step that bfloat16 cannot show is kept in the weights in float32."""
    draft = network(LLAMA, 3, torch.bfloat16)
    online = OnlineDraft(draft, 1, 1e-5, "kl")
    given = rejections(draft)
    online.finish_request(given)
    assert online.model.dtype == torch.bfloat16
    assert {w.dtype for w in online.weights.values()} == {torch.float32}
    old, new = draft.weights["0.qkv.weight"], online.model.weights["0.qkv.weight"]
    assert (old != new).float().mean() < 0.5
    first = online.weights["0.qkv.weight"].detach().clone()
    assert (first != old.float()).float().mean() > 0.9
    online.finish_request(given)  # this step begins where the first one ended
    moved = (online.weights["0.qkv.weight"].detach() - old.float()).abs()
    assert float(moved.mean()) > 1.5 * float((first - old.float()).abs().mean())


def test_a_step_without_a_finite_gradient_is_not_taken() -> None:
    first = small_network(1, 6)
    online = OnlineDraft(first, 1, 0.1, "kl")
    given = rejections(first)
    online.finish_request(given._replace(logits=given.logits * torch.nan))
    assert online.model is first and online.updates == 0
    online.finish_request(given)
    assert online.updates == 1 and online.model.logits([0, 1]).isfinite().all()


def test_a_draft_with_a_vocabulary_of_its_own_learns() -> None:
    config = Config(9, 8, 1, 2, 1, 4, 12, 32, head_ids=(1, 3, 4, 8), tied=False)
    draft = Model.random(config, 2, torch.float64, scale=0.5)
    online = OnlineDraft(draft, 1, 0.05, "kl")
    for seed in range(4):
        online.finish_request(rejections(draft, seed))
    assert online.updates == 4
    p = online.model.logits([0, 1, 2])[-1].softmax(-1)
    assert p.isfinite().all() and set(p.nonzero().flatten().tolist()) == {1, 3, 4, 8}


def acceptance(models: tuple[Model, Model], requests: int, **knobs: Any) -> list[float]:
    """Return the mean of sum min(p, q) at every draft token of each request."""
    decoder = begin(models, (0, 1), SamplingParams(), tokens=24, **knobs)
    means = list[float]()
    for number in range(requests):
        overlaps = list[float]()
        while not decoder.finished:
            text = list(decoder.context)
            round = decoder.step(Seeded(decoder.rounds))
            for place, q in enumerate(round.tree.draft_probs):
                p = models[0].logits([*text, *round.tree.tokens[:place]])[-1].softmax(-1)
                overlaps.append(float(torch.minimum(p, torch.as_tensor(q)).sum()))
        means.append(sum(overlaps) / len(overlaps))
        decoder.end()
        decoder.rewind(0)
        decoder.extend((number % 6, (number // 6) % 6))
    return means


@pytest.mark.parametrize("loss", ["kl", "jsd"])
@pytest.mark.slow
def test_a_stream_of_requests_raises_the_acceptance(loss: str) -> None:
    """A draft that does not know its target learns it; the same draft without updates does not."""
    models = pair(3)
    online = acceptance(models, 48, interval=2, lr=0.02, loss=loss, gamma=3)
    frozen = acceptance(models, 48, interval=1000, gamma=3)
    assert sum(online[-12:]) / 12 > sum(frozen[-12:]) / 12 + 0.1
    assert sum(online[-12:]) > sum(online[:12])


# ---------------------------------------------------------------------- what stays


def test_greedy_text_is_plain_decodings_across_updates() -> None:
    target, draft = network(LLAMA, 0), network(LLAMA, 1)
    for number in range(4):
        prompt = [number, 3, 1]
        plain = tinyspec.generate(target, prompt, max_new_tokens=20)
        ours = tinyspec.generate(
            target, prompt, max_new_tokens=20, method="osd", draft=draft, interval=1, lr=0.05
        )
        assert ours.tokens == plain.tokens  # type: ignore[union-attr]
    assert learned(target, draft, interval=1, lr=0.05).updates == 4


def learned(target: Model, draft: Model, **knobs: Any) -> OnlineDraft:
    """What is kept of this target and draft."""
    own = CARD.settings(knobs)
    key = ("osd", draft, own["interval"], own["lr"], own["loss"])
    session = SimpleNamespace(model=target)
    return per_model_state(session, key, lambda: pytest.fail("nothing is kept"))


def test_what_was_learned_belongs_to_a_target_a_draft_and_knobs() -> None:
    target, draft = network(LLAMA, 0), network(LLAMA, 1)
    other = copy.copy(target)
    options: dict[str, Any] = {"method": "osd", "draft": draft, "max_new_tokens": 8}
    for where, knobs in ((target, {"interval": 1}), (target, {"interval": 2}), (other, {})):
        tinyspec.generate(where, [1, 2], **options, **knobs)
    assert learned(target, draft, interval=1).updates == 1
    assert learned(target, draft, interval=2).requests == 1
    assert learned(other, draft).requests == 1


def test_a_request_that_runs_keeps_the_draft_it_began_with() -> None:
    target, draft = network(LLAMA, 0), network(LLAMA, 1)
    options: dict[str, Any] = {"method": "osd", "draft": draft, "interval": 1, "lr": 0.05}
    slow = start_generation(target, [1, 2], max_new_tokens=12, **options)
    drafter: Any = slow.decoder.drafter
    rounds = iter(slow)
    next(rounds)
    tinyspec.generate(target, [3, 4], max_new_tokens=12, **options)
    online = learned(target, draft, interval=1, lr=0.05)
    assert online.updates == 1 and drafter.model.model is draft is not online.model
    fresh: Any = start_generation(target, [1, 2], max_new_tokens=12, **options).decoder.drafter
    assert fresh.model.model is online.model


def test_rows_of_a_batch_keep_nothing() -> None:
    target, draft = network(LLAMA, 0), network(LLAMA, 1)
    options: dict[str, Any] = {"method": "osd", "draft": draft, "interval": 1, "lr": 0.5}
    first = tinyspec.generate(target, [[1, 2], [3]], max_new_tokens=9, temperature=1.0, **options)
    again = tinyspec.generate(target, [[1, 2], [3]], max_new_tokens=9, temperature=1.0, **options)
    assert [row.tokens for row in first] == [row.tokens for row in again]  # type: ignore[union-attr]
    with pytest.raises(pytest.fail.Exception):
        learned(target, draft, interval=1, lr=0.5)


def test_a_request_that_never_had_a_text_does_not_count() -> None:
    decoder = CARD.make(Request(small_network(1).session(), [small_network(2).session()]))
    decoder.end()
    drafter: Any = decoder.drafter
    assert drafter.online.requests == 0


@pytest.mark.parametrize("n", [0, 1])
def test_few_tokens_or_none_end_a_request_too(n: int) -> None:
    drafter = run_to_end(begin(pair(1), (0,), interval=5, tokens=n))
    drafter.end()
    assert (drafter.online.requests, drafter.online.buffer) == (1, [])


def test_the_card_says_that_a_text_depends_on_earlier_requests() -> None:
    assert CARD.seed_promise.endswith("set of knobs and list of earlier requests")
    assert "earlier requests" not in find_technique("token_recycling").seed_promise
