"""Declare the settings of every experiment of `tinyspec bench`. Its options are made of them.

Each experiment has a dataclass here and a file of its name in `experiments/`. A field has a default
and, by `setting`, the help text and the limits of its option. Nothing heavy is imported, so --help
answers at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DTYPES = "float32, bfloat16, float16, float64."


@dataclass(frozen=True)
class OptionSpec:
    """How a setting is written on the command line.

    flags         names of the option; none: that of the field
    of            type of a list's entries: str for A,B, int for 1,2,4 or 1-16, float for 0.5,0.9
    what          what a list of numbers counts, for the error message
    least, most   limits of a number, or of a list's numbers
    choices       words that are allowed
    repeated      whether the option may be given several times, one value each
    kind          "text" for files whose text is read, "file" and "folder" for paths
    shown         the default as --help shows it; None: as it is
    """

    help: str
    flags: Sequence[str] = ()
    of: type | None = None
    what: str = ""
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    repeated: bool = False
    required: bool = False
    kind: str = ""
    shown: str | None = None


def setting(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """Return the dataclass field of a setting; the other arguments are those of `OptionSpec`."""
    return field(default=default, metadata={"option": OptionSpec(help, flags, **more)})


def model_setting(default: str, help: str = "Name or folder.") -> Any:
    return setting(default, help, "--model", "-m")


def tokens_setting(default: int) -> Any:
    return setting(default, "Tokens to write.", least=1)


def rounds_setting(default: int) -> Any:
    return setting(default, "How often each is timed, in turn.", least=1)


def temperature_setting() -> Any:
    return setting(0.0, "0 is greedy.", "--temperature", "-t", least=0)


def dtype_setting(default: str | None = None) -> Any:
    return setting(default, DTYPES if default else f"{DTYPES} [default: as stored]")


JOBS_SETTING: Any = setting(
    1, "Processes that share the work, by joblib: nothing is timed.", least=1
)
RAY_SETTING: Any = setting(False, "With --jobs: on the nodes of a Ray cluster.")


@dataclass(frozen=True)
class CommandSpec:
    """A command of `tinyspec bench`.

    settings  its dataclass; the docstring is the command's help
    resumes   help text of --resume, if it writes --out itself and goes on with that file
    tables    whether it has tables, which --markdown writes
    chart     whether it has a chart, which --svg draws
    knobs     whether the knobs of settings.method are options too
    """

    name: str
    settings: type[Any]
    resumes: str = ""
    tables: bool = False
    chart: bool = False
    knobs: bool = False

    @property
    def module(self) -> str:
        """Return the name of the experiment's module."""
        return f"tinyspec.bench.experiments.{self.name.replace('-', '_')}"


COMMANDS: dict[str, CommandSpec] = {}


def command(name: str, **more: Any) -> Callable[[type[T]], type[T]]:
    """Register the dataclass of a command's settings; the other arguments are `CommandSpec`'s."""

    def register(settings: type[T]) -> type[T]:
        COMMANDS[name] = CommandSpec(name, settings, **more)
        return settings

    return register


