"""Change a file in the small ways that cosmic-ray knows, one at a time, and ask the laws which they catch.

    make mutants FILE=tinyspec/decoding/verify.py

Each mutant runs in a process of its own, on the pure Python twins, with the laws as its only tests:
first those that the museum names for mistakes in this file, then, for what they let pass, every
other law. The table tells a law's verdict from a crash or an endless run while a law was asked. A
mutant that passes every law is printed with its change. Survivors that are no mistake stand with
their reason in `.ci/survivors.toml`. Exit code 1: a survivor is missing from that list.
"""

import argparse
import contextlib
import difflib
import importlib.abc
import importlib.util
import multiprocessing
import os
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parent.parent
TWINS = "twin"
Answers = Any  # a queue of multiprocessing
SKIPPED = (
    "Is_",
    "IsNot_",
    "_Is",
    "_IsNot",
    "Pow",
    "Shift",
    "Bit",
    "Invert",
    "ExceptionReplacer",
    "Variable",
)
"""Operators that are left out: their mutants are near copies of others (`a ** b` for `a * b`), or crash at once."""


def list_mutants(source: str) -> list[str]:
    """Return each mutated text of a file once, in the order of its lines."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    found = {}
    for name in plugins.operator_names():
        if any(part in name for part in SKIPPED):
            continue
        operator = plugins.get_operator(name)()
        occurrence = 0
        while (text := mutate_code(source, operator, occurrence)) is not None:
            found[text] = None
            occurrence += 1
    return sorted(found, key=lambda text: next(
        (i for i, (a, b) in enumerate(zip(source, text, strict=False)) if a != b), len(source)
    ))  # fmt: skip


def changed_lines(source: str, text: str) -> tuple[str, str]:
    """Return what a mutant removes and what it puts there instead."""
    diff = list(difflib.ndiff(source.splitlines(), text.splitlines()))
    return tuple(" / ".join(d[2:].strip() for d in diff if d[0] == sign) for sign in "-+")  # type: ignore[return-value]


def import_changed(path: Path, text: str) -> None:
    """Let this process import a file of the package with another text."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    class Changed(importlib.abc.SourceLoader):
        def get_filename(self, fullname: str) -> str:
            return str(path)

        def get_data(self, path: str) -> bytes:
            return text.encode()

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: object, target: object = None) -> object:
            found = fullname == module
            return importlib.util.spec_from_loader(fullname, Changed()) if found else None

    sys.meta_path.insert(0, Finder())


def time_laws(path: Path, answers: Answers) -> None:
    """Send the seconds that each law takes on the library as it is, those of this file's mistakes first.

    A law that the pure twins do not satisfy (torch sums a row in an order that depends on its neighbours) is left out.
    """
    os.environ["TINYSPEC_PURE"] = "1"
    from tinyspec.laws.evidence import LawViolated
    from tinyspec.laws.judges import all_judges
    from tinyspec.laws.museum import mutants
    from tinyspec.laws.parts import PARTS

    module = ".".join(path.relative_to(ROOT / "tinyspec").with_suffix("").parts) + "."
    here = {m.law for m in mutants() if any(p.place.startswith(module) for p in m.patches)}
    seconds = {}
    for law, judge in all_judges().items():
        began = time.process_time()
        with contextlib.suppress(LawViolated):
            judge(PARTS)
            seconds[law] = time.process_time() - began
    answers.put(dict(sorted(seconds.items(), key=lambda item: (item[0] not in here, item[1]))))


def judge_mutant(path: Path, text: str, laws: Sequence[str], answers: Answers) -> None:
    """Import the package with this text as one of its files, ask the laws, and send who caught it.

    Where the twin law is asked alone, the compiled kernels run, and the changed twin is held to them.
    """
    os.environ["TINYSPEC_PURE"] = "0" if laws == [TWINS] else "1"
    import_changed(path, text)
    law = "import"
    try:
        from tinyspec.laws.judges import all_judges
        from tinyspec.laws.parts import PARTS

        for law in laws:
            all_judges()[law](PARTS)
        answers.put("")
    except BaseException as error:
        verdict = type(error).__name__ == "LawViolated"  # its class may have been imported anew
        answers.put(law if verdict else f"{type(error).__name__} under: {law}")


def ask_child(work: Callable[..., None], *arguments: Any, seconds: int) -> Any:
    """Return what `work` sends from a process of its own, or "no end" after so much processor time."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        work(*arguments, answers)

    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=limited)
    child.start()
    child.join()
    return "no end, or a crash of the process" if answers.empty() else answers.get()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a file of the package")
    parser.add_argument(
        "--seconds", type=int, default=60, help="of processor time for each mutant (default: 60)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    options = parser.parse_args()
    path = options.file.resolve()
    source = path.read_text(encoding="utf-8")
    known = tomllib.loads((ROOT / ".ci/survivors.toml").read_text(encoding="utf-8"))
    reasons = {
        (entry["old"], entry["new"]): entry["reason"]
        for entry in known.get(path.relative_to(ROOT).as_posix(), [])
    }
    for library in ("torch", "scipy.stats", "safetensors.torch"):
        importlib.import_module(library)  # once, for every child

    laws = ask_child(time_laws, path, seconds=600)
    print(
        f"{len(laws)} laws, {sum(laws.values()):.0f} s of processor time for each survivor",
        flush=True,
    )
    asked = [[TWINS], list(laws)] if path.name.startswith("reference") else [list(laws)]

    def judge(text: str) -> str:
        for some in asked:
            if law := ask_child(judge_mutant, path, text, some, seconds=options.seconds):
                return str(law)
        return ""

    mutants = list_mutants(source)
    caught: Counter[str] = Counter()
    unlisted = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        judged = pool.map(judge, mutants)
        for text, law in zip(mutants, judged, strict=True):
            if law:
                caught[law] += 1
                continue
            old, new = changed_lines(source, text)
            reason = reasons.get((old, new))
            unlisted += reason is None
            print(f"- {old}\n+ {new}\n  {reason or 'SURVIVED'}", flush=True)
    for law, n in caught.most_common():
        print(f"{n:5}  {law}")
    verdicts = sum(n for law, n in caught.items() if law in laws)
    print(
        f"{len(mutants)} mutants: {verdicts} caught by a verdict, {caught.total() - verdicts} crash or do not end, "
        f"{len(mutants) - caught.total()} survive, {unlisted} of them without a reason"
    )
    return bool(unlisted)


if __name__ == "__main__":
    sys.exit(main())
