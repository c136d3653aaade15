"""The classes of damaged inputs.

Each function draws one input, and returns its description and a function that tries it.
"""

import json
import os
import shutil
import signal
import struct
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType as Quant

import tinyspec
from tests.fuzz.mutate import (
    NUMBERS,
    TEXTS,
    damage_bytes,
    damage_json,
    damage_text,
    draw_json_value,
    draw_value,
    dump_json,
)
from tests.lm.small import LLAMA
from tests.lm.test_chat_template import GREEDY, ORDINARY
from tests.lm.test_gguf import byte_metadata
from tests.lm.test_gguf import write as write_gguf
from tests.zoo import TEXT, run, tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.lm.chat_template import render_chat
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import load_plugin, load_techniques
from tinyspec.training.recipe import read_recipe, read_translation_recipe

Try = Callable[[], object]
PROMPT = "the cat sat on the mat"
MESSAGES = [{"role": "user", "content": "naïve é\n"}, {"role": "assistant", "content": "yes"}]
MODELS = Path(__file__).parents[2] / "models"
PLUGINS = Path(__file__).parents[2] / "tinyspec" / "speculative" / "verification"


class Refused(Exception):
    """The command line refused its arguments in one line."""


class World(NamedTuple):
    """What inputs are made of: sound models, and a folder of this process for damaged ones."""

    folder: Path
    scratch: Path
    big: Model
    small: Model
    translator: Seq2Seq


def build_world(folder: Path) -> None:
    """Write the sound models: those of `tiny_zoo`, a .gguf file and a translator; and a text."""
    tiny_zoo(folder)
    heads = replace(LLAMA, d_model=64, n_heads=1, n_kv_heads=1, head_dim=64)
    config = replace(heads, vocab_size=8, n_layers=1, d_ff=8, bos=1, eos=(2,))
    write_gguf(folder / "model.gguf", config, Quant.F32, **byte_metadata("gpt-2", small=True))
    sizes = {"d_model": 8, "n_heads": 2, "d_ff": 8, "encoder_layers": 1, "decoder_layers": 1}
    own = {"lengths": 24, "extra": {"trained_for": "mask_predict"}}
    shape = Seq2SeqConfig(20, **sizes, max_positions=24, **own)  # type: ignore[arg-type]
    Seq2Seq.create(shape, torch.Generator().manual_seed(0)).save(folder / "translator")
    (folder / "text.txt").write_text(TEXT)


def open_world(folder: Path) -> World:
    """Load the sound models in this process, whose current folder becomes an empty one."""
    scratch = folder / f"scratch-{os.getpid()}"
    scratch.mkdir()
    os.chdir(scratch)
    big, small = tinyspec.load(folder / "big"), tinyspec.load(folder / "small")
    return World(folder, scratch, big, small, tinyspec.load_translator(folder / "translator"))


# ---------------------------------------------------------------------- checkpoints


def copy_model(world: World, name: str = "big") -> Path:
    """A fresh copy of a sound model, as links but for what is then written anew."""
    target = world.scratch / "model"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in (world.folder / name).iterdir():
        (target / file.name).symlink_to(file)
    return target


def write_anew(file: Path, data: bytes) -> None:
    """Write a file in place of a link to a sound one."""
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def use_model(path: Path) -> None:
    """Load a checkpoint and, if that succeeds, let it read, write and chat."""
    model = tinyspec.load(path)
    text = PROMPT if model.has_tokenizer else [1, 2, 3]
    tinyspec.generate(model, text, max_new_tokens=3, draft=None)
    if model.has_tokenizer and model.tokenizer.has_chat:
        tinyspec.generate(model, MESSAGES[:1], max_new_tokens=2, stop=["\n"])


def damage_config(world: World, rng: Random) -> tuple[str, Try]:
    """config.json of a decoder or an encoder-decoder."""
    name = rng.choice(["big", "big", "big", "translator"])
    folder = copy_model(world, name)
    values = json.loads((world.folder / name / "config.json").read_text())
    data = dump_json(damage_json(rng, values), rng)
    write_anew(folder / "config.json", data)
    if name == "big":
        return repr(data), lambda: use_model(folder)
    return repr(data), lambda: tinyspec.translate(
        tinyspec.load_translator(folder), [5, 6], iterations=2, lengths=2
    )


