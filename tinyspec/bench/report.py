"""Write tables, notes and charts of results, for a terminal and in Markdown.

A table is data: a `Column` names a figure and says how it is written, and `make_grid` makes the
table of them. A slow-down is written as one: "4.5x slower".
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from tinyspec.bench.harness import describe_units, record_knobs
from tinyspec.bench.plan import PLAIN, ArmSpec, format_knob
from tinyspec.bench.plot import FASTER, PEER, SLOWER, Bars, Chart, Lines
from tinyspec.technique import Guarantee, find_technique

SHORT = {
    "mt_bench": "MT-bench",
    "translation": "transl.",
    "summarization": "summ.",
    "math_reasoning": "maths",
    "rag": "RAG",
    "qa": "QA",
    "human_eval": "HumanEval",
    "gsm8k": "GSM8K",
}
OLD_DEFAULTS = {"price": 0.25, "tree": "ranks"}
"""Defaults of knobs when results did not record their knobs yet."""


class Grid:
    """A table of texts: a title, a header, rows. The first column has names, the others numbers."""

    def __init__(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]):
        self.title, self.header, self.rows = title, list(header), [list(row) for row in rows]

    def to_rich(self) -> Table:
        """Return the table for a terminal."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Return the table in Markdown, after its title if it has one."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        cells = [" | ".join(cell.replace("\n", " ") for cell in line) for line in lines]
        title = f"**{self.title}**\n\n" if self.title else ""
        return title + "\n".join(f"| {line} |" for line in cells)


class Column(NamedTuple):
    """A column of a table.

    figure  what it shows of a row: a key, a path of keys, or a function of the row
    write   how that is written: a format such as ".2f", or a function
    """

    heading: str
    figure: str | tuple[str, ...] | Callable[[Any], Any]
    write: str | Callable[[Any], str] = ""

    def write_cell(self, row: Any) -> str:
        """Return the text of a row in this column."""
        value = row
        if callable(self.figure):
            value = self.figure(row)
        else:
            for key in (self.figure,) if isinstance(self.figure, str) else self.figure:
                value = value[key]
        return (
            format_number(value, self.write) if isinstance(self.write, str) else self.write(value)
        )


def make_grid(
    title: str, rows: Mapping[str, Any], columns: Sequence[Column], first: str = ""
) -> Grid:
    """Return a table with a line for each row.

    rows   the figures of each row by its name
    first  heading of the column of names

    >>> rows = {"a": {"speed": 2.0}, "b": {"speed": None}}
    >>> make_grid("", rows, [Column("tokens/s", "speed", ".1f")]).rows
    [['a', '2.0'], ['b', '-']]
    """
    header = [first, *(column.heading for column in columns)]
    cells = [[name, *(c.write_cell(row) for c in columns)] for name, row in rows.items()]
    return Grid(title, header, cells)


def format_number(value: Any, spec: str = ".2f") -> str:
    """Return a number as text; "-" for None.

    >>> format_number(1.234), format_number(None), format_number(0.5, ".0%")
    ('1.23', '-', '50%')
    """
    return "-" if value is None else format(value, spec)


def format_speedup(value: float | None, unit: str = "") -> str:
    """Return a speed-up as text. A slow-down is turned round: how many times slower.

    >>> [format_speedup(value) for value in (1.234, 0.22, 0.93, 0.0125, None)]
    ['1.23', '4.5x slower', '1.08x slower', '80x slower', '-']
    >>> format_speedup(1.234, "x")
    '1.23x'
    """
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" if round(value, 2) >= 1 else f"{_format_slow_down(value)}x slower"


def _format_slow_down(value: float) -> str:
    """Return 1 / value to two digits; below 2 to three, since two would call 0.98 "1.0x slower"."""
    times = 1 / value
    if times < 1.995:
        return f"{times:.2f}"
    return f"{times:.1f}" if times < 9.95 else f"{float(f'{times:.2g}'):.0f}"


