"""A real model, SmolLM2-135M-Instruct, against transformers on the same weights.

The prompts are the benchmark's own questions.
"""

import pytest
import torch

import tinyspec
from tinyspec import data, models
from tinyspec.bench.experiments import peer
from tinyspec.bench.tasks import SPEC_BENCH, load_items
from tinyspec.errors import TinyspecError

pytestmark = pytest.mark.real

if models.find_model("smollm2") is None:
    pytest.skip(
        "SmolLM2 is not on this machine: tinyspec models fetch smollm2", allow_module_level=True
    )


@pytest.fixture(scope="module")
def smollm2():  # type: ignore[no-untyped-def]
    return tinyspec.load("smollm2")


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_on_twelve_questions() -> None:
    try:
        data.read_spec_bench()
    except TinyspecError as missing:
        pytest.skip(str(missing))
    result = peer.measure_peer(peer.PeerSettings("smollm2", questions=12, tokens=64), quiet=True)
    assert result["passed"], [row for row in result["rows"] if row["mismatches"]]
    assert result["tokens"] == 12 * 64


@pytest.mark.slow
def test_as_its_file_stores_it_it_has_the_logits_of_bfloat16_on_twenty_prompts() -> None:
    stored, whole = tinyspec.load("smollm2"), tinyspec.load("smollm2", dtype="bfloat16")
    if not stored.quantised_bytes:
        pytest.skip("its weights are bfloat16 here: that is faster, or there is no model.gguf")
    items = [item for task in SPEC_BENCH for item in load_items(task, 4)][:20]
    for item in items:
        ids = stored.tokenizer.encode(item.turns[0])[:256]
        assert torch.equal(stored.logits(ids), whole.logits(ids)), item.turns[0][:50]


def test_digits_are_split_one_by_one(smollm2) -> None:  # type: ignore[no-untyped-def]
    ids = smollm2.tokenizer.encode("In 1984 there were 365 days, 24 hours each")
    pieces = [smollm2.tokenizer.decode([i]) for i in ids]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("198436524")


def test_it_answers_sensibly_by_copying(smollm2) -> None:  # type: ignore[no-untyped-def]
    question = "What is the capital of France? Answer in one short sentence."
    plain = tinyspec.generate(smollm2, question, chat=True, max_new_tokens=24)
    copied = tinyspec.generate(smollm2, question, chat=True, method="llma", max_new_tokens=24)
    assert "Paris" in plain.text
    assert copied.text == plain.text
    assert copied.finish_reason == "eos"


def test_the_stored_weights_are_one_copy_and_a_chat_template(smollm2) -> None:  # type: ignore[no-untyped-def]
    assert smollm2.config.tied
    assert smollm2.tokenizer.has_chat
    assert smollm2.config.parameters() == pytest.approx(134.5e6, rel=0.01)


@pytest.mark.slow
def test_its_committed_draft_predicts_part_of_its_text_and_changes_none_of_it(smollm2) -> None:  # type: ignore[no-untyped-def]
    """models/smollm2-draft holds layers alone: embeddings, head and tokenizer are the target's."""
    assert models.find_drafts_of("smollm2")[0] == "smollm2-draft"
    draft = tinyspec.load("smollm2-draft")
    folder = models.find_model("smollm2-draft")
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 16e6
    assert len(draft.config.head_ids) == 8192
    asked = {"chat": True, "max_new_tokens": 32}
    plain = tinyspec.generate(smollm2, "Tell me about the sea.", **asked)  # type: ignore[arg-type]
    quick = tinyspec.generate(
        smollm2, "Tell me about the sea.", method="speculative_decoding", **asked
    )  # type: ignore[arg-type]
    assert quick.text == plain.text
    assert quick.stats.tokens_per_call > 1.2
