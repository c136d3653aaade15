"""Render a chat template: a stranger's program, which reads messages and writes a text.

Jinja's sandbox keeps a template away from the machine. It does not keep it from taking all memory
or all time: `{{ 'a' * 10**9 }}` is a legal template. Here a `TemplateMeter` counts what a template
does, and every way to make a value goes through it:

    MeteredNodes        a list, tuple or dictionary, texts joined by ~, a pass of a loop, output
    MeteredEnvironment  + * ** and %, calls, filters

So every value has a bounded size, counted with all that it contains. Comparing, printing or
hashing a value is then bounded too. A few operations can return far more than they are given, such
as `zfill`: the size of their result is computed before they run.

Source: jinja.palletsprojects.com/en/stable/sandbox, "Security Considerations": a sandbox alone does
not bound memory and time.

Left out: one operation on values of the greatest size is not interrupted; it takes milliseconds.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import update_wrapper, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tinyspec.errors import TinyspecError

TEMPLATE_LIMIT = 1 << 17  # characters of a template; the longest that we met has 25,000
VALUE_LIMIT = 1 << 23  # characters of a value or of the text: about two million tokens
TOTAL_LIMIT = 1 << 27  # characters of all values together, so that keeping them all is possible
STEP_LIMIT = 1 << 20  # calls, filters, operators and passes of loops; about a second
SECONDS = 10.0  # time for a text; a machine that is busy makes the same steps, but later
ELEMENT = 64  # characters that an entry of a list counts as: about its size in memory
BIT_LIMIT = 1 << 12  # bits of a whole number: multiplying such numbers takes microseconds

Message = Mapping[str, str]


class TemplateLimit(Exception):
    """Raised in a template that takes more than the `TemplateMeter` allows."""


class TemplateMeter:
    """Count the steps of one template and the size of what it makes; stop it at the limits."""

    def __init__(self) -> None:
        self.steps = self.total = 0
        self.deadline = time.monotonic() + SECONDS

    def count_step(self) -> None:
        """Count a step. Raises TemplateLimit after too many, or after too long."""
        self.steps += 1
        if self.steps > STEP_LIMIT:
            raise TemplateLimit(f"it takes more than {STEP_LIMIT} steps")
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it takes more than {SECONDS:g} s")

    def check_size(self, size: float) -> None:
        """Raise TemplateLimit for a value of more than VALUE_LIMIT characters."""
        if size > VALUE_LIMIT:
            raise TemplateLimit(f"it makes a value of more than {VALUE_LIMIT} characters")

    def count_value(self, value: Any) -> Any:
        """Return a new value, after its size was counted.

        A text counts whole. The entries of a container were counted when they were made, so a
        container counts as ELEMENT an entry.
        """
        self.count_step()
        self.check_size(measure_value(value))
        if isinstance(value, (str, bytes)):
            self.total += len(value)
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            self.total += ELEMENT * len(value)
        if self.total > TOTAL_LIMIT:
            raise TemplateLimit(f"its values have more than {TOTAL_LIMIT} characters together")
        return value


def measure_value(value: Any) -> int:
    """Return the characters of a value, with all that it contains, and stop above VALUE_LIMIT.

    Raises TemplateLimit for a whole number of more than BIT_LIMIT bits.

    >>> measure_value("four"), measure_value(["four", "four"])
    (4, 200)
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, int):
        if value.bit_length() > BIT_LIMIT:
            raise TemplateLimit(f"it makes a number of more than {BIT_LIMIT} bits")
        return 1
    size = ELEMENT
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for child in value:
            size += ELEMENT + measure_value(child)
            if size > VALUE_LIMIT:
                break
    return size


# ------------------------------ the sizes of results, before they are made


def _measure_replaced(text: Any, old: Any, new: Any, count: Any = -1) -> int:
    before = str(text)
    return len(before) + before.count(str(old)) * len(str(new))


def _measure_joined(items: Sequence[Any], separator: Any) -> int:
    return measure_value(items) + len(items) * measure_value(separator)


