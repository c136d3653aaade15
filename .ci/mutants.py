"""Change a file in every small way that cosmic-ray knows, and ask the laws which changes they catch.

    make mutants FILE=tinyspec/decoding/verify.py

Each mutant runs in a process of its own, on the pure Python twins, with the laws as its only tests:
first those that the museum names for mistakes in this file, then, for what they let pass, every
other law. A mutant that no law catches is printed with its change. Survivors that are no mistake
stand with their reason in `.ci/survivors.toml`. Exit code 1: a survivor is missing from that list.
"""

import argparse
import difflib
import importlib.util
import multiprocessing
import os
import sys
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.update(TINYSPEC_PURE="1", OMP_NUM_THREADS="1")
ROOT = Path(__file__).parent.parent
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
"""Operators whose mutants are near copies of others' (`a ** b` for `a * b`), or crash at once."""


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


def judge_mutant(path: Path, text: str, answers: "multiprocessing.SimpleQueue[str]") -> None:
    """Import the package with this text as one of its files, ask the laws, and send who caught it."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    class Changed(importlib.abc.SourceLoader):  # type: ignore[name-defined, misc]
        def get_filename(self, name: str) -> str:
            return str(path)

        def get_data(self, path: str) -> bytes:
            return text.encode()

    class Finder(importlib.abc.MetaPathFinder):  # type: ignore[name-defined, misc]
        def find_spec(self, name: str, path: object, target: object = None) -> object:
            if name == module:
                return importlib.util.spec_from_loader(name, Changed())
            return None

    sys.meta_path.insert(0, Finder())
    law = "at import"
    try:
        from tinyspec.laws.judges import all_judges
        from tinyspec.laws.museum import mutants
        from tinyspec.laws.parts import PARTS

        here = [
            m.law for m in mutants() for p in m.patches if f"tinyspec.{p.place}".startswith(module)
        ]
        for law in [name for name, _ in Counter(here).most_common()]:
            all_judges()[law](PARTS)
        for law in all_judges():
            if law not in here:
                all_judges()[law](PARTS)
        answers.put("")
    except BaseException as error:
        answers.put(f"{law}: {type(error).__name__}")


def run_mutant(path: Path, text: str, seconds: float) -> str:
    """Return the law that caught a mutant and how, or "" if none did."""
    answers: multiprocessing.SimpleQueue[str] = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=judge_mutant, args=(path, text, answers)
    )
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        return "no end: time"
    return answers.get() if not answers.empty() else f"at import: exit {child.exitcode}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a file of the package")
    parser.add_argument("--seconds", type=float, default=300, help="for each mutant (default: 300)")
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

    if wrong := run_mutant(path, source, 10 * options.seconds):
        sys.exit(f"the file as it stands is accused ({wrong}): mend that first")
    mutants = list_mutants(source)
    caught: Counter[str] = Counter()
    unlisted = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for text, law in zip(
            mutants, pool.map(lambda t: run_mutant(path, t, options.seconds), mutants), strict=True
        ):
            if law:
                caught[law.split(":")[0]] += 1
                continue
            old, new = changed_lines(source, text)
            reason = reasons.get((old, new))
            unlisted += reason is None
            print(f"- {old}\n+ {new}\n  {reason or 'SURVIVED'}", flush=True)
    for law, n in caught.most_common():
        print(f"{n:5}  {law}")
    survived = len(mutants) - caught.total()
    print(
        f"{len(mutants)} mutants: {caught.total()} caught, {survived} survived, {unlisted} without a reason"
    )
    return bool(unlisted)


if __name__ == "__main__":
    sys.exit(main())
