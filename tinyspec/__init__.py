"""tinyspec: the textbook of accelerated generation that you can run.

    import tinyspec

    out = tinyspec.generate("storyteller", "The dragon", method="speculative_decoding", gamma=4)
    print(out)                          # the text and a line of figures; in a notebook, in colours
    print(out.stats.tokens_per_call)    # tokens per target call; plain decoding makes 1

    for piece in tinyspec.stream("storyteller", "Once upon a time", temperature=0.8, seed=7):
        print(piece, end="")

    model = tinyspec.load("storyteller", dtype="float32")    # or a folder, a .gguf file, a hub id
    print(tinyspec.generate(model, ["The dragon", "The king"])[1].text)

    print(tinyspec.translate("multi30k-nat", "A dog runs.", seed=1).text)    # chapter 3

    print(tinyspec.techniques())        # what there is: paper, family, guarantee
    help(tinyspec.generate)             # what it takes

Every technique says what it promises (exact: the same distribution as plain decoding; greedy;
lossy; approx) and is held to it by `tinyspec.laws`. Read first, since the others have its shape:
`tinyspec/speculative/drafting/speculative_decoding.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from tinyspec.arguments import Prompt
    from tinyspec.generation import Generation
    from tinyspec.lm.model import Model
    from tinyspec.lm.seq2seq import Seq2Seq
    from tinyspec.notebook import Catalogue
    from tinyspec.pairing import Draft, Head
    from tinyspec.translation import Source, Translation

__all__ = ["generate", "load", "load_translator", "stream", "techniques", "translate"]

try:
    __version__ = version("tinyspec")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

F = TypeVar("F", bound=Callable[..., Any])


def __dir__() -> list[str]:
    """Return what completion and `dir` offer: the public names."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"]


class _Unquoted(str):
    """An annotation that `help` prints as it is written."""

    __repr__ = str.__str__


def _explain_call(example: str) -> Callable[[F], F]:
    """Return a decorator of public functions, whose wrong calls show an example in one line.

    It also makes `help(function)` print the annotations without quotation marks.
    """

    def decorate(function: F) -> F:
        kinds = function.__annotations__
        function.__annotations__ = {name: _Unquoted(kind) for name, kind in kinds.items()}
        name, code = function.__name__, function.__code__
        positional = code.co_varnames[: code.co_argcount]
        needed = positional[: len(positional) - len(function.__defaults__ or ())]

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            missing = [name for name in needed[len(args) :] if name not in options]
            if not missing and len(args) <= len(positional):
                return function(*args, **options)
            from tinyspec.errors import TinyspecError
            from tinyspec.familiar import hint_argument

            if missing:
                wrong = f"{name} needs {' and '.join(needed)}, and {missing[0]} is missing"
            else:
                first = " and ".join(positional) or "nothing"
                wrong = f"{name} takes {first} by position, and all else by name"
            hints = [f" ({word}: {hint})" for word in options if (hint := hint_argument(word))]
            raise TinyspecError(f"{wrong}: write {example}" + "".join(hints[:1]))

        return cast(F, call)

    return decorate


@_explain_call("tinyspec.load('storyteller')")
def load(name_or_path: str | Path, device: str = "cpu", dtype: Any = None) -> Model:
    """Return a model, by a bundled name (storyteller), folder, .gguf file, or hub id (org/name).

    dtype None is what the checkpoint stores (on a CPU without compiled kernels: float32); or
    "float32", "bfloat16", "float16", "float64".
    """
    from tinyspec import models

    return models.load(name_or_path, device=device, dtype=dtype)


