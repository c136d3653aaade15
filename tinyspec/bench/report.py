"""Tables of a run, for a terminal and in Markdown. A slow-down is printed as one: "4.5x slower"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from tinyspec.bench.plan import PLAIN, ArmSpec
from tinyspec.bench.plot import FASTER, PEER, SLOWER, Bars, Chart, Lines
from tinyspec.technique import Guarantee, find_technique

SHORT = {"mt_bench": "MT-bench", "translation": "transl.", "summarization": "summ.", "math_reasoning": "maths",
         "rag": "RAG", "qa": "QA", "human_eval": "HumanEval", "gsm8k": "GSM8K"}  # fmt: skip
Rows = list[list[str]]


class Grid:
    """A table in plain data: a title, a header, rows of texts. The first column is a name, the
    others are numbers.
    """

    def __init__(self, title: str, header: Sequence[str], rows: Rows):
        self.title, self.header, self.rows = title, list(header), rows

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(self.header):
            table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        return f"**{self.title}**\n\n{self.table()}"

    def table(self) -> str:
        """Return the table in Markdown, without its title."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        cells = [" | ".join(cell.replace("\n", " ") for cell in line) for line in lines]
        return "\n".join(f"| {line} |" for line in cells)


def format_speedup(value: float | None, unit: str = "") -> str:
    """Return a speed-up as text. A slow-down is turned round: how many times slower.

    >>> [format_speedup(value) for value in (1.234, 0.22, 0.93, 0.0125, None)]
    ['1.23', '4.5x slower', '1.08x slower', '80x slower', '-']
    >>> format_speedup(1.234, "x")
    '1.23x'
    """
    if value is None:
        return "-"
    return f"{value:.2f}{unit}" if round(value, 2) >= 1 else f"{_slow_down(value)}x slower"


def _slow_down(value: float) -> str:
    """Return 1 / value to two digits; below 2 to three, since two would call 0.98 "1.0x slower"."""
    times = 1 / value
    return (
        f"{times:.2f}"
        if times < 1.995
        else f"{times:.1f}"
        if times < 9.95
        else f"{float(f'{times:.2g}'):.0f}"
    )


def format_quartiles(five: Mapping[str, float] | None) -> str:
    """Return a speed-up with its quartiles. Where all three are slow-downs, all three are told as
    such.

    >>> format_quartiles({"min": 1, "q1": 1.2, "median": 1.5, "q3": 1.75, "max": 2})
    '1.50 (1.20-1.75)'
    >>> format_quartiles({"min": 0.1, "q1": 0.2, "median": 0.25, "q3": 0.4, "max": 1})
    '4.0x slower (2.5-5.0)'
    >>> format_quartiles({"min": 0.5, "q1": 0.8, "median": 1.1, "q3": 1.2, "max": 1.2})
    '1.10 (1.25x slower to 1.20)'
    """
    if five is None:
        return "-"
    low, middle, high = five["q1"], five["median"], five["q3"]
    if round(low, 2) >= 1:
        spread = f"{low:.2f}-{high:.2f}"
    elif round(high, 2) < 1:
        spread = f"{_slow_down(high)}-{_slow_down(low)}"
    else:
        spread = f"{format_speedup(low)} to {format_speedup(high)}"
    return f"{format_speedup(middle)} ({spread})"


def find_least_speedup(figures: Mapping[str, Any], arm: str) -> float | None:
    """The worst speed-up of any prompt."""
    found = [of[arm]["speedup"]["min"] for of in figures["tasks"].values() if of[arm]["speedup"]]
    return min(found, default=None)