def format_quartiles(five: Mapping[str, float] | None) -> str:
    """Return a speed-up with its quartiles, which are written on the scale of the median.

    After "4.0x slower" the quartiles are times slower too: below 1 they are faster.

    >>> format_quartiles({"min": 1, "q1": 1.2, "median": 1.5, "q3": 1.75, "max": 2})
    '1.50 (1.20-1.75)'
    >>> format_quartiles({"min": 0.1, "q1": 0.2, "median": 0.25, "q3": 0.4, "max": 1})
    '4.0x slower (2.5-5.0)'
    >>> format_quartiles({"min": 0.5, "q1": 0.8, "median": 1.1, "q3": 1.2, "max": 1.2})
    '1.10 (0.80-1.20)'
    >>> format_quartiles({"min": 0.5, "q1": 0.5, "median": 0.8, "q3": 1.25, "max": 1.5})
    '1.25x slower (0.80-2.0)'
    """
    if five is None:
        return "-"
    low, middle, high = five["q1"], five["median"], five["q3"]
    if round(middle, 2) >= 1:
        spread = f"{low:.2f}-{high:.2f}"
    else:
        spread = f"{_format_slow_down(high)}-{_format_slow_down(low)}"
    return f"{format_speedup(middle)} ({spread})"


def format_identical(of: Mapping[str, Any]) -> str:
    """Return on how many requests an arm wrote plain decoding's text; "-" if that is not known."""
    return "-" if of["identical"] is None else f"{of['identical']} of {of['jobs']}"


def format_bytes(value: float | None) -> str:
    """Return bytes in MiB."""
    return "-" if value is None else f"{value / 2**20:.0f}"


def count_things(n: int, what: str) -> str:
    """Return a number of things.

    >>> count_things(1, "round"), count_things(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{n} {what}" + ("" if n == 1 else "s")


# ---------------------------------------------------------------------- a run of `tinyspec bench`

TAU = Column("tau", "tau", ".2f")
COUNTS = (
    Column("target passes/token", "calls_per_token", ".2f"),
    Column("draft passes/token", "draft_calls_per_token", ".2f"),
    Column("nodes/token", "nodes_per_token", ".2f"),
)
PROMPT = (
    Column("prompt tokens/s", "prompt_tokens_per_second", ".0f"),
    Column("ms to the first token", "first_token", ".0f"),
)
DRAFTING = Column("drafting, plain steps", lambda of: of.get("drafting"), ".2f")
SAME_TEXT = Column("same text", format_identical)


def gather_arms(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each arm's figures over all tasks, with its figures by task under "tasks"."""
    return {
        arm: {**of, "tasks": {task: each[arm] for task, each in figures["tasks"].items()}}
        for arm, of in figures["overall"].items()
    }


def list_speedup_columns(
    tasks: Mapping[str, Any], write: Callable[[Any], str], *figure: str
) -> list[Column]:
    """Return a column for each task, and the mean if there are several."""
    columns = [Column(SHORT.get(t, t), ("tasks", t, "speedup", *figure), write) for t in tasks]
    return [*columns, *([Column("mean", "mean", format_speedup)] if len(tasks) > 1 else [])]


