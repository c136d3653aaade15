"""Print the code lines and tokens of each room of the package (`make size`).

A code line bears at least one token that is neither a comment nor part of a docstring.
"""

import io
import tokenize
from collections import Counter
from pathlib import Path

BEARING = {tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING}
STATEMENT_ENDS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL}
CHAPTERS = {"speculative", "early_exit", "nonautoregressive"}
PACKAGE = Path(__file__).parent.parent / "tinyspec"


def count_code(source: str) -> tuple[int, int]:
    """Return how many lines bear code, and how many tokens they bear.

    >>> count_code('def f(x):\\n    "Doc."\\n    # why\\n    return x\\n')
    (2, 8)
    """
    lines, tokens, previous = set[int](), 0, None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in BEARING:
            opens_statement = previous is None or previous.type in STATEMENT_ENDS
            if not (token.type == tokenize.STRING and opens_statement):
                lines.update(range(token.start[0], token.end[0] + 1))
                tokens += 1
        if token.type != tokenize.COMMENT:
            previous = token
    return len(lines), tokens


def room_of(path: Path) -> str:
    """Return the room of a file: its folder, with the chapters and the museum as rooms of their own."""
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1 or parts[0] in ("show", "hub"):
        return "root + show"
    if parts[0] in CHAPTERS:
        return "chapters"
    if parts[0] == "laws" and parts[1] == "museum":
        return "museum"
    return parts[0]


def main() -> None:
    lines, tokens, files = Counter[str](), Counter[str](), Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        n_lines, n_tokens = count_code(path.read_text(encoding="utf-8"))
        for room in (room_of(path), "all"):
            lines[room] += n_lines
            tokens[room] += n_tokens
            files[room] += 1
    print(f"{'room':12} {'lines':>7} {'tokens':>8} {'files':>6}")
    for room in sorted(lines, key=lambda room: (room == "all", room)):
        print(f"{room:12} {lines[room]:7,} {tokens[room]:8,} {files[room]:6}")


if __name__ == "__main__":
    main()