def format_number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def list_tables(result: Mapping[str, Any]) -> Iterator[Grid]:
    """All tables of a result."""
    figures, settings = result["figures"], result["settings"]
    names = list(figures["tasks"])
    heads = [SHORT.get(name, name) for name in names]
    arms = list(figures["overall"])
    many = len(names) > 1
    rows = [
        [
            arm,
            *(format_quartiles(figures["tasks"][name][arm]["speedup"]) for name in names),
            *([format_speedup(figures["overall"][arm]["mean"])] if many else []),
            format_speedup(find_least_speedup(figures, arm)),
        ]
        for arm in arms
    ]
    yield Grid(
        "Times as fast as plain decoding, after the prompt: median of prompts (quartiles), and the "
        "least of all prompts",
        ["", *heads, *(["mean"] if many else []), "least"],
        rows,
    )
    if result.get("chapter"):
        for name in names:
            yield _tabulate_task(result, name)
    yield Grid(
        "What it took",
        ["", "tokens/s", "with prompt", "tau", "target passes/token", "draft passes/token", "nodes/token",
         "position-layers/token", "same text", "peak MiB"],
        [_count_row(result, arm) for arm in arms],
    )  # fmt: skip
    for peer, ratios in figures["against"].items():
        others = [arm for arm in arms if arm in ratios and arm != peer and ratios[arm]]
        shown = [
            [
                arm,
                *(format_speedup(ratios[arm].get(n)) for n in names),
                format_speedup(ratios[arm]["mean"]),
            ]
            for arm in others
        ]
        yield Grid(f"Times as fast as {peer}", ["", *heads, "mean"], shown)
    if "curve_figures" in result:
        yield _tabulate_curve(result["curve_figures"], settings)


def _count_row(result: Mapping[str, Any], arm: str) -> list[str]:
    of = result["figures"]["overall"][arm]
    held = result.get("memory", {}).get(arm)
    same = "-" if of["identical"] is None else f"{of['identical']} of {of['jobs']}"
    return [
        arm,
        format_number(of["tokens_per_second"], 1),
        format_speedup(of["request"]),
        format_number(of["tau"]),
        format_number(of["calls_per_token"]),
        format_number(of["draft_calls_per_token"]),
        format_number(of["nodes_per_token"]),
        format_number(of["layers_per_token"], 1),
        same,
        "-" if held is None else f"{held['peak'] / 2**20:.0f}",
    ]


def _tabulate_task(result: Mapping[str, Any], task: str) -> Grid:
    """All techniques on one task, a row each."""
    rows = []
    for arm, of in result["figures"]["tasks"][task].items():
        same = "-" if of["identical"] is None else f"{of['identical']} of {of['jobs']}"
        counts = (
            of["tau"],
            of["alpha"],
            of["calls_per_token"],
            of["draft_calls_per_token"],
            of["nodes_per_token"],
        )
        rows.append(
            [
                arm,
                format_quartiles(of["speedup"]),
                *map(format_number, counts),
                same,
                format_number(of["state_per_token"], 0),
            ]
        )
    return Grid(
        f"{SHORT.get(task, task)}: {count_things(rows_of(result, task), 'request')}",
        ["", "times as fast (quartiles)", "tau", "alpha", "target passes/token", "draft passes/token", "nodes/token",
         "same text", "state bytes/token"],
        rows,
    )  # fmt: skip


def rows_of(result: Mapping[str, Any], task: str) -> int:
    """How many requests of a task there were."""
    return max((of["jobs"] for of in result["figures"]["tasks"][task].values()), default=0)


def _tabulate_curve(figures: Mapping[str, Any], settings: Mapping[str, Any]) -> Grid:
    curves = figures["curves"]
    ks = list(next(iter(curves.values()))["rows"])
    header = [
        "new tokens",
        *(f"{label}\n{what}" for label in curves for what in ("ms", "t(k)/t(1)", "over the floor")),
    ]
    rows = [
        [
            k,
            *(
                text
                for curve in curves.values()
                for row in [curve["rows"][k]]
                for text in (
                    format_number(row["milliseconds"], 1),
                    format_number(row["against_one"]),
                    format_number(row.get("over")),
                )
            ),
        ]
        for k in ks
    ]
    tops = (
        f"{figures['bandwidth'] / 1e9:.1f} GB/s",
        f"{figures['peak'] / 1e9:.0f} billion operations/s",
    )
    return Grid(
        f"One forward pass after {figures['cached']} cached tokens, {settings['dtype']}; the floor "
        "is the larger of "
        f"weights at {tops[0]} ({_find_best(figures, 'bandwidth')}) and arithmetic at {tops[1]} "
        f"({_find_best(figures, 'peak')})",
        header,
        rows,
    )


