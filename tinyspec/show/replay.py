"""Make a page that plays a generation back, round by round or pass by pass.

The page needs no network and no other file: the trace lies in it as JSON, and can be saved from it.
What a colour says (Okabe and Ito's palette), a mark says too. The page opens playing, and says in
one sentence what to see. Three pictures, shown where the trace has them: the tree of draft tokens
of each round, with probabilities; the layers that each token ran (early exit); draft tokens or a
canvas, one row per round or pass.
"""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from tinyspec.decoding.trace import Trace
from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole
from tinyspec.generation import Generation
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.show.display import describe_layers, escape_controls
from tinyspec.translation import Translation

Record = dict[str, Any]
"""What a page is made from, as plain data. `kind` is "text" (rounds) or "canvas" (passes)."""


def record_rounds(model: Model | Seq2Seq, method: str, generation: Generation) -> Record:
    """Return a generation's trace with the words of its tokens.

    Probabilities are there if the trace was `detailed`.
    """
    stats, trace, config = generation.stats, generation.trace, model.config
    depth = config.decoder_layers if isinstance(config, Seq2SeqConfig) else config.n_layers
    passes = f"{stats.target_calls} forward passes ({stats.tokens_per_call:.2f} per pass)"
    drafts = f", {stats.accepted} of {stats.drafted} draft tokens accepted" if stats.drafted else ""
    layers = describe_layers(trace.layers_run, depth)
    prompt = model.tokenizer.decode(trace.prompt)
    if isinstance(generation, Translation):  # what is translated says more than the start token
        prompt = model.tokenizer.decode(generation.source) + "\n"
    return {
        "kind": "text",
        "model": model.name,
        "method": method,
        "summary": f"{stats.emitted} tokens in {passes}{drafts}{layers}; "
        f"ended by {generation.finish_reason}",
        "n_layers": depth,
        "prompt": escape_controls(prompt),
        "rounds": _rounds(model.tokenizer, model.config.vocab_size, trace),
    }


def record_passes(model: Seq2Seq, method: str, done: Translation) -> Record:
    """Return what a canvas went through, pass by pass: of the candidate that was kept."""
    tokenizer, size = model.tokenizer, model.config.vocab_size
    kept = done.passes[-1].tokens.index(done.tokens) if done.passes else 0
    passes = []
    for written in done.passes:
        tokens, changed = written.tokens[kept], set(written.changed[kept])
        passes.append(
            {
                "pieces": [_word(tokenizer, size, token) for token in tokens],
                "fresh": [slot in changed for slot in range(len(tokens))],
                "sure": [math.exp(min(score, 0.0)) for score in written.scores[kept]],
            }
        )
    return {
        "kind": "canvas",
        "model": model.name,
        "method": method,
        "summary": done.figures(),
        "n_layers": model.config.decoder_layers,
        "prompt": escape_controls(tokenizer.decode(done.source)),
        "passes": passes,
    }


def _rounds(tokenizer: Tokenizer, size: int, trace: Trace) -> list[Record]:
    """Return every round with the text of its tokens and of its draft tokens.

    The text of a token is what it adds to the text; that of a draft token stands alone.
    """
    stream, newest, rounds = tokenizer.stream(), trace.prompt[-1:], list[Record]()
    for entry in trace.rounds:
        guesses, said = (
            [None] * len(entry.tokens),
            [None] * len(entry.emitted),
        )  # of a trace without details
        known = {"p": entry.p or guesses, "q": entry.q or guesses, "said": entry.said or said}
        words = {
            "root": _word(tokenizer, size, newest[0]) if newest else "",
            "node_pieces": [_word(tokenizer, size, token) for token in entry.tokens],
            "pieces": [escape_controls(stream.push([token])) for token in entry.emitted],
        }
        rounds.append(asdict(entry) | known | words)
        newest = entry.emitted[-1:] or newest
    if rounds and (rest := escape_controls(stream.flush())):
        rounds[-1]["pieces"][-1] += rest
    return rounds


def _word(tokenizer: Tokenizer, size: int, token: int) -> str:
    """Return one token as text; a special one by its name, a probe by its number."""
    return (
        f"<probe {token - size}>" if token >= size else escape_controls(tokenizer.token_text(token))
    )


