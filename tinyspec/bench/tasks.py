"""Make the prompts of a run: Spec-Bench in its six groups, HumanEval, GSM8K, edits, and books.

Spec-Bench (Xia et al. 2024, arXiv 2401.07851) counts MT-bench's eight categories as one group. Its
questions have two turns. Every arm must read the same ids, so the answer in a second turn's prompt
is plain greedy decoding's, up to its first end of text. A model with a chat template gets its
prompt through it; another one continues the plain text. The 20 edits are our own. The books are
openings of the valid books, to be continued.
"""

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import NamedTuple, TypeVar

from tinyspec import data
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.generation import prompt_ids
from tinyspec.lm.model import Model

T = TypeVar("T")
SPEC_BENCH = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
TASKS = (*SPEC_BENCH, "human_eval", "gsm8k", "edits", "books")
GROUPS = {"spec_bench": SPEC_BENCH, "all": TASKS}  # names for several tasks
COPYING = ("summarization", "rag", "edits")  # answers that copy from their prompts

Answer = Callable[["Job"], Sequence[int]]


class Item(NamedTuple):
    """A prompt of a task. `turns` are the user's messages; without `chat` the text is continued."""

    task: str
    id: str
    turns: tuple[str, ...]
    chat: bool = True


class Job(NamedTuple):
    """One request: ids to read, and how many tokens to write. Every arm gets the same.

    cropped  ids left out at the front because the model's context is short
    """

    task: str
    prompt: str
    turn: int
    ids: tuple[int, ...]
    tokens: int
    cropped: int = 0

    @property
    def key(self) -> str:
        """Return its name in a result file."""
        return f"{self.task}/{self.prompt}/{self.turn}"


def expand_tasks(names: Sequence[str]) -> tuple[str, ...]:
    """Return tasks, in one order, from names of tasks and of groups. NAME:20 asks for 20 prompts.

    >>> expand_tasks(["edits:20", "spec_bench"])[-2:]
    ('rag', 'edits:20')
    """
    known, wanted = [*GROUPS, *TASKS], dict[str, str]()
    for entry in names:
        name, colon, count = entry.partition(":")
        if name not in known:
            raise TinyspecError(f"there is no task '{name}': {suggest_nearest(name, known)}")
        if colon and not (count.isdecimal() and int(count)):
            raise TinyspecError(f"'{entry}': '{count}' is no number of prompts; write {name}:20")
        wanted |= {task: task + colon + count for task in GROUPS.get(name, (name,))}
    return tuple(wanted[task] for task in TASKS if task in wanted)


def choose_items(entries: Sequence[str], n: int) -> list[Item]:
    """Return the prompts of what `expand_tasks` gave: n of each task, or as many as its entry says.

    >>> [item.id for item in choose_items(["edits:2"], 5)]
    ['proofread-1', 'config-1']
    """
    parts = [entry.partition(":") for entry in entries]
    return [
        item for task, _, count in parts for item in load_items(task, int(count) if count else n)
    ]


