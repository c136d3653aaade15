"""Run llama.cpp as an arm, through llama-cpp-python: the same weights and the same ids.

    llama.cpp                  weights in the run's dtype
    llama.cpp:weights=q8_0     or float32, bfloat16
    llama.cpp:weights=stored   the model's own .gguf file
    llama.cpp:repack=false     weights keep the layout of their file
    llama.cpp:lookup=10        llama-cpp-python's prompt lookup, with so many draft tokens

With quantised weights, 0.3.36 crashed where it repacked them, on a machine with AMX units.

The weights are written as a .gguf file for the run. Only the C interface is used: ids in, one
forward pass, its own sampler, id out. Python does nothing else between two tokens. But with
`lookup` the bindings' own loop decodes: drafts, checks and samples are Python there, and a pass
over the prompt keeps the logits of every token.
"""

import ctypes
import tempfile
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tinyspec import models
from tinyspec.bench.arms import Arm, ArmOutput, Clock
from tinyspec.bench.plan import STORED, ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.lm import checkpoint, gguf_export
from tinyspec.lm.model import Model

KNOBS = ("weights", "repack", "lookup")
BATCH = 512  # tokens of a prompt that it reads together
_log_callback: list[Any] = []  # C calls it instead of writing a log, so it must not be freed


def load_library() -> Any:
    """Return the bindings, without their log. Raises TinyspecError if they are not installed."""
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
            raise TinyspecError(
                "the peer llama.cpp is not installed: pip install 'tinyspec[peers]'"
            ) from None
        raise TinyspecError(
            f"llama-cpp-python is installed but does not load ({error}); "
            "pip install --force-reinstall 'tinyspec[peers]'"
        ) from None
    lib: Any = llama_cpp
    if not _log_callback:
        _log_callback.append(lib.llama_log_callback(lambda level, text, data: None))
        lib.llama_log_set(_log_callback[0], ctypes.c_void_p(0))
        lib.llama_backend_init()
    return lib


def export_weights(spec: ArmSpec, settings: BenchSettings, model: Model, folder: Path) -> Path:
    """Write the weights of this arm into the folder, and return the file.

    Raises TinyspecError for a wrong arm before anything is written.
    """
    load_library()
    knobs = dict(spec.knobs)
    if strange := next((name for name in knobs if name not in KNOBS), None):
        raise TinyspecError(
            f"{spec.name} has no knob '{strange}': {suggest_nearest(strange, KNOBS)}"
        )
    lookup = str(knobs.get("lookup", 1))
    if not lookup.isdigit() or int(lookup) < 1 or {"lookup", "repack"} <= knobs.keys():
        raise TinyspecError(
            f"{spec.label}: lookup is a number of draft tokens from 1 on, without repack beside it"
        )
    if model.device.type != "cpu":
        raise TinyspecError(
            "the peer llama.cpp is measured on the CPU only: leave it out with --device cuda"
        )
    weights = str(knobs.get("weights", settings.dtype))
    if weights == STORED:
        return find_own_file(settings.model)
    gguf_export.write_gguf(folder / "model.gguf", model, weights)
    return folder / "model.gguf"


def find_own_file(model: str) -> Path:
    """Return the .gguf file that a model is, or has in its folder. Raises TinyspecError if none."""
    path = models.find_model(model)
    found = path
    if path is not None and path.is_dir():
        found = checkpoint.find_quantised_file(path)
    if found is None:
        raise TinyspecError(
            f"{model} has no .gguf file of its own: take llama.cpp:weights=bfloat16, or q8_0"
        )
    return found