def damage_tuned(world: World, rng: Random) -> tuple[str, Try]:
    """The section of config.json that tells how a model was tuned."""
    folder = copy_model(world)
    values = json.loads((world.folder / "big" / "config.json").read_text())
    settings = {"masks": 2, "mask_prob": 0.5, "mask_id": -1}
    made = damage_json(rng, {"method": "space", "from": "big", "settings": settings})
    values["tinyspec"] = {"tuned": made}
    write_anew(folder / "config.json", dump_json(values, rng))
    return repr(made), lambda: tinyspec.generate(
        tinyspec.load(folder), PROMPT, method="space", max_new_tokens=3
    )


def damage_generation_config(world: World, rng: Random) -> tuple[str, Try]:
    """generation_config.json and tokenizer_config.json."""
    folder = copy_model(world)
    name = rng.choice(["generation_config.json", "tokenizer_config.json"])
    values = json.loads((world.folder / "big" / name).read_text())
    values |= {"eos_token": "the", "chat_template": "{{ messages }}"} if name[0] == "t" else {}
    data = dump_json(damage_json(rng, values), rng)
    write_anew(folder / name, data)
    if name[0] == "t":
        (folder / "chat_template.jinja").unlink()
    return f"{name} {data!r}", lambda: use_model(folder)


