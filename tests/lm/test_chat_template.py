"""A chat template writes the text that jinja writes, or it is stopped in one line.

A template comes from a stranger, so it is not trusted.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinyspec.errors import TinyspecError
from tinyspec.lm import chat_template
from tinyspec.lm.chat_template import render_chat

MESSAGES = [
    {"role": "system", "content": "be  brief "},
    {"role": "user", "content": "naïve <b> 'text'\nof two lines"},
    {"role": "assistant", "content": "yes"},
]

ORDINARY = {
    "roles": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[{{ m.content | trim }}]"
        "{% elif loop.last %}{{ m['role'] ~ ': ' ~ m.content }}{% else %}{{ m.content + '\n' "
        "}}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(found=false, text='') %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.found = true %}{% set ns.text = ns.text + "
        "m.content %}{% endif %}"
        "{% endfor %}{{ ns.text if ns.found else 'none' }}"
    ),
    "macro": (
        "{% macro turn(m, first=true) %}{{ '' if first else '|' }}{{ m.role | upper }}{{ "
        "caller() if caller }}{% endmacro %}"
        "{% for m in messages %}{{ turn(m, loop.first) }}{% endfor %}"
        "{% call turn(messages[0]) %}!{% endcall %}"
    ),
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | "
        "join(', ') }}"
        "{{ messages | map(attribute='role') | list }}{{ messages[0] | dictsort }}{{ messages "
        "| length }}"
        "{{ 'a b'.split() | reverse | join }}{{ messages[1].content | replace('text', 'word') "
        "| indent(2, true) }}"
        "{% for a, b in messages[0].items() %}{{ '%s=%5s' | format(a, b) }}{{ "
        "'{:>8}'.format(b) }}{% endfor %}"
        "{{ [1, 2, 3] | sum }}{{ (1.25 * 3) | round(1) }}{{ 2 ** 5 % 7 }}{{ {'a': (1, 2)} }}{{ "
        "'ab' * 3 }}"
    ),
    "blocks": (
        "{% set text %}{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor "
        "%}{% endset %}"
        "{{ text | trim }}{% filter upper %}a{{ 1 }}{% endfilter %}{{ undefined_name }}{{ "
        "messages[9] is defined }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("template", ORDINARY.values(), ids=ORDINARY)
def test_counting_does_not_change_the_text(template: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(template).render(messages=MESSAGES, bos_token="<s>")
    assert render_chat(template, MESSAGES, True, {"bos_token": "<s>"}) == expected != ""


DOUBLING = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor "
    "%%}{{ ns.x }}"
)
GREEDY = {
    "lipsum": "{{ lipsum(n=100000) }}",
    "format": '{{ "%1000000000d" | format(1) }}',
    "percent": "{{ '%1000000000d' % 1 }}",
    "a width that is computed": "{{ '%*d' % (10 ** 9, 1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "str.format with a width that is computed": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "str.format by another way": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "many fields": "{{ ('%9999d' * 9999) % ([1] * 9999) }}",
    "zfill": "{{ '1'.zfill(10 ** 9) }}",
    "center": "{{ 'a' | center(10 ** 9) }}",
    "indent": "{{ 'a' | indent(10 ** 9, true) }}",
    "batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 9, 'x') | list }}",
    "round": "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "wordwrap": "{{ ('a ' * 99999) | wordwrap(1, true, 'b' * 99999) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "a slow codec": "{{ ('é' * 10 ** 6).encode('punycode') }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "a text many times": "{{ 'a' * 10 ** 9 }}",
    "many times a text": "{{ 10 ** 9 * 'a' }}",
    "a list many times": "{{ [1] * 10 ** 9 }}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
    "join": "{{ (['a' * 10 ** 6] * 10 ** 3) | join }}",
    "str.join": "{{ ''.join(['a' * 10 ** 6] * 10 ** 3) }}",
    "join of what is not a list": (
        "{{ range(10 ** 5) | map(attribute='x', default='a' * 10 ** 6) | join }}"
    ),
    "sum of lists": (
        "{{ range(10 ** 5) | map(attribute='x', default=[1] * 10 ** 4) | sum(start=[]) | "
        "length }}"
    ),
    "many wide texts": "{{ range(10 ** 5) | map('center', 10 ** 5) | list | length }}",
    "loops in loops": (
        "{% set r = range(10 ** 5) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    ),
    "plain text in a loop": "{% for i in range(10 ** 5) %}" + 9999 * "a" + "{% endfor %}",
    "plain text in a loop, captured": (
        "{% set x %}{% for i in range(10 ** 5) %}" + 9999 * "a" + "{% endfor %}{% endset %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a block without end": "{% block b %}{{ self.b() }}{% endblock %}",
    "doubling by ~": DOUBLING % ("'a'", "ns.x ~ ns.x"),
    "doubling by +": DOUBLING % ("'a'", "ns.x + ns.x"),
    "doubling a list": DOUBLING % ("[1]", "[ns.x, ns.x]"),
    "doubling a tuple": DOUBLING % ("(1, 1)", "(ns.x, ns.x)"),
    "doubling a dictionary": DOUBLING % ("{}", "{1: ns.x, 2: ns.x}"),
    "squaring": DOUBLING % ("3", "ns.x * ns.x"),
    "a long program": "{{ 1 }}" * 50_000,
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "blocks in blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "loops in loops in loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
}  # fmt: skip

RUN_WITHIN_A_GIGABYTE = """
import resource, sys
from tinyspec.lm.chat_template import render_chat
from tinyspec.errors import TinyspecError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for template in sys.stdin.read().split("\\0"):
    try:
        text = render_chat(template, [{"role": "user", "content": "x"}], True, {})
        print("accepted", len(text))
    except TinyspecError as error:
        print(" ".join(str(error).split()) if "\\n" not in str(error) else "two lines")
"""


@pytest.mark.slow
def test_a_greedy_template_is_stopped_before_it_has_a_gigabyte() -> None:
    """One process with a gigabyte renders all of them, and each gets its line."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_WITHIN_A_GIGABYTE],
        input="\0".join(GREEDY.values()),
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    lines = dict(zip(GREEDY, done.stdout.splitlines(), strict=True))
    assert {n: line for n, line in lines.items() if not line.startswith("the chat template")} == {}
    assert {n: line for n, line in lines.items() if "all memory" in line} == {}


def test_a_template_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    with pytest.raises(TinyspecError, match="takes more than 10 s"):
        render_chat("{% for i in range(99) %}{{ i }}{% endfor %}", MESSAGES, True, {})


def test_memory_that_is_out_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def use_all(*_: object, **__: object) -> str:
        raise MemoryError

    monkeypatch.setattr(chat_template.json, "dumps", use_all)
    with pytest.raises(TinyspecError, match="takes too much: it takes all memory"):
        render_chat("{{ messages | tojson }}", MESSAGES, True, {})


def test_a_long_conversation_is_within_the_limits() -> None:
    """A thousand messages, joined one after the other, and five thousand in a loop."""
    messages = [{"role": "user", "content": "word " * 40}] * 1000
    text = render_chat(ORDINARY["namespace"], messages, True, {})
    assert len(text) == 200_000
    assert len(render_chat(ORDINARY["roles"], messages * 5, True, {})) > 1_000_000