def _measure_formatted(text: Any, values: Any) -> int:
    """Return the most characters of `text % values` or `text.format(values)`.

    Every field may hold all values, or be as wide as the greatest number in the text. A width that
    is a value itself (`%*d`, `{:{}}`) has no bound.
    """
    form = str(text)
    if re.search(r"%[^a-zA-Z%]*\*", form) or re.search(r"\{[^{}]*\{", form.replace("{{", "")):
        raise TemplateLimit("it formats a text with a width that is computed")
    width = max((int(digits[:18]) for digits in re.findall(r"\d+", form)), default=0)
    return len(form) + (form.count("%") + form.count("{")) * (width + measure_value(values))


_FILTER_SIZES: dict[str, Callable[..., Any]] = {
    "batch": lambda value, count, *_: count * ELEMENT,
    "center": lambda text, width=80: len(str(text)) + width,
    "format": lambda text, *values, **named: _measure_formatted(text, [values, named]),
    "indent": lambda text, width=4, *_, **__: (
        len(str(text))
        + (str(text).count("\n") + 1) * (len(width) if str(width) == width else width)
    ),
    "replace": _measure_replaced,
    "round": lambda value, precision=0, *_: precision,
    "slice": lambda value, count, *_: count * ELEMENT,
    "wordwrap": lambda text, width=79, cut=True, wrapstring=None, *_: (
        len(str(text)) * (1 + len(wrapstring or ""))
    ),
}
"""Filters that return far more than they are given: name -> (arguments) -> size, or more."""

_METHOD_SIZES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill"), lambda text, width, *_: len(text) + width
    ),
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * tabsize,
    "join": lambda separator, items: _measure_joined(items, separator),
    "replace": _measure_replaced,
    "to_bytes": lambda value, length=1, *_, **__: length,
    "translate": lambda text, table: len(text) * measure_value(table),
}
"""Methods of texts and numbers that return far more than they are given."""

_CODECS = ("utf-8", "utf8", "ascii", "latin-1")  # others are written in Python, and slow


