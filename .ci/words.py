"""Print how the package names and explains things: the language rules of the house in figures (`make words`)."""

import ast
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "tinyspec"
FIELD_WORDS = """
accept attend bleu calibrate check chrf commit decode draft embed encode entropy extend fit forward generate linear load main
observe perplexity plan prefill propose quantize race refine reject rescore residual rewind rotate run sample save score
softmax step stream tokenize train translate update validate verify
"""
"""Single words of the field that name a function well."""


def main() -> None:
    homes = defaultdict(set)
    functions = one_word = docstrings = clauses = wide = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        wide += sum(len(line) > 100 for line in text.splitlines())
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
                if isinstance(node, ast.FunctionDef):
                    functions += 1
                    one_word += "_" not in node.name and node.name not in FIELD_WORDS.split()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                docstrings += 1
                clauses += bool(re.match(r"(The|A|An|What|Whether|How|Where|So)\b", doc))
    shared = sum(len(found) for found in homes.values() if len(found) > 1)
    print(
        f"functions named by one word that is not the field's  {100 * one_word / functions:4.0f} %"
    )
    print(
        f"public names that several modules define             {100 * shared / sum(map(len, homes.values())):4.0f} %"
    )
    print(
        f"docstrings that open with a noun clause              {100 * clauses / docstrings:4.0f} %"
    )
    print(f"lines of more than 100 columns                       {wide:4}")


if __name__ == "__main__":
    main()
