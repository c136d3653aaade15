"""Greedy text equals plain decoding's to the last token, in the number types that people use.

A text in a batch equals the text alone. Elsewhere this holds in float32 up to rare ties, and in
bfloat16 not at all: a block rounds otherwise than one row does. On a CPU no bit of a row depends on
its block here, so not one token may differ.
"""

from typing import Any

import pytest
import torch

import tinyspec
from tinyspec import _core
from tinyspec.generation import Generation
from tinyspec.laws.exact.models import add_random_head
from tinyspec.lm.engine import Engine
from tinyspec.lm.model import Model
from tinyspec.technique import Guarantee, load_techniques

pytestmark = pytest.mark.skipif(
    _core.compute is None, reason="NO COMPILED TRANSFORMER: rows have no fixed bits"
)
PROMPTS = [
    "Once upon a time there was a",
    "The King said to his daughter, 'You must",
    "In the middle of the forest stood",
    "'What is the matter?' asked the",
    "One day the youngest of the three brothers went out, and when he came to the river he saw",
    "He",
]
SETTINGS = {  # how many rows stand in a block
    "speculative_decoding": [{"gamma": 1}, {"gamma": 3}, {"gamma": 7}],
    "llma": [{"k": 4}, {"k": 15}, {"n": 3}, {"k": 15, "price": 0.25}],
    "auto": [{"k": 4}, {"k": 15}, {"gamma": 1}, {"gamma": 7}],
}
METHODS = [
    (name, knobs)
    for name, card in load_techniques().items()
    if card.kind == "decoder"
    and card.guarantee in (Guarantee.EXACT, Guarantee.GREEDY)
    and not card.has_own_target
    for knobs in SETTINGS.get(name, [{}])
    if name != "autoregressive"
]

TYPES = ["float32", "bfloat16"]
CASES = [
    (dtype, *case)
    for dtype in TYPES
    for case in METHODS
    if dtype == "bfloat16" or case[0] in SETTINGS
]


@pytest.fixture(scope="module", params=TYPES)
def pair(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    return tuple(tinyspec.load(name, dtype=request.param) for name in ("storyteller", "apprentice"))


def tokens_and_logprobs(text: Generation) -> tuple[list[int], list[float]]:
    """Tokens and the logarithms of their probabilities, which show every bit."""
    return text.tokens, text.logprobs


@pytest.fixture(scope="module")
def plain(pair: tuple[Model, Model]) -> list[tuple[list[int], list[float]]]:
    return [
        tokens_and_logprobs(tinyspec.generate(pair[0], prompt, max_new_tokens=64))
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    ("pair", "method", "knobs"),
    CASES,
    indirect=["pair"],
    ids=[" ".join(map(str, c)) for c in CASES],
)
def test_greedy_text_is_plain_decodings_to_the_last_token(
    pair: tuple[Model, Model], plain: list[Any], method: str, knobs: dict[str, Any]
) -> None:
    card = load_techniques()[method]
    target, draft = add_random_head(pair[0], card, 0), pair[1]
    if card.cyclic:  # its layers repeat, so it is another model
        texts = [tinyspec.generate(target, prompt, max_new_tokens=64) for prompt in PROMPTS]
        plain = [tokens_and_logprobs(text) for text in texts]
    options: dict[str, Any] = {"method": method, "draft": draft, "max_new_tokens": 64, **knobs}
    first = 0 if card.trained is None else 4  # a random head is rejected whatever the prompt says
    prompts, plain = PROMPTS[first:], plain[first:]
    if card.copies:
        options["references"] = [" ".join(PROMPTS)]
    for prompt, expected in zip(prompts, plain, strict=True):
        assert tokens_and_logprobs(tinyspec.generate(target, prompt, **options)) == expected
    assert [
        tokens_and_logprobs(row) for row in tinyspec.generate(target, prompts, **options)
    ] == plain


@pytest.mark.parametrize("method", ["autoregressive", "speculative_decoding", "llma"])
def test_a_sampled_prompt_in_a_batch_equals_the_prompt_alone(
    pair: tuple[Model, Model], method: str
) -> None:
    target, draft = pair
    options = {
        "method": method,
        "draft": draft,
        "max_new_tokens": 40,
        "temperature": 1.0,
        "top_p": 0.98,
    }
    batch = tinyspec.generate(target, PROMPTS, seed=11, **options)
    for i, (prompt, row) in enumerate(zip(PROMPTS, batch, strict=True)):
        assert tokens_and_logprobs(row) == tokens_and_logprobs(
            tinyspec.generate(target, prompt, seed=11 + i, **options)
        )


def test_logits_that_are_rounded_otherwise_in_a_block_are_detected(
    pair: tuple[Model, Model], plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What everyone else has in bfloat16: the last state is rounded to it where a block is
    computed.
    """
    right = Engine.logits_as_array

    def rounded(self: Engine, x: Any) -> Any:
        return right(self, torch.from_numpy(x).bfloat16().float().numpy() if len(x) > 1 else x)

    monkeypatch.setattr(Engine, "logits_as_array", rounded)
    options = {"method": "speculative_decoding", "draft": pair[1], "gamma": 7, "max_new_tokens": 64}
    assert [
        tokens_and_logprobs(tinyspec.generate(pair[0], prompt, **options)) for prompt in PROMPTS
    ] != plain
