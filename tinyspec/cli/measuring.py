"""The commands of experiments: their options are made of the settings, and all end alike."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import flag, option
from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole

if TYPE_CHECKING:
    from tinyspec.bench.experiment import Experiment
    from tinyspec.bench.settings import CommandSpec, OptionSpec

RAW = ("samples", "prompts", "machine", "columns")  # long, and in the file that --out writes

OUTPUT_FILE = base.OutputPath(parents=True)

result_options = base.options(
    option("--out", type=OUTPUT_FILE, help="Write the result with all samples here."),
    flag("--json", "as_json", help="The result with all samples on standard output."),
    base.quiet_option,
)

svg_option = option("--svg", type=OUTPUT_FILE, help="Draw the picture into this file.")
markdown_option = option("--markdown", type=OUTPUT_FILE, help="Write the tables here.")


def make_command(spec: "CommandSpec") -> click.Command:
    """Return the command of an experiment. The experiment itself is loaded when it runs."""
    described = [field for field in fields(spec.settings) if "option" in field.metadata]

    def measure(ctx: click.Context, /, **options: Any) -> None:
        from tinyspec.bench import plot, report
        from tinyspec.bench.harness import save_result

        given = spec.settings(**{field.name: options.pop(field.name) for field in described})
        svg, markdown = options.pop("svg", None), options.pop("markdown", None)
        as_json, out = options.pop("as_json"), options.pop("out")
        if spec.resumes:
            options["out"] = out
        if spec.knobs:
            (options["knobs"],) = base.read_knobs(ctx, options.pop("knob"), [given.method])
        experiment: Experiment = import_module(spec.module).EXPERIMENT
        result = experiment.run(given, **options)
        if out is not None and not spec.resumes:
            save_result(out, result)
        tables = experiment.tables(result) if experiment.tables else ()
        closing = experiment.closing(result) if experiment.closing else ()
        lines = closing if tables or closing else list_figures(result)
        print_result(result, as_json, [table.to_rich() for table in tables], lines)
        if svg is not None and experiment.chart:
            write_text(svg, plot.draw_chart(experiment.chart(result)))
        if markdown is not None:
            notes = experiment.notes(result) if experiment.notes else ()
            write_text(markdown, report.write_page(result, tables, notes))
        name_files(out, svg, markdown)

    measure.__doc__ = spec.settings.__doc__
    chosen: list[Any] = [make_option(field) for field in described]
    if spec.knobs:
        at = 1 + [field.name for field in described].index("method")
        chosen.insert(at, base.knob_option)
    chosen += [flag("--resume", help=spec.resumes)] if spec.resumes else []
    chosen += [svg_option] if spec.chart else []
    chosen += [markdown_option] if spec.tables else []
    kind = base.KnobCommand if spec.knobs else base.Command
    with_options = base.options(*chosen, result_options)(click.pass_context(measure))
    return click.command(spec.name, cls=kind)(with_options)


def make_option(field: "Field[Any]") -> Callable[[Any], Any]:
    """Return the option of a setting."""
    spec: OptionSpec = field.metadata["option"]
    default: Any = field.default
    flags = list(spec.flags) or [f"--{field.name.replace('_', '-')}"]
    if default is True:
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    more: dict[str, Any] = {"help": spec.help or None}
    if spec.kind:
        more |= {"multiple": spec.kind == "text", "type": _PathOption(spec.kind)}
    elif spec.of is not None:
        text = spec.shown or ",".join(
            f"{value:g}" if spec.of is float else str(value) for value in default
        )
        more |= {"type": _ListOption(spec, flags[0]), "metavar": "LIST", "required": spec.required}
        more |= {"default": text, "show_default": bool(text)}
    elif not isinstance(default, bool):
        example = default[0] if spec.repeated else default
        more |= {"default": default, "multiple": spec.repeated}
        more |= {"type": _number_type(spec, example), "show_default": default is not None}
    else:
        more |= {"default": default, "show_default": False, "is_flag": True}
    return click.option(*flags, field.name, **more)


def _number_type(spec: "OptionSpec", example: Any) -> Any:
    """Return the type of an option that takes one value, like `example`."""
    if spec.choices:
        return click.Choice(spec.choices)
    if isinstance(example, float):
        return click.FloatRange(spec.least, spec.most) if spec.least is not None else float
    if isinstance(example, int) or spec.least is not None:
        least, most = (None if end is None else int(end) for end in (spec.least, spec.most))
        return int if least is None else click.IntRange(least, most)
    return str


class _PathOption(click.Path):
    """A path that exists; of a text file, what stands in it."""

    def __init__(self, kind: str):
        self.kind = kind
        super().__init__(
            exists=True, dir_okay=kind == "folder", file_okay=kind != "folder", path_type=Path
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        return base.read_text(Path(str(path))) if self.kind == "text" else path


class _ListOption(click.ParamType[Any]):
    """A list with commas: names, whole numbers with ranges, or numbers."""

    name = "list"

    def __init__(self, spec: "OptionSpec", flag: str):
        self.spec, self.flag = spec, flag

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if self.spec.of is int:
            return tuple(read_numbers(self.flag, value, self.spec.what, int(self.spec.least or 1)))
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if self.spec.of is str:
            return tuple(parts)
        try:
            return tuple(map(float, parts))
        except ValueError:
            raise TinyspecError(
                f"{self.flag} {value}: write numbers with commas between, such as 0.5,0.9"
            ) from None


def read_numbers(option: str, text: str, what: str, least: int = 1) -> list[int]:
    """Return what a list of numbers means: 1,2,4 or 1-16, or both.

    >>> read_numbers("--blocks", "1,4-6,4", "tokens")
    [1, 4, 5, 6]
    """
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        is_span = first.isdecimal() and (not dash or last.isdecimal())
        if not is_span or not least <= int(first) <= int(last or first):
            raise TinyspecError(
                f"{option} {text}: write numbers of {what} from {least} on, "
                f"such as {least},{2 * least},{4 * least} or {least}-{16 * least}"
            )
        found += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(found))


def print_result(
    result: Mapping[str, Any], as_json: bool, tables: Iterable[Any], lines: Iterable[str] = ()
) -> None:
    """Print a result as JSON, or its tables and the lines below them."""
    if as_json:
        click.echo(json.dumps(result))
    else:
        for table in tables:
            base.console().print(table, highlight=False)
        for line in lines:
            click.echo(line)


def write_text(file: Path, text: str) -> None:
    """Write a text file; its folder is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.encode())


def name_files(*files: Path | None) -> None:
    """Name the files that were written, on standard error."""
    for file in files:
        if file is not None:
            click.echo(f"written: {file}", err=True)


def list_figures(figures: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Return the figures as indented lines; a list of raw things is left to the file."""
    lines: list[str] = []
    for name, value in figures.items():
        lead = "  " * depth + name.replace("_", " ")
        is_list_of_raw = isinstance(value, list) and value and isinstance(value[0], (dict, list))
        if name in RAW or is_list_of_raw:
            continue
        if isinstance(value, Mapping):
            lines += [lead, *list_figures(value, depth + 1)]
        else:
            lines.append(f"{lead}: {value:.4g}" if isinstance(value, float) else f"{lead}: {value}")
    return lines
