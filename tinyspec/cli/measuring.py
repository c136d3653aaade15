"""What the commands of `tinyspec bench` share: options of measurements, and how a result is written
and shown.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

RAW = ("samples", "prompts", "machine", "columns")  # long, and in the file that --out writes


def rounds(default: int) -> Any:
    return click.option(
        "--rounds",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="How often each is timed, in turn.",
    )


def tokens(default: int) -> Any:
    return click.option(
        "--tokens",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="Tokens to write.",
    )


results = base.options(
    click.option(
        "--out", type=base.OutputPath(parents=True), help="Write the result with all samples here."
    ),
    click.option(
        "--json", "as_json", is_flag=True, help="The result with all samples on standard output."
    ),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar."),
)


def numbers(option: str, text: str, what: str) -> list[int]:
    """What a list of numbers means: 1,2,4 or 1-16, or both.

    >>> numbers("--blocks", "1,4-6,4", "tokens")
    [1, 4, 5, 6]
    """
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not (
            first.isdecimal()
            and (not dash or last.isdecimal())
            and 0 < int(first) <= int(last or first)
        ):
            raise TinyspecError(f"{option} {text}: write numbers of {what}, such as 1,2,4 or 1-16")
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def show(measure: Any, options: dict[str, Any], kept: bool = False, **more: Any) -> None:
    """Measure; write the result to --out (`kept`: it does so itself), and print it whole (--json)
    or without raw samples.
    """
    out, as_json = options.pop("out"), options.pop("as_json")
    result: dict[str, Any] = measure(**options, **({"out": out} if kept else {}), **more)
    if out is not None and not kept:
        from tinyspec.bench.harness import save

        save(out, result)
    if as_json:
        click.echo(json.dumps(result))
        return
    for line in summary(result):
        click.echo(line)
    if out is not None:
        click.echo(f"written: {out}")


def write(texts: Mapping[Path | None, str]) -> None:
    """Texts into their files, where one is named; each is announced on standard error."""
    for file, text in texts.items():
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            click.echo(f"written: {file}", err=True)


def summary(figures: Mapping[str, Any], depth: int = 0) -> list[str]:
    """The figures as indented lines; a list of raw things is left to the file."""
    lines: list[str] = []
    for name, value in figures.items():
        lead = "  " * depth + name.replace("_", " ")
        if name in RAW or (
            isinstance(value, list) and value and isinstance(value[0], (dict, list))
        ):
            continue
        if isinstance(value, Mapping):
            lines += [lead, *summary(value, depth + 1)]
        else:
            lines.append(f"{lead}: {value:.4g}" if isinstance(value, float) else f"{lead}: {value}")
    return lines
