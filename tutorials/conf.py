"""The book: lessons as MyST Markdown, executed when it is built. `tinyspec book` builds and opens it."""

import os

os.environ["MPLCONFIGDIR"] = os.environ.get(
    "MPLCONFIGDIR", os.path.join(os.path.dirname(__file__), "_build", "matplotlib")
)

project = "tinyspec"
author = "the tinyspec authors"
html_title = "tinyspec: the textbook of accelerated generation"
extensions = ["myst_nb", "sphinx-mathjax-offline"]  # the second brings MathJax's own files: nothing is fetched
exclude_patterns = ["_build", "results", "assignments/*/build"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True  # a lesson whose cell fails stops the build, with file and line
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True

html_theme = "furo"
html_static_path: list[str] = []
html_copy_source = False
mathjax_path = "mathjax/tex-chtml.js"