class MeteredNodes(NodeTransformer):
    """Put the meter around each part of a template that makes a value or goes round a loop."""

    @staticmethod
    def _wrap(node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """Count what is written, also plain text: in a loop it is written many times."""
        self.generic_visit(node)
        pieces = [
            nodes.Const(piece.data, lineno=node.lineno)
            if isinstance(piece, nodes.TemplateData)
            else piece
            for piece in node.nodes
        ]
        node.nodes = [self._wrap(piece, "count_output") for piece in pieces]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """Join texts by a filter, which computes the size first."""
        self.generic_visit(node)
        return self._wrap(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "join_texts")

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        """Count a list. One that holds itself twice doubles each time it is made."""
        self.generic_visit(node)
        return self._wrap(node, "count_value")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """Count a tuple, unless it is what a loop or an assignment writes to."""
        self.generic_visit(node)
        return node if node.ctx != "load" else self._wrap(node, "count_value")

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Count each pass of a loop."""
        self.generic_visit(node)
        step = self._wrap(nodes.Const(None, lineno=node.lineno), "count_value")
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; for us it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ShortNamespace(Namespace):
    """A namespace whose text does not show what it holds: it may hold itself many times."""

    def __repr__(self) -> str:
        return "<Namespace>"


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what transformers gives to templates. A `TemplateMeter` counts in it."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, meter: TemplateMeter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.meter = meter
        self.filters["tojson"] = _tojson
        self.filters = {
            name: self._meter_filter(name, function) for name, function in self.filters.items()
        }
        own = {
            "count_output": self._count_output,
            "count_value": meter.count_value,
            "join_texts": self._join_texts,
        }
        for name, function in own.items():
            self.filters[name] = _ignore_context(function)
        del self.globals["lipsum"]
        self.globals["namespace"] = _ShortNamespace
        self.globals["raise_exception"] = _raise_template_error
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = MeteredNodes().visit(super()._parse(source, name, filename))
        return tree

    def _meter_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = int(hasattr(function, "jinja_pass_arg"))  # the context comes before the value

        @wraps(function)
        def metered(*args: Any, **named: Any) -> Any:
            given = list(args[first:])
            if name in _FILTER_SIZES:
                self.meter.check_size(_FILTER_SIZES[name](*given, **named))
            if name == "join":
                given[0] = list(given[0])
                separator = given[1] if len(given) > 1 else named.get("d", "")
                self.meter.check_size(_measure_joined(given[0], separator))
            start = [*given[1:], *named.values()] if name == "sum" else []
            if not all(isinstance(x, (int, float, str)) for x in start):
                raise TypeError("the filter sum adds numbers only")
            return self.meter.count_value(function(*args[:first], *given, **named))

        return metered

    def _count_output(self, value: Any) -> str:
        text: str = self.meter.count_value(value if isinstance(value, str) else str(value))
        return text

    def _join_texts(self, parts: tuple[Any, ...]) -> str:
        self.meter.check_size(measure_value(parts))
        text: str = self.meter.count_value("".join(map(str, parts)))
        return text

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function for a template."""
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            if name == "join":
                args = (list(*args),)
            if name in _METHOD_SIZES:
                self.meter.check_size(_METHOD_SIZES[name](owner, *args, **named))
            if name in ("encode", "decode") and not {*args, *named.values()} <= {*_CODECS}:
                raise TypeError(f"{name} takes {' or '.join(_CODECS)}")
        self.meter.count_step()
        return self.meter.count_value(super().call(context, function, *args, **named))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute left operator right for a template."""
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, (str, bytes)):
            self.meter.check_size(_measure_formatted(left, right))
        elif operator == "**" and numbers and left.bit_length() * right > BIT_LIMIT:
            raise TemplateLimit(f"it makes a number of more than {BIT_LIMIT} bits")
        elif operator == "*" and not numbers:
            for items, times in ((left, right), (right, left)):
                if isinstance(items, (str, bytes, list, tuple)) and isinstance(times, int):
                    self.meter.check_size(measure_value(items) * times)
        return self.meter.count_value(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe function in place of a text's `format`; None for anything else."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def metered(*args: Any, **named: Any) -> str:
            self.meter.check_size(_measure_formatted(value.__self__, [args, named]))
            return safe(*args, **named)

        return update_wrapper(metered, value)


def _ignore_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a filter that jinja never computes in advance: it may do so without the context."""

    @jinja2.pass_context
    def late(_: Context, value: Any) -> Any:
        return function(value)

    return late


def _raise_template_error(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3}", form):
        raise TypeError("strftime_now takes a short format without wide fields")
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML; a prompt is not HTML.
    wide = isinstance(indent, int) and indent > 16
    if wide or isinstance(indent, str) or (separators and max(map(len, separators)) > 16):
        raise TypeError("tojson takes an indent up to 16, and separators of up to 16 characters")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def render_chat(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tokens: Mapping[str, str],
) -> str:
    """Return messages as one text, by the checkpoint's template.

    tokens  variables of the template: `bos_token`, `eos_token`, ...

    Raises TinyspecError for a message without text, for what the template itself rejects, and for a
    template that takes more than the limits of this file.
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
    if len(template) > TEMPLATE_LIMIT:
        raise TinyspecError(
            f"the chat template has {len(template)} characters, the most is {TEMPLATE_LIMIT}: "
            "give the model a shorter chat_template.jinja"
        )
    variables = {**tokens, "messages": plain, "add_generation_prompt": add_generation_prompt}
    meter = TemplateMeter()
    try:
        made = MeteredEnvironment(meter).from_string(template)
        text = made.render(tools=None, documents=None, **variables)
        meter.check_size(len(text))
    except jinja2.TemplateError as error:
        raise _explain("refuses these messages", error.message or "") from error
    except (TemplateLimit, MemoryError) as error:
        todo = "; give the model another chat_template.jinja"
        raise _explain("takes too much", str(error) or "it takes all memory", todo) from error
    except Exception as error:  # it is a program: it can fail in every way
        raise _explain("fails on these messages", str(error) or type(error).__name__) from error
    return text


def _explain(what: str, why: str, todo: str = "") -> TinyspecError:
    """Return an error on one line, however long a template's own message is."""
    why = " ".join(why.split())
    return TinyspecError(
        f"the chat template {what}: {why if len(why) <= 200 else why[:197] + '...'}{todo}"
    )