def damage_safetensors(world: World, rng: Random) -> tuple[str, Try]:
    """model.safetensors: its bytes, or its header as JSON; sometimes an index of shards."""
    folder = copy_model(world)
    data = (world.folder / "big" / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    kind = rng.randrange(5)
    if kind == 0:
        (folder / "model.safetensors").unlink()
        where = {f"model.layers.{i}.mlp.up_proj.weight": "model-1-of-1.safetensors" for i in (0, 1)}
        new = dump_json(damage_json(rng, {"metadata": {}, "weight_map": where}), rng)
        (folder / "model.safetensors.index.json").write_bytes(new)
        write_anew(folder / "model-1-of-1.safetensors", data)
        return repr(new), lambda: use_model(folder)
    if kind < 3:
        header = dump_json(damage_json(rng, json.loads(data[8 : 8 + size])), rng)
        new = struct.pack("<Q", len(header)) + header + data[8 + size :]
    else:
        new = damage_bytes(rng, data, 8 + size if kind == 3 else len(data))
    write_anew(folder / "model.safetensors", new)
    return f"{new[:3000]!r}, {len(new)} bytes, CRC {zlib.crc32(new)}", lambda: use_model(folder)


def damage_gguf(world: World, rng: Random) -> tuple[str, Try]:
    """A .gguf file: its metadata, or all of it."""
    data = (world.folder / "model.gguf").read_bytes()
    new = damage_bytes(rng, data, rng.choice([1600, 1600, 1600, len(data)]))
    path = world.scratch / "model.gguf"
    path.write_bytes(new)
    return f"{new[:2000]!r}, {len(new)} bytes, CRC {zlib.crc32(new)}", lambda: use_model(path)


KINDS = {
    "normalizer": (
        *("Precompiled", "Replace", "Prepend", "Strip", "NFC", "NFKD", "Lowercase", "StripAccents"),
        *("BertNormalizer", "Sequence", "ByteLevel", "Nmt"),
    ),
    "pre_tokenizer": (
        *("ByteLevel", "Split", "Metaspace", "Punctuation", "Digits", "Whitespace", "Sequence"),
        *("CharDelimiterSplit", "UnicodeScripts", "BertPreTokenizer", "FixedLength"),
    ),
    "decoder": (
        *("ByteLevel", "WordPiece", "Metaspace", "Strip", "Fuse", "ByteFallback", "Replace", "CTC"),
        *("BPEDecoder", "Sequence"),
    ),
    "post_processor": ("ByteLevel", "TemplateProcessing", "BertProcessing",
                       "RobertaProcessing", "Sequence"),
}  # fmt: skip
FIELDS = [
    *("precompiled_charsmap", "content", "prepend", "strip_left", "strip_right", "start", "stop"),
    *("add_prefix_space", "trim_offsets", "use_regex", "behavior", "invert", "replacement",
      "split"),
    *("prepend_scheme", "individual_digits", "delimiter", "prefix", "cleanup", "pad_token",
      "length"),
    *("word_delimiter_token", "suffix", "sep", "cls", "single", "pair", "special_tokens",
      "lowercase"),
    *("normalizers", "pretokenizers", "decoders", "processors", "clean_text", "strip_accents"),
]  # fmt: skip


def draw_part(rng: Random, part: str, depth: int = 0) -> Any:
    """A normalizer, decoder, ... whose fields have values of any kind."""
    values = {"type": rng.choice(KINDS[part])}
    for name in rng.sample(FIELDS, rng.randrange(1, 20)):
        values[name] = rng.choice(
            [draw_json_value(rng), True, False, "x", "▁", " ", "Removed", 1, 3]
        )
    pattern = rng.choice([*TEXTS[:8], "(a+)+$", "a|", "\\b", "(?=.)", ".", "[", " +", "\\s*"])
    values["pattern"] = {rng.choice(["String", "Regex"]): pattern}
    names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    if depth < 2 and part in names:
        values[names[part]] = [draw_part(rng, part, depth + 1) for _ in range(rng.randrange(3))]
    return values


def damage_tokenizer(world: World, rng: Random) -> tuple[str, Try]:
    """tokenizer.json: any place of it, or a part of another kind."""
    folder = copy_model(world)
    values = json.loads((world.folder / "big" / "tokenizer.json").read_text())
    if rng.random() < 0.6:
        part = rng.choice([*KINDS])
        values[part] = draw_part(rng, part)
        shown = json.dumps(values[part])
    else:
        values = damage_json(rng, values)
        shown = ""
    data = dump_json(values, rng)
    write_anew(folder / "tokenizer.json", data)
    return f"{shown} {data[:3000]!r}", lambda: use_model(folder)


# ---------------------------------------------------------------------- templates


VALUES = [
    *("messages", "messages[0].content", "bos_token", "x", "loop", "[1, 'a']", "{'a': 1}", "'ab'"),
    *("3", "0.5", "10 ** 9", "-1", "none", "true", "ns", "range(99999)", "namespace(a=1)", "[]",
      "''"),
    *("'%9d'", "'{:>9}'", "99999", "cycler('a', 'b')", "messages[0]", "(1, 2)"),
]  # fmt: skip
FILTERS = [
    *("join", "replace", "center", "indent", "format", "batch", "slice", "round", "list", "sort",
      "sum"),
    *("tojson", "upper", "trim", "length", "map", "select", "first", "last", "unique", "dictsort"),
    *("items", "groupby", "string", "int", "float", "default", "wordwrap", "truncate", "reverse"),
    *("min", "max", "abs", "attr", "escape", "safe", "title", "urlize", "xmlattr", "pprint"),
]  # fmt: skip
METHODS = [
    *("split", "strip", "upper", "replace", "zfill", "center", "join", "format", "encode", "items"),
    *("keys", "get", "count", "ljust", "startswith", "find", "rjust", "expandtabs", "translate"),
    *("splitlines", "partition", "title", "to_bytes", "hex"),
]  # fmt: skip


def draw_expression(rng: Random, depth: int = 0) -> str:
    """An expression of a template: any operator, filter or method on any value."""
    if depth > 3 or rng.random() < 0.2:
        return rng.choice(VALUES)
    one, other = (draw_expression(rng, depth + 1) for _ in range(2))
    return rng.choice(
        [
            (
                f"({one} "
                f"{rng.choice(['+', '-', '*', '/', '//', '%', '**', '~', '==', 'in', 'and', '<'])} "
                f"{other})"
            ),
            f"({one} | {rng.choice(FILTERS)})",
            f"({one} | {rng.choice(FILTERS)}({other}))",
            f"({one} | {rng.choice(FILTERS)}({other}, {draw_expression(rng, depth + 1)}))",
            f"{one}.{rng.choice(METHODS)}({other})",
            f"{one}.{rng.choice(METHODS)}({other}, {draw_expression(rng, depth + 1)})",
            f"{one}[{other}]",
            f"[{one}, {other}]",
            f"{{{one}: {other}}}",
            f"({one} if {other} else {one})",
        ]
    )


def draw_statement(rng: Random, depth: int = 0) -> str:
    """A piece of a template."""
    value = draw_expression(rng)
    doubles = "{% for i in range(50) %}{% set ns.a = DOUBLE %}{% endfor %}{{ ns.a }}"
    inner = draw_statement(rng, depth + 1) if depth < 4 else "x"
    return rng.choice(
        [
            f"{{{{ {value} }}}}{inner if depth < 2 else ''}",
            f"{{% for i in {value} %}}{inner}{{% endfor %}}",
            f"{{% set x = {value} %}}{inner}",
            f"{{% set ns = namespace(a={value}) %}}" + doubles.replace("DOUBLE", "ns.a ~ ns.a"),
            f"{{% set ns = namespace(a={value}) %}}" + doubles.replace("DOUBLE", "[ns.a, ns.a]"),
            f"{{% macro f(x) %}}{inner}{{{{ f(x) if {value} }}}}{{% endmacro %}}{{{{ f(1) }}}}",
            f"{{% if {value} %}}{inner}{{% endif %}}",
            (
                f"{{% filter "
                f"{rng.choice(['upper', 'trim', 'indent(9999)', 'center(99999999)'])} "
                f"%}}{inner}{{% endfilter %}}"
            ),
            f"{{% set x %}}{inner}{{% endset %}}{{{{ x * 99 }}}}",
        ]
    )


def damage_template(world: World, rng: Random) -> tuple[str, Try]:
    """A chat template: a sound or a greedy one with pieces changed, or one that is drawn."""
    if rng.random() < 0.4:
        template = damage_text(rng, rng.choice([*ORDINARY.values(), *GREEDY.values()]))
    else:
        template = "".join(draw_statement(rng) for _ in range(rng.randrange(1, 4)))
    return template[:3000], lambda: render_chat(template, MESSAGES, True, {"bos_token": "<s>"})


# ---------------------------------------------------------------------- arguments


def damage_knobs(world: World, rng: Random) -> tuple[str, Try]:
    """The knobs of any technique: values of any type, and those at the bounds."""
    ours = [c for c in load_techniques().values() if c.build.__module__.startswith("tinyspec.")]
    card = rng.choice([card for card in ours if card.knobs and card.kind != "analysis"])
    knobs: dict[str, Any] = {}
    for knob in rng.sample(card.knobs, rng.randrange(1, len(card.knobs) + 1)):
        values = [draw_value(rng), draw_value(rng), knob.default, *knob.choices, *knob.small]
        if knob.low is not None and knob.high is not None:
            values += [
                knob.low,
                knob.high,
                knob.low - 1,
                knob.high + 1,
                rng.uniform(knob.low, knob.high),
            ]
        if isinstance(knob.default, str):
            words = [
                "1x2x3",
                "2+1",
                "9x9x9",
                "1,1/1",
                "99999999,1/1",
                "0.5,0.1",
                "1e9",
                "1,1",
                "a0",
                "m1",
            ]
            values += [
                *words,
                "x".join("1" * 900),
                damage_text(rng, rng.choice([knob.default, *words])),
            ]
        knobs[knob.name] = rng.choice(values)
    shown = f"{card.name} {describe(knobs)}"
    if card.kind == "refine":
        return shown, lambda: tinyspec.translate(
            world.translator, [5, 6], method=card.name, **knobs
        )
    heat = rng.choice([0.0, 0.8])
    return shown, lambda: tinyspec.generate(
        world.big,
        PROMPT,
        method=card.name,
        draft=world.small,
        max_new_tokens=6,
        temperature=heat,
        **knobs,
    )


def damage_arguments(world: World, rng: Random) -> tuple[str, Try]:
    """Arguments of generate, stream, load, translate and load_translator: values of any type."""
    name = rng.choice(
        ["generate"] * 6 + ["stream", "load", "translate", "translate", "load_translator"]
    )
    options: dict[str, Any] = {}
    wanted = {
        "generate": (
            *(
                "prompt",
                "method",
                "draft",
                "max_new_tokens",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
            ),
            *("repetition_penalty", "seed", "stop", "chat", "references", "model", "other"),
        ),
        "load": ("name_or_path", "device", "dtype"),
        "translate": (
            "source",
            "method",
            "seed",
            "teacher",
            "max_new_tokens",
            "temperature",
            "model",
        ),
    }
    wanted |= {"stream": wanted["generate"], "load_translator": wanted["load"]}  # fmt: skip
    first = {"load": {"name_or_path": "storyteller"}, "load_translator": {"name_or_path": "x"}}
    base: dict[str, Any] = first.get(name) or {
        "model": world.big,
        "prompt": PROMPT,
        "max_new_tokens": 4,
    }
    if name == "translate":
        base = {"model": world.translator, "source": [5, 6]}
    for key in rng.sample(wanted[name], rng.choice([1, 1, 2, 3])):
        options[key] = draw_value(rng)
        if key in ("prompt", "source", "stop", "references") and rng.random() < 0.4:
            options[key] = [draw_value(rng) for _ in range(rng.randrange(4))]
        if key == "stop" and rng.random() < 0.3:
            options[key] = [rng.choice(TEXTS), [rng.choice(NUMBERS)]]
    if rng.random() < 0.2 and name in ("generate", "stream"):
        options.setdefault("method", rng.choice([*load_techniques()]))
        options.setdefault("draft", world.small)
    given = {**base, **options}

    def call() -> None:
        result = getattr(tinyspec, name)(**given)
        if name == "stream":
            "".join(result)

    return f"{name} {describe(options)}", call


def describe(values: dict[str, Any]) -> str:
    """Values as a report shows them."""
    shown = []
    for key, value in values.items():
        try:
            text = repr(value)
        except Exception:
            text = f"a {type(value).__name__}"
        shown.append(f"{key}={text[:200]}")
    return ", ".join(shown)


def damage_command(world: World, rng: Random) -> tuple[str, Try]:
    """Return a command line of a subcommand: generate, chat, translate, replay, methods and
    others.
    """
    folder = world.folder
    lines = [
        [
            "generate",
            PROMPT,
            "--model",
            str(folder / "big"),
            "-n",
            "4",
            "--method",
            "llma",
            "--json",
        ],
        [
            "generate",
            PROMPT,
            "--model",
            str(folder / "big"),
            "-n",
            "4",
            "--temperature",
            "0.8",
            "--seed",
            "3",
        ],
        [
            "generate",
            PROMPT,
            "--model",
            str(folder / "big"),
            "--method",
            "specinfer",
            "--expansion",
            "2x1",
        ],
        [
            "generate",
            "--model",
            str(folder / "big"),
            "--reference",
            "text.txt",
            "--stop",
            "the",
            "--chat",
        ],
        ["chat", "--model", str(folder / "big"), "--system", "be brief", "-n", "4"],
        ["translate", "5 6", "--model", str(folder / "translator"), "--method", "mask_predict"],
        ["replay", "trace.json", "--out", "page.html"],
        ["methods", "llma"],
        ["models", "list"],
        ["models", "card", "storyteller"],
        ["grade", "A1", "folder"],
        ["data", "datastore", "store", str(folder / "text.txt"), "--model", str(folder / "big")],
        ["generate", PROMPT, "--model", str(folder / "model.gguf"), "-n", "3"],
    ]
    words = list(rng.choice(lines))
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(words))
        change = rng.randrange(5)
        odd = rng.choice(
            [*TEXTS, *map(str, NUMBERS[:20]), "--", "-", "--help", "--json", "--stats"]
        )
        if change == 0:
            words[at] = odd
        elif change == 1:
            words.insert(at, odd)
        elif change == 2:
            words[at] = damage_text(rng, words[at])
        elif change == 3 and len(words) > 1:
            del words[at]
        else:
            flags = [
                "--temperature",
                "--top-k",
                "--top-p",
                "--seed",
                "-n",
                "--gamma",
                "--k",
                "--knob",
            ]
            flags += [
                "--device",
                "--dtype",
                "--draft",
                "--method",
                "--stop",
                "--reference",
                "--replay",
            ]
            words += [rng.choice(flags), odd]
    stdin = rng.choice(
        ["", "the cat\n", "/stats\nthe\n/reset\n/quit\n", "\x00\n", "\ud800", "é" * 999]
    )
    (world.scratch / "trace.json").write_bytes(dump_json(draw_json_value(rng), rng))
    # No shell can pass a NUL or half a surrogate pair; a byte that is not UTF-8 arrives as \udcff.
    words = [w.replace("\x00", "\udcff").replace("\ud800", "\udcff") for w in words]
    harmless = [w for w in words if w not in ("fetch", "race", "bench", "laws", "book", "train")]

    def call() -> None:
        done = run(*harmless, stdin=stdin.encode("utf-8", "replace").decode())
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        if done.exit_code == 0 or (errors and errors[0].startswith("Usage: ")):  # a group's help
            return
        last = errors[-1] if errors else ""
        if done.exit_code != 2 or not last.startswith("tinyspec: ") or "is a defect" in done.stderr:
            raise AssertionError(f"exit code {done.exit_code}, and standard error: {errors}")
        if len(errors) > 1 and not all(
            line.startswith(("tinyspec: ", "note: ", "(")) for line in errors
        ):
            raise AssertionError(f"more than one line: {errors}")
        raise Refused(last)

    return repr(harmless), call


