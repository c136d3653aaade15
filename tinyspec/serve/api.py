"""What requests ask and what replies say: the formats of OpenAI's API, field by field.

A field that a request leaves out, or sets to null, has the default of `tinyspec generate`, and the
text is the one that `tinyspec.generate` gives, whoever else is served at the same time: always at
temperature 0, and above it as far as a seed decides the text (`tinyspec methods` says it).

    field                  answer
    model                  the served model's name, or left out; another: 404
    prompt                 completions: a text, token ids, or a list of these; prompt i: seed + i
    messages               chat: role and content; the content is a text, or parts of type text
    max_tokens             128 if left out. The text ends earlier where the context is full
    max_completion_tokens  chat: the newer name of max_tokens
    temperature            0 if left out: greedy. OpenAI's default is 1
    top_p                  answered
    top_k                  answered, also min_p and repetition_penalty, as by other local servers
    min_p                  answered
    repetition_penalty     answered
    seed                   0 if left out: the same request gives the same reply
    stop                   a text, or up to 4, of at most 1,000 characters each; none is sent
    stream                 answered: server-sent events, one for each round, then [DONE]
    stream_options         with stream: true only. include_usage is answered; include_obfuscation is
                           false only
    logprobs               true (completions: 0): log p of each token, before the sampling settings
    top_logprobs           0 only: other tokens are not listed
    prediction             type "content": a text that the method may copy from (llma, auto, rest);
                           llma is the method if none is named and the server's does not copy
    user                   ignored, also metadata
    metadata               ignored
    tinyspec               own fields: method, knobs (by name), draft (a served draft model's name)

    n                      1 only: send several requests, they share forward passes
    best_of                1 only
    echo                   false only
    suffix                 none
    presence_penalty       0 only: repetition_penalty is answered
    frequency_penalty      0 only
    logit_bias             {} only
    tools                  [] only
    tool_choice            none or auto
    parallel_tool_calls    true or false: there are no tools
    functions              [] only
    function_call          none
    response_format        {"type": "text"} only
    modalities             ["text"] only
    store                  false only: nothing is kept
    service_tier           auto or default

Any other field, and any other value of those in the second list, is error 400, which names it. Each
request is computed from its first token: the cache of an earlier one is not used again (prefix
caching is left out). A request names no file on the server's disk.

A reply has OpenAI's fields, and one of its own:

    tinyspec   method, seed, target_calls, tokens_per_call (tau), drafted, accepted, acceptance;
               of several prompts, all together
    usage      with a prediction also completion_tokens_details: accepted_prediction_tokens and
               rejected_prediction_tokens are the draft tokens that were accepted and rejected
    logprobs   chat: `bytes` of each token, also of half a character; null: a control token, which
               has no text. Completions: `text_offset`, where the token's first character stands in
               the reply's text, counted from 0 (the prompt is no part of it). A token that a stop
               string cut off has the place that it would have

In a stream, `tinyspec` says of each event how many tokens are accepted, recovered, bonus or plain
(`decoding/trace.py` explains these), and in `parts` which text is whose. The last event of a choice
has the figures. A piece never ends in half a character, nor in what may become a stop string.

An error is {"error": {message, type, param, code}}.

Source: platform.openai.com/docs/api-reference (completions, chat, streaming).
"""

import codecs
import json
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from tinyspec.decoding.trace import Origin, Statistics
from tinyspec.errors import TinyspecError, describe_value, suggest_nearest
from tinyspec.generation import Generation
from tinyspec.lm.tokenizer import Tokenizer

BODY_LIMIT = 1 << 20  # bytes of a request: some 200,000 tokens, more than any context here
PROMPT_LIMIT = 64  # prompts of one request
STOP_LIMIT = 4  # stop strings, as in OpenAI's API
STOP_CHARACTERS = 1000  # of each; a longer one is looked for in ever more text, at every token
NUMBER_BITS = 64  # of a whole number: seeds have as many
RETRY_SECONDS = 1  # a client that finds the queue full may come back after this time

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
COMMON = {
    *("model", "max_tokens", "stream", "stream_options", "logprobs", "prediction", "tinyspec"),
    *SAMPLING,
}
IGNORED = {"user", "metadata"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
}
"""Fields of OpenAI's API that are not answered, with the values that ask for nothing."""

