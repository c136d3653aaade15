"""tinyspec: the textbook of accelerated generation that you can run.

    import tinyspec

    model = tinyspec.load("storyteller")          # a bundled model; a folder, a .gguf or a hub id work too
    out = tinyspec.generate(model, "The dragon", method="speculative_decoding", gamma=4)
    print(out.text)
    print(out.stats.tokens_per_call)              # tokens kept per call of the model; plain decoding makes 1

    for piece in tinyspec.stream(model, "Once upon a time", method="llma", temperature=0.8, seed=7):
        print(piece, end="")

    model = tinyspec.load_translator("multi30k-nat")             # an encoder-decoder; chapter 3
    print(tinyspec.translate(model, "A dog runs.", method="nat", seed=1).text)

    for card in tinyspec.techniques():            # what there is: paper, family, guarantee, knobs
        print(card.name, card.guarantee.value, card.paper)

Every technique says what it promises (exact: the same law as plain decoding; greedy; lossy; approx) and is held to it by
`tinyspec.laws`. Read `tinyspec/speculative/drafting/speculative_decoding.py` first: it is the shape of all the others.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinyspec.generation import Generation, Prompt
    from tinyspec.lm.seq2seq import Seq2Seq
    from tinyspec.lm.transformer import Model
    from tinyspec.pairing import Draft
    from tinyspec.technique import Card
    from tinyspec.translation import Source, Translation

__all__ = ["generate", "load", "load_translator", "stream", "techniques", "translate"]

try:
    __version__ = version("tinyspec")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"


def load(name_or_path: str | Path, device: str = "cpu", dtype: Any = None) -> "Model":
    """A model: a bundled name (storyteller), a checkpoint folder, a .gguf file, or a hub id such as org/name.

    dtype None is what the checkpoint stores (on a CPU without compiled kernels: float32); or "float32", "bfloat16",
    "float16", "float64".
    """
    from tinyspec import models

    return models.load(name_or_path, device=device, dtype=dtype)


def generate(
    model: "Model",
    prompt: "Prompt | Sequence[Prompt]",
    *,
    method: str = "autoregressive",
    draft: "Draft" = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | Sequence[int]] = (),
    chat: bool = False,
    **knobs: Any,
) -> "Generation | list[Generation]":
    """Extend a prompt (text, token ids, or chat messages) and return text, tokens, logprobs and statistics.

    method   a name from `techniques()`; its knobs are further keyword arguments (gamma=4, ...)
    draft    the draft model of methods that need one, or a list of them for methods that use several (a name or a loaded
             model each; the last stands in for those that are missing); None takes the one the model's card names
    stop     texts or token sequences that end the text
    chat     treat a text prompt as a user's message in the model's chat template
    seed     the same seed gives the same text, whatever ran before (above temperature 0 not by methods that plan by the clock)

    A list of prompts runs as one ragged batch and gives a list; row i uses seed + i and equals that row run alone: on a
    CPU in float32 and bfloat16 token for token and bit for bit, elsewhere but for ties within rounding.
    """
    from tinyspec.generation import generate

    options = {"method": method, "draft": draft, "max_new_tokens": max_new_tokens, "temperature": temperature}
    warp = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    return generate(model, prompt, **options, **warp, seed=seed, stop=stop, chat=chat, **knobs)


def stream(model: "Model", prompt: "Prompt", **options: Any) -> Iterator[str]:
    """The new text as it grows. Takes what `generate` takes."""
    from tinyspec.generation import stream

    return stream(model, prompt, **options)


def load_translator(name_or_path: str | Path, device: str = "cpu", dtype: Any = None) -> "Seq2Seq":
    """An encoder-decoder: a name or a folder. dtype None is float32, in which these small models are quickest."""
    from tinyspec import translators

    return translators.load_translator(name_or_path, device=device, dtype=dtype)


def translate(
    model: "Seq2Seq | str",
    source: "Source | Sequence[Source]",
    *,
    method: str | None = None,
    seed: int = 0,
    teacher: "Seq2Seq | str | None" = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    **knobs: Any,
) -> "Translation | list[Translation]":
    """Translate a source (text or token ids) and return what `generate` does, and what every pass made of the canvas.

    method   one that rewrites a canvas (nat, mask_predict), or, on an autoregressive model, `plain` and any method that
             extends a text without a draft model (jacobi, lookahead_jacobi, ...); None: what the model was trained for
    seed     the same seed gives the same translation
    teacher  an autoregressive model that judges the candidates of methods that ask one; None takes the one the model's
             card names
    max_new_tokens  of methods that extend a text; None: half as many again as the source has, and 11
    temperature     of what is drawn; None: methods that extend a text are greedy, others have a default of their own

    A list of sources gives a list, translated one after another; source i uses seed + i.
    """
    from tinyspec.translation import translate

    options = {"method": method, "teacher": teacher, "max_new_tokens": max_new_tokens, "temperature": temperature}
    return translate(model, source, seed=seed, **options, **knobs)


def techniques() -> "list[Card]":
    """The cards of all techniques: name, paper, family, guarantee, knobs."""
    from tinyspec.technique import techniques

    return list(techniques().values())