def list_prompt_columns(arms: Mapping[str, Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns about the prompt. Results from before they were measured have none."""
    return PROMPT if all(of.get("first_token") is not None for of in arms.values()) else ()


def list_drafting_column(arms: Mapping[str, Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the column of drafting costs. Older results, and those of a device, have none."""
    return (DRAFTING,) if any("drafting" in of for of in arms.values()) else ()


def find_least_speedup(figures: Mapping[str, Any], arm: str) -> float | None:
    """Return the worst speed-up of any prompt."""
    found = [of[arm]["speedup"]["min"] for of in figures["tasks"].values() if of[arm]["speedup"]]
    return min(found, default=None)


def list_tables(result: Mapping[str, Any]) -> Iterator[Grid]:
    """Make all tables of a result."""
    figures, tasks = result["figures"], result["figures"]["tasks"]
    memory = result.get("memory", {})
    arms = gather_arms(figures)
    for arm, of in arms.items():
        of |= {"least": find_least_speedup(figures, arm), "peak": memory.get(arm, {}).get("peak")}
    yield make_grid(
        "Times as fast as plain decoding, after the prompt: median of prompts (quartiles), and the "
        "least of all prompts",
        arms,
        [*list_speedup_columns(tasks, format_quartiles), Column("least", "least", format_speedup)],
    )
    if result.get("chapter"):
        for task, each in tasks.items():
            yield _tabulate_task(task, each)
    yield make_grid(
        "What it took",
        arms,
        [
            Column("tokens/s", "tokens_per_second", ".1f"),
            Column("with prompt", "request", format_speedup),
            *list_prompt_columns(arms),
            TAU,
            *COUNTS,
            *list_drafting_column(arms),
            Column("position-layers/token", "layers_per_token", ".1f"),
            SAME_TEXT,
            Column("peak MiB", "peak", format_bytes),
        ],
    )
    for peer, ratios in figures["against"].items():
        none = dict.fromkeys(tasks)
        others = {arm: {**none, **ratios[arm]} for arm in arms if arm != peer and ratios.get(arm)}
        columns = [Column(SHORT.get(name, name), name, format_speedup) for name in (*tasks, "mean")]
        yield make_grid(f"Times as fast as {peer}", others, columns)
    if "curve_figures" in result:
        yield _tabulate_curve(result["curve_figures"], result["settings"])


def _tabulate_task(task: str, arms: Mapping[str, Any]) -> Grid:
    """Return the table of all techniques on one task."""
    requests = max((of["jobs"] for of in arms.values()), default=0)
    columns = [
        Column("times as fast (quartiles)", "speedup", format_quartiles),
        TAU,
        Column("alpha", "alpha", ".2f"),
        *COUNTS,
        *list_drafting_column(arms),
        SAME_TEXT,
        Column("state bytes/token", "state_per_token", ".0f"),
    ]
    return make_grid(f"{SHORT.get(task, task)}: {count_things(requests, 'request')}", arms, columns)


def _tabulate_curve(figures: Mapping[str, Any], settings: Mapping[str, Any]) -> Grid:
    """Return the cost curve of each program, and the floor under it in the title."""
    curves = figures["curves"]
    rows = {
        k: {label: {"over": None, **curve["rows"][k]} for label, curve in curves.items()}
        for k in next(iter(curves.values()))["rows"]
    }
    columns = [
        column
        for label in curves
        for column in (
            Column(f"{label}\nms", (label, "milliseconds"), ".1f"),
            Column(f"{label}\nt(k)/t(1)", (label, "against_one"), ".2f"),
            Column(f"{label}\nover the floor", (label, "over"), ".2f"),
        )
    ]
    best = {
        kind: max(reached, key=reached.__getitem__, default="nobody")
        for kind, reached in figures["ceilings"].items()
    }
    title = (
        f"One forward pass after {figures['cached']} cached tokens, {settings['dtype']}; the floor "
        f"is the larger of weights at {figures['bandwidth'] / 1e9:.1f} GB/s ({best['bandwidth']}) "
        f"and arithmetic at {figures['peak'] / 1e9:.0f} billion operations/s ({best['peak']})"
    )
    return make_grid(title, rows, columns, first="new tokens")


def list_notes(result: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the tables must know, a line each."""
    settings, m = result["settings"], result["machine"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    end = "at most" if settings["until_eos"] else "(an end of text ends nothing)"
    lines = [
        f"{settings['model']}, {settings['dtype']} on {settings['device']}, {how}, "
        f"{settings['tokens']} tokens an answer {end}, {count_things(settings['rounds'], 'round')}",
        f"{count_things(m['cores'], 'core')} of {m['cpu']}{describe_units(m)}, "
        f"{count_things(m['threads'], 'thread')}, torch {m['torch']}, "
        f"{result['date']}, commit {result['commit']}",
    ]
    commits = list(dict.fromkeys(str(sitting["commit"]) for sitting in result["sittings"]))
    if len(commits) > 1:
        lines.append(f"samples of several commits: {', '.join(commits)}")
    lines += list_unusual_knobs(result)
    if list_drafting_column(result["figures"]["overall"]):
        lines.append(
            "drafting, plain steps: how long a round drafts, in plain decoding's time per token; "
            "the median of the requests"
        )
    if result.get("chapter"):
        lines.append(f"draft model: {settings['draft'] or 'none; what needs one is left out'}")
        lines.append(
            "tau: tokens per forward pass of the target; alpha: of the positions at which draft "
            "tokens were tested, the share at which one was accepted; a persistent technique "
            "begins each round with nothing and keeps what it sees in that round"
        )
        lines += list_lossy_arms(settings["methods"])
    lines += describe_additions(result, settings["methods"])
    lines += [f"built for {arm}: {what}" for arm, what in result.get("built", {}).items()]
    lines += [f"left out: {reason}" for reason in result["skipped"]]
    for label, curve in result.get("curve_figures", {}).get("curves", {}).items():
        if curve["falls"]:
            lines.append(f"{label}: cost falls at {', '.join(map(str, curve['falls']))} new tokens")
    for name, text in result.get("texts", {}).items():
        if text["distinct_4grams"] < 0.8:
            lines.append(
                f"{name}: only {text['distinct_4grams']:.0%} of plain text's 4-grams are distinct: "
                "it loops"
            )
    return lines


def list_unusual_knobs(result: Mapping[str, Any]) -> list[str]:
    """Return a line with the knobs that ran with other values than the cards' defaults.

    Those that stand in an arm's name are left out. Results from before these were recorded have no
    such line, and neither have those in which every knob had its default.

    >>> list_unusual_knobs({"knobs": {"spectr": {"gamma": 4}, "bild:gamma=2": {"gamma": 2}}})
    ["knobs that differ from the card's default: spectr gamma=4"]
    """
    found = []
    for label, knobs in result.get("knobs", {}).items():
        spec = ArmSpec.parse(label)
        if not spec.is_peer and (shown := describe_knobs(spec.name, knobs, spec.card_knobs)):
            found.append(f"{label} {shown}")
    return [f"knobs that differ from the card's default: {'; '.join(found)}"] if found else []


def describe_knobs(method: str, knobs: Mapping[str, Any], told: Collection[str] = ()) -> str:
    """Return the knobs of a method that have another value than its card's default.

    told  names that are left out

    >>> describe_knobs("speculative_decoding", {"gamma": 4, "lenience": 1.0})
    'gamma=4'
    """
    usual = record_knobs(find_technique(method).settings({}))
    changed = (
        (name, value)
        for name, value in knobs.items()
        if name not in told and (name not in usual or value != usual[name])
    )
    return ", ".join(f"{name}={format_knob(value)}" for name, value in changed)


def list_lossy_arms(labels: Sequence[str]) -> list[str]:
    """Return, for arms that may write another text than plain decoding, why.

    >>> list_lossy_arms(["llma", "speculative_decoding:lenience=0.5"])
    ['speculative_decoding:lenience=0.5: lossy at these settings, so its text may be another']
    """
    lines = []
    for label in labels:
        spec = ArmSpec.parse(label)
        card = find_technique(spec.name)
        if card.has_own_target:
            lines.append(f"{label}: keeps {card.keeps}, so its text may be another")
        elif card.promise(**spec.card_knobs) in (Guarantee.LOSSY, Guarantee.APPROX):
            lines.append(f"{label}: lossy at these settings, so its text may be another")
    return lines


def describe_additions(result: Mapping[str, Any], labels: Sequence[str]) -> list[str]:
    """Return which arms ran with an addition of ours, if any did: one sentence.

    An older result does not tell its knobs. Then the defaults of that time count.

    >>> print(*describe_additions({}, ["auto", "llma", "llma:price=0"]))
    With an addition of ours switched on: `llma` (price 0.25). The paper's rule is price 0.
    """
    ran, rules = list[str](), dict[str, None]()
    for spec in map(ArmSpec.parse, labels):
        for knob in find_technique(spec.name).knobs:
            if knob.ours is None:
                continue
            known = result.get("knobs", {}).get(spec.label) or dict(spec.knobs)
            value = known.get(knob.name, OLD_DEFAULTS.get(knob.name, knob.default))
            # A text that is not ours is an input of the paper's rule, as Sequoia's vector.
            is_ours = value == knob.ours if isinstance(value, str) else value != knob.default
            if is_ours:
                ran.append(f"`{spec.label}` ({knob.name} {value})")
                rules[f"{knob.name} {_format_knob(knob.default)}"] = None
    if not ran:
        return []
    arms, paper = ", ".join(ran), ", ".join(rules)
    return [f"With an addition of ours switched on: {arms}. The paper's rule is {paper}."]


def _format_knob(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}" or "measured"


def render_result(result: Mapping[str, Any]) -> RenderableType:
    """Return tables and notes for a terminal."""
    return Group(*(grid.to_rich() for grid in list_tables(result)), *list_notes(result))


def write_page(result: Mapping[str, Any], grids: Sequence[Grid], notes: Sequence[str] = ()) -> str:
    """Return a page in Markdown: the commands that made the result, its tables, and its notes."""
    commands = dict.fromkeys(one["command"] for one in result.get("sittings", [result]))
    blocks = [
        *(f"`{command}`" for command in commands),
        *(grid.to_markdown() for grid in grids),
        *notes,
    ]
    return "\n\n".join(blocks) + "\n"


def write_markdown(result: Mapping[str, Any]) -> str:
    """Return the page of a run of `tinyspec bench`."""
    notes = "\n".join(f"- {line}" for line in list_notes(result))
    return write_page(result, list(list_tables(result)), [notes])


def describe_provenance(result: Mapping[str, Any]) -> str:
    """Return on what, when and from which commit a result was measured."""
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}; {result['date']}, commit {result['commit']}"
    )


def describe_old_columns(result: Mapping[str, Any], columns: Collection[str]) -> list[str]:
    """Return a note if a result lacks samples' columns that are measured today; else nothing.

    >>> old = {"columns": ["tokens"], "date": "2026-01-01"}
    >>> describe_old_columns(old, ["tokens", "seconds"])[0].partition(":")[0]
    'Measured on 2026-01-01, before all columns and rows of today existed'
    >>> describe_old_columns(old, ["tokens"])
    []
    """
    if set(columns) <= set(result["columns"]):
        return []
    return [
        f"Measured on {result['date']}, before all columns and rows of today existed: a column "
        'that shows "-" in every row was not measured, and a technique without a row did not run.'
    ]


# ---------------------------------------------------------------------- charts of a run


def make_charts(result: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts of a run by name: speed-ups by task, and the cost curve if measured."""
    drawn = {"speedups": _chart_speedups(result)}
    if "curve_figures" in result:
        drawn["curve"] = _chart_curve(result)
    return drawn


def _chart_speedups(result: Mapping[str, Any]) -> Chart:
    """Draw a panel for each task, a bar for each arm. A bar of a slow-down points left from 1."""
    tasks, every = result["figures"]["tasks"], result["figures"]["overall"]
    arms = [arm for arm in every if arm != PLAIN]
    fives = {task: {arm: of[arm]["speedup"] for arm in arms} for task, of in tasks.items()}
    top = max([1.0, *(five["q3"] for of in fives.values() for five in of.values() if five)])

    def choose_colour(arm: str, five: Mapping[str, float]) -> str:
        if ArmSpec.parse(arm).is_peer:
            return PEER
        return FASTER if five["median"] >= 1 else SLOWER

    panels = [
        Bars(
            task.replace("_", " "),
            {arm: five and five["median"] for arm, five in of.items()},
            {arm: (five["q1"], five["q3"]) for arm, five in of.items() if five},
            origin=1.0,
            colours={arm: choose_colour(arm, five) for arm, five in of.items() if five},
            top=top,
            digits=2,
            named=at % 3 == 0,
        )
        for at, (task, of) in enumerate(fives.items())
    ]
    means = [f"{arm} {every[arm]['mean']:.2f}" for arm in arms if every[arm]["mean"] is not None]
    about = (
        "Times as fast as plain decoding. The thin line spans the quartiles over prompts; peers "
        "are grey."
    )
    return Chart(
        f"{result['settings']['model']}: times as fast as plain decoding",
        panels,
        [about, *list_notes(result)[:2]],
        f"mean over tasks: {'; '.join(means)}",
        columns=3,
    )


def _chart_curve(result: Mapping[str, Any]) -> Chart:
    """Draw the time of a pass over k tokens, in ms and over that of 1, and the machine's floor."""
    figures = result["curve_figures"]
    rows: dict[str, dict[int, dict[str, float]]] = {
        label: {int(k): row for k, row in sorted(of["rows"].items(), key=lambda pair: int(pair[0]))}
        for label, of in figures["curves"].items()
    }
    own = rows.get("tinyspec", {})
    floor = {k: row["floor"] for k, row in own.items() if "floor" in row}
    floors: dict[str, Mapping[int, float]] = {
        "milliseconds": floor,
        "against_one": {k: ms / own[min(own)]["milliseconds"] for k, ms in floor.items()},
    }
    titles = {
        "milliseconds": "milliseconds",
        "against_one": "time of k tokens over the program's own time of one",
    }
    lines = {
        name: {label: {k: r[name] for k, r in line.items()} for label, line in rows.items()}
        for name in titles
    }
    ends = [
        f"{label} at {max(of)} tokens {of[max(of)]:.2f}"
        for label, of in lines["against_one"].items()
        if of
    ]
    return Chart(
        f"{result['settings']['model']}: the cost of a forward pass over k new tokens",
        [
            Lines(title, lines[name], "new tokens", floors[name], "the machine's floor")
            for name, title in titles.items()
        ],
        [f"After {figures['cached']} cached tokens.", *list_notes(result)[:2]],
        "; ".join(ends),
    )