@_explain_call("tinyspec.generate('storyteller', 'The dragon', max_new_tokens=20)")
def generate(
    model: Model | str | Path,
    prompt: Prompt | Sequence[Prompt],
    *,
    method: str = "autoregressive",
    draft: Draft = None,
    head: Head = None,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | Sequence[int]] = (),
    chat: bool = False,
    references: str | Sequence[str | Sequence[int]] = (),
    **knobs: Any,
) -> Generation | list[Generation]:
    """Extend a prompt and return the text, its tokens, their logprobs, statistics and a trace.

    model    a loaded model, or a name, folder, .gguf file or hub id, which is loaded once and kept
             (`load` chooses device and dtype). Four models are kept, and read again when their
             files change
    prompt   a text; token ids, as a list or a 1-D integer array or tensor; or chat messages,
             [{"role": "user", "content": "..."}, ...]. A list of prompts is a batch
    method   a name from `techniques()`; its knobs are further keyword arguments (gamma=4, ...)
    draft    the draft model of methods that need one (a loaded model, a name or a path), or a list
             for methods that use several (the last stands in for those that are missing); None
             takes the one the model's card names
    head     the folder or name of a trained head, for methods that need one (medusa); None takes
             one on this machine that was trained for the model
    max_new_tokens  the text ends after so many; None: the model ends it, or its context is full
    temperature     0 is greedy; above it the text is sampled
    stop     a text, or a list of texts and lists of token ids, that end the text
    chat     treat a text prompt as a user's message in the model's chat template
    references      texts that a method may copy from (llma)
    seed     the same seed gives the same text, whatever ran before. Methods whose drafts have no
             probabilities (as llma) write plain decoding's text with that seed. Above temperature
             0, methods that plan by the clock, and one whose draft learns (osd), do not keep their
             text. `tinyspec methods NAME` says what one seed promises

    Returns a Generation: text, tokens, logprobs, finish_reason, stats, trace. For a batch, a list
    of them: row i uses seed + i and equals that row run alone; on a CPU in float32 and bfloat16 bit
    for bit, elsewhere but for ties within rounding.

    Raises tinyspec.errors.TinyspecError, one line, for whatever is wrong with an argument. A row of
    a batch that fails ends itself alone: when all have ended, BatchError (a TinyspecError) names it
    (prompt[2]: ...), and its `results` has what the others wrote.
    """
    from tinyspec.generation import generate

    options = {
        "method": method,
        "draft": draft,
        "head": head,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
    }
    more = {"stop": stop, "chat": chat, "references": references}
    sampling = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    return generate(model, prompt, **options, **sampling, seed=seed, **more, **knobs)


@_explain_call("tinyspec.stream('storyteller', 'The dragon', max_new_tokens=20)")
def stream(model: Model | str | Path, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Yield the new text as it grows. Takes the arguments of `generate`, and one prompt.

    A piece never ends in half a character, or inside what may become a stop text.
    """
    from tinyspec.generation import stream

    return stream(model, prompt, **options)


@_explain_call("tinyspec.load_translator('multi30k-nat')")
def load_translator(name_or_path: str | Path, device: str = "cpu", dtype: Any = None) -> Seq2Seq:
    """Return an encoder-decoder, by name or folder.

    dtype None is float32, in which these small models are quickest.
    """
    from tinyspec import models

    return models.load_translator(name_or_path, device=device, dtype=dtype)


@_explain_call("tinyspec.translate('multi30k-nat', 'A dog runs.')")
def translate(
    model: Seq2Seq | str | Path,
    source: Source | Sequence[Source],
    *,
    method: str | None = None,
    seed: int = 0,
    teacher: Seq2Seq | str | Path | None = None,
    draft: Seq2Seq | str | Path | None = None,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    **knobs: Any,
) -> Translation | list[Translation]:
    """Translate a source (text or token ids) and return what `generate` does, and what every pass
    made of the canvas.

    model    a loaded translation model, or a name or folder: it is loaded once and kept
    method   one that rewrites a canvas (nat, mask_predict), or, on an autoregressive model, `plain`
             and any method that extends a text without a draft model (jacobi, lookahead_jacobi,
             ...), or specdec, or blockwise on a model that was trained for it; None: what the
             model was trained for
    seed     the same seed gives the same translation
    teacher  an autoregressive model that judges the candidates of methods that ask one; None takes
             the one the model's card names
    draft    the model that drafts for specdec; None takes one on this machine that was trained for
             the model
    max_new_tokens  of methods that extend a text; None: half as many again as the source has, and
                    11
    temperature     of what is drawn; None: methods that extend a text are greedy, others have a
                    default of their own

    A list of sources gives a list, translated one after another; source i uses seed + i. If one
    fails, BatchError names it after the last (source[2]: ...), and its `results` has the others.
    """
    from tinyspec.translation import translate

    options = {
        "method": method,
        "teacher": teacher,
        "draft": draft,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
    }
    return translate(model, source, seed=seed, **options, **knobs)


@_explain_call("tinyspec.techniques()")
def techniques() -> Catalogue:
    """Return the cards of all techniques, a list that prints as a table.

    A card has name, title, summary, paper, family, guarantee, knobs, and `doc`, which its file
    says.
    """
    from tinyspec.notebook import Catalogue
    from tinyspec.technique import load_techniques

    return Catalogue(load_techniques().values())