HINTS = {
    "n": "send several requests instead, they share forward passes",
    "presence_penalty": "use repetition_penalty",
    "frequency_penalty": "use repetition_penalty",
}
OWN = {"method", "knobs", "draft"}
FINISH_REASONS = {"eos": "stop", "stop": "stop"}  # all others are "length"


class ApiError(Exception):
    """An error that a client is told of: a status, and what stands in the reply.

    param  the field that is wrong, if it is one
    code   a word for programs
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        text = str(TinyspecError(message))  # on one line, whatever it quotes
        super().__init__(text)
        self.status, self.headers = status, dict(headers or {})
        self.body = {"error": {"message": text, "type": type, "param": param, "code": code}}


def unavailable(message: str) -> ApiError:
    """Return error 503: the server stops."""
    return ApiError(message, status=503, type="server_error", code="draining")


def internal_error() -> ApiError:
    """Return error 500. It says nothing of what happened: that may quote another client's text."""
    message = "the server failed at this request; its log says why"
    return ApiError(message, status=500, type="server_error", code="internal_error")


def full_queue(running: int, waiting: int) -> ApiError:
    """Return error 429: as many requests wait as may."""
    return ApiError(
        f"{running} texts run and {waiting} wait, and the server takes no more: try again in "
        f"{RETRY_SECONDS} s",
        status=429,
        type="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )


# ---------------------------------------------------------------------- requests


class Asked(NamedTuple):
    """A request that was read.

    prompts  texts, token ids, or the messages of a chat
    options  what `start_generation` takes, without the draft
    draft    the name of a served draft model; None: those that the server has
    """

    is_chat: bool
    prompts: list[Any]
    options: dict[str, Any]
    draft: str | None
    stream: bool
    include_usage: bool
    logprobs: bool


def read_body(body: bytes) -> dict[str, Any]:
    """Return the object that a request's body holds. Raises ApiError if it is none."""

    def refuse_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number of JSON")

    def read_int(digits: str) -> int:
        if len(digits) > 20 or (number := int(digits)).bit_length() > NUMBER_BITS:
            raise ValueError(f"a whole number of {len(digits)} digits has over {NUMBER_BITS} bits")
        return number

    def read_float(digits: str) -> float:
        if not math.isfinite(number := float(digits)):
            raise ValueError("a number is too large")
        return number

    try:
        text = body.decode("utf-8")
        found = json.loads(
            text, parse_constant=refuse_constant, parse_int=read_int, parse_float=read_float
        )
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode("utf-8")  # fails for half a character
    except RecursionError:
        raise ApiError("the body is no JSON that can be read: it nests too deeply") from None
    except UnicodeError:
        raise ApiError("the body is no JSON in UTF-8, or has half a character in it") from None
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(f"the body is {describe_value(found)}: it must be a JSON object")
    return found


def read_request(body: Mapping[str, Any], is_chat: bool, served: str) -> Asked:
    """Return what a request asks. Raises ApiError, which names the field that is wrong.

    served  the name of the model
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, is_chat)
    model = _take(given, "model", str, "the name of a model", served)
    if model != served:
        message = f"there is no model {describe_value(model)} here: this server has '{served}'"
        raise ApiError(message, status=404, param="model", code="model_not_found")
    options: dict[str, Any] = {name: given[name] for name in SAMPLING if name in given}
    options["stop"] = _read_stops(given.get("stop", []))
    seed = _take(given, "seed", int, "a whole number", 0)
    budget = _read_budget(given, "max_tokens")
    if "max_completion_tokens" in given:
        budget = _read_budget(given, "max_completion_tokens")
    options |= {"seed": seed, "max_new_tokens": budget}
    if "prediction" in given:
        options["references"] = [_read_prediction(given["prediction"])]
    own = _take(given, "tinyspec", dict, "an object", {})
    _check_keys(own, OWN, "tinyspec")
    own = {name: value for name, value in own.items() if value is not None}
    if "method" in own:
        options["method"] = _take(own, "method", str, "a method's name", "", "tinyspec.")
    options["knobs"] = _read_knobs(_take(own, "knobs", dict, "an object", {}, "tinyspec."))
    streaming = _take(given, "stream_options", dict, "an object", {})
    _check_keys(streaming, {"include_usage", "include_obfuscation"}, "stream_options")
    flag, place = "true or false", "stream_options."
    stream = _take(given, "stream", bool, flag, False)
    if "stream_options" in given and not stream:
        message = "stream_options needs stream: true: leave it out, or ask for a stream"
        raise ApiError(message, param="stream_options")
    if _take(streaming, "include_obfuscation", bool, flag, False, place):
        name = f"{place}include_obfuscation"
        message = f"{name} is true, which is not answered: give false, or leave it out"
        raise ApiError(message, param=name, code="unsupported_value")
    return Asked(
        is_chat=is_chat,
        prompts=[_read_messages(given)] if is_chat else _read_prompts(given),
        options=options,
        draft=_take(own, "draft", str, "a draft model's name", None, "tinyspec."),
        stream=stream,
        include_usage=_take(streaming, "include_usage", bool, flag, False, place),
        logprobs=_read_logprobs(given, is_chat),
    )


def _check_names(given: Mapping[str, Any], is_chat: bool) -> None:
    """Raise ApiError for an unknown field, and for one of OpenAI's that is not answered."""
    known = COMMON | ({"messages", "max_completion_tokens"} if is_chat else {"prompt"})
    _check_keys(given, known | IGNORED | NEUTRAL.keys())
    for name in given.keys() & NEUTRAL.keys():
        value = given[name]
        same_kind = (type(value) is type(one) or _is_number(value, one) for one in NEUTRAL[name])
        neutral = zip(NEUTRAL[name], same_kind, strict=True)
        if not any(same and value == one for one, same in neutral):
            only = " or ".join(json.dumps(one) for one in NEUTRAL[name])
            hint = HINTS.get(name, f"give {only}, or leave it out" if only else "leave it out")
            message = f"{name} is {describe_value(value)}, which is not answered: {hint}"
            raise ApiError(message, param=name, code="unsupported_value")


def _is_number(*values: Any) -> bool:
    return all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)


