"""`tinyspec bench clients`: measure the server by number of clients, beside decoding alone.

`tinyspec serve` is a process of its own. Its clients are threads of this process: each posts the
next prompt of a common list as soon as it has a reply. The arms take turns on the same prompts:

    alone                   one prompt after the other, in this process
    1 client, 8 clients     through HTTP
    llama.cpp, 8 sequences  its batch API, with a token of each text in a pass (extra `peers`)

While one runs, the others wait. Prompts are timed too. A text ends where the model ends it, so
tokens are counted from what came back. A soak sends texts of many lengths from 64 clients and
compares each with the text that its prompt gets alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import eq
from statistics import median
from typing import Any, NamedTuple

from tinyspec import models
from tinyspec.bench.arms import Clock, collect_garbage, list_draft_names
from tinyspec.bench.experiment import Experiment
from tinyspec.bench.experiments import client_runs as runs
from tinyspec.bench.experiments.client_runs import ClientJob, Completion
from tinyspec.bench.harness import name_dtype, show_progress_bar, stamp_result
from tinyspec.bench.llamacpp import LlamaCppBatch
from tinyspec.bench.measure import order_of_turn
from tinyspec.bench.plan import ArmSpec, BenchSettings
from tinyspec.bench.plot import Bars, Chart
from tinyspec.bench.report import (
    Column,
    Grid,
    count_things,
    describe_provenance,
    format_bytes,
    format_speedup,
    make_grid,
)
from tinyspec.bench.settings import ClientSettings
from tinyspec.bench.tasks import find_room, tokenize_openings
from tinyspec.errors import TinyspecError
from tinyspec.generation import check_options, start_generation
from tinyspec.technique import find_technique

ALONE, ONE, PEER = "alone", "1 client", "llama.cpp"
PROMPTS = 8  # of a round, at least
OPENING_TOKENS = 64  # of a prompt, at most

RunJobs = Callable[[Sequence[ClientJob]], list[Completion]]


class ClientSample(NamedTuple):
    """What an arm wrote in a round.

    seconds  with the prompts;  tokens: new ones of all texts
    same     texts that equal those of `alone` in this round
    """

    round: int
    arm: str
    seconds: float
    tokens: int
    texts: int
    same: int


def measure_clients(
    given: ClientSettings, quiet: bool = False, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Return all samples and what follows from them. Raises TinyspecError for wrong settings."""
    if not given.clients:
        raise TinyspecError("there is nothing to measure: name --clients")
    method = ArmSpec.parse(given.method)
    knobs, card = dict(method.knobs), find_technique(method.name)
    check_options(method=method.name, **knobs)
    model = models.load(given.model, dtype=given.dtype)
    takes_drafts = card.drafts or card.optional_draft
    names = list_draft_names(BenchSettings(given.model), model) if takes_drafts else []
    drafts = [models.load(name, dtype=model.dtype) for name in names]
    longest = max(given.tokens, runs.SOAK_TOKENS[1] if given.soak else 0)
    room = min(find_room(model, longest, *drafts), OPENING_TOKENS)
    prompts, most = tokenize_openings(model, room), max(given.clients)

    def decode(job: ClientJob) -> Completion:
        running = start_generation(
            model, job.ids, method=method.name, draft=drafts or None, max_new_tokens=job.tokens,
            **knobs,
        )  # fmt: skip
        for _ in running:
            pass
        result = running.result()
        return Completion(result.text, len(result.tokens))

    def decode_by_peer(peer: LlamaCppBatch, jobs: Sequence[ClientJob]) -> list[Completion]:
        texts = peer.run([job.ids for job in jobs], given.tokens, model.config.eos)
        return [Completion(model.tokenizer.decode(ids), len(ids)) for ids in texts]

    dtype = name_dtype(model.dtype)
    options = ["--model", given.model, "--dtype", dtype, "--method", method.name]
    options += [f"--knob={name}={value}" for name, value in knobs.items()]
    options += ["--draft", ",".join(names)] if names else []
    options += ["--max-queued", str(2 * max(most, runs.SOAK_CLIENTS))]
    left_out = None
    with ExitStack() as stack:
        server = stack.enter_context(runs.run_server(options))
        arms: dict[str, RunJobs] = {ALONE: lambda jobs: [decode(job) for job in jobs]}
        for n in given.clients:
            arms[count_things(n, "client")] = partial(runs.ask_server, server, n)
        try:
            kind = BenchSettings(given.model, dtype=dtype)
            peer = LlamaCppBatch(kind, model, room + given.tokens, most)
        except TinyspecError as error:
            left_out = str(error)
        else:
            stack.callback(peer.close)
            arms[f"{PEER}, {count_things(most, 'sequence')}"] = partial(decode_by_peer, peer)
        samples = run_rounds(arms, prompts, max(PROMPTS, most), given, quiet, clock)
        soak = runs.soak_server(server, decode, prompts, given.soak, quiet) if given.soak else None
    settings = {
        "model": model.name,
        "drafts": names,
        "dtype": dtype,
        "method": given.method,
        "clients": list(given.clients),
        "tokens": given.tokens,
        "rounds": given.rounds,
        "prompt_tokens": room,
        "soak": given.soak,
        "is_persistent": card.persistent,
    }
    return stamp_result(
        {
            "settings": settings,
            "left_out": left_out,
            "columns": list(ClientSample._fields),
            "samples": [list(sample) for sample in samples],
            "figures": summarize_clients(samples),
            "soak": soak,
        }
    )