def describe_picture(record: Record) -> str:
    """Return one sentence that says what to see in a record: what a row, a column or a bar is."""
    if record["kind"] == "canvas":
        if len(record["passes"]) < 2:
            return (
                "All tokens are written in a single pass: "
                "the stronger a cell's colour, the surer the model."
            )
        changed = len(
            {i for later in record["passes"][1:] for i, new in enumerate(later["fresh"]) if new}
        )
        after = f"{changed} of {len(record['passes'][-1]['pieces'])} positions change after pass 1"
        return (
            f"Each row is a pass over the whole text, and outlined tokens are those that it "
            f"changed: {after}."
        )
    rounds, depth = record["rounds"], record["n_layers"]
    if any(ran < depth for round in rounds for ran in round["ran"]):
        return (
            "Each bar is a token, as tall as the layers that ran for it: "
            f"a short bar is a token that was read from an early layer, a full one ran all {depth}."
        )
    if not any(not all(round["probe"]) for round in rounds):
        return (
            "Each column is a round: without draft tokens, a forward pass of the model writes "
            "one token."
        )
    if record["method"] == "jacobi":
        return (
            "Each row is a forward pass that answers all positions of a block at once: its "
            "answers are the next "
            "row's draft tokens, and those that were already right are accepted."
        )
    source = "" if any(round["draft_calls"] for round in rounds) else " found without a draft model"
    if all(parent == i - 1 for round in rounds for i, parent in enumerate(round["parents"])):
        shape = "Each row is a round: a chain of draft tokens"
    else:
        shape = (
            "Each round has a tree that grows from left to right: its branches are rival "
            "draft tokens"
        )
    return (
        f"{shape}{source}, of which the model accepts the green ones and adds one token of its own."
    )


def render_page(record: Record) -> str:
    """Return the record as HTML: one file, nothing to fetch."""
    template = files("tinyspec.show").joinpath("replay.html").read_text(encoding="utf-8")
    template = template.replace("{{PICTURE}}", html.escape(describe_picture(record)))
    # inside a script element only "<" could end it; as an escape it is the same JSON
    return template.replace(
        "{{DATA}}", json.dumps(record, ensure_ascii=False).replace("<", "\\u003c")
    )


def read_record(path: str | Path) -> Record:
    """Return a record that `--replay FILE.json` or the page itself saved.

    Raises TinyspecError where it is none.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TinyspecError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise TinyspecError(
            f"{path} is no JSON: save one with tinyspec generate --replay FILE.json"
        ) from None
    needed: Sequence[str] = ("kind", "model", "method", "summary", "n_layers", "prompt")
    steps = (
        {"text": "rounds", "canvas": "passes"}.get(found.get("kind", ""))
        if isinstance(found, dict)
        else None
    )
    if (
        steps is None
        or any(name not in found for name in (*needed, steps))
        or not _has_steps(found[steps], steps)
    ):
        raise TinyspecError(
            f"{path} is no trace of a generation: save one with tinyspec generate --replay "
            "FILE.json"
        )
    return found  # type: ignore[no-any-return]


def _has_steps(found: Any, steps: str) -> bool:
    """Return whether this is a list of rounds or passes, each with all that the page reads."""
    names = ["pieces", "fresh", "sure"]
    if steps == "rounds":
        names = [
            "tokens",
            "parents",
            "path",
            "refused",
            "origins",
            "probe",
            "ran",
            "p",
            "q",
            "said",
            "draft_calls",
        ]
        names += ["root", "node_pieces", "pieces"]
    return isinstance(found, list) and all(
        isinstance(step, dict) and set(names) <= step.keys() for step in found
    )


def tell_written(path: str | Path) -> str:
    """Return a line that says where the replay is and what to do with it.

    >>> tell_written("tree.html")
    'wrote tree.html: open it in a browser'
    """
    what = (
        "tinyspec replay makes a page of it"
        if Path(path).suffix == ".json"
        else "open it in a browser"
    )
    return f"wrote {path}: {what}"


def save_page(record: Record, path: str | Path) -> None:
    """Write the page; the record itself where the name ends in .json."""
    path = Path(path)
    text = (
        json.dumps(record, ensure_ascii=False, indent=1)
        if path.suffix == ".json"
        else render_page(record)
    )
    write_whole(path, text.encode())