def damage_recipe(world: World, rng: Random) -> tuple[str, Try]:
    """A recipe of training (only read), or a technique file as a plugin."""
    if rng.random() < 0.3:
        source = rng.choice(sorted(PLUGINS.glob("[a-z]*.py"))).read_text(encoding="utf-8")
        path = world.scratch / f"plugin_{rng.randrange(10**9)}.py"
        text = damage_text(rng, source)
        path.write_bytes(text.encode("utf-8", "replace"))
        return f"plugin {text[:200]!r}", lambda: load_plugin(path)
    source = rng.choice(sorted(MODELS.glob("*/recipe.toml")))
    text = damage_text(rng, source.read_text(encoding="utf-8"))
    for _ in range(rng.randrange(3)):  # a value in place of another
        lines = text.splitlines()
        at = rng.randrange(len(lines)) if lines else 0
        if lines and "=" in lines[at]:
            value = (
                json.dumps(draw_json_value(rng)).replace("NaN", "nan").replace("Infinity", "inf")
            )
            lines[at] = f"{lines[at].partition('=')[0]}= {value}"
        text = "\n".join(lines)
    path = world.scratch / "recipe.toml"
    path.write_bytes(text.encode("utf-8", "replace"))
    read = read_translation_recipe if source.parent.name.startswith("multi30k") else read_recipe
    return f"recipe {text[:2000]!r}", lambda: read(path)