def _find_best(figures: Mapping[str, Any], kind: str) -> str:
    reached: Mapping[str, float] = figures["ceilings"][kind]
    return max(reached, key=lambda who: reached[who], default="nobody")


def count_things(n: int, what: str) -> str:
    """A number of things.

    >>> count_things(1, "round"), count_things(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{n} {what}" + ("" if n == 1 else "s")


def list_notes(result: Mapping[str, Any]) -> list[str]:
    """What must be known beside the tables, a line each."""
    settings, m = result["settings"], result["machine"]
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    end = "at most" if settings["until_eos"] else "(an end of text ends nothing)"
    units = " with " + ", ".join(m["units"]) if m["units"] else ""
    lines = [
        f"{settings['model']}, {settings['dtype']} on {settings['device']}, {how}, "
        f"{settings['tokens']} tokens an answer "
        f"{end}, {count_things(settings['rounds'], 'round')}",
        f"{count_things(m['cores'], 'core')} of {m['cpu']}{units}, {count_things(m['threads'], 'thread')}, "
        f"torch {m['torch']}, "
        f"{result['date']}, commit {result['commit']}",
    ]
    commits = list(dict.fromkeys(str(sitting["commit"]) for sitting in result["sittings"]))
    if len(commits) > 1:
        lines.append(f"samples of several commits: {', '.join(commits)}")
    if result.get("chapter"):
        drafts = settings["draft"] or "none; what needs one is left out"
        lines.append(f"draft model: {drafts}")
        lines.append(
            "tau: tokens per forward pass of the target; alpha: of the positions at which draft "
            "tokens were tested, the "
            "share at which one was accepted; a persistent technique begins each round with "
            "nothing and keeps what it "
            "sees in that round"
        )
        lines += list_lossy_arms(settings["methods"])
    lines += [f"built for {arm}: {what}" for arm, what in result.get("built", {}).items()]
    lines += [f"left out: {reason}" for reason in result["skipped"]]
    for label, curve in result.get("curve_figures", {}).get("curves", {}).items():
        if curve["falls"]:
            lines.append(f"{label}: cost falls at {', '.join(map(str, curve['falls']))} new tokens")
    for name, text in result.get("texts", {}).items():
        if text["distinct_4grams"] < 0.8:
            lines.append(
                f"{name}: only {text['distinct_4grams']:.0%} of plain text's 4-grams are distinct: it loops"
            )
    return lines


def list_lossy_arms(labels: Sequence[str]) -> list[str]:
    """Of arms that may write another text than plain decoding: why.

    >>> list_lossy_arms(["llma", "speculative_decoding:lenience=0.5"])
    ['speculative_decoding:lenience=0.5: lossy at these settings, so its text may be another']
    """
    lines = []
    for label in labels:
        spec = ArmSpec.read(label)
        card = find_technique(spec.name)
        if card.keeps:
            lines.append(f"{label}: keeps {card.keeps}, so its text may be another")
        elif card.promise(**dict(spec.knobs)) in (Guarantee.LOSSY, Guarantee.APPROX):
            lines.append(f"{label}: lossy at these settings, so its text may be another")
    return lines


def render_result(result: Mapping[str, Any]) -> RenderableType:
    """All of it, for a terminal."""
    return Group(*(grid.rich() for grid in list_tables(result)), *list_notes(result))


def write_page(result: Mapping[str, Any], grids: Sequence[Grid], notes: Sequence[str] = ()) -> str:
    """Return a page in Markdown: the command that made the result, its tables, and what must be
    known beside them.
    """
    return (
        "\n\n".join([f"`{result['command']}`", *(grid.markdown() for grid in grids), *notes]) + "\n"
    )


def write_markdown(result: Mapping[str, Any]) -> str:
    """The same for a page. The command that made it comes first."""
    return write_page(
        result, list(list_tables(result)), ["\n".join(f"- {line}" for line in list_notes(result))]
    )


def describe_provenance(result: Mapping[str, Any]) -> str:
    """Return on what, when and from which commit a result was measured."""
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}; {result['date']}, commit {result['commit']}"
    )


def make_charts(result: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts of a run by name: speed-ups by task, and the cost curve if it was measured."""
    drawn = {"speedups": _speedup_chart(result)}
    if "curve_figures" in result:
        drawn["curve"] = _curve_chart(result)
    return drawn


