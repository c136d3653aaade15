"""Check what a user hands to `generate`, `stream` and `translate`, before anything is computed.

Every error names the argument, what was given, and what is expected, in one line.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypeAlias

from tinyspec.errors import TinyspecError, describe_value
from tinyspec.familiar import hint_argument
from tinyspec.technique import Card

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids (a list, or a 1-D integer array or tensor), or chat messages."""

PROMPT = "a text, a list of token ids, or a list of chat messages"
IDS = "a list of token ids"
TOP_K_LIMIT = 2**63 - 1  # the largest number that the compiled sampler can hold
TOKEN_LIMIT = 2**31 - 1  # the largest id that the compiled kernels can hold


def wrong_argument(name: str, value: Any, expected: str) -> TinyspecError:
    """Return the error for an argument of a wrong type."""
    return TinyspecError(f"{name} is {describe_value(value)}: it must be {expected}")


def check_whole(name: str, value: Any, expected: str) -> int:
    """Return a whole number as an int. Raise TinyspecError for all else, also True and 2.0."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise wrong_argument(name, value, expected)


def check_number(name: str, value: Any, expected: str = "a number") -> Any:
    """Return a real number as it is. Raise TinyspecError for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_argument(name, value, expected)
    return value


def check_sampling(
    temperature: Any,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = 1.0,
) -> None:
    """Raise TinyspecError unless these are numbers. `SamplingParams` checks their ranges."""
    check_number("temperature", temperature, "a number of at least 0 (0 is greedy)")
    check_number("repetition_penalty", repetition_penalty, "a number above 0 (1 is off)")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None:
            check_number(name, value, "a number from 0 to 1 (leave it out: all)")
    expected = "a whole number of at least 1 (leave it out: all)"
    if top_k is not None and check_whole("top_k", top_k, expected) > TOP_K_LIMIT:
        raise wrong_argument(
            "top_k", top_k, f"a whole number from 1 to {TOP_K_LIMIT} (leave it out: all)"
        )


def check_budget(max_new_tokens: Any, seed: Any) -> None:
    """Raise TinyspecError unless the number of tokens and the seed are whole numbers."""
    if max_new_tokens is not None:
        expected = "a whole number of at least 0"
        if check_whole("max_new_tokens", max_new_tokens, expected) < 0:
            raise wrong_argument("max_new_tokens", max_new_tokens, "0 or more")
    check_whole("seed", seed, "a whole number (the same seed gives the same text)")


def check_ids(name: str, value: Any, expected: str = IDS) -> list[int]:
    """Return token ids as a list, from whole numbers or a 1-D integer array or tensor."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if "int" not in str(value.dtype) or len(value.shape) != 1:
            rows = f"a list of rows without padding: [{name}[0], ...]"
            several = f"; give its one row, {name}[0], or for several prompts {rows}"
            if tuple(value.shape[:-1]) != (1,):
                several = f"; for several, {rows}" if len(value.shape) == 2 else ""
            raise wrong_argument(name, value, f"a 1-D array of whole numbers{several}")
        return [int(token) for token in value.tolist()]
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise wrong_argument(name, value, expected)
    each = "a token id (a whole number)"
    return [check_whole(f"{name}[{place}]", token, each) for place, token in enumerate(value)]


def check_prompt(prompt: Any, name: str = "prompt") -> Prompt:
    """Return a prompt as a text, ints, or messages. Raise TinyspecError for anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        hint = f": give {name}['input_ids']" if "input_ids" in prompt else ""
        if hint and len(getattr(prompt["input_ids"], "shape", ())) == 2:
            hint += "[0], one row"
        hint = f": give [{name}]" if "role" in prompt else hint
        raise TinyspecError(f"{name} is a {type(prompt).__name__}: it must be {PROMPT}{hint}")
    if isinstance(prompt, bytes):
        raise wrong_argument(name, prompt, f"{PROMPT}; bytes become a text with .decode()")
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return [_check_message(f"{name}[{place}]", message) for place, message in enumerate(prompt)]
    return check_ids(name, prompt, PROMPT)