def _check_keys(given: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    lead = f"{where}." if where else ""
    for name in given:
        if name not in known:
            place = f" in {where}" if where else ""
            message = f"there is no field {describe_value(name)}{place}: "
            message += suggest_nearest(name, known)
            raise ApiError(message, param=f"{lead}{name}"[:100], code="unknown_field")


def _take(
    given: Mapping[str, Any], name: str, kind: type, expected: str, default: Any, lead: str = ""
) -> Any:
    """Return a field, or the default. Raises ApiError unless it is of this type."""
    value = given.get(name, default)
    is_flag = kind is int and isinstance(value, bool)  # which is an int to Python
    if name in given and (is_flag or not isinstance(value, kind)):
        raise _wrong(f"{lead}{name}", value, expected)
    return value


def _wrong(name: str, value: Any, expected: str) -> ApiError:
    return ApiError(f"{name} is {describe_value(value)}: it must be {expected}", param=name)


def _read_budget(given: Mapping[str, Any], name: str) -> int:
    number: int = _take(given, name, int, "a whole number of at least 0", 128)
    if number < 0:
        raise _wrong(name, number, "a whole number of at least 0")
    return number


def _read_stops(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    expected = f"a text of at most {STOP_CHARACTERS} characters, or at most {STOP_LIMIT} of them"
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise _wrong("stop", stop, expected)
    if len(stops) > STOP_LIMIT or any(len(one) > STOP_CHARACTERS for one in stops):
        raise _wrong("stop", stop, expected)
    return stops


def _read_logprobs(given: Mapping[str, Any], is_chat: bool) -> bool:
    if is_chat:
        asked: bool = _take(given, "logprobs", bool, "true or false", False)
        return asked
    expected = "0: the log-probabilities of the text's own tokens; others are not listed"
    if _take(given, "logprobs", int, expected, 0) != 0:
        raise _wrong("logprobs", given["logprobs"], expected)
    return "logprobs" in given


def _read_prediction(prediction: Any) -> str:
    expected = '{"type": "content", "content": "a text"}'
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise _wrong("prediction", prediction, expected)
    _check_keys(prediction, {"type", "content"}, "prediction")
    return _read_content(prediction.get("content"), "prediction.content")


def _read_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return knobs by name. A value that names a file is the operator's to give."""
    for name, value in knobs.items():
        where = f"tinyspec.knobs.{name}"[:100]
        if not isinstance(value, (bool, int, float, str)):
            raise _wrong(where, value, "a number, a text, true or false")
        text = value if isinstance(value, str) else ""
        if text and (name == "datastore" or text.endswith(".json") or re.search(r"[/\\]", text)):
            message = f"{where}: a request names no file; `tinyspec serve --knob` does"
            raise ApiError(message, param=where)
    return dict(knobs)


def _read_prompts(given: Mapping[str, Any]) -> list[Any]:
    expected = "a text, a list of token ids, or a list of texts or of lists of ids"
    prompt = given.get("prompt")
    if "prompt" not in given:
        raise ApiError(f"there is no prompt: give {expected}", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong("prompt", prompt, expected)
    if _are_ids(prompt):
        return [prompt]
    if not all(isinstance(one, str) for one in prompt) and not all(map(_are_ids, prompt)):
        raise _wrong("prompt", prompt, expected)
    if len(prompt) > PROMPT_LIMIT:
        message = f"there are {len(prompt)} prompts: send at most {PROMPT_LIMIT} in a request"
        raise ApiError(message, param="prompt")
    return prompt


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _read_messages(given: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        expected = 'a list such as [{"role": "user", "content": "a text"}]'
        if "messages" not in given:
            raise ApiError(f"there are no messages: give {expected}", param="messages")
        raise _wrong("messages", messages, expected)
    read = list[dict[str, str]]()
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(where, message, 'such as {"role": "user", "content": "a text"}')
        present = {name: value for name, value in message.items() if value is not None}
        _check_keys(present, {"role", "content"}, where)
        content = _read_content(message.get("content"), f"{where}.content")
        read.append({"role": message["role"], "content": content})
    return read


def _read_content(content: Any, where: str) -> str:
    """Return a content, which is a text or a list of parts of type text."""
    if isinstance(content, str):
        return content
    expected = 'a text, or parts such as {"type": "text", "text": "a text"}'
    texts = list[str]()
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _wrong(where, content, expected)
        texts.append(text)
    return "".join(texts)


def explain(error: TinyspecError) -> ApiError:
    """Return error 400 for what `start_generation` found wrong. Its first word may be a field."""
    message = str(error).replace("max_new_tokens", "max_tokens")
    first = re.match(r"\w+", message)
    names = {*SAMPLING, "max_tokens", "prompt"}
    return ApiError(message, param=first[0] if first and first[0] in names else None)


# ---------------------------------------------------------------------- replies


class Piece(NamedTuple):
    """What a round added to a text.

    parts     text that may be shown, with the origin of the token that allowed it
    tokens    [k] the round's tokens
    logprobs  [k] log p of each
    origins   [k] where each came from
    """

    parts: list[tuple[str, Origin]]
    tokens: tuple[int, ...]
    logprobs: list[float]
    origins: tuple[Origin, ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


class TextPositions:
    """The positions, in a text that grows, of the first character of each of its tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.n_characters, self.has_begun = 0, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def locate(self, token: int) -> int:
        """Add a token, and return the position of its first character, perhaps begun before it."""
        own = self.tokenizer.token_bytes(token)
        if own and not self.has_begun:
            self.has_begun = True
            # SentencePiece's decoder drops the space at the beginning of a text.
            drops_space = own[:1] == b" " and self.tokenizer.decode([token])[:1] != " "
            self.n_characters -= int(drops_space)
        half, _ = self._utf8.getstate()
        until_first = (half + own[:1]).decode("utf-8", "replace")
        position = self.n_characters + max(len(until_first) - 1, 0)
        self.n_characters += len(self._utf8.decode(own))
        return max(position, 0)


@dataclass
class ReplyWriter:
    """Write the replies to one request."""

    asked: Asked
    model: str
    method: str
    tokenizer: Tokenizer
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    positions: dict[int, TextPositions] = field(default_factory=dict)  # by the index of the choice

    def write_reply(self, results: Sequence[Generation]) -> dict[str, Any]:
        """Return the whole reply."""
        choices = [self._write_choice(i, result) for i, result in enumerate(results)]
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        return {
            **self._head(kind),
            "choices": choices,
            "usage": self._usage(results),
            "tinyspec": self._figures(results),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        lead = "chatcmpl" if self.asked.is_chat else "cmpl"
        return {
            "id": f"{lead}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _write_choice(self, index: int, result: Generation) -> dict[str, Any]:
        content: dict[str, Any] = {"text": result.text}
        if self.asked.is_chat:
            content = {"message": {"role": "assistant", "content": result.text, "refusal": None}}
        return {
            "index": index,
            **content,
            "logprobs": self._write_logprobs(index, result.tokens, result.logprobs),
            "finish_reason": FINISH_REASONS.get(result.finish_reason, "length"),
        }

    def _write_logprobs(self, index: int, tokens: Sequence[int], logprobs: Sequence[float]) -> Any:
        """Return the log-probabilities of a choice's next tokens."""
        if not self.asked.logprobs:
            return None
        texts = [self.tokenizer.token_text(token) for token in tokens]
        if not self.asked.is_chat:
            positions = self.positions.setdefault(index, TextPositions(self.tokenizer))
            return {
                "tokens": texts,
                "token_logprobs": [*logprobs],
                "top_logprobs": None,
                "text_offset": [positions.locate(token) for token in tokens],
            }
        bytes_of = (list(self.tokenizer.token_bytes(token)) or None for token in tokens)
        content: list[dict[str, Any]] = [
            {"token": text, "logprob": logprob, "bytes": own, "top_logprobs": []}
            for text, logprob, own in zip(texts, logprobs, bytes_of, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _usage(self, results: Sequence[Generation]) -> dict[str, Any]:
        made = sum(len(result.tokens) for result in results)
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }
        if "references" in self.asked.options:
            stats = add_statistics(results)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            }
        return usage

    def _figures(self, results: Sequence[Generation], index: int = 0) -> dict[str, Any]:
        """Return the figures of results, of which the first is choice `index`: seed + index."""
        stats = add_statistics(results)
        return {
            "method": self.method,
            "seed": self.asked.options["seed"] + index,
            "target_calls": stats.target_calls,
            "tokens_per_call": stats.tokens_per_call,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "acceptance": stats.acceptance,
        }

    # ------------------------------------------------------------------ streams

    def write_opening(self) -> list[dict[str, Any]]:
        """Return the first events of a stream: in a chat, the role of each choice."""
        if not self.asked.is_chat:
            return []
        return [self._write_event([self._write_delta(0, {"role": "assistant", "content": ""})])]

    def write_piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the event of a round."""
        content = {"content": piece.text} if self.asked.is_chat else {"text": piece.text}
        logprobs = self._write_logprobs(index, piece.tokens, piece.logprobs)
        event = self._write_event([self._write_delta(index, content, logprobs=logprobs)])
        kinds = Counter(piece.origins)
        counts = {kind: kinds[kind] for kind in ("accepted", "recovered", "bonus", "plain")}
        parts = [{"text": text, "origin": origin} for text, origin in piece.parts if text]
        return event | {"tinyspec": {**counts, "parts": parts}}

    def write_end(self, index: int, result: Generation) -> dict[str, Any]:
        """Return the last event of a choice: why it ended, and its figures."""
        reason = FINISH_REASONS.get(result.finish_reason, "length")
        content: dict[str, Any] = {} if self.asked.is_chat else {"text": ""}
        event = self._write_event([self._write_delta(index, content, reason)])
        return event | {"tinyspec": self._figures([result], index)}

    def write_usage(self, results: Sequence[Generation]) -> list[dict[str, Any]]:
        """Return the event of the usage, if it was asked for."""
        if not self.asked.include_usage:
            return []
        return [self._write_event([]) | {"usage": self._usage(results)}]

    def _write_event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        usage = {"usage": None} if self.asked.include_usage else {}
        return {**self._head(kind), "choices": choices, **usage}

    def _write_delta(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None = None,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        inner = {"delta": content} if self.asked.is_chat else content
        return {"index": index, **inner, "logprobs": logprobs, "finish_reason": reason}


def add_statistics(results: Sequence[Generation]) -> Statistics:
    """Return the figures of several texts together."""
    total = Statistics()
    for result in results:
        total.target_calls += result.stats.target_calls
        total.drafted += result.stats.drafted
        total.accepted += result.stats.accepted
        total.emitted += result.stats.emitted
    return total
