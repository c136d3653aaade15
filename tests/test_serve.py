"""`tinyspec serve`, through real HTTP on this machine and with OpenAI's own client.

A reply is the text that `generate` gives alone; a stream is its text in pieces; whatever a client
sends, it gets an answer in the API's form, and no other client notices.
"""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import tokenizers

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec import pairing
from tinyspec.decoding.costs import MeasuredRounds
from tinyspec.errors import TinyspecError
from tinyspec.generation import Generation
from tinyspec.lm.model import Model
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.lm.transformer import Transformer
from tinyspec.speculative import batched

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed, reason="the server's extra: pip install -e '.[serve]'")
httpx = pytest.importorskip("httpx", reason="a client of the tests: pip install -e '.[test]'")
openai = pytest.importorskip("openai", reason="a client of the tests: pip install -e '.[test]'")

from tinyspec.serve import api, app, engine  # noqa: E402
from tinyspec.technique import find_policy, list_policies  # noqa: E402

PATIENCE = 120.0  # seconds that a loaded machine may take until a test gives up
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROMPT = "Once upon a time, the old sailor"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "the cat"}]


class Served(NamedTuple):
    """A server that runs in a thread."""

    engine: engine.ServingEngine
    server: app.GracefulServer
    thread: threading.Thread
    url: str

    def post(self, path: str, body: Any, **more: Any) -> Any:
        """Send a body as JSON, or as it is if it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, timeout=PATIENCE, **more)

    def get(self, path: str, **more: Any) -> Any:
        return httpx.get(self.url + path, timeout=PATIENCE, **more)

    def client(self, key: str = "none") -> Any:
        """Return OpenAI's client."""
        url = f"{self.url}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream; the last one must be [DONE]."""
        lines = self.post(path, {**body, "stream": True}).text.strip().split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, int]:
        """Return the metrics by name."""
        lines = self.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("tinyspec_"): int(value) for name, value in pairs}


@contextmanager
def serving(
    model: Model, drafts: Any = None, key: str | None = None, **more: Any
) -> Iterator[Served]:
    """Serve a model in a thread until the block ends."""
    its = engine.ServingEngine(model, drafts, **more)
    server, listening = app.make_server(its, key), app.open_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Served(its, server, thread, url)
    finally:
        server.begin_stop(0)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], Any]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def storyteller() -> Model:
    return tinyspec.load("storyteller")


@pytest.fixture(scope="module")
def story(storyteller: Model) -> Iterator[Served]:
    """The bundled pair."""
    with serving(storyteller, [tinyspec.load("apprentice")]) as served:
        yield served


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random model with a chat template, which writes half characters."""
    return tinyspec.load(tiny_zoo(tmp_path_factory.mktemp("zoo")).big)


@pytest.fixture(scope="module")
def talker(tiny: Model) -> Iterator[Served]:
    with serving(tiny) as served:
        yield served


def test_a_method_with_a_draft_of_its_own_does_not_get_the_servers(story: Served) -> None:
    assert "quantized_draft" not in pairing._named.get(story.engine.model, {})
    body = {"prompt": PROMPT, "max_tokens": 12, "tinyspec": {"method": "quantized_draft"}}
    text = story.post(COMPLETIONS, {**body, "temperature": 0}).json()["choices"][0]["text"]
    assert text == tinyspec.generate("storyteller", PROMPT, max_new_tokens=12).text
    assert "quantized_draft" in pairing._named[story.engine.model]


class Gate:
    """Forward passes of all models wait here for a permit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun, self._permits = 0, threading.Semaphore(0)
        self.is_open = False
        compute = Transformer.forward

        def forward(model: Transformer, feeds: Any) -> Any:
            self.begun += 1
            while not (self.is_open or self._permits.acquire(timeout=0.01)):
                pass
            return compute(model, feeds)

        monkeypatch.setattr(Transformer, "forward", forward)

    def let(self, passes: int) -> None:
        """Let some passes through."""
        self._permits.release(passes)

    def open(self) -> None:
        self.is_open = True


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def alone(model: Model, prompt: Any, **options: Any) -> Generation:
    """Return what `generate` gives for a prompt that is alone."""
    result = tinyspec.generate(model, prompt, **options)
    assert isinstance(result, Generation)
    return result


def error_of(reply: Any, status: int) -> dict[str, Any]:
    """Return the error of a reply, which has the API's form and one line."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    message: str = body["error"]["message"]
    assert message and "\n" not in message and "Traceback" not in message
    error: dict[str, Any] = body["error"]
    return error


# ---------------------------------------------------------------------- the text


def test_a_reply_is_the_text_that_generate_gives(story: Served, storyteller: Model) -> None:
    reply = story.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 12}).json()
    expected = alone(storyteller, PROMPT, max_new_tokens=12)
    assert reply["object"] == "text_completion" and reply["model"] == "storyteller"
    choice = {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"}
    assert reply["choices"] == [choice]
    n_prompt = len(storyteller.tokenizer.encode(PROMPT))
    assert reply["usage"] == {
        "prompt_tokens": n_prompt,
        "completion_tokens": 12,
        "total_tokens": n_prompt + 12,
    }


METHODS: list[tuple[str, float, dict[str, Any]]] = [
    ("autoregressive", 0.8, {}),
    ("speculative_decoding", 0.0, {}),
    ("speculative_decoding", 0.8, {"gamma": 3}),
    ("llma", 0.8, {}),
    ("suffix_decoding", 0.8, {}),
    ("specinfer", 0.8, {}),
    ("jacobi", 0.0, {}),
    ("medusa", 0.8, {}),
]


def test_eight_clients_with_different_methods_get_what_they_get_alone(
    story: Served, storyteller: Model
) -> None:
    """With OpenAI's client, all at the same time."""

    def ask(seed: int) -> Any:
        method, temperature, knobs = METHODS[seed]
        return story.client().completions.create(
            model="storyteller",
            prompt=PROMPT,
            max_tokens=24,
            temperature=temperature,
            top_p=0.9,
            seed=seed,
            extra_body={"tinyspec": {"method": method, "knobs": knobs}},
        )

    with ThreadPoolExecutor(len(METHODS)) as pool:
        replies = list(pool.map(ask, range(len(METHODS))))
    for seed, reply in enumerate(replies):
        method, temperature, knobs = METHODS[seed]
        options = {"method": method, "temperature": temperature, **knobs}
        expected = alone(storyteller, PROMPT, max_new_tokens=24, top_p=0.9, seed=seed, **options)
        assert reply.choices[0].text == expected.text, method
        assert reply.usage.completion_tokens == len(expected.tokens)
        assert reply.tinyspec["target_calls"] == expected.stats.target_calls
        assert reply.tinyspec["acceptance"] == expected.stats.acceptance
        assert reply.tinyspec["method"] == method