def _check_message(name: str, message: Any) -> Mapping[str, str]:
    keys = ("role", "content")
    if not isinstance(message, Mapping) or not all(
        isinstance(message.get(key), str) for key in keys
    ):
        raise wrong_argument(name, message, "a chat message: {'role': 'user', 'content': 'a text'}")
    return message


def is_batch(prompt: Any) -> bool:
    """Return whether this is a list of prompts: an entry is a text, a list, or an array of ids."""
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        return False
    return any(
        isinstance(row, (str, bytes, list, tuple)) or getattr(row, "shape", ()) for row in prompt
    )


def check_batch(prompts: Sequence[Any], name: str = "prompt") -> list[Prompt]:
    """Return the prompts of a batch. An error names the entry: prompt[2]."""
    return [check_prompt(prompt, f"{name}[{row}]") for row, prompt in enumerate(prompts)]


def check_texts(name: str, given: Any, example: str) -> list[str | list[int]]:
    """Return texts or token sequences as a list; None is none, a single text is a list of one."""
    if given is None or isinstance(given, str):
        return [] if given is None else [given]
    is_array = hasattr(given, "dtype") and hasattr(given, "shape")
    if isinstance(given, (bytes, Mapping)) or is_array or not isinstance(given, Iterable):
        raise wrong_argument(
            name, given, f"a text, or a list of texts and lists of token ids, such as {example}"
        )
    expected = f"a text or a list of token ids, such as {name}={example}"
    texts = [
        x if isinstance(x, str) else check_ids(f"{name}[{i}]", x, expected)
        for i, x in enumerate(given)
    ]
    for i, text in enumerate(texts):
        for place, token in enumerate(text if isinstance(text, list) else ()):
            if not 0 <= token <= TOKEN_LIMIT:
                each = f"a token id, from 0 to {TOKEN_LIMIT}"
                raise wrong_argument(f"{name}[{i}][{place}]", token, each)
    if name == "stop" and (empty := [i for i, text in enumerate(texts) if not text]):
        raise TinyspecError(f"stop[{empty[0]}] is empty: it would stop before the first token")
    return texts


def check_names(
    card: Card, given: Mapping[str, Any], known: Iterable[str], temperature: Any = None
) -> None:
    """Raise TinyspecError for another library's argument, or one that is spelled nearly like ours.

    Knobs of the technique pass, and what is no name at all: `Card.settings` speaks of those.
    """
    own, ours = [knob.name for knob in card.knobs], list(known)
    for name, value in given.items():
        if name in own:
            continue
        if name == "do_sample" and isinstance(value, bool):
            raise TinyspecError(f"do_sample: {_explain_do_sample(value, temperature)}")
        if hint := hint_argument(name):
            raise TinyspecError(f"{name}: {hint}")
        close = get_close_matches(name, [*own, *ours], n=1, cutoff=0.7)
        if close and close[0] in ours:
            raise TinyspecError(f"there is no argument '{name}': did you mean '{close[0]}'?")


def _explain_do_sample(wanted: bool, temperature: Any) -> str:
    """Return what to write in place of transformers' `do_sample`.

    >>> _explain_do_sample(True, 0.0)
    'write temperature=0.8, or another above 0: it is what makes the text sampled'
    >>> _explain_do_sample(True, 0.7)
    'leave it out: temperature=0.7 samples already'
    """
    sampled = isinstance(temperature, (int, float)) and temperature > 0
    if wanted == sampled:
        kind = "samples" if wanted else "is greedy"
        return f"leave it out: temperature={temperature or 0} {kind} already"
    if wanted:
        return "write temperature=0.8, or another above 0: it is what makes the text sampled"
    return "write temperature=0, or leave temperature out: it is what makes the text greedy"