CLASSES: dict[str, Callable[[World, Random], tuple[str, Try]]] = {
    "tokenizer.json": damage_tokenizer,
    "config.json": damage_config,
    "how a model was tuned": damage_tuned,
    "generation_config.json and tokenizer_config.json": damage_generation_config,
    "model.safetensors": damage_safetensors,
    "a .gguf file": damage_gguf,
    "a chat template": damage_template,
    "knobs of techniques": damage_knobs,
    "arguments in Python": damage_arguments,
    "arguments on the command line": damage_command,
    "recipes and plugins": damage_recipe,
}


BREAKS: dict[str, Try] = {
    "selftest: hang": lambda: time.sleep(3600),
    "selftest: signal": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "selftest: division by zero": lambda: 1 // 0,
    "selftest: exit": lambda: os._exit(3),
    "selftest: memory": lambda: bytearray(1 << 40),
}
"""What no input may do, so that the tests see it counted."""


def try_input(world: World, kind: str, seed: int) -> tuple[str, str]:
    """Draw the input of a class that this seed gives, and try it.

    Returns "accepted" or "refused", or "traceback" with the input and the error.
    """
    if kind in BREAKS:
        shown, attempt = kind, BREAKS[kind]
    else:
        shown, attempt = CLASSES[kind](world, Random(f"{kind} {seed}"))
    try:
        attempt()
    except (TinyspecError, Refused) as error:
        text = str(error)
        if text and "\n" not in text and len(text) < 2000:
            return "refused", text
        return "traceback", f"{shown}\nnot one line: {text[:2000]!r}"
    except BaseException as error:
        where = traceback.format_exc(limit=-12)
        return (
            "traceback",
            f"{shown[:3000]}\n{type(error).__name__}: {str(error)[:500]}\n{where[-3000:]}",
        )
    return "accepted", ""
