"""What the laws of streams share: a small model with a tokenizer, scripts, and references.

A *script* tells a model what to write after some texts. So a law can ask what a technique does with
an outline, though no model that fits into a law can write one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.streams import EditedTarget
from tinyspec.laws.exact.joint import Reference
from tinyspec.laws.exact.models import run_dense
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.lm.tokenizer import Tokenizer

TEXT_END = 256  # the end of text; the ids below it are bytes
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@lru_cache(maxsize=4)
def text_network(seed: int = 0, positions: int = 4096) -> Model:
    """Return a random transformer of one layer that reads and writes bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    config = Config(
        vocab_size=TEXT_END + 1, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4,
        d_ff=12, max_positions=positions, eos=(TEXT_END,),
    )  # fmt: skip
    random = Model.random(config, seed=seed, dtype=torch.float64, scale=0.6)
    return Model(config, random.weights, Tokenizer(backend, {}, TEMPLATE), "bytes")


def write_script(model: Model, script: Mapping[str, str]) -> Callable[[Any], EditedTarget]:
    """Return a function that makes the target of a model which follows a script.

    script  what a text contains last -> what the model writes after it, to its end; other texts are
            continued as the model likes
    """
    tokenizer = model.tokenizer
    replies = {cue: [*tokenizer.encode(reply), TEXT_END] for cue, reply in script.items()}

    def edit(text: list[int], logits: Tensor) -> Tensor:
        shown = tokenizer.decode(text)
        found = [(shown.rfind(cue) + len(cue), cue) for cue in replies if cue in shown]
        if not found:
            return logits
        end, cue = max(found)
        done = len(tokenizer.encode(shown[end:]))
        if done >= len(replies[cue]):
            return logits
        sure = torch.full_like(logits, -1e4)
        sure[:, replies[cue][done]] = 0.0
        return sure

    return lambda session: EditedTarget(session, edit)


def plain_reference(model: Model, sampling: SamplingParams) -> Reference:
    """Return plain decoding of this model, by dense passes."""
    return Reference(lambda text: run_dense(model, list(text)).logits[-1], sampling)


def decode_plainly(
    model: Model, prompt: Sequence[int], n: int, sampling: SamplingParams, rng: Seeded
) -> list[int]:
    """Return n tokens of plain decoding with the noise of this source, by dense passes."""
    reference = plain_reference(model, sampling)
    text, noise = tuple(prompt), rng.split("dense", 0)  # draws with the uniforms of `rng`
    while len(text) < len(prompt) + n:
        text = (*text, noise.draw_at(reference.next(text), len(text)))
    return list(text[len(prompt) :])
