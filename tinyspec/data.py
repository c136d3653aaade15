"""Texts for training, benchmarks and tests: where they lie, and how they are read.

They lie in the folder that TINYSPEC_DATA names, else in the user's cache, where `tinyspec data
fetch` puts them (sources.py says from where). Nothing here is needed to generate.
"""

import gzip
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tinyspec.errors import TinyspecError

Split = Literal["train", "valid", "test"]


def data_folder() -> Path:
    """Return where data is looked for: TINYSPEC_DATA, else the user's cache."""
    if named := os.environ.get("TINYSPEC_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "tinyspec" / "data"


def find_data_file(name: str, root: str | Path | None = None) -> Path:
    """Return a data file, given its path below the data folder.

    Raises TinyspecError, which says how to get it, where it is not there.
    """
    root = Path(root) if root is not None else data_folder()
    path = root / name
    if not path.is_file():
        raise TinyspecError(
            f"{path}: no such data file; `tinyspec data fetch` brings it, or TINYSPEC_DATA names "
            "a folder that has it"
        )
    return path


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, plain, .gz or .xz, without their line feeds."""
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n")
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise TinyspecError(
            f"{path}: damaged ({error}); delete it and run `tinyspec data fetch`"
        ) from error


def read_records(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON lines file, each of which must have the named fields."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            entry = json.loads(line)
            missing = [name for name in fields if name not in entry]
        except (ValueError, TypeError) as error:
            raise TinyspecError(f"{path}, line {number}: not a JSON object ({error})") from error
        if not isinstance(entry, dict) or missing:
            raise TinyspecError(
                f"{path}, line {number}: expected an object with {', '.join(fields)}"
            )
        yield entry


class Book(NamedTuple):
    """A book as it was published: with its title block, in markdown."""

    author: str
    title: str
    text: str


def read_books(split: Literal["train", "valid"], root: str | Path | None = None) -> list[Book]:
    """Return the classics: 107 books to train on, or the three that are never trained on."""
    path = find_data_file(f"text/classics.{split}.jsonl.xz", root)
    return [
        Book(e["author"], e["title"], e["text"])
        for e in read_records(path, "author", "title", "text")
    ]


class Question(NamedTuple):
    """A Spec-Bench question: one turn, or several of a conversation."""

    id: int
    category: str
    turns: tuple[str, ...]


def read_spec_bench(root: str | Path | None = None) -> list[Question]:
    """Return Spec-Bench (Xia et al. 2024): chat, translation, summaries, maths, retrieval, ..."""
    path = find_data_file("spec_bench/question.jsonl", root)
    entries = read_records(path, "question_id", "category", "turns")
    return [Question(e["question_id"], e["category"], tuple(e["turns"])) for e in entries]


class Problem(NamedTuple):
    """A HumanEval problem: complete `prompt` so that `test` passes."""

    id: str
    prompt: str
    solution: str
    test: str


def read_human_eval(root: str | Path | None = None) -> list[Problem]:
    """Return HumanEval (Chen et al. 2021): 164 Python functions with tests."""
    path = find_data_file("code_math/HumanEval.jsonl.gz", root)
    entries = read_records(path, "task_id", "prompt", "canonical_solution", "test")
    return [Problem(e["task_id"], e["prompt"], e["canonical_solution"], e["test"]) for e in entries]


class Sum(NamedTuple):
    """A grade-school maths question with its worked answer."""

    question: str
    answer: str


def read_gsm8k(
    split: Literal["train", "test"] = "test", root: str | Path | None = None
) -> list[Sum]:
    """Return GSM8K (Cobbe et al. 2021)."""
    path = find_data_file(
        f"code_math/gsm8k.{split}.jsonl" + (".gz" if split == "train" else ""), root
    )
    return [Sum(e["question"], e["answer"]) for e in read_records(path, "question", "answer")]


def read_shakespeare(root: str | Path | None = None) -> str:
    """Return all of Shakespeare's plays, as one text."""
    return find_data_file("text/tinyshakespeare.txt", root).read_text(encoding="utf-8")


def read_wikitext(split: Literal["valid", "test"] = "test", root: str | Path | None = None) -> str:
    """Return WikiText-2, tokenised by words, with <unk>."""
    return find_data_file(f"text/wikitext-2.{split}.txt", root).read_text(encoding="utf-8")


def read_multi30k(split: Split = "test", root: str | Path | None = None) -> list[tuple[str, str]]:
    """Return Multi30k task 1 (Elliott et al. 2016): image captions, (English, German) pairs."""
    name = {"train": "train", "valid": "val", "test": "test_2016_flickr"}[split]
    english, german = (
        list(read_lines(find_data_file(f"multi30k/{name}.{language}.gz", root)))
        for language in ("en", "de")
    )
    if len(english) != len(german):
        raise TinyspecError(
            f"multi30k/{name}: {len(english)} English lines but {len(german)} German ones"
        )
    return list(zip(english, german, strict=True))
