"""The book: lessons as MyST Markdown, executed when it is built. `tinyspec book` builds and opens it."""

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging as sphinx_logging

from tinyspec.cli import notebooks
from tinyspec.cli.lessons import read_cells, strip_outputs

os.environ["MPLCONFIGDIR"] = os.environ.get(
    "MPLCONFIGDIR", os.path.join(os.path.dirname(__file__), "_build", "matplotlib")
)
logging.getLogger("traitlets").setLevel(logging.WARNING)  # it tells of every kernel that starts

project = "tinyspec"
author = "the tinyspec authors"
copyright = "2026, the tinyspec authors (MIT licence)"
html_title = "tinyspec"
extensions = [
    "myst_nb",
    "sphinx-mathjax-offline",
]  # the second brings MathJax's own files: nothing is fetched
exclude_patterns = ["_build", "jupyter_execute", "_static", "results", "assignments/*/build"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True  # a lesson whose cell fails stops the build, with file and line
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_show_sphinx = False
mathjax_path = "mathjax/tex-chtml.js"
ADDRESS = notebooks.find_address()
html_theme_options: dict[str, Any] = {}
if ADDRESS:
    html_theme_options |= {
        "source_repository": ADDRESS,
        "source_branch": "main",
        "source_directory": "tutorials/",
    }

# The generation that the index plays back.
REPLAY = "generate 'The dragon opened one eye and' --method specinfer --expansion 3x2x1x1 --temperature 0.8 --seed 7 -n 60"


class LinkPapers(SphinxTransform):
    """Let the name of a paper, as in "arXiv 2211.17192", lead to it."""

    default_priority = 800
    PAPER = re.compile(r"(arXiv[:\s]\s*)?\b(\d{4}\.\d{5})\b")

    def apply(self, **_: Any) -> None:
        """Replace the names in running text; those in code and in links stay."""
        for text in [*self.document.findall(nodes.Text)]:
            inside = text.parent
            if not self.PAPER.search(text) or isinstance(
                inside, (nodes.literal, nodes.literal_block, nodes.reference)
            ):
                continue
            pieces: list[nodes.Node] = []
            at = 0
            for found in self.PAPER.finditer(text):
                pieces.append(nodes.Text(text[at : found.start()]))
                pieces.append(
                    nodes.reference(
                        "", found[0], refuri=f"https://arxiv.org/abs/{found[2]}", internal=False
                    )
                )
                at = found.end()
            inside.replace(text, [*pieces, nodes.Text(text[at:])])


def report_warnings(app: Sphinx, doctree: nodes.document) -> None:
    """Name each cell whose output shows a Python warning: `tinyspec book` then builds no book."""
    for block in doctree.findall(nodes.literal_block):
        if "stderr" in block["classes"] and (found := notebooks.WARNING.search(block.astext())):
            place = f"{doctree['source']}:{block.line or block.parent.line or 1}"
            sphinx_logging.getLogger(__name__).warning(
                f"the cell shows a warning, {found[0]}", location=place
            )


def describe_pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Give each picture that a cell draws the alt text of the page."""
    cells = read_cells(Path(doctree["source"]).read_text(encoding="utf-8"))
    drawn = [part for part in doctree.findall(nodes.container) if "cell" in part["classes"]]
    for cell, part in zip(cells, drawn, strict=True):
        for image in part.findall(nodes.image):
            image["alt"] = cell.alt or "What the code above draws"


def leave_outputs_out(app: Sphinx, name: str, source: list[str]) -> None:
    """Drop what a page shows below its cells for readers of the file: the book has what they did now."""
    source[0] = strip_outputs(source[0])


def write_replay(app: Sphinx) -> None:
    """Record the generation that the index plays back."""
    if app.builder.format == "html":
        Path(app.outdir).mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "tinyspec",
            *shlex.split(REPLAY),
            "--replay",
            str(Path(app.outdir) / "replay.html"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def executed(app: Sphinx, name: str) -> Path:
    """Return where myst-nb leaves a page that it has run."""
    return Path(app.outdir).parent / "jupyter_execute" / f"{name}.ipynb"


def offer_notebook(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Put links to the lesson as a notebook below its title."""
    if "body" not in context or not executed(app, name).exists():
        return
    links = [f'<a href="notebooks/{name}.ipynb" download>Download as notebook</a>']
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        colab = f"https://colab.research.google.com/github/{repository}/blob/notebooks/{name}.ipynb"
        links.append(f'<a href="{colab}">Open in Colab</a>')
    buttons = f'</h1>\n<p class="as-notebook">{" ".join(links)}</p>'
    context["body"] = context["body"].replace("</h1>", buttons, 1)


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Write the pages that were run as notebooks that run anywhere."""
    import nbformat

    if error or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    for name in sorted(app.env.found_docs):
        if executed(app, name).exists():
            notebook = nbformat.read(executed(app, name), as_version=4)
            nbformat.write(notebooks.make_standalone(notebook), folder / f"{name}.ipynb")


def setup(app: Sphinx) -> dict[str, bool]:
    """Tell Sphinx of all this."""
    app.add_transform(LinkPapers)
    app.connect("builder-inited", write_replay)
    app.connect("source-read", leave_outputs_out)
    app.connect("doctree-read", report_warnings)
    app.connect("doctree-read", describe_pictures)
    app.connect("html-page-context", offer_notebook)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
