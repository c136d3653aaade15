"""Run transformers as an arm: the same weights, the same ids, the same number of tokens.

    transformers               plain decoding
    transformers:lookup=10     prompt lookup decoding, 10 draft tokens (and :ngram=2, the longest
                               match)
    transformers:assistant=apprentice    assisted decoding (and :tokens=5, draft tokens)

`generate` reads the prompt and makes its first tokens in one step, so its prefill ends with that
step. It does not get a cache that was filled before: assisted decoding then makes other tokens
(seen with 5.23).
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.arms import Arm, ArmOutput, Clock, make_synchronizer
from tinyspec.bench.plan import ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm.model import Model

KNOBS = ("lookup", "ngram", "assistant", "tokens")


def make_peer_arms(
    specs: list[ArmSpec], settings: BenchSettings, model: Model, room: int
) -> list[Arm]:
    """Return the peers of a run, with room for so many tokens.

    Raises TinyspecError for a peer that is not installed, or a knob that it does not have.
    """
    made: list[Arm] = []
    theirs: Any = None
    for spec in specs:
        if spec.name == "llama.cpp":
            from tinyspec.bench.llamacpp import make_arm

            made.append(make_arm(spec, settings, model, room))
            continue
        _check_knobs(spec)  # before transformers is imported: that takes seconds
        theirs = theirs or load_transformers(settings.model, settings, model)
        made.append(TransformersArm(spec, theirs, settings))
    return made


def _check_knobs(spec: ArmSpec) -> None:
    for name, _ in spec.knobs:
        if name not in KNOBS:
            raise TinyspecError(f"{spec.name} has no knob '{name}': {suggest_nearest(name, KNOBS)}")


def load_transformers(name: str, settings: BenchSettings, model: Model | None = None) -> Any:
    """Return transformers' model of the same weights. A .gguf file is saved as a folder first."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise TinyspecError(
            "the peer transformers is not installed: pip install 'tinyspec[peers]'"
        ) from None
    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    path = models.find_model(name)
    with tempfile.TemporaryDirectory() as folder:
        if path is None or not path.is_dir():
            (model or models.load(name, dtype=settings.load_dtype)).save(folder)
            path = Path(folder)
        kept = settings.load_dtype
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto" if kept is None else getattr(torch, kept)
        )
    # No token ends a text. A minimum length would forbid the token, and so change the text.
    theirs.generation_config.eos_token_id = None
    return theirs.to(settings.device).eval()


class TransformersArm:
    """`generate`, as its manual says to call it."""

    def __init__(self, spec: ArmSpec, theirs: Any, settings: BenchSettings):
        self.label, self.theirs, self.device = spec.label, theirs, torch.device(settings.device)
        knobs: dict[str, Any] = dict(spec.knobs)
        _check_knobs(spec)
        self.knobs: Mapping[str, Any] = knobs
        self.assistant: Any = None
        self.options: dict[str, Any] = {"do_sample": settings.temperature > 0, "pad_token_id": 0}
        if settings.temperature > 0:
            self.options |= {
                "temperature": settings.temperature,
                "top_p": settings.top_p or 1.0,
                "top_k": 0,
            }
        if "lookup" in knobs:
            self.options["prompt_lookup_num_tokens"] = int(knobs["lookup"])
            self.options["max_matching_ngram_size"] = int(knobs.setdefault("ngram", 2))
        if "assistant" in knobs:
            self.assistant = load_transformers(str(knobs["assistant"]), settings)
            if "tokens" in knobs:
                self.assistant.generation_config.num_assistant_tokens = int(knobs["tokens"])
            self.options["assistant_model"] = self.assistant

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """Call `generate`. Without a mask it would hide the prompt's own end-of-turn token."""
        prompt = torch.tensor([job.ids], device=self.device)
        wait, first = make_synchronizer(self.device), list[tuple[float, int]]()

        def step(ids: Any, *_: Any, **__: Any) -> Any:
            """Record when the first step ended, and its tokens. It is a rule that never stops."""
            if not first:
                wait()
                first.append((clock(), ids.shape[1] - len(job.ids)))
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        torch.manual_seed(seed)
        rows, calls = CallCounter(self.theirs), CallCounter(self.assistant)
        with torch.no_grad(), rows, calls:
            begun = clock()
            out = self.theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=job.tokens,
                stopping_criteria=[step],
                **self.options,
            )
            wait()
            done = clock()
        ids = tuple(int(token) for token in out[0, len(job.ids) :])
        read, early = first[0]
        drafts = "prompt_lookup_num_tokens" in self.options or self.assistant is not None
        nodes = rows.rows - len(job.ids) - (rows.calls - 1) if drafts else 0
        return ArmOutput(
            read - begun,
            done - read,
            ids,
            rows.calls,
            calls.calls,
            nodes,
            early=early,
            first=read - begun,
        )

    def forwards(self, cached: int) -> "TransformersForward":
        """Return what its cost curve is measured on."""
        return TransformersForward(self.theirs, cached, self.device)

    def close(self) -> None:
        self.theirs = self.assistant = None


class CallCounter:
    """Count a model's forward passes, and the positions in them. Without a model, count nothing."""

    def __init__(self, model: Any):
        self.model, self.calls, self.rows = model, 0, 0
        self._hook: Any = None

    def __enter__(self) -> "CallCounter":
        if self.model is not None:
            self._hook = self.model.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _count(self, _: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        self.calls += 1
        self.rows += int(ids.shape[1])


class TransformersForward:
    """Forward passes of transformers' model over k tokens after `cached` others."""

    label = "transformers"

    def __init__(self, theirs: Any, cached: int, device: torch.device):
        from transformers import DynamicCache

        self.theirs, self.cached, self.device = theirs, cached, device
        self.cache: Any = DynamicCache(config=theirs.config)
        self.wait = make_synchronizer(device)
        self.weights: int | None = None  # what ours read: the same weights
        self._forward(cached)
        self.added = 0

    def prepare(self, k: int) -> None:
        """Remove what the last forward pass added."""
        if self.added:
            self.cache.crop(-self.added)
        self.added = k

    def run(self, k: int) -> None:
        self._forward(k)
        self.wait()

    @torch.no_grad()
    def _forward(self, k: int) -> None:
        ids = torch.arange(k, device=self.device)[None] % self.theirs.config.vocab_size
        self.theirs(input_ids=ids, past_key_values=self.cache, use_cache=True)
