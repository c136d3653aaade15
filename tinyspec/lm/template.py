"""Chat templates: a checkpoint's own Jinja program that turns messages into one text.

Templates come from strangers, so they run in Jinja's immutable sandbox, with the settings and
helpers that transformers gives them: trimmed blocks, `tojson`, `raise_exception`, `strftime_now`,
loop controls, `{% generation %}`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyspec.errors import TinyspecError

Message = Mapping[str, str]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; for us it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML; a prompt is not HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
) -> str:
    """Messages as the checkpoint's one text. `tokens` are the template's variables (`bos_token`,
    `eos_token`, ...).

    Raises TinyspecError for a message without text, and for whatever the template itself refuses.
    """
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise TinyspecError(
                f'chat message {i}: expected {{"role": text, "content": text}}, got {message!r}'
            )
        plain.append({str(k): v for k, v in message.items()})
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    variables = {**tokens, "messages": plain, "add_generation_prompt": add_generation_prompt}
    try:
        return environment.from_string(template).render(tools=None, documents=None, **variables)
    except jinja2.TemplateError as error:
        raise TinyspecError(f"the chat template refuses these messages: {error.message}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise TinyspecError(f"the chat template fails on these messages: {error}") from error