@pytest.mark.parametrize("policy", list_policies())
def test_no_policy_changes_a_text(tiny: Model, policy: str) -> None:
    chosen = find_policy(policy)
    with serving(tiny, policy=chosen, method="llma") as served, ThreadPoolExecutor(4) as pool:
        bodies = [{"prompt": "the cat and " * (1 + i), "max_tokens": 8} for i in range(4)]
        replies = pool.map(lambda body: served.post(COMPLETIONS, body).json(), bodies)
        for body, reply in zip(bodies, replies, strict=True):
            expected = alone(tiny, body["prompt"], max_new_tokens=8, method="llma")
            assert reply["choices"][0]["text"] == expected.text


def test_the_prompts_of_a_request_have_seeds_of_their_own(
    story: Served, storyteller: Model
) -> None:
    prompts = [PROMPT, "The dog"]
    body = {"prompt": prompts, "max_tokens": 8, "temperature": 0.9, "seed": 5}
    reply = story.post(COMPLETIONS, body).json()
    for i, prompt in enumerate(prompts):
        expected = alone(storyteller, prompt, max_new_tokens=8, temperature=0.9, seed=5 + i)
        assert reply["choices"][i] == {
            "index": i,
            "text": expected.text,
            "logprobs": None,
            "finish_reason": "length",
        }
    assert reply["usage"]["completion_tokens"] == 16


def test_a_prompt_may_be_token_ids(story: Served, storyteller: Model) -> None:
    ids = storyteller.tokenizer.encode(PROMPT)
    expected = alone(storyteller, PROMPT, max_new_tokens=4).text
    for prompt in (ids, [ids]):
        reply = story.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 4}).json()
        assert reply["choices"][0]["text"] == expected


def test_a_chat_is_answered_by_the_template(talker: Served, tiny: Model) -> None:
    expected = alone(tiny, HELLO, max_new_tokens=6)
    reply = talker.client().chat.completions.create(
        model=tiny.name, messages=HELLO, max_completion_tokens=6
    )
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}],
        }
    ]
    again = talker.post(CHAT, {"messages": parts, "max_tokens": 6}).json()
    assert again["choices"][0]["message"]["content"] == expected.text


def test_a_text_ends_where_the_context_is_full(talker: Served) -> None:
    reply = talker.post(COMPLETIONS, {"prompt": "the cat", "max_tokens": 10**6}).json()
    assert reply["usage"]["total_tokens"] <= 96
    assert reply["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_prediction_is_copied_from(story: Served, storyteller: Model) -> None:
    """A prediction that says the whole text is accepted; the text stays the same."""
    expected = alone(storyteller, PROMPT, max_new_tokens=24)
    reply = story.client().completions.create(
        model="storyteller",
        prompt=PROMPT,
        max_tokens=24,
        extra_body={"prediction": {"type": "content", "content": PROMPT + expected.text}},
    )
    assert reply.choices[0].text == expected.text
    assert reply.tinyspec["method"] == "llma", "the server's method does not copy"
    details = reply.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == reply.tinyspec["accepted"] > 8
    drafted = reply.tinyspec["drafted"]
    assert details.rejected_prediction_tokens == drafted - reply.tinyspec["accepted"]


def test_logprobs_are_those_of_the_text(talker: Served, tiny: Model) -> None:
    expected = alone(tiny, "the cat", max_new_tokens=5)
    texts = [tiny.tokenizer.token_text(token) for token in expected.tokens]
    body = {"prompt": "the cat", "max_tokens": 5, "logprobs": 0}
    told = talker.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert told["token_logprobs"] == expected.logprobs and told["tokens"] == texts
    events = talker.stream(COMPLETIONS, body)
    pieces = [event["choices"][0]["logprobs"] for event in events]
    assert [p for piece in pieces if piece for p in piece["token_logprobs"]] == expected.logprobs
    chat = {"messages": HELLO, "max_tokens": 3, "logprobs": True}
    content = talker.post(CHAT, chat).json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == alone(tiny, HELLO, max_new_tokens=3).logprobs


SENTENCE = tokenizers.Tokenizer(
    tokenizers.models.BPE(
        {"▁a": 0, "b": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}, "</s>": 258}, []
    )
)
SENTENCE.decoder = tokenizers.decoders.Sequence(
    [
        tokenizers.decoders.Replace("▁", " "),
        tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(),
        tokenizers.decoders.Strip(" ", 1, 0),
    ]
)
SENTENCE.add_special_tokens(["</s>"])