def run_rounds(
    arms: Mapping[str, RunJobs],
    prompts: Sequence[list[int]],
    n: int,
    given: ClientSettings,
    quiet: bool,
    clock: Clock,
) -> list[ClientSample]:
    """Run all arms in turns on n prompts a round. A round before the first fills caches."""
    samples = list[ClientSample]()
    title, total = f"{given.model}: {len(arms)} arms", (1 + given.rounds) * len(arms)
    with show_progress_bar(title, total, quiet) as tick:
        for round in range(-1, given.rounds):
            chosen = [prompts[(round * n + i) % len(prompts)] for i in range(n)]
            jobs = [ClientJob(ids, given.tokens) for ids in chosen]
            seconds, texts = dict[str, float](), dict[str, list[Completion]]()
            for arm in order_of_turn(list(arms), max(round, 0)):
                collect_garbage()
                begun = clock()
                texts[arm] = arms[arm](jobs)
                seconds[arm] = clock() - begun
                tick()
            for arm in arms if round >= 0 else ():
                tokens = sum(one.tokens for one in texts[arm])
                same = sum(map(eq, texts[arm], texts[ALONE]))
                samples.append(ClientSample(round, arm, seconds[arm], tokens, n, same))
    return samples


# ---------------------------------------------------------------------- what is shown


def summarize_clients(samples: Sequence[ClientSample]) -> dict[str, dict[str, Any]]:
    """Return the figures of each arm, from the samples alone: medians of the rounds."""
    rates = {(s.arm, s.round): s.tokens / s.seconds for s in samples}
    arms = list(dict.fromkeys(s.arm for s in samples))
    bases = [arm for arm in arms if arm in (ALONE, ONE) or arm.startswith(PEER)]
    found = dict[str, dict[str, Any]]()
    for arm in arms:
        own = [s for s in samples if s.arm == arm]
        found[arm] = {
            "tokens_per_second": median(rates[arm, s.round] for s in own),
            "against": {
                base: median(rates[arm, s.round] / rates[base, s.round] for s in own)
                for base in bases
            },
            "same": sum(s.same for s in own),
            "of": sum(s.texts for s in own),
        }
    return found


def tabulate_clients(result: Mapping[str, Any]) -> list[Grid]:
    """Return a table of the arms, and one of the soak."""
    figures, of, soak = result["figures"], result["settings"], result["soak"]
    columns = [Column("tokens/s", "tokens_per_second", ".1f")]
    columns += [
        Column(f"as {base}", ("against", base), format_speedup)
        for base in figures[ALONE]["against"]
    ]
    columns.append(Column("same text", lambda row: f"{row['same']} of {row['of']}"))
    title = f"{of['model']}, {of['method']}: new tokens per second, and times as fast"
    grids = [make_grid(title, figures, columns)]
    if soak is not None:
        columns = [Column(name, name, "d") for name in ("requests", "errors", "unequal")]
        columns += [Column("seconds", "seconds", ".0f")]
        columns += [Column(f"MiB at {at}%", ("memory", at), format_bytes) for at in soak["memory"]]
        grids.append(make_grid("Soak", {f"{soak['clients']} clients": soak}, columns))
    return grids


def chart_clients(result: Mapping[str, Any]) -> Chart:
    """Draw the tokens per second of each arm."""
    rates = {arm: of["tokens_per_second"] for arm, of in result["figures"].items()}
    title = f"{result['settings']['model']}: one server, several clients"
    summary = "; ".join(f"{arm}: {rate:.1f} tokens per second" for arm, rate in rates.items())
    return Chart(title, [Bars("new tokens per second", rates)], list_client_notes(result), summary)


def list_client_notes(result: Mapping[str, Any]) -> list[str]:
    """Return how the figures were measured, what was slower, and what the soak found."""
    of, figures, soak = result["settings"], result["figures"], result["soak"]
    served = {arm: row for arm, row in figures.items() if arm.endswith(("client", "clients"))}
    slow = [
        f"{arm} {ratio:.2f} of {base}"
        for arm, row in served.items()
        for base, ratio in row["against"].items()
        if round(ratio, 2) < 1
    ]
    same, every = (sum(row[key] for row in served.values()) for key in ("same", "of"))
    notes = [
        f"{of['dtype']}, greedy, {of['method']}, at most {of['tokens']} new tokens after "
        f"prompts of {of['prompt_tokens']} or fewer of the valid books, which are timed too; "
        f"{count_things(of['rounds'], 'round')} of other texts; medians of the rounds. "
        f"{same} of {every} texts over HTTP are those of {ALONE}. {describe_provenance(result)}.",
        "Slower over HTTP: " + (", ".join(slow) or "none") + ".",
    ]
    if of["is_persistent"]:
        notes.append(f"{of['method']} remembers texts: an arm's texts help the next arm's.")
    if result["left_out"]:
        notes.append(f"Left out: {result['left_out']}.")
    if soak is not None:
        first = f"; the first: {soak['first_error']}" if soak["errors"] else ""
        notes.append(
            f"Soak: {soak['clients']} clients for {soak['seconds']:.0f} s, "
            f"{count_things(soak['requests'], 'request')}, {count_things(soak['errors'], 'error')}"
            f"{first}, {count_things(soak['unequal'], 'text')} unlike the one alone."
        )
    return notes


EXPERIMENT = Experiment(
    measure_clients, tabulate_clients, chart_clients, list_client_notes, list_client_notes
)