class LlamaCppArm:
    """A model and a context of llama.cpp for `room` tokens of each of several sequences.

    The .gguf file may be deleted then.
    """

    def __init__(
        self, spec: ArmSpec, settings: BenchSettings, path: Path, room: int, sequences: int = 1
    ):
        self.label, self.lib = spec.label, load_library()
        self.knobs: Mapping[str, Any] = {
            "weights": settings.dtype,
            "repack": True,
            **dict(spec.knobs),
        }
        self.sampling = settings.temperature, settings.top_p
        how = self.lib.llama_model_default_params()
        how.use_mmap, how.n_gpu_layers = False, 0
        how.use_extra_bufts = bool(self.knobs["repack"])
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), how)
        if not self.model:
            raise TinyspecError(
                f"llama.cpp does not load {settings.model}: it may not know this architecture"
            )
        how = self.lib.llama_context_default_params()
        how.n_ctx, how.n_seq_max = room * sequences, sequences
        how.kv_unified = sequences > 1  # one cache for all: the faster way
        how.n_batch = how.n_ubatch = BATCH
        how.n_threads = how.n_threads_batch = torch.get_num_threads()
        how.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model, how)
        if not self.context:
            raise TinyspecError("llama.cpp could not make a context: out of memory?")
        self.memory = self.lib.llama_get_memory(self.context)
        self.weights: int | None = int(self.lib.llama_model_size(self.model))

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """Decode in its own loop: forward pass, sample, forward pass."""
        sampler = self._sampler(seed)
        self.lib.llama_memory_clear(self.memory, False)
        sample, decode, context = self.lib.llama_sampler_sample, self.lib.llama_decode, self.context
        batch_of, one = self.lib.llama_batch_get_one, (self.lib.llama_token * 1)(job.ids[-1])
        ids: list[int] = []
        begun = clock()
        self.read(job.ids[:-1])
        read = first = clock()
        for at in range(job.tokens):
            if decode(context, batch_of(one, 1)):
                raise RuntimeError("llama_decode failed")
            token = sample(sampler, context, -1)
            if at == 0:
                first = clock()
            ids.append(token)
            one[0] = token
        done = clock()
        self.lib.llama_sampler_free(sampler)
        return ArmOutput(
            read - begun, done - read, tuple(ids), job.tokens, nodes=0, first=first - begun
        )

    def read(self, ids: Any) -> None:
        """Run ids after what is cached, many at a time."""
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            array = (self.lib.llama_token * len(part))(*part)
            if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(part))):
                raise RuntimeError("llama_decode failed")

    def forwards(self, cached: int) -> "LlamaCppForward":
        """Return what its cost curve is measured on."""
        return LlamaCppForward(self, cached)

    def close(self) -> None:
        if self.model:
            self.lib.llama_free(self.context)
            self.lib.llama_model_free(self.model)
            self.model = self.context = None

    def _sampler(self, seed: int) -> Any:
        temperature, top_p = self.sampling
        chain = self.lib.llama_sampler_chain_init(self.lib.llama_sampler_chain_default_params())
        if temperature == 0:
            self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_greedy())
            return chain
        self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_temp(temperature))
        if top_p is not None:
            self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_top_p(top_p, 1))
        self.lib.llama_sampler_chain_add(chain, self.lib.llama_sampler_init_dist(seed))
        return chain


class LlamaCppLookupArm:
    """Speculation of llama-cpp-python: `LlamaPromptLookupDecoding` in its own `generate`."""

    def __init__(self, spec: ArmSpec, settings: BenchSettings, path: Path, room: int):
        lib, self.label = load_library(), spec.label
        self.knobs: Mapping[str, Any] = {"weights": settings.dtype, **dict(spec.knobs)}
        self.sampling = settings.temperature, settings.top_p
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        threads, drafted = torch.get_num_threads(), int(self.knobs["lookup"])
        self.llama = lib.Llama(
            str(path), n_gpu_layers=0, use_mmap=False, n_batch=BATCH, n_ubatch=BATCH,
            n_ctx=room + drafted,  # the last draft is as long as any
            n_threads=threads, n_threads_batch=threads, verbose=False,
            logits_all=True,  # else it has no room for the logits of a long prompt
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=drafted),
        )  # fmt: skip
        self.rows = list[int]()  # tokens of each pass
        read = self.llama.eval

        def count(tokens: Sequence[int]) -> None:
            self.rows.append(len(tokens))
            read(tokens)

        self.llama.eval = count

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """Call `generate`, which makes the first token with the pass over the prompt."""
        temperature, top_p = self.sampling
        self.llama.set_seed(seed)
        self.llama.reset()
        self.rows.clear()
        begun = clock()
        stream = self.llama.generate(
            list(job.ids), temp=temperature, top_k=0, top_p=top_p or 1.0, min_p=0.0,
            repeat_penalty=1.0,
        )  # fmt: skip
        ids = [next(stream)]
        read = clock()
        ids += islice(stream, job.tokens - 1)
        done = clock()
        calls = len(self.rows)
        drafted = sum(self.rows) - len(job.ids) - (calls - 1)
        return ArmOutput(
            read - begun, done - read, tuple(ids), calls, nodes=drafted, early=1, first=read - begun
        )

    def close(self) -> None:
        self.llama.close()