def test_the_bytes_of_tokens_join_to_a_character_and_it_has_one_position(tiny: Model) -> None:
    """Of a byte alphabet, and of SentencePiece, whose text loses its first space."""
    face = "\N{GRINNING FACE}"
    for tokenizer, ids in (
        (tiny.tokenizer, tiny.tokenizer.encode(f"the{face}{face}x")),
        (Tokenizer(SENTENCE), [0, *(byte + 2 for byte in (face * 2).encode()), 1, 258, 0]),
    ):
        text = tokenizer.decode(ids)
        joined = b"".join(tokenizer.token_bytes(id) for id in ids).decode()
        assert joined.removeprefix(" ") == text
        positions = api.TextPositions(tokenizer)
        found = [positions.locate(id) for id in ids]
        first = text.index(face)
        assert found.count(first) == found.count(first + 1) == 4, "four tokens, one character"
        texts = [tokenizer.token_text(id) for id in ids]
        for id, at, own in zip(ids, found, texts, strict=True):
            if "\ufffd" not in own and id != 258 and not own.startswith("<0x"):
                assert text[at:].startswith(own if at else own.lstrip(" "))


def test_a_control_token_has_no_bytes() -> None:
    assert Tokenizer(SENTENCE).token_bytes(258) == b""


def test_broken_bytes_have_the_positions_of_what_the_text_shows(tiny: Model) -> None:
    byte = {tiny.tokenizer.token_text(id): id for id in range(256)}
    backend = tiny.tokenizer.backend
    half = backend.token_to_id("\u00e2")  # the byte E2 begins a character of three bytes
    assert half is not None
    positions = api.TextPositions(tiny.tokenizer)
    ids = [half, byte["a"], half, half, byte["b"]]
    assert tiny.tokenizer.decode(ids) == "\ufffda\ufffd\ufffdb"
    assert [positions.locate(id) for id in ids] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_have_bytes_and_positions_whole_or_in_a_stream(
    talker: Served, tiny: Model, seed: int
) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": seed}
    body = {"prompt": "the cat", "max_tokens": 40, "logprobs": 0, **options}
    choice = talker.post(COMPLETIONS, body).json()["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    for own, at in zip(choice["logprobs"]["tokens"], offsets, strict=True):
        if "\ufffd" not in own:
            assert choice["text"][at:].startswith(own)
    pieces = [event["choices"][0]["logprobs"] for event in talker.stream(COMPLETIONS, body)]
    assert [at for piece in pieces if piece for at in piece["text_offset"]] == offsets
    chat = {"messages": HELLO, "max_tokens": 40, "logprobs": True, **options}
    told = talker.post(CHAT, chat).json()["choices"][0]
    joined = b"".join(bytes(one["bytes"] or ()) for one in told["logprobs"]["content"])
    assert joined.decode("utf-8", "replace") == told["message"]["content"]


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_joins_to_the_text(talker: Served, tiny: Model, seed: int) -> None:
    """Of a model that writes bytes at random: no piece has half a character."""
    options: dict[str, Any] = {"temperature": 1.5, "seed": seed}
    expected = alone(tiny, "the cat", max_new_tokens=60, method="suffix_decoding", **options)
    events = talker.stream(COMPLETIONS, {"prompt": "the cat", "max_tokens": 60, **options})
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == expected.text
    whole = sum(piece.count("\ufffd") for piece in pieces)
    assert whole == expected.text.count("\ufffd")
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")


def test_a_text_that_ends_in_half_a_character_is_sent_whole(talker: Served, tiny: Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 1}
    tokens = alone(tiny, "the cat", max_new_tokens=60, **options).tokens
    decode = tiny.tokenizer.decode
    n = next(n for n in range(1, 60) if decode(tokens[:n]).endswith("\ufffd"))
    events = talker.stream(COMPLETIONS, {"prompt": "the cat", "max_tokens": n, **options})
    assert "".join(event["choices"][0]["text"] for event in events) == decode(tokens[:n])


def test_a_chat_streams_to_openais_client(talker: Served, tiny: Model) -> None:
    expected = alone(tiny, HELLO, max_new_tokens=12)
    chunks = list(
        talker.client().chat.completions.create(
            model=tiny.name,
            messages=HELLO,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == expected.text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_says_where_each_token_came_from(story: Served, storyteller: Model) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    own = {"method": "speculative_decoding"}
    body = {"prompt": PROMPT, "max_tokens": 40, "tinyspec": own, **options}
    *pieces, end = story.stream(COMPLETIONS, body)
    expected = alone(
        storyteller, PROMPT, max_new_tokens=40, method="speculative_decoding", **options
    )
    for kind in ("accepted", "recovered", "bonus", "plain"):
        counted = sum(piece["tinyspec"][kind] for piece in pieces)
        assert counted == expected.trace.origins.count(kind), kind
    for piece in pieces:
        parts = piece["tinyspec"]["parts"]
        assert "".join(part["text"] for part in parts) == piece["choices"][0]["text"]
    assert end["tinyspec"]["target_calls"] == len(pieces) == expected.stats.target_calls
    assert end["tinyspec"]["tokens_per_call"] == expected.stats.tokens_per_call


def test_a_stop_string_is_never_sent(story: Served, storyteller: Model) -> None:
    """Nor is its beginning, though it comes in several tokens."""
    text = alone(storyteller, PROMPT, max_new_tokens=40).text
    stop = text[20:31]
    expected = text[: text.index(stop)]
    body = {"prompt": PROMPT, "max_tokens": 40, "stop": ["never there", stop]}
    reply = story.post(COMPLETIONS, body).json()["choices"][0]
    assert reply["text"] == expected and reply["finish_reason"] == "stop"
    sent = ""
    for event in story.stream(COMPLETIONS, body):
        sent += event["choices"][0]["text"]
        assert expected.startswith(sent)
    assert sent == expected


def test_several_prompts_stream_at_once(story: Served, storyteller: Model) -> None:
    prompts = [PROMPT, "The dog", "A king"]
    body = {"prompt": prompts, "max_tokens": 10, "stream_options": {"include_usage": True}}
    *events, last = story.stream(COMPLETIONS, body)
    for i, prompt in enumerate(prompts):
        own = [event for event in events if event["choices"][0]["index"] == i]
        mine = [event["choices"][0] for event in own]
        assert own[-1]["tinyspec"]["seed"] == i
        assert (
            "".join(choice["text"] for choice in mine)
            == alone(storyteller, prompt, max_new_tokens=10, seed=i).text
        )
    assert last["usage"]["completion_tokens"] == 30


# ---------------------------------------------------------------------- what is wrong

PLAIN = {"prompt": "a", "max_tokens": 1}
WRONG: list[tuple[Any, int, str | None, str]] = [
    (b"{", 400, None, "no JSON"),
    (b"", 400, None, "no JSON"),
    (b"\xff\xfe\x00", 400, None, "UTF-8"),
    (b'{"prompt": "\\ud800"}', 400, None, "half a character"),
    (b"[" * 100_000, 400, None, "too deeply"),
    (b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "x", "no field 'x'"),
    (b'{"prompt": "a", "temperature": NaN}', 400, None, "NaN"),
    (b'{"prompt": "a", "temperature": 1e999}', 400, None, "too large"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None, "5000 digits"),
    (b'["prompt"]', 400, None, "must be a JSON object"),
    ({}, 400, "prompt", "there is no prompt"),
    ({"prompt": 5}, 400, "prompt", "prompt is 5"),
    ({"prompt": []}, 400, "prompt", "prompt is []"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": [[1], "a"]}, 400, "prompt", "it must be"),
    ({"prompt": [1, 99999]}, 400, "prompt", "99999"),
    ({"prompt": ["a"] * 65}, 400, "prompt", "at most 64"),
    ({**PLAIN, "max_tokens": -1}, 400, "max_tokens", "at least 0"),
    ({**PLAIN, "max_tokens": True}, 400, "max_tokens", "True"),
    ({**PLAIN, "temperature": -0.5}, 400, "temperature", "-0.5"),
    ({**PLAIN, "temperature": "hot"}, 400, "temperature", "'hot'"),
    ({**PLAIN, "top_p": 2}, 400, "top_p", "at most 1"),
    ({**PLAIN, "seed": 1.5}, 400, "seed", "1.5"),
    ({**PLAIN, "stop": ["a"] * 5}, 400, "stop", "at most 4"),
    ({**PLAIN, "stop": ""}, 400, "stop", "empty"),
    ({**PLAIN, "stop": ["a" * 1001]}, 400, "stop", "at most 1000 characters"),
    ({**PLAIN, "n": 2}, 400, "n", "several requests"),
    ({**PLAIN, "n": True}, 400, "n", "True"),
    ({**PLAIN, "logprobs": 3}, 400, "logprobs", "logprobs is 3"),
    ({**PLAIN, "echo": True}, 400, "echo", "not answered"),
    ({**PLAIN, "tools": [{}]}, 400, "tools", "not answered"),
    ({**PLAIN, "foo": 1}, 400, "foo", "no field 'foo'"),
    ({**PLAIN, "max_token": 1}, 400, "max_token", "did you mean 'max_tokens'"),
    ({**PLAIN, "stream_options": {"x": 1}}, 400, "stream_options.x", "no field 'x'"),
    ({**PLAIN, "stream_options": {}}, 400, "stream_options", "stream: true"),
    (
        {**PLAIN, "stream_options": {"include_usage": True}, "stream": False},
        400,
        "stream_options",
        "stream: true",
    ),
    (
        {**PLAIN, "stream_options": {"include_obfuscation": True}, "stream": True},
        400,
        "stream_options.include_obfuscation",
        "not answered",
    ),
    (
        {**PLAIN, "stream_options": {"include_obfuscation": 0}, "stream": True},
        400,
        "stream_options.include_obfuscation",
        "true or false",
    ),
    ({**PLAIN, "prediction": "a"}, 400, "prediction", "content"),
    ({**PLAIN, "tinyspec": {"method": "lmla"}}, 400, "tinyspec.method", "did you mean 'llma'"),
    ({**PLAIN, "tinyspec": {"method": "sot"}}, 400, "tinyspec.method", "extend one text"),
    ({**PLAIN, "tinyspec": {"method": "sarathi"}}, 400, "tinyspec.method", "--policy sarathi"),
    ({**PLAIN, "tinyspec": {"knobs": {"seed": 1}}}, 400, "tinyspec.knobs", "no knob 'seed'"),
    (
        {**PLAIN, "tinyspec": {"method": "medusa", "knobs": {"head": "~"}}},
        400,
        "tinyspec.knobs",
        "no knob 'head'",
    ),
    ({**PLAIN, "tinyspec": {"draft": "gpt"}}, 400, "tinyspec.draft", "apprentice"),
    ({**PLAIN, "tinyspec": {"x": 1}}, 400, "tinyspec.x", "no field 'x'"),
    (
        {**PLAIN, "tinyspec": {"method": "rest", "knobs": {"datastore": "store"}}},
        400,
        "tinyspec.knobs.datastore",
        "names no file",
    ),
    ({**PLAIN, "model": "gpt-4"}, 404, "model", "storyteller"),
]


@pytest.mark.parametrize(("body", "status", "param", "words"), WRONG)
def test_what_is_wrong_is_named(
    story: Served, body: Any, status: int, param: str | None, words: str
) -> None:
    error = error_of(story.post(COMPLETIONS, body), status)
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_prompt_as_long_as_the_context_is_told_both_numbers(talker: Served) -> None:
    reply = talker.post(COMPLETIONS, {"prompt": [5] * 96})
    error = error_of(reply, 400)
    assert error["code"] == "context_length_exceeded" and error["message"].count("96") == 2
    assert talker.post(COMPLETIONS, {"prompt": [5] * 95, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("field", ["prompt", "messages", "prediction"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    talker: Served, tiny: Model, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Encoding a long text would hold up all other clients."""
    encoded, encode = list[str](), Tokenizer.encode

    def note(tokenizer: Tokenizer, text: str, **more: Any) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text, **more)

    most = 96 * max(len(tiny.tokenizer.token_text(id).encode()) for id in range(256, 300))
    monkeypatch.setattr(Tokenizer, "encode", note)
    for size in (most + 1, 300_000):
        encoded.clear()
        text = "é" * (size // 2) + "a" * (size % 2)  # bytes count, not characters
        bodies: dict[str, dict[str, Any]] = {
            "prompt": {**PLAIN, "prompt": ["a", text]},
            "messages": {"messages": [{"role": "user", "content": text[4:]}]},
            "prediction": {**PLAIN, "prediction": {"type": "content", "content": text}},
        }
        body = bodies[field]
        if field == "messages":
            body["messages"].append({"role": "user", "content": ""})  # two roles of four bytes
        error = error_of(talker.post(CHAT if field == "messages" else COMPLETIONS, body), 400)
        assert error["param"] == field and error["code"] == "context_length_exceeded"
        assert f"{size} bytes" in error["message"] and f"{most}, in 96 tokens" in error["message"]
        assert encoded == []
    fits = {**PLAIN, "prediction": {"type": "content", "content": "a" * most}}
    assert talker.post(COMPLETIONS, fits).status_code == 200


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": 5, "content": "a"}]}, "messages[1]"),
    ({"messages": [{**HELLO[0], "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": HELLO, "logprobs": 1}, "logprobs"),
    ({"messages": HELLO, "max_tokens": -5, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), WRONG_CHATS)
def test_what_is_wrong_with_a_chat_is_named(
    talker: Served, body: dict[str, Any], param: str
) -> None:
    assert error_of(talker.post(CHAT, body), 400)["param"] == param


def test_a_model_without_a_template_says_so(story: Served) -> None:
    error = error_of(story.post(CHAT, {"messages": HELLO}), 400)
    assert "no chat template" in error["message"]


HOSTILE = [
    True, 0, -1, 2**63, 1e308, "", "a", "\x00\ufffd", "1", [], [None], [[]], [[[1]]], ["a", 1], [1.5],
    [2**64 - 1], {}, {"": None}, {"type": "content", "content": []}, {"method": 1}, {"knobs": []},
    {"knobs": {"": 1}}, {"include_usage": 1},
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(api.COMMON | api.IGNORED | api.NEUTRAL.keys() | {"prompt"}))
def test_no_value_of_a_field_is_a_defect(talker: Served, name: str) -> None:
    """Whatever its type, it is answered, or is error 400 or 404 in the API's form."""
    with httpx.Client(base_url=talker.url, timeout=PATIENCE) as client:
        for value in HOSTILE:
            reply = client.post(COMPLETIONS, json={**PLAIN, name: value})
            if reply.status_code != 200:
                error_of(reply, 404 if name == "model" and isinstance(value, str) else 400)


@pytest.mark.parametrize("method", ["sequoia", "ee_llm"])
def test_no_value_of_a_knob_is_a_defect(story: Served, method: str) -> None:
    knobs = [knob.name for knob in tinyspec.technique.find_technique(method).knobs]
    with httpx.Client(base_url=story.url, timeout=PATIENCE) as client:
        for name in knobs:
            for value in HOSTILE:
                own = {"method": method, "knobs": {name: value}}
                reply = client.post(COMPLETIONS, json={**PLAIN, "tinyspec": own})
                if reply.status_code != 200:
                    error_of(reply, 400)


def test_unknown_paths_and_methods_of_http(story: Served) -> None:
    assert "/nope" in error_of(story.get("/nope"), 404)["message"]
    error_of(story.get(COMPLETIONS), 405)
    error_of(story.get("/health/"), 404)
    error_of(story.post("/v1/models", {}), 405)


def test_the_served_model_is_listed(story: Served) -> None:
    client = story.client()
    assert [model.id for model in client.models.list()] == ["storyteller"]
    found = client.models.retrieve("storyteller")
    assert found.tinyspec["drafts"] == ["apprentice"] and found.tinyspec["context"] == 512
    with pytest.raises(openai.NotFoundError, match="storyteller"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="storyteller"):
        client.completions.create(model="gpt-4", prompt="a")


def test_a_body_too_large_is_not_read(story: Served) -> None:
    body = {"prompt": "a" * api.BODY_LIMIT}
    assert error_of(story.post(COMPLETIONS, body), 413)["code"] == "body_too_large"


def test_a_key_is_asked_for(tiny: Model) -> None:
    with serving(tiny, key="open sesame") as served:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "open sesame"}):
            reply = served.post(COMPLETIONS, PLAIN, headers=headers)
            assert error_of(reply, 401)["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        error_of(served.get("/v1/models"), 401)
        with pytest.raises(openai.AuthenticationError):
            served.client("wrong").models.list()
        assert served.client("open sesame").models.list().data
        assert served.get("/health").status_code == 200, "who watches it needs no key"


def test_a_key_may_have_any_letters(tiny: Model) -> None:
    """A client sends UTF-8; spaces at the ends of a header are no part of it."""
    with serving(tiny, key=" schlüssel") as served:
        right = {"Authorization": b"Bearer " + "schlüssel".encode()}
        assert served.get("/v1/models", headers=right).status_code == 200


def test_knobs_of_the_server_hold_however_a_client_spells_the_method(tiny: Model) -> None:
    with serving(tiny, method="llma", knobs={"k": 2}) as served:
        for name in ("llma", "LLMA", "prompt_lookup"):
            body = {"prompt": "the cat", "max_tokens": 8, "tinyspec": {"method": name}}
            reply = served.post(COMPLETIONS, body).json()
            assert reply["tinyspec"]["method"] == "llma"
            assert reply["tinyspec"]["drafted"] <= 2 * reply["tinyspec"]["target_calls"]


PROFILE = batched.BatchProfile(MeasuredRounds({1: [1.0, 1.1, 1.2]}, {1: 0.1}), [0.8, 0.6])


def test_no_request_begins_a_measurement(story: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others would wait meanwhile. What measures nothing is answered."""
    monkeypatch.setattr(batched, "measure_batches", lambda *given: pytest.fail("it measured"))
    for method in ("synergy", "smartspec"):
        reply = story.post(COMPLETIONS, {**PLAIN, "tinyspec": {"method": method}})
        error = error_of(reply, 400)
        assert error["param"] == "tinyspec.method"
        assert f"--method {method}" in error["message"]
        assert ("table" in error["message"]) == (method == "synergy")
    for method, knobs in (
        ("synergy", {"table": "2@1"}),
        ("bass", {}),
        ("tetris", {}),
        ("auto", {}),
    ):
        own = {"method": method, "knobs": knobs}
        reply = story.post(COMPLETIONS, {**PLAIN, "max_tokens": 4, "tinyspec": own})
        assert reply.status_code == 200, reply.text


def test_the_servers_own_method_is_measured_once_with_its_own_knobs(
    storyteller: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, drafts = list[str](), [tinyspec.load("apprentice"), tinyspec.load("apprentice")]
    drafts[1].name = "other"

    def note(draft: str, *given: Any) -> batched.BatchProfile:
        measured.append(draft)
        return PROFILE

    monkeypatch.setattr(batched, "measure_batches", note)
    with serving(storyteller, drafts, method="synergy", knobs={"longest": 2}) as served:
        for own in (
            {},
            {"method": "synergy"},
            {"knobs": {"longest": 2}},
            {"draft": "apprentice"},
            {"knobs": {"longest": 5, "table": "1@1"}, "draft": "other"},
        ):
            reply = served.post(COMPLETIONS, {**PLAIN, "max_tokens": 4, "tinyspec": own})
            assert reply.status_code == 200, reply.text
        for own in ({"knobs": {"longest": 3}}, {"draft": "other"}):
            error = error_of(served.post(COMPLETIONS, {**PLAIN, "tinyspec": own}), 400)
            assert "leave its knobs and draft out" in error["message"]
    assert measured == ["apprentice"]


def test_the_methods_that_measure_are_known_by_their_cards() -> None:
    cards = tinyspec.technique.load_techniques().values()
    calling = {card.name for card in cards if "find_profile" in card.build.__globals__}
    assert calling == {"synergy", "smartspec"}
    assert calling == {card.name for card in cards if engine._measures_models(card, {"table": ""})}


def test_methods_that_the_model_always_refuses_are_not_listed(tiny: Model) -> None:
    listed = engine.ServingEngine(tiny).list_methods()
    assert {"speed", "smartspec"}.isdisjoint(listed) and {"synergy", "bass", "llma"} <= {*listed}
    assert "smartspec" in engine.ServingEngine(tiny, method="smartspec").list_methods()
    config = replace(tiny.config, extra={"repeat": 2})
    repeated = Model(config, Model.random(config).weights, tiny.tokenizer, "repeated")
    assert "speed" in engine.ServingEngine(repeated).list_methods()


@pytest.mark.slow
def test_a_method_that_plans_for_a_batch_measures_before_the_first_request(
    storyteller: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str]()
    real = batched.measure_batches

    def note(draft: str, *given: Any) -> Any:
        measured.append(draft)
        return real(draft, *given)

    monkeypatch.setattr(batched, "measure_batches", note)
    draft = tinyspec.load("apprentice")
    its = engine.ServingEngine(storyteller, [draft], method="synergy")
    assert measured == []
    its.run_first_batch()
    assert measured == ["apprentice"]
    with serving(storyteller, [draft], method="synergy") as served:
        reply = served.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 8}).json()
    assert reply["tinyspec"]["method"] == "synergy"
    assert measured == ["apprentice"], "the request measured nothing again"


def test_a_head_that_does_not_fit_is_said_before_the_server_starts(tiny: Model) -> None:
    with pytest.raises(TinyspecError, match="medusa"):
        engine.ServingEngine(tiny, method="medusa")


def test_a_defect_is_told_without_its_words(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client gets 500, the log gets the traceback, and the others get their texts."""
    begin = engine.start_generation

    def fail(model: Model, ids: list[int], **options: Any) -> Any:
        if options["seed"] == 13:
            raise RuntimeError("another client's secret")
        return begin(model, ids, **options)

    monkeypatch.setattr(engine, "start_generation", fail)
    with serving(tiny) as served, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "the cat", "max_tokens": 8}
        other = pool.submit(served.post, COMPLETIONS, body)
        for stream in (False, True):
            reply = served.post(COMPLETIONS, {**body, "seed": 13, "stream": stream})
            error_of(reply, 500)
            assert "secret" not in reply.text
        expected = alone(tiny, "the cat", max_new_tokens=8)
        assert other.result().json()["choices"][0]["text"] == expected.text
    assert "another client's secret" in caplog.text


def test_a_failure_in_a_stream_is_its_last_event(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any) -> Iterator[Any]:
        yield engine.Started()
        yield api.Piece([("a", "plain")], (5,), [0.0], ("plain",))
        raise RuntimeError("secret")

    monkeypatch.setattr(engine, "decode_text", write)
    with serving(tiny) as served:
        reply = served.post(COMPLETIONS, {**PLAIN, "stream": True})
    first, last = reply.text.strip().split("\n\n")
    assert json.loads(first[6:])["choices"][0]["text"] == "a"
    assert json.loads(last[6:])["error"]["code"] == "internal_error" and "secret" not in last


# ---------------------------------------------------------------------- many requests


def test_a_full_queue_is_told_when_to_come_back(tiny: Model, gate: Gate) -> None:
    body = {"prompt": "the cat", "max_tokens": 4}
    with serving(tiny, max_live=1, max_queued=1) as served, ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(served.post, COMPLETIONS, body) for _ in range(2)]
        scheduler = served.engine.scheduler
        wait_until(lambda: scheduler.live == scheduler.queued == 1)
        reply = served.post(COMPLETIONS, body)
        error = error_of(reply, 429)
        assert error["type"] == "rate_limit_error" and int(reply.headers["retry-after"]) >= 1
        assert "1 texts run and 1 wait" in error["message"]
        with pytest.raises(openai.RateLimitError):
            served.client().completions.create(model=tiny.name, prompt="a")
        assert (
            "send fewer"
            in error_of(served.post(COMPLETIONS, {"prompt": ["a"] * 3}), 400)["message"]
        )
        gate.open()
        assert [reply.result().status_code for reply in replies] == [200, 200]
        assert served.post(COMPLETIONS, body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_text_within_one_pass(
    tiny: Model, gate: Gate, stream: bool
) -> None:
    with serving(tiny, method="autoregressive") as served:
        body = {"prompt": "the cat", "max_tokens": 80, "stream": stream}
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as raw:
            content = json.dumps(body).encode()
            head = (
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
            )
            raw.sendall(head.encode() + content)
            gate.let(3)
            wait_until(lambda: gate.begun == 4)
            if stream:
                assert raw.recv(100)
            (ticket,) = served.engine.scheduler._live.values()
        wait_until(lambda: ticket.is_cancelled)
        gate.open()
        wait_until(lambda: ticket.is_done)
        assert gate.begun == 4, "the pass that ran was the last one"
        assert served.metrics()['requests_total{outcome="cancelled"}'] == 1


def test_a_client_that_goes_gives_its_place_in_the_queue_back(tiny: Model, gate: Gate) -> None:
    with serving(tiny, max_live=1) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.post, COMPLETIONS, {"prompt": "the cat", "max_tokens": 4})
        scheduler = served.engine.scheduler
        wait_until(lambda: scheduler.live == 1)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(served.url + COMPLETIONS, json=PLAIN, timeout=0.5)
        wait_until(lambda: scheduler.queued == 0)
        gate.open()
        assert first.result().status_code == 200


def test_the_metrics_add_up(tiny: Model) -> None:
    with serving(tiny, method="llma") as served, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "the cat and the cat and the", "max_tokens": 12}
        replies = [
            reply.json() for reply in pool.map(lambda _: served.post(COMPLETIONS, body), range(4))
        ]
        error_of(served.post(COMPLETIONS, {"prompt": 5}), 400)
        told = served.metrics()
    usage = [reply["usage"] for reply in replies]
    figures = [reply["tinyspec"] for reply in replies]
    assert told['requests_total{outcome="finished"}'] == 4
    assert told['rejected_total{status="400"}'] == 1
    assert told["prompt_tokens_total"] == sum(one["prompt_tokens"] for one in usage)
    assert told["tokens_total"] == sum(one["completion_tokens"] for one in usage)
    assert told["draft_tokens_total"] == sum(one["drafted"] for one in figures) > 0
    assert told["accepted_tokens_total"] == sum(one["accepted"] for one in figures) > 0
    by_position = [
        told[f'accepted_at_position_total{{position="{at}"}}']
        for at in range(1, 1 + sum(name.startswith("accepted_at_position") for name in told))
    ]
    assert sum(by_position) == told["accepted_tokens_total"]
    assert told["drafts_total"] >= by_position[0]
    assert by_position == sorted(by_position, reverse=True), "a position needs all before it"
    # Each text reads all but the last token of its prompt, then scores a token and its draft.
    calls, drafted = (sum(one[name] for one in figures) for name in ("target_calls", "drafted"))
    assert told["rows_total"] == told["prompt_tokens_total"] - 4 + calls + drafted
    assert 0 < told["passes_total"] <= calls + 4
    assert told["live"] == told["queued"] == 0


def test_metrics_are_in_the_format_of_prometheus(talker: Served) -> None:
    lines = talker.get("/metrics").text.splitlines()
    for name in engine.METRICS:
        assert any(line.startswith(f"# HELP tinyspec_{name} ") for line in lines)
        assert any(line.startswith(f"# TYPE tinyspec_{name} ") for line in lines)
    values = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r'tinyspec_[a-z_]+(\{[a-z]+="[a-z0-9]+"\})? \d+', v) for v in values)


# ---------------------------------------------------------------------- the end


def test_a_server_that_stops_finishes_what_runs(tiny: Model, gate: Gate) -> None:
    body = {"prompt": "the cat", "max_tokens": 6}
    with serving(tiny) as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, COMPLETIONS, body)
        wait_until(lambda: gate.begun == 1)
        served.server.handle_exit(signal.SIGTERM, None)
        error_of(served.get("/health"), 503)
        assert error_of(served.post(COMPLETIONS, body), 503)["code"] == "draining"
        gate.open()
        expected = alone(tiny, "the cat", max_new_tokens=6)
        assert running.result().json()["choices"][0]["text"] == expected.text
        served.thread.join(PATIENCE)
        assert not served.thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_second_signal_cuts_what_still_runs(tiny: Model, gate: Gate, stream: bool) -> None:
    body = {"prompt": "the cat", "max_tokens": 80, "stream": stream}
    with serving(tiny, method="autoregressive") as served, ThreadPoolExecutor(1) as pool:
        running = pool.submit(served.post, COMPLETIONS, body)
        gate.let(3)
        wait_until(lambda: gate.begun == 4)
        (ticket,) = served.engine.scheduler._live.values()
        served.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: served.server.is_waiting)
        assert not ticket.is_cancelled, "the first signal waits"
        served.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: ticket.is_cancelled)
        gate.open()
        reply = running.result()
    if stream:
        last = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "draining"
    else:
        assert error_of(reply, 503)["code"] == "draining"


