"""Write the pages of a folder of results: `python -m tinyspec.bench.summary tutorials/results`.

README.md there is organised by question; every other page holds all tables of one result, and the
charts stand beside them. Nothing is measured. Tests hold the committed pages to these texts, so
that no number in them can be older than the result it came from.
"""

import json
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tinyspec.bench import answers, report
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments import parts, serve_tables
from tinyspec.bench.harness import describe_machines
from tinyspec.bench.plot import Chart, draw_chart

TEMPLATE = "results.md.jinja"
QUOTED = (
    "race", "plain", "core", "speculative-storyteller", "speculative-smollm2", "retrieval",
    "sizes", "exits", "translation", "translation-iterations", "dialects", "equality", "peer",
    "bench", "bench-float32", "bench-sequoia", "parts", "parts-storyteller", "parts-apprentice",
    "peer-torch", "layerskip", "ppd", "sweeps", "skip", "laws_thorough", "laws_seeds",
    "laws_seeds_trees",
)  # fmt: skip
"""The results that the page quotes."""
OPTIONAL = (
    "long_context", "heads", "heads-sizes", "osd", "distillspec", "exits-translator", "mpee",
    "bench-stored", "bench-smollm2-heads", "batches", "batches-smollm2",
    "batches-long", "clients", "serve-smollm2", "streams", "streams-apar", "bench-quantized-draft",
    "heads-eesd", "exits-consistent", "bench-speed", "bench-head-cost", "heads-sizes-smollm2",
    "dialects-deep", "dialects-flowseq", "exits-hash", "bench-kangaroo", "bench-space",
    "bench-medusa2", "bench-cllm", "exits-free", "exits-skip",
    "exits-skip-bottom", "exits-consistent-flat", "exits-translator-test", "heads-smollm2",
    "heads-typical", "batches-medium", "translation-sat",
)  # fmt: skip
"""The results that the page quotes as soon as the folder has them."""
UNTIMED = (
    "peer-torch",
    "layerskip",
    "laws_thorough",
    "laws_seeds",
    "laws_seeds_trees",
    "heads",
    "heads-sizes",
    "heads-eesd",
    "heads-sizes-smollm2",
    "heads-smollm2",
    "heads-typical",
)
"""Those of them in which nothing is timed: any machine gives the same figures."""

TABLED = (
    "sizes", "exits", "sweeps", "translation", "parts", "dialects", "layerskip", "ppd",
    "long_context", "heads", "osd", "distillspec", "mpee", "serve", "batches", "clients",
    "streams",
)  # fmt: skip
"""The experiments that have a page of their own, by what its name has before a hyphen."""
LABELLED = (
    "exits", "exits-consistent", "exits-hash", "exits-free", "exits-skip", "exits-translator",
    "exits-skip-bottom", "exits-consistent-flat", "exits-translator-test",
    "translation", "heads", "heads-eesd", "heads-smollm2", "heads-typical",
    "batches", "batches-long", "batches-medium", "streams", "streams-apar",
)  # fmt: skip
"""Those of them whose labels begin with a method: what has a row there is measured."""
BY_HAND = ("vllm.md",)
"""The pages that a script in tests writes, from another program's run. They have no result here."""


def load_result(folder: Path, name: str) -> dict[str, Any]:
    """Return one committed result."""
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return result


def headline_table(folder: Path, tutorials: str = "tutorials/") -> str:
    """Return the table of three claims that README.md shows too.

    tutorials  the folder that its links go to
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
        f"Spec-Bench questions, in {bits['dtype']} (a property of our CPU kernels) "
        "| `tinyspec bench equality` |",
        f"| faster | `auto` on SmolLM2-135M: {report.format_speedup(auto, 'x')} on Spec-Bench, "
        f"{report.format_speedup(edits, 'x')} on text edits "
        f"| `tinyspec bench --methods auto`, [settings]({tutorials}results/bench.md) |",
        f"| on tiny models | bundled models: {report.format_speedup(greedy['ratio'], 'x')} "
        f"([why so little]({tutorials}01_why_five_cost_one.md)) "
        f"| `tinyspec bench {' '.join(race['command'].split()[2:5])}` |",
    ]
    head = f"| claim | result on {race['machine']['cores']} CPU cores | reproduce with |"
    return "\n".join([head, "|---|---|---|", *rows])


def write_readme(folder: Path) -> str:
    """Return the page of all measurements: the template, filled with figures and tables."""
    here = [name for name in OPTIONAL if (folder / f"{name}.json").exists()]
    results = {name: load_result(folder, name) for name in (*QUOTED, *here)}
    timed = {name: result for name, result in results.items() if name not in UNTIMED}
    environment = Environment(
        loader=PackageLoader("tinyspec.bench", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count_things": report.count_things,
        "join_blocks": answers.join_blocks,
        "make_anchor": make_anchor,
        "number": report.format_number,
        "speedup": report.format_speedup,
        "times": answers.format_times,
    }
    functions = {
        name: function
        for module in (answers, parts, report, serve_tables)
        for name, function in vars(module).items()
        if name.startswith(("count_", "describe_", "find_", "list_", "tabulate_"))
    }
    page = environment.get_template(TEMPLATE).render(
        **functions,
        **{name.replace("-", "_"): result for name, result in results.items()},
        claims=_tabulate_claims(results, "../"),
        machines=describe_machines(timed),
        labelled=[results[name] for name in LABELLED if name in results],
        names=list(results),
        questions=list_headings(),
        share=answers.GOOD_AGREEMENT,
    )
    return _join_lines(page)


def list_headings() -> list[str]:
    """Return the headings of the sections: questions, in the order in which a reader asks."""
    text = files("tinyspec.bench").joinpath(TEMPLATE).read_text("utf-8")
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def _join_lines(page: str) -> str:
    """Put each paragraph, and each entry of a list, on one line. Tables and code stay as they are.

    >>> _join_lines("one\\ntwo\\n\\n- a\\n  b\\n- c\\n")
    'one two\\n\\n- a b\\n- c\\n'
    """
    blocks = [
        block if block.startswith(("|", "```")) else re.sub(r"\n(?!- )\s*", " ", block)
        for block in page.strip().split("\n\n")
    ]
    return answers.join_blocks(blocks) + "\n"


def make_anchor(heading: str) -> str:
    """Return the anchor that a heading has in Markdown.

    >>> make_anchor("When is it slower?")
    'when-is-it-slower'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def render_pages(folder: Path) -> dict[str, str]:
    """Render every page. Returns its text by its file name."""
    pages = {"README.md": write_readme(folder)}
    for path in sorted(folder.glob("*.md")):
        if path.name not in (*pages, *BY_HAND):
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
    for file, page in render_pages(results_folder).items():
        (results_folder / file).write_text(page, encoding="utf-8")
    for file, chart in list_charts(results_folder).items():
        (results_folder / file).write_text(draw_chart(chart), encoding="utf-8")