RESUME = "Go on with the file of --out."
ONLINE_RESUME = "Go on with the file of --out; the draft learns the prompts that are done again."
RETRIEVERS = ("llma", "lookahead_trie", "suffix_decoding", "rest")
THRESHOLDS = (0.01, 0.05, 0.1, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""The survey's sweep begins at 0.5. Gaps of small models are mostly below."""
MEASURES = ("softmax", "saturation", "classifier")


def decay_setting(default: str) -> Any:
    return setting(
        default, "How the threshold falls along a text.", choices=("paper", "t5x", "constant")
    )


TAU_SETTING: Any = setting(4.0, "How fast the threshold falls.", least=0)
MIN_EXIT_SETTING: Any = setting(1, "The lowest exit.", least=1)
TEXTS_SETTING: Any = setting(
    (), "Plain text to take passages from; may be repeated. [default: the classics]", kind="text"
)
PROMPT_TOKENS_SETTING: Any = setting(64, "Tokens of a passage that are its prompt.", least=1)
SEED_SETTING: Any = setting(0, "Seed of the passages.")


@command("race", knobs=True)
@dataclass(frozen=True)
class RaceSettings:
    """A technique against plain decoding over ten committed prompts, greedy and sampled.

    \b
    Examples:
      tinyspec bench race
      tinyspec bench race --method llma --rounds 3 --out results/llma.json
      tinyspec bench race --gamma 6 --temperature 0
    """

    model: str = model_setting("storyteller", "Name, folder, .gguf file or hub id.")
    method: str = setting("speculative_decoding", "See `tinyspec methods`.")
    tokens: int = tokens_setting(128)
    rounds: int = rounds_setting(5)
    temperatures: tuple[float, ...] = setting((0.0, 0.8), "", "--temperature", "-t", repeated=True)
    repetition_penalty: float = setting(1.2, "For both arms: 1 lets text loop.")


@command("core")
@dataclass(frozen=True)
class CoreSettings:
    """The compiled kernels against transformers' processors and torch, from the same logits.

    \b
    Examples:
      tinyspec bench core
      tinyspec bench core --rounds 31 --out results/core.json
    """

    rounds: int = rounds_setting(15)


@command("plain")
@dataclass(frozen=True)
class PlainSettings:
    """Plain decoding against transformers' generate: same weights, same tokens, batch 1; and peak
    memory.

    \b
    Examples:
      tinyspec bench plain
      tinyspec bench plain --model storyteller --dtype float32
    """

    model: str = model_setting("smollm2")
    tokens: int = tokens_setting(128)
    rounds: int = rounds_setting(5)
    dtypes: tuple[str, ...] = setting(
        ("float32", "bfloat16"), "May be repeated.", "--dtype", repeated=True
    )


@command("peer")
@dataclass(frozen=True)
class PeerSettings:
    """Greedy tokens against transformers', or our own torch path's, on the same float32 weights, on
    real questions.

    \b
    Examples:
      tinyspec bench peer
      tinyspec bench peer --against torch
      tinyspec bench peer --questions 12 --method autoregressive --method llma
    """

    model: str = model_setting("smollm2")
    questions: int = setting(50, "Prompts of Spec-Bench.", least=1)
    tokens: int = tokens_setting(64)
    methods: tuple[str, ...] = setting(
        ("autoregressive",), "May be repeated.", "--method", repeated=True
    )
    against: str = setting(
        "transformers",
        "transformers, or our own torch path: what TINYSPEC_PURE=1 takes.",
        choices=("transformers", "torch"),
    )


@command("equality", resumes=RESUME)
@dataclass(frozen=True)
class EqualitySettings:
    """Greedy speculation against plain greedy decoding, token for token, in bfloat16, on real
    questions.

    \b
    Examples:
      tinyspec bench equality --questions 12
      tinyspec bench equality --out equality.json --resume --jobs 4
    """

    model: str = model_setting("smollm2")
    questions: int | None = setting(None, "Prompts of Spec-Bench. [default: all]", least=1)
    tokens: int = tokens_setting(64)
    methods: tuple[str, ...] = setting(("llma",), "May be repeated.", "--method", repeated=True)
    dtype: str = setting("bfloat16", "Type of the weights.")
    jobs: int = JOBS_SETTING
    ray: bool = RAY_SETTING


@command("plan-draft", tables=True)
@dataclass(frozen=True)
class PlanSettings:
    """Which draft model, and how many tokens of it: measured, forecast, recommended (arXiv
    2402.01528).

    \b
    Examples:
      tinyspec bench plan-draft
      tinyspec bench plan-draft --drafts apprentice,models/mine --longest 8 --out results/plan.json
      tinyspec bench plan-draft --numbers results/plan.json
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    drafts: tuple[str, ...] = setting(
        (), "Candidates. [default: the draft that the card names]", of=str
    )
    longest: int = setting(6, "Drafted tokens a round, at most.", least=1)
    prompts: int = setting(4, "Openings to measure on.", least=1)
    tokens: int = tokens_setting(64)
    temperature: float = temperature_setting()
    dtype: str | None = dtype_setting()
    check: bool = setting(True, "Measure the forecasts on other prompts. [default: on]")
    numbers: Path | None = setting(
        None, "Advise from the numbers of this file; nothing is run.", kind="file"
    )


@command("sizes", tables=True, chart=True)
@dataclass(frozen=True)
class SizeSettings:
    """Acceptance and time by the size of the draft: alpha, tau, time, and the forecast of both.

    \b
    Examples:
      tinyspec train lm --distill storyteller --layers 1 --minutes 5 --out drafts/one
      tinyspec bench sizes --drafts drafts/one,apprentice --out sizes.json --svg sizes.svg
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    drafts: tuple[str, ...] = setting(
        (), "Drafts of several sizes: names or folders.", of=str, required=True
    )
    gammas: tuple[int, ...] = setting(
        (1, 2, 3, 4), "Drafted tokens a round.", of=int, what="drafted tokens"
    )
    prompts: int = setting(20, "Openings of the valid books.", least=1)
    tokens: int = tokens_setting(64)
    rounds: int = rounds_setting(3)
    temperature: float = temperature_setting()
    dtype: str = dtype_setting("bfloat16")


@command("acceptance")
@dataclass(frozen=True)
class AcceptanceSettings:
    """Sequoia's acceptance vector: how often the draft's child of each rank is the accepted one.

    The knob takes the file of --out. Without it sequoia learns the vector while it decodes.

    \b
    Examples:
      tinyspec bench acceptance --model storyteller --out accepts.json
      tinyspec bench acceptance --temperature 0.8 --prompts 40
      tinyspec generate --method sequoia --accepts accepts.json "Once upon a time"
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    draft: str | None = setting(None, "The draft. [default: the one that the card names]")
    prompts: int = setting(20, "Openings of the valid books.", least=1)
    tokens: int = setting(64, "Tokens that the target adds to each.", least=1)
    ranks: int = setting(8, "Children of a node.", least=1, most=64)
    temperature: float = temperature_setting()
    seed: int = setting(0, "Seed of the texts and of the children.")
    dtype: str = dtype_setting("bfloat16")


@command("osd", tables=True, chart=True, resumes=ONLINE_RESUME)
@dataclass(frozen=True)
class OnlineSettings:
    """The acceptance of a draft that learns between requests (osd), beside that of the same draft
    without updates.

    Both arms answer each prompt in turn, with the same seed. The file of --out is written after
    every prompt. The trained weights are not in it: --resume answers the prompts that are done
    again, by the arm that learns alone, and goes on.

    \b
    Examples:
      tinyspec bench osd --prompts 40 --chunk 10
      tinyspec bench osd --out osd.json --markdown osd.md --svg osd.svg
      tinyspec bench osd --lr 1e-3 --interval 4 --loss rkl --temperature 0
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    draft: str | None = setting(None, "The draft. [default: the one that the card names]")
    prompts: int = setting(160, "Passages of the valid books.", least=1)
    chunk: int = setting(20, "Prompts of a row of the table.", least=1)
    tokens: int = tokens_setting(96)
    temperature: float = setting(1.0, "0 is greedy.", "--temperature", "-t", least=0)
    gamma: int = setting(4, "Tokens drafted in a round.", least=1, most=64)
    interval: int = setting(8, "Requests between two updates of the draft.", least=1)
    lr: float = setting(1e-4, "Learning rate of the draft.", least=0)
    loss: str = setting(
        "kl", "Divergence of the draft from the target.", choices=("kl", "rkl", "jsd")
    )
    texts: tuple[str, ...] = TEXTS_SETTING
    prompt_tokens: int = PROMPT_TOKENS_SETTING
    seed: int = SEED_SETTING
    dtype: str = dtype_setting("float32")


@command("skip", resumes=RESUME)
@dataclass(frozen=True)
class SkipSettings:
    """Search the sublayers that self_speculative skips: Bayesian optimisation of the measured time
    per token.

    The knob takes the file of --out. It is written after every evaluation, and --resume goes on
    with it.

    \b
    Examples:
      tinyspec bench skip --model storyteller --out skip.json
      tinyspec bench skip --model storyteller --out skip.json --resume --evaluations 200
      tinyspec generate --method self_speculative --skip skip.json "Once upon a time"
    """

    model: str = model_setting("storyteller")
    evaluations: int = setting(100, "Skip sets to be timed; the paper's are 1,000.", least=1)
    prompts: int = setting(2, "Openings to measure on.", least=1, most=20)
    tokens: int = tokens_setting(32)
    temperature: float = temperature_setting()
    seed: int = setting(0, "Seed of the search.")
    dtype: str | None = dtype_setting()


@command("retrieval")
@dataclass(frozen=True)
class RetrievalSettings:
    """The cost of a draft lookup, and of an added token, by the size of the index.

    \b
    Examples:
      tinyspec bench retrieval
      tinyspec bench retrieval --size 100000 --method suffix_decoding
      tinyspec bench retrieval --size 1000000 --size 10000000 --out retrieval.json
    """

    sizes: tuple[int, ...] = setting(
        (10_000, 100_000, 1_000_000),
        "Tokens in the index; may be repeated. 10 million take some GB.",
        "--size",
        least=1000,
        repeated=True,
    )
    arms: tuple[str, ...] = setting(
        RETRIEVERS, "May be repeated.", "--method", choices=RETRIEVERS, repeated=True
    )
    rounds: int = rounds_setting(5)


@command("long-context", tables=True, resumes=RESUME)
@dataclass(frozen=True)
class LongContextSettings:
    """TriForce on long texts: acceptance of each level, tokens per target pass, and time, by
    context and budget.

    All arms continue passages of the valid books in turns, on one cache. The file of --out is
    written after every passage; the same command with --resume goes on with it.

    \b
    Examples:
      tinyspec bench long-context --out long.json --markdown long.md
      tinyspec bench long-context --contexts 2048 --budgets 256 --prompts 1
      tinyspec bench long-context --model storyteller --contexts 192 --budgets 32,64
    """

    model: str = model_setting("smollm2", "The target: name or folder.")
    draft: str | None = setting(None, "The draft. [default: the one that the card names]")
    contexts: tuple[int, ...] = setting(
        (2048, 4096, 6144), "Tokens of a prompt.", of=int, what="tokens"
    )
    budgets: tuple[int, ...] = setting(
        (256, 512, 1024), "Tokens of the old cache that are retrieved.", of=int, what="tokens"
    )
    gamma1: int = setting(1, "Tokens that the small model drafts.", least=1)
    gamma2: int = setting(6, "Tokens that the middle level drafts.", least=1)
    prompts: int = setting(3, "Passages.", least=1)
    tokens: int = tokens_setting(64)
    rounds: int = rounds_setting(1)
    texts: tuple[str, ...] = TEXTS_SETTING
    seed: int = SEED_SETTING
    dtype: str = dtype_setting("bfloat16")


@command("distillspec", tables=True)
@dataclass(frozen=True)
class DistillSpecSettings:
    """DistillSpec's grid: a draft for each source of texts and each divergence, trained alike.

    Nothing is timed. A draft that lies in --drafts already is measured, not trained again, so the
    same command goes on after Ctrl-C.

    \b
    Examples:
      tinyspec bench distillspec --drafts drafts --out grid.json --markdown grid.md
      tinyspec bench distillspec --losses tv,kl --sources target,draft --minutes 2 --drafts drafts
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    drafts: str = setting("distillspec-drafts", "Folder of the drafts.")
    losses: tuple[str, ...] = setting(
        ("kl", "rkl", "jsd", "tv"), "Divergences: kl, rkl, jsd, tv; or lk.", of=str
    )
    sources: tuple[str, ...] = setting(
        ("target", "draft", "mix"), "Who writes the texts: target, draft, mix.", of=str
    )
    layers: int = setting(2, "Layers of a draft, the target's first.", least=1)
    texts: int = setting(1500, "Texts of the target.", least=2)
    steps: int = setting(3000, "Steps of a training, at most.", least=1)
    minutes: float = setting(5.0, "Minutes of a training, at most.", least=0)
    seed: int = setting(0, "Seed of the trainings.")


@command("heads", tables=True, chart=True)
@dataclass(frozen=True)
class HeadsSettings:
    """Every trained head of a model, beside lookup and a draft model: tokens per pass, and how
    often a draft token is accepted at each depth. Counted, not timed.

    \b
    Examples:
      tinyspec bench heads --out heads.json --markdown heads.md --svg heads.svg
      tinyspec bench heads --methods medusa,eagle:nodes=4,llma --prompts 20
      tinyspec bench heads --model smollm2 --temperature 1 --jobs 2
      tinyspec bench heads --keep heads.json --out heads.json
      tinyspec bench heads --sizes 1,3,5,7,15,25,63 \\
          --curve tutorials/results/speculative-storyteller.json --out heads-sizes.json
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    methods: tuple[str, ...] = setting(
        (), "NAME or NAME:knob=value. [default: all with a head, llma, a draft]", of=str
    )
    sizes: tuple[int, ...] = setting(
        (), "Count these sizes of each head's tree instead.", of=int, what="draft tokens"
    )
    curve: Path | None = setting(
        None, "--sizes: predict times by the cost curve of this result of `bench`.", kind="file"
    )
    keep: Path | None = setting(
        None, "Keep this result's rows of methods that are not counted here.", kind="file"
    )
    prompts: int = setting(60, "Openings of the valid books.", least=1)
    tokens: int = tokens_setting(64)
    temperature: float = temperature_setting()
    seed: int = setting(0, "Of the first opening; each further one adds 1.")
    dtype: str = dtype_setting("bfloat16")
    jobs: int = JOBS_SETTING
    ray: bool = RAY_SETTING


@command("layerskip", tables=True)
@dataclass(frozen=True)
class LayerSkipSettings:
    """Exits of a model as drafts, and LayerSkip with them: counted, not timed.

    \b
    Examples:
      tinyspec bench layerskip
      tinyspec bench layerskip --models storyteller --exits 3,6,9 --gamma 6
      tinyspec bench layerskip --temperature 1 --out layerskip.json --markdown layerskip.md
    """

    models: tuple[str, ...] = setting(
        ("exits-plain", "exits-loss", "exits-layerskip"), "Names or folders.", of=str
    )
    exits: tuple[int, ...] = setting(
        tuple(range(2, 9)), "Layers that draft: 2,3 or 2-8.", of=int, what="layers", shown="2-8"
    )
    gamma: int = setting(4, "Tokens drafted in a round.", least=1)
    temperature: float = temperature_setting()
    prompts: int = setting(10, "Openings to measure on.", least=1, most=60)
    tokens: int = tokens_setting(64)
    dtype: str | None = dtype_setting()


@command("parts", tables=True)
@dataclass(frozen=True)
class PartsSettings:
    """The parts of a forward pass over 1 to 32 new tokens: matrices, head, attention, what is
    between them, and Python around them.

    The floor beside them is that of `tinyspec bench`, in medians: weights at the greatest bandwidth
    or arithmetic at the peak.

    \b
    Examples:
      tinyspec bench parts
      tinyspec bench parts --dtype float32 --cached 64,1024
      tinyspec bench parts --model storyteller --cached 128 --out parts.json --markdown parts.md
    """

    model: str = model_setting("smollm2")
    dtype: str = setting("bfloat16", "float32 or bfloat16.")
    cached: tuple[int, ...] = setting(
        (256, 768), "Tokens before the new ones.", of=int, what="tokens"
    )
    rounds: int = rounds_setting(15)


@command("ppd", tables=True, chart=True)
@dataclass(frozen=True)
class PpdSettings:
    """Predictions in the middle of a model: how often they are right, their worth on k + 1
    processors, and in threads.

    \b
    Examples:
      tinyspec bench ppd
      tinyspec bench ppd --model smollm2 --dtype bfloat16 --prompts 3 --tokens 32
      tinyspec bench ppd --layer 6 --out ppd.json --markdown ppd.md --svg ppd.svg
    """

    model: str = model_setting("storyteller")
    ks: tuple[int, ...] = setting(
        (1, 3, 5), "Numbers of predicted tokens.", of=int, what="predicted tokens"
    )
    layer: int = setting(0, "Layer of the timed runs; 0: two thirds of all.", least=0)
    prompts: int = setting(6, "Openings to measure on.", least=1, most=60)
    tokens: int = tokens_setting(48)
    rounds: int = rounds_setting(5)
    dtype: str | None = dtype_setting()


@command("streams", tables=True)
@dataclass(frozen=True)
class StreamSettings:
    """Answers that several streams write (sot, apar): time and tokens per second against plain
    decoding of the same model.

    The answers differ from plain decoding's. Their quality is not measured.

    \b
    Examples:
      tinyspec bench streams --questions 5
      tinyspec bench streams --methods sot:points=4 --tokens 64 --out streams.json
      tinyspec bench streams --model models/storyteller-apar --methods apar,apar:streams=2
    """

    model: str = model_setting("smollm2")
    methods: tuple[str, ...] = setting(
        ("sot", "sot:router=prompt", "sot:router=words"),
        "One technique of several streams, with any knobs: NAME or NAME:knob=value.",
        of=str,
    )
    questions: int = setting(
        20, "Questions: MT-bench's, or lists for a model tuned for apar.", least=1
    )
    tokens: int = setting(128, "Most tokens of each stream.", least=1)
    rounds: int = rounds_setting(1)
    dtype: str | None = dtype_setting()


@command("sweeps", tables=True, chart=True)
@dataclass(frozen=True)
class SweepSettings:
    """How many tokens a Jacobi sweep fixes, and the time, by the size of a block: in turns with
    plain decoding.

    \b
    Examples:
      tinyspec bench sweeps
      tinyspec bench sweeps --model smollm2 --dtype bfloat16 --blocks 1,4,16 --no-whole --prompts 3
      tinyspec bench sweeps --init prompt --out sweeps.json --markdown sweeps.md --svg sweeps.svg
    """

    model: str = model_setting("storyteller")
    blocks: tuple[int, ...] = setting(
        tuple(range(1, 17)),
        "Tokens of a block: 1,2,4 or 1-16.",
        of=int,
        what="tokens",
        shown="1-16",
    )
    whole: bool = setting(True, "All tokens as one block, too. [default: on]")
    init: str = setting(
        "pad", "How a block is filled at first.", choices=("pad", "random", "prompt", "last")
    )
    prompts: int = setting(10, "Openings to measure on.", least=1, most=60)
    tokens: int = tokens_setting(64)
    rounds: int = rounds_setting(3)
    dtype: str | None = dtype_setting()


@command("serve", tables=True, chart=True, resumes=RESUME)
@dataclass(frozen=True)
class ServeSettings:
    """Many requests at once, by policy: tokens/s, time to first token, and gaps between tokens, in
    real time and under a simulated clock.

    Policies: lockstep, prefill-first, fcfs, and those of `tinyspec methods` such as sarathi, each
    with its knobs. All serve the same random requests, in turns. The costs of passes are measured
    between the runs. The clock that they give is compared with real time, and then has the costs of
    a GPU. The file of --out is written after every run.

    \b
    Examples:
      tinyspec bench serve --out serve.json --markdown serve.md --svg serve.svg
      tinyspec bench serve --policies fcfs:budget=64,sarathi:budget=64 --loads 0.6 --requests 20
      tinyspec bench serve --model smollm2 --prompt-tokens 512 --out serve.json --resume
    """

    model: str = model_setting("storyteller")
    policies: tuple[str, ...] = setting(
        (
            "lockstep",
            "prefill-first",
            "fcfs",
            "sarathi",
            *(f"sarathi:budget={budget}" for budget in (32, 64, 128, 256)),
        ),
        "NAME or NAME:knob=value.",
        of=str,
    )
    loads: tuple[float, ...] = setting(
        (0.3, 0.6, 0.9), "Arrivals per second, as shares of the capacity.", of=float
    )
    ratios: tuple[int, ...] = setting(
        (1, 4, 16), "Tokens of a prompt for each new one, all requests at once.", of=int,
        what="tokens",
    )  # fmt: skip
    requests: int = setting(60, "Requests of each trace.", least=2)
    prompt_tokens: int = setting(256, "Mean length of a prompt.", least=1)
    new_tokens: int = setting(64, "Mean length of an answer.", least=1)
    max_live: int = setting(16, "Requests that run at once, at most.", least=1)
    rounds: int = setting(1, "Traces of each kind, every one with a seed of its own.", least=1)
    grid_rounds: int = setting(
        7, "How often each kind of pass is timed at least, between the runs.", least=1
    )
    seed: int = setting(0, "Seed of the traces.")
    dtype: str | None = dtype_setting()


@command("batches", tables=True, chart=True)
@dataclass(frozen=True)
class BatchSettings:
    """Drafts in batches of several sizes, beside plain decoding, and the best draft lengths.

    All requests of a batch begin at once and share forward passes. The techniques take turns.

    \b
    Examples:
      tinyspec bench batches --out batches.json --markdown batches.md --svg batches.svg
      tinyspec bench batches --model smollm2 --dtype bfloat16 --sizes 1,4,16 --rounds 5
      tinyspec bench batches --methods speculative_decoding:gamma=4,synergy --tokens 64
      tinyspec bench batches --model smollm2 --prompt-tokens 2048 --methods magicdec --sizes 1,4,16
    """

    model: str = model_setting("storyteller", "The target: name or folder.")
    draft: str | None = setting(None, "The draft. [default: the one that the card names]")
    methods: tuple[str, ...] = setting(
        ("speculative_decoding:gamma=4", "synergy", "smartspec", "bass", "tetris", "auto"),
        "NAME or NAME:knob=value.",
        of=str,
    )
    sizes: tuple[int, ...] = setting((1, 2, 4, 8, 16), "Requests of a batch.", of=int, what="size")
    tokens: int = tokens_setting(64)
    rounds: int = rounds_setting(3)
    longest: int = setting(8, "Longest draft that is measured.", least=1)
    prompt_tokens: int = setting(
        64, "Tokens of a prompt. More than 64: passages of the valid books.", least=1
    )
    dtype: str | None = dtype_setting()


@command("clients", tables=True, chart=True)
@dataclass(frozen=True)
class ClientSettings:
    """The server (`tinyspec serve`) with one client and with several, beside decoding alone, and
    beside llama.cpp's batches where it is installed.

    The server is a process of its own, which ends with the command. The arms take turns on the same
    prompts. A soak then compares each reply to 64 clients with the text that its prompt gets alone.

    \b
    Examples:
      tinyspec bench clients --out clients.json --markdown clients.md
      tinyspec bench clients --model smollm2 --dtype bfloat16 --rounds 5
      tinyspec bench clients --method llma --clients 1,4,16 --soak 600
    """

    model: str = model_setting("storyteller")
    method: str = setting("autoregressive", "NAME or NAME:knob=value.")
    clients: tuple[int, ...] = setting((1, 8), "Clients at once.", of=int, what="clients")
    tokens: int = tokens_setting(64)
    rounds: int = rounds_setting(3)
    soak: float = setting(0.0, "Seconds with 64 clients, after the rounds; 0: none.", least=0)
    dtype: str | None = dtype_setting()


@command("translation", tables=True, chart=True, resumes=RESUME)
@dataclass(frozen=True)
class TranslationSettings:
    """Every way to translate: BLEU, passes of decoder and encoder, time at batch 1 and in large
    batches, repeated tokens.

    All arms translate each sentence in turn. The file of --out is written after every twenty
    sentences; the same command with --resume goes on with it.

    \b
    Examples:
      tinyspec data fetch multi30k
      tinyspec bench translation --out results/translation.json --markdown results/translation.md
      tinyspec bench translation --experiment iterations --out iterations.json --svg iterations.svg
    """

    models: tuple[str, ...] = setting(
        (), "Names or folders. [default: those on this machine]", of=str
    )
    experiment: str = setting(
        "table",
        "All methods; or Mask-Predict with 1 to 10 iterations, the survey's third experiment.",
        choices=("table", "iterations"),
    )
    sentences: int = setting(1000, "Test sentences, the first ones.", least=1)
    samples: tuple[int, ...] = setting(
        (10,), "NAT's samples, for the teacher to judge.", of=int, what="samples", least=2
    )
    iterations: tuple[int, ...] = setting(
        (),
        "Iterations of Mask-Predict. [default: 1,4,10; 1 to 10 for iterations]",
        of=int,
        what="iterations",
    )
    lengths: tuple[int, ...] = setting(
        (),
        "Lengths that Mask-Predict tries. [default: 3,5, the paper's is 5; 1,3,5 for iterations]",
        of=int,
        what="lengths",
    )
    batch: int = setting(64, "Sentences of a large batch.", least=1)
    rounds: int = rounds_setting(3)
    data_folder: Path | None = setting(
        None,
        "Where Multi30k lies. [default: TINYSPEC_DATA, else the cache]",
        "--data",
        kind="folder",
    )


@command(
    "dialects",
    tables=True,
    chart=True,
    resumes="Go on with the file of --out, and with its trainings.",
)
@dataclass(frozen=True)
class DialectSettings:
    """The cost of writing all words at once where a source has several right translations, and what
    reduces it.

    Trains small models for each kind of dialects: one that reads what it wrote, one that writes in
    a single pass, this one again on the first one's translations, and every technique that
    rewrites, most of them on both. Ctrl-C stops, and --resume goes on.

    \b
    Examples:
      tinyspec bench dialects --kinds lex --words 8 --shortest 4 --longest 6 --steps 400
      tinyspec bench dialects --out dialects.json --markdown dialects.md --svg dialects.svg
    """

    kinds: tuple[str, ...] = setting(("lex", "ord", "fert"), "lex, ord, fert, or lex+ord.", of=str)
    methods: tuple[str, ...] = setting(
        (), "Techniques that are trained too. [default: all that rewrite]", of=str
    )
    modes: int = setting(4, "Right translations of a source.", least=1)
    words: int = setting(10, "Words of the source language.", least=1)
    shortest: int = setting(5, "Words of a source, at least.", least=1)
    longest: int = setting(7, "Words of a source, at most.", least=1)
    pairs: int = setting(12_000, "Training pairs.", least=1)
    tests: int = setting(500, "Sources that are held out.", least=1)
    width: int = setting(96, "Width of the layers, a multiple of 4.", least=4)
    layers: int = setting(1, "Layers of the encoder, and of the decoder.", least=1)
    # The models learn word orders at about step 500, all of a sudden.
    steps: int = setting(1500, "Steps of each training.", least=1)
    batch: int = setting(64, "Pairs of a step.", least=1)
    seed: int = setting(0, "Seed of the pairs and the weights.")
    passes: tuple[int, ...] = setting(
        (1, 2, 4, 10), "Passes of refinement and Mask-Predict.", of=int, what="passes"
    )
    lengths: tuple[int, ...] = setting(
        (1, 3), "Mask-Predict's length beams.", of=int, what="lengths"
    )
    student_steps: int = 0  # training steps of the distilled model; 0: as many as `steps`
    lr: float = 3e-3  # learning rate of all trainings


@command("exits", tables=True, chart=True, resumes=RESUME)
@dataclass(frozen=True)
class ExitSettings:
    """What early exits save and cost: layers, fills and head products against agreement, perplexity
    or BLEU.

    Every technique of the chapter that runs on the model, beside one fixed exit for all tokens; on
    given text, and writing freely. A translator translates Multi30k's test sentences.

    \b
    Examples:
      tinyspec bench exits --model storyteller --methods calm,calm:measure=saturation,ppd
      tinyspec bench exits --model models/exits-loss --out exits.json --resume --svg exits.svg
      tinyspec bench exits --model multi30k-exits --prompts 200 --markdown exits-translator.md
    """

    model: str = model_setting("storyteller", "Name or folder, also of a translator.")
    methods: tuple[str, ...] = setting(
        (),
        "NAME or NAME:knob=value. [default: every technique of the chapter, by its card]",
        of=str,
    )
    thresholds: tuple[float, ...] = setting(
        THRESHOLDS, "From 0 to 1, of techniques that have one.", of=float
    )
    prompts: int = setting(20, "Passages, or sentences of a translator.", least=1)
    tokens: int = tokens_setting(64)
    stages: int = setting(4, "Stages of EE-LLM's simulated pipeline.", least=1)
    texts: tuple[str, ...] = TEXTS_SETTING
    prompt_tokens: int = PROMPT_TOKENS_SETTING
    seed: int = SEED_SETTING
    dtype: str | None = dtype_setting()
    data_folder: Path | None = setting(
        None,
        "Where Multi30k lies. [default: TINYSPEC_DATA, else the cache]",
        "--data",
        kind="folder",
    )


@command("mpee", tables=True)
@dataclass(frozen=True)
class MpeeSettings:
    """Who wrote a passage: a classifier that leaves early by layers, by tokens, and by both (MPEE).

    Trains an encoder on passages of the authors of three books or more, one book of each held out,
    and asks it for the passages of those books. Thresholds are chosen on one half of them and
    judged on the other.

    \b
    Examples:
      tinyspec bench mpee --out mpee.json --markdown mpee.md
      tinyspec bench mpee --steps 20 --tests 4 --width 32 --layers 3
    """

    tokenizer: str = setting("exits-plain", "Model whose tokenizer is used: name or folder.")
    passage: int = setting(96, "Tokens of a passage.", least=2)
    tests: int = setting(100, "Passages of each held-out book.", least=2)
    layers: int = setting(6, "Layers of the encoder.", least=2)
    width: int = setting(128, "Width of the layers, a multiple of 32.", least=32)
    steps: int = setting(1500, "Steps of each training.", least=1)
    batch: int = setting(32, "Passages of a step.", least=1)
    rhos: tuple[float, ...] = setting(
        (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), "Shares of the tokens that go on.", of=float
    )
    taus: tuple[float, ...] = setting(
        (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), "Confidences to leave at.", of=float
    )
    budgets: tuple[float, ...] = setting(
        (0.3, 0.4, 0.5, 0.6, 0.8), "Shares of the whole encoder's operations.", of=float
    )
    seed: int = setting(0, "Seed of the weights and the passages.")
    lr: float = 2e-3  # learning rate of all trainings


@command("calibrate")
@dataclass(frozen=True)
class CalibrationSettings:
    """Choose CALM's threshold so that texts stay within delta of the full model's, with probability
    1 - epsilon.

    Learn then Test: thresholds from 1 down, until the first that cannot be shown to be safe.

    \b
    Examples:
      tinyspec calibrate --model storyteller --delta 0.3
      tinyspec calibrate --model storyteller --delta 0.1 --consistency risk --json
    """

    model: str = model_setting("storyteller")
    delta: float = setting(0.1, "The greatest risk: expected loss of a text.")
    epsilon: float = setting(0.05, "The greatest probability of a greater risk.")
    consistency: str = setting(
        "textual",
        "With the full model's text (1 - ROUGE-L), or in how well the passage's own is predicted.",
        choices=("textual", "risk"),
    )
    measure: str = setting("softmax", "The measure of confidence.", choices=MEASURES)
    decay: str = decay_setting("paper")
    tau: float = TAU_SETTING
    min_exit: int = MIN_EXIT_SETTING
    prompts: int = setting(200, "Calibration examples.", least=1)
    tokens: int = tokens_setting(32)
    step: float = setting(0.05, "Distance between two thresholds.")
    check: int = setting(200, "Fresh passages to check the choice on.", least=0)
    texts: tuple[str, ...] = TEXTS_SETTING
    prompt_tokens: int = PROMPT_TOKENS_SETTING
    seed: int = SEED_SETTING
    dtype: str | None = dtype_setting()