def spread_evenly(entries: Sequence[T], n: int) -> list[T]:
    """Return n of the entries, evenly spread over all; all of them if there are no more.

    >>> spread_evenly("abcdefgh", 4)
    ['a', 'c', 'e', 'g']
    """
    return [entries[i * len(entries) // n] for i in range(n)] if n < len(entries) else list(entries)


def load_items(task: str, n: int) -> list[Item]:
    """Return n prompts of a task, spread over it.

    Raises TinyspecError, with the command that fetches it, if the data is missing.
    """
    if task in SPEC_BENCH:
        named = SPEC_BENCH[1:]
        asked = [
            q
            for q in data.read_spec_bench()
            if q.category == task or (task == "mt_bench" and q.category not in named)
        ]
        return [Item(task, str(q.id), q.turns) for q in spread_evenly(asked, n)]
    if task == "human_eval":
        return [
            Item(task, p.id.rpartition("/")[2], (_ask_to_complete(p.prompt),))
            for p in spread_evenly(data.read_human_eval(), n)
        ]
    if task == "gsm8k":
        sums = list(enumerate(data.read_gsm8k("test")))
        return [Item(task, str(i), (s.question,)) for i, s in spread_evenly(sums, n)]
    if task == "edits":
        return [
            Item(task, e["id"], (f"{e['instruction']}\n\n{e['text']}",))
            for e in spread_evenly(read_edits(), n)
        ]
    return [
        Item(task, str(i), (text,), chat=False)
        for i, text in spread_evenly(list(enumerate(read_openings())), n)
    ]


def read_edits() -> list[dict[str, str]]:
    """Return the committed edit prompts: [{"id", "kind", "instruction", "text"}].

    Their answers mostly copy `text`.
    """
    return read_committed("edits.json")


def read_openings() -> list[str]:
    """Return 60 openings of paragraphs from the three books that no model of the zoo has seen."""
    return [entry["text"] for entry in read_committed("continuations.json")]


def tokenize_openings(model: Model, room: int) -> list[list[int]]:
    """Return the openings as ids, cut at the front so that each fits into so many positions."""
    return [prompt_ids(model, text)[-room:] for text in read_openings()]


def find_room(model: Model, tokens: int, *drafts: Model) -> int:
    """Return how long a prompt may be if `tokens` new ones follow. Raises TinyspecError if none."""
    room = min(each.config.max_positions for each in (model, *drafts)) - tokens
    if room < 1:
        raise TinyspecError(
            f"{tokens} new tokens do not fit into the context of {model.name}: fewer --tokens"
        )
    return room


def tokenize_question(model: Model, question: data.Question, tokens: int) -> list[int]:
    """Return the first turn of a question as ids, cut so that `tokens` new ones fit."""
    ids = prompt_ids(model, question.turns[0], chat=model.tokenizer.has_chat)
    return ids[-(model.config.max_positions - tokens) :]


def read_committed(name: str) -> list[dict[str, str]]:
    """Return the prompts of a file of this folder."""
    found: list[dict[str, str]] = json.loads(
        files("tinyspec.bench").joinpath(name).read_text("utf-8")
    )
    return found


def _ask_to_complete(code: str) -> str:
    asked = "Complete this Python function. Write out the whole function."
    return f"{asked}\n\n```python\n{code.strip()}\n```"


def list_jobs(
    model: Model, items: Sequence[Item], tokens: int, answer: Answer, until_eos: bool = False
) -> list[Job]:
    """Return the requests of these prompts, one for each turn, in order.

    answer     returns plain greedy decoding's ids for a job. A second turn's prompt contains them.
    until_eos  an answer is as long as plain greedy decoding's
    """
    made: list[Job] = []
    for item in items:
        messages: list[dict[str, str]] = []
        for turn, asked in enumerate(item.turns):
            messages.append({"role": "user", "content": asked})
            ids = _tokenize_messages(model, item, messages)
            room = find_room(model, tokens)
            job = Job(item.task, item.id, turn, tuple(ids[-room:]), tokens, max(len(ids) - room, 0))
            last = turn == len(item.turns) - 1
            if until_eos or not last:
                reply = cut_at_eos(answer(job), model.config.eos)
                job = job._replace(tokens=len(reply)) if until_eos else job
                messages.append({"role": "assistant", "content": model.tokenizer.decode(reply)})
            made.append(job)
    return made


def cut_at_eos(ids: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Return the ids up to the first end of text, and that one.

    >>> cut_at_eos([5, 0, 7], [0])
    [5, 0]
    """
    at = next((i for i, token in enumerate(ids) if token in eos), len(ids) - 1)
    return list(ids[: at + 1])


def _tokenize_messages(model: Model, item: Item, messages: list[dict[str, str]]) -> list[int]:
    if item.chat and model.tokenizer.has_chat:
        return model.tokenizer.chat(messages)
    return prompt_ids(model, "\n\n".join(message["content"] for message in messages))