@pytest.mark.slow
def test_sigterm_ends_the_command_with_code_0() -> None:
    command = [sys.executable, "-m", "tinyspec", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url is not None, line

        def is_ready() -> bool:
            try:
                return bool(httpx.get(f"{url[0]}/health").status_code == 200)
            except httpx.ConnectError:
                return False

        wait_until(is_ready)
        reply = httpx.post(url[0] + COMPLETIONS, json=PLAIN, timeout=PATIENCE)
        assert reply.status_code == 200
        host, port = url[0].removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:  # sends half of a body
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
            slow.sendall(head.encode() + b"{")
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
            assert process.stderr.read() == ""


# ---------------------------------------------------------------------- the command


def test_the_command_says_what_is_wrong() -> None:
    assert "sarathi" in failed(run("serve", "--policy", "sarati"))
    assert "no knob 'x'" in failed(run("serve", "--policy", "fcfs", "--policy-knob", "x=1"))
    assert "NAME=VALUE" in failed(run("serve", "--policy-knob", "budget"))
    assert "extend one text" in failed(run("serve", "--method", "sot"))
    assert "did you mean 'llma'" in failed(run("serve", "--method", "lmla"))
    assert "empty" in failed(run("serve", "--api-key", ""))
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert "--port" in failed(run("serve", "--port", port))


def test_a_reply_does_not_wait_for_an_acknowledgement() -> None:
    """asyncio sends small packets at once where the socket's protocol is named."""
    with app.open_socket("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP
        with socket.create_connection(listening.getsockname()), pytest.raises(TinyspecError):
            app.open_socket("127.0.0.1", listening.getsockname()[1])


def test_an_address_that_others_can_reach_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.GracefulServer, "run", lambda *_, **__: None)
    assert "warning" not in run("serve", "--port", "0").stderr
    told = run("serve", "--port", "0", "--host", "0.0.0.0").stderr
    assert "warning: 0.0.0.0" in told and "without a key" in told
    told = run("serve", "--port", "0", "--host", "0.0.0.0", "--api-key", "k").stderr
    assert "warning: 0.0.0.0" in told and "without a key" not in told


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("fifo", {}, "known: aligned, fcfs"),
        ("lockstep", {"budget": 4}, "it has none"),
        ("fcfs", {"budgt": 4}, "did you mean 'budget'"),
        ("fcfs", {"budget": 0}, "at least 1"),
        ("aligned", {"patience": "long"}, "'long'"),
        ("sarathi", {"budget": -1}, "budget"),
        ("autoregressive", {}, "there is no policy"),
    ],
)
def test_what_is_wrong_with_a_policy_is_named(name: str, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(TinyspecError, match=re.escape(words)):
        find_policy(name, **knobs)


def test_the_table_of_fields_is_that_of_the_code() -> None:
    table = set(re.findall(r"(?m)^    ([a-z_]+)  ", (api.__doc__ or "").split("An error is")[0]))
    fields = api.COMMON | api.IGNORED | api.NEUTRAL.keys()
    own = {"field", "usage"}  # the header, and the fields of replies
    assert table - own == fields | {"prompt", "messages", "max_completion_tokens"}
    help = run("serve", "--help").stdout
    for name in api.COMMON - {"stream_options", "tinyspec"}:
        assert name in help, name


# ---------------------------------------------------------------------- the page


def test_the_page_needs_nothing_else(talker: Served) -> None:
    reply = talker.get("/")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.search(r"https?://|<link|\bsrc=|@import|url\(|innerHTML", reply.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    driver = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[look]'")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    with driver.sync_playwright() as started:
        running = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


def send_in_page(page: Any, text: str, method: str, tokens: int = 24) -> Any:
    """Send a text from the page, wait for its end, and return the last answer."""
    page.fill("#method", method)
    page.fill("#tokens", str(tokens))
    page.fill("#message", text)
    before = page.locator("[data-ended]").count()
    page.click("#send")
    page.locator("[data-ended]").nth(before).wait_for(state="attached", timeout=PATIENCE * 1000)
    return page.locator("article").last


def test_the_page_colours_what_was_accepted(
    browser: Any, story: Served, storyteller: Model
) -> None:
    page = browser.new_page()
    page.goto(story.url)
    page.locator("#title", has_text="storyteller").wait_for(timeout=PATIENCE * 1000)
    answer = send_in_page(page, PROMPT, "speculative_decoding")
    expected = alone(storyteller, PROMPT, max_new_tokens=24, method="speculative_decoding")
    assert answer.locator(".text").text_content() == PROMPT + expected.text
    spans = answer.locator(".text span").all()[1:]
    shown = [span.get_attribute("class") for span in spans]
    assert shown == expected.trace.origins
    colours = {
        kind: answer.locator(f".{kind}").first.evaluate("node => getComputedStyle(node).color")
        for kind in {"accepted", "recovered", "bonus"} & set(shown)
    }
    assert len(set(colours.values())) == len(colours) >= 2
    assert "target calls" in answer.locator("p").text_content()
    assert page.evaluate("document.documentElement.dataset.error") is None
    page.close()


def test_the_page_holds_a_conversation_and_shows_errors(
    browser: Any, talker: Served, tiny: Model
) -> None:
    page = browser.new_page()
    page.goto(talker.url)
    page.locator("#about", has_text="96 tokens").wait_for(timeout=PATIENCE * 1000)
    answer = send_in_page(page, "the <b>cat</b>", "autoregressive", 6)
    messages = [{"role": "user", "content": "the <b>cat</b>"}]
    first = alone(tiny, messages, max_new_tokens=6).text
    assert answer.locator(".text").text_content() == first
    answer = send_in_page(page, "a", "autoregressive", 4)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "a"}]
    expected = alone(tiny, messages, max_new_tokens=4, seed=1).text
    assert answer.locator(".text").text_content() == expected
    answer = send_in_page(page, "a", "lmla", 4)
    assert "did you mean 'llma'" in answer.locator(".error").text_content()
    page.close()
