"""Write the pages of a folder of results: `python -m tinyspec.bench.summary tutorials/results`.

README.md there is organised by question; every other page holds all tables of one result, and the
charts stand beside them. Nothing is measured. Tests hold the committed pages to these texts, so
that no number in them can be older than the result it came from.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tinyspec.bench import answers, report
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.harness import describe_machines
from tinyspec.bench.plot import Chart, draw

QUOTED = (
    "race", "plain", "core", "speculative-storyteller", "speculative-smollm2", "retrieval",
    "sizes", "exits", "translation", "translation-iterations", "dialects", "equality", "peer",
    "bench", "bench-float32", "parts", "parts-storyteller", "parts-apprentice", "peer-torch",
    "layerskip", "ppd", "sweeps", "laws_thorough", "laws_seeds",
)  # fmt: skip
"""The results that the page quotes."""
UNTIMED = ("peer-torch", "layerskip", "laws_thorough", "laws_seeds")
"""Those of them in which nothing is timed: any machine gives the same figures."""

QUESTIONS: dict[str, Callable[[answers.Results], str]] = {
    "Is the output really unchanged?": answers.answer_unchanged,
    "How much faster is it?": answers.answer_faster,
    "When is it slower?": answers.answer_slower,
    "What does a forward pass cost, and where does the time go?": answers.answer_cost,
    "How fast is plain decoding itself?": answers.answer_plain,
    "What do sampling and verifying cost?": answers.answer_kernels,
    "What does a lookup cost?": answers.answer_lookup,
    "How large should the draft model be?": answers.answer_sizes,
    "What does leaving early buy?": answers.answer_exits,
    "What does writing all words at once cost in quality?": answers.answer_at_once,
}
"""The sections of the page, in the order in which a reader asks."""

TABLED = (
    "sizes", "exits", "sweeps", "translation", "parts", "dialects", "layerskip", "ppd"
)  # fmt: skip
"""The experiments that have a page of their own, by the first word of its name."""


def load_result(folder: Path, name: str) -> dict[str, Any]:
    """One committed result."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result


def headline_table(folder: Path, tutorials: str = "tutorials/") -> str:
    """Return the table of three claims that README.md shows too; links go to the folder
    `tutorials`.
    """
    return _tabulate_claims(
        {name: load_result(folder, name) for name in ("equality", "bench", "race")}, tutorials
    )


def _tabulate_claims(results: Mapping[str, Mapping[str, Any]], tutorials: str) -> str:
    bits, wide, race = (results[name] for name in ("equality", "bench", "race"))
    auto = wide["figures"]["overall"]["auto"]["spec_bench"]
    edits = wide["figures"]["tasks"]["edits"]["auto"]["speedup"]["median"]
    greedy = race["temperature 0.0"]
    rows = [
        "| lossless | greedy text identical to plain decoding's on "
        f"{answers.count_identical(bits)} of {bits['questions']} "
        f"Spec-Bench questions, in {bits['dtype']} | `tinyspec bench equality` |",
        f"| faster | `auto` on SmolLM2-135M: {report.format_speedup(auto, 'x')} on Spec-Bench, "
        f"{report.format_speedup(edits, 'x')} on text edits "
        f"| `tinyspec bench --methods auto`, [settings]({tutorials}results/bench.md) |",
        f"| honest | bundled models: {report.format_speedup(greedy['ratio'], 'x')} ([why so "
        f"little]({tutorials}01_why_five_cost_one.md)) "
        f"| `tinyspec bench {' '.join(race['command'].split()[2:5])}` |",
    ]
    head = f"| claim | result on {race['machine']['cores']} CPU cores | reproduce with |"
    return "\n".join([head, "|---|---|---|", *rows])


def write_readme(folder: Path) -> str:
    """Return the page of all measurements."""
    results = {name: load_result(folder, name) for name in QUOTED}
    sections = [f"## {question}\n\n{answer(results)}" for question, answer in QUESTIONS.items()]
    contents = [f"- [{question}](#{anchor_of(question)})" for question in QUESTIONS]
    return answers.join_blocks(
        "# Measurements",
        _tabulate_claims(results, "../"),
        "\n".join(f"- {line}" for line in _describe_method(results)),
        "\n".join(contents),
        *sections,
    ) + "\n"  # fmt: skip


def _describe_method(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return where, when and how it was measured, and how to read it."""
    timed = {name: result for name, result in results.items() if name not in UNTIMED}
    return [
        f"**Machine and dates**: {describe_machines(timed)}.",
        "**Method**: arms take turns in one run. Where techniques or peers are compared by task, a "
        "ratio is taken within a turn, and the median of them is shown; the race, plain decoding and "
        "the kernels show the ratio of two medians. *The mean* is that of the groups.",
        "**Baseline**: a speed-up is against plain decoding of the same model in the same number "
        "format, in the same run. Each table names its model, format and prompts, and the figures of "
        "two tables differ because these do: a large model spends more of its time in the forward "
        "pass, and text that repeats its prompt is easy to draft. Where a table compares with "
        "another program, it says so.",
        "**Reading**: 1.31 or 1.31x is 1.31 times as fast. A slow-down is turned round: 4.5x "
        "slower. *After the prompt*: "
        "the time to read the prompt is left out.",
        "**Data**: all samples are in the `.json` files of this folder. Tests recompute the "
        "figures from them, and hold this "
        "page to `python -m tinyspec.bench.summary tutorials/results`, which writes it and "
        "measures nothing.",
    ]


def anchor_of(heading: str) -> str:
    """Return the anchor that a heading has in Markdown.

    >>> anchor_of("When is it slower?")
    'when-is-it-slower'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def list_pages(folder: Path) -> dict[str, str]:
    """Return the text of every page by its file name."""
    pages = {"README.md": write_readme(folder)}
    for path in sorted(folder.glob("*.md")):
        if path.name not in pages:
            result, kind = load_result(folder, path.stem), path.stem.partition("-")[0]
            if kind in TABLED:
                of = _find_experiment(kind)
                assert of.tables is not None
                notes = of.notes(result) if of.notes else ()
                pages[path.name] = report.write_page(result, of.tables(result), notes)
            else:
                pages[path.name] = report.write_markdown(result)
    return pages


def list_charts(folder: Path) -> dict[str, Chart]:
    """Return the chart of every result that has one, by its file name."""
    charts = dict[str, Chart]()
    for path in sorted(folder.glob("*.json")):
        name, kind = path.stem, path.stem.partition("-")[0]
        if kind in TABLED:
            of = _find_experiment(kind)
            if of.chart:
                charts[f"{name}.svg"] = of.chart(load_result(folder, name))
        elif (folder / f"{name}.md").exists():  # results of `tinyspec bench` itself
            drawn = report.make_charts(load_result(folder, name))
            charts |= {f"{name}-{which}.svg": chart for which, chart in drawn.items()}
    return charts


def _find_experiment(kind: str) -> Experiment:
    experiment: Experiment = import_module(f"tinyspec.bench.experiments.{kind}").EXPERIMENT
    return experiment


if __name__ == "__main__":
    results_folder = Path(sys.argv[1])
    for file, page in list_pages(results_folder).items():
        (results_folder / file).write_text(page, encoding="utf-8")
    for file, chart in list_charts(results_folder).items():
        (results_folder / file).write_text(draw(chart), encoding="utf-8")