def load_arm(spec: ArmSpec, settings: BenchSettings, path: Path, room: int) -> Arm:
    """Return the arm that runs a .gguf file, which may be deleted then."""
    kind = LlamaCppLookupArm if "lookup" in dict(spec.knobs) else LlamaCppArm
    return kind(spec, settings, path, room)


def make_arm(spec: ArmSpec, settings: BenchSettings, model: Model, room: int) -> Arm:
    """Return the arm of a model of ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = export_weights(spec, settings, model, Path(folder))
        return load_arm(spec, settings, path, room)


class LlamaCppForward:
    """Forward passes over k tokens after `cached` others, with logits of every token."""

    def __init__(self, llama: LlamaCppArm, cached: int):
        self.llama, self.cached = llama, cached
        self.label, self.weights, self.lib = llama.label, llama.weights, llama.lib
        self.lib.llama_memory_clear(llama.memory, False)
        llama.read([7 * i % 97 for i in range(cached)])
        self.batch = self.lib.llama_batch_init(BATCH, 0, 1)

    def prepare(self, k: int) -> None:
        """Remove what the last forward pass added, and set up the next."""
        self.lib.llama_memory_seq_rm(self.llama.memory, 0, self.cached, -1)
        batch = self.batch
        batch.n_tokens = k
        for i in range(k):
            batch.token[i], batch.pos[i] = 7 * i % 97, self.cached + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1

    def run(self, k: int) -> None:
        if self.lib.llama_decode(self.llama.context, self.batch):
            raise RuntimeError("llama_decode failed")
        self.lib.llama_synchronize(self.llama.context)


class LlamaCppBatch:
    """Several texts at once, greedily: a forward pass has one token of each.

    room       tokens of each text with its prompt
    sequences  texts that run at once
    """

    def __init__(self, settings: BenchSettings, model: Model, room: int, sequences: int):
        spec = ArmSpec("llama.cpp")
        with tempfile.TemporaryDirectory() as folder:
            path = export_weights(spec, settings, model, Path(folder))
            self.llama = LlamaCppArm(spec, settings, path, room, sequences)
        self.lib, self.sequences = self.llama.lib, sequences
        self.batch, self.sampler = self.lib.llama_batch_init(BATCH, 0, 1), self.llama._sampler(0)

    def run(
        self, prompts: Sequence[Sequence[int]], tokens: int, eos: Collection[int]
    ) -> list[list[int]]:
        """Return the new ids of each prompt: `tokens`, or fewer that end in one of `eos`."""
        every = list[list[int]]()
        for first in range(0, len(prompts), self.sequences):
            some = prompts[first : first + self.sequences]
            texts: list[list[int]] = [[] for _ in some]
            rows = [
                (token, at, sequence, at == len(ids) - 1)
                for sequence, ids in enumerate(some)
                for at, token in enumerate(ids)
            ]
            self.lib.llama_memory_clear(self.llama.memory, False)
            while rows:
                for sequence, token in self.decode(rows):
                    texts[sequence].append(token)
                rows = [
                    (new[-1], len(ids) + len(new) - 1, sequence, True)
                    for sequence, (ids, new) in enumerate(zip(some, texts, strict=True))
                    if len(new) < tokens and new[-1] not in eos
                ]
            every += texts
        return every

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Run rows (token, position, sequence, whether the next token is asked for).

        Returns (sequence, next token) of those that ask.
        """
        batch, found = self.batch, list[tuple[int, int]]()
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, asks) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, asks
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if self.lib.llama_decode(self.llama.context, batch):
                raise RuntimeError("llama_decode failed")
            found += [
                (row[2], self.lib.llama_sampler_sample(self.sampler, self.llama.context, i))
                for i, row in enumerate(part)
                if row[3]
            ]
        return found

    def close(self) -> None:
        self.lib.llama_sampler_free(self.sampler)
        self.lib.llama_batch_free(self.batch)
        self.llama.close()