def _speedup_chart(result: Mapping[str, Any]) -> Chart:
    """A panel a task, a bar an arm, from 1 (plain decoding) to the right, or left where it is slower."""
    tasks, every = result["figures"]["tasks"], result["figures"]["overall"]
    arms = [arm for arm in every if arm != PLAIN]
    fives = {task: {arm: of[arm]["speedup"] for arm in arms} for task, of in tasks.items()}
    top = max([1.0, *(five["q3"] for of in fives.values() for five in of.values() if five)])

    def colour(arm: str, five: Mapping[str, float]) -> str:
        return PEER if ArmSpec.read(arm).peer else FASTER if five["median"] >= 1 else SLOWER

    panels = [
        Bars(
            task.replace("_", " "),
            {arm: five and five["median"] for arm, five in of.items()},
            {arm: (five["q1"], five["q3"]) for arm, five in of.items() if five},
            origin=1.0,
            colours={arm: colour(arm, five) for arm, five in of.items() if five},
            top=top,
            digits=2,
            named=at % 3 == 0,
        )
        for at, (task, of) in enumerate(fives.items())
    ]
    means = "; ".join(
        f"{arm} {every[arm]['mean']:.2f}" for arm in arms if every[arm]["mean"] is not None
    )
    about = [
        "Times as fast as plain decoding. The thin line spans the quartiles over prompts; peers are grey."
    ]
    title = f"{result['settings']['model']}: times as fast as plain decoding"
    return Chart(
        title, panels, [*about, *list_notes(result)[:2]], f"mean over tasks: {means}", columns=3
    )


def _curve_chart(result: Mapping[str, Any]) -> Chart:
    """What a forward pass over k tokens takes, in ms and against one token, with the machine's floor."""
    figures = result["curve_figures"]
    rows: dict[str, dict[int, dict[str, float]]] = {
        label: {int(k): row for k, row in sorted(of["rows"].items(), key=lambda pair: int(pair[0]))}
        for label, of in figures["curves"].items()
    }
    own = rows.get("tinyspec", {})
    floor = {k: row["floor"] for k, row in own.items() if "floor" in row}
    against = {k: ms / own[min(own)]["milliseconds"] for k, ms in floor.items()}
    titles = {
        "milliseconds": "milliseconds",
        "against_one": "time of k tokens over the program's own time of one",
    }
    lines = {
        name: {label: {k: r[name] for k, r in line.items()} for label, line in rows.items()}
        for name in titles
    }
    floors: dict[str, Mapping[int, float]] = {"milliseconds": floor, "against_one": against}
    return Chart(
        f"{result['settings']['model']}: the cost of a forward pass over k new tokens",
        [
            Lines(title, lines[name], "new tokens", floors[name], "the machine's floor")
            for name, title in titles.items()
        ],
        [f"After {figures['cached']} cached tokens.", *list_notes(result)[:2]],
        "; ".join(
            f"{label} at {max(of)} tokens {of[max(of)]:.2f}"
            for label, of in lines["against_one"].items()
            if of
        ),
    )
