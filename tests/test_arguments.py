"""Arguments of `generate` and `translate`: a wrong one is an error of one line that names it.

Names from other libraries get a hint.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinyspec
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec import familiar, generation, models
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import find_technique, load_techniques


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def model(zoo: Zoo) -> Model:
    return tinyspec.load(zoo.big)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed: the error comes first."""

    def forward(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(Model, "forward", forward)


WRONG_PROMPTS = [
    (None, "prompt is None: it must be a text, a list of token ids, or a list of chat messages"),
    (5, "prompt is 5: "),
    (b"x", "prompt is b'x': .*decode"),
    (1.5, "prompt is 1.5: "),
    ({1, 2}, r"prompt is \{1, 2\}: "),
    ([None], r"prompt\[0\] is None: it must be a token id"),
    ([1.5], r"prompt\[0\] is 1.5: it must be a token id"),
    ([3, True], r"prompt\[1\] is True: it must be a token id"),
    (
        np.array([1.5]),
        r"prompt is an array of float64 with shape \(1,\): it must be a 1-D array of whole numbers",
    ),
    (np.array([True]), "prompt is an array of bool"),
    (
        torch.tensor([[1, 2]]),
        r"prompt is an array of int64 with shape \(1, 2\): .*a list of rows without padding",
    ),
    (
        torch.tensor([[1, 2]]),
        r"prompt is an array .*; give its one row, prompt\[0\], or for several",
    ),
    (
        np.array([[1, 2], [3, 4]]),
        r"prompt is an array .*whole numbers; for several, a list of rows",
    ),
    ({"input_ids": torch.tensor([[1]])}, r"prompt is a dict: .*give prompt\['input_ids'\]\[0\]"),
    ({"role": "user", "content": "hi"}, r"prompt is a dict: .*give \[prompt\]"),
    ({"input_ids": [1]}, r"prompt is a dict: .*give prompt\['input_ids'\]"),
    ([{"role": "user"}], r"prompt\[0\] is \{'role': 'user'\}: it must be a chat message"),
    ([{"role": "user", "content": "hi"}, 5], r"prompt\[1\] is 5: it must be a chat message"),
    (["a", 5], r"prompt\[1\] is 5: it must be a text"),
    ([5, "a"], r"prompt\[0\] is 5: it must be a text"),
    (["a", None], r"prompt\[1\] is None"),
    (["a", b"b"], r"prompt\[1\] is b'b'"),
    ([[1], [1.5]], r"prompt\[1\]\[0\] is 1.5: it must be a token id"),
    (object(), "prompt is <object"),
    (np.random.default_rng(0), r"prompt is of type numpy\.Generator"),
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("prompt", "words"),
    WRONG_PROMPTS,
    ids=[f"{n} {type(given).__name__}" for n, (given, _) in enumerate(WRONG_PROMPTS)],
)
def test_a_wrong_prompt_is_named_in_one_line(model: Model, prompt: Any, words: str) -> None:
    with pytest.raises(TinyspecError, match=f"^{words}") as caught:
        tinyspec.generate(model, prompt)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "0.8"}, "temperature is '0.8': it must be a number of at least 0"),
    ({"temperature": True}, "temperature is True"),
    ({"temperature": None}, "temperature is None"),
    ({"top_k": "5"}, "top_k is '5': it must be a whole number"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"top_k": 2**63}, "top_k is 9223372036854775808: it must be a whole number from 1 to"),
    ({"top_p": "1"}, "top_p is '1': it must be a number"),
    ({"min_p": [1]}, r"min_p is \[1\]: it must be a number"),
    ({"repetition_penalty": "1"}, "repetition_penalty is '1'"),
    ({"seed": None}, "seed is None: it must be a whole number"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5: it must be a whole number"),
    ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
    ({"stop": [5]}, r"stop\[0\] is 5: it must be a text or a list of token ids, such as stop="),
    ({"stop": 5}, "stop is 5: "),
    ({"stop": np.array(3)}, r"stop is an array of int64 with shape \(\): it must be a text"),
    ({"references": np.array([1, 2]), "method": "llma"}, "references is an array of int64"),
    ({"stop": ["a", ""]}, r"stop\[1\] is empty"),
    ({"max_new_tokens": -1}, "max_new_tokens is -1: it must be 0 or more"),
    (
        {"draft": np.array([]), "method": "speculative_decoding"},
        "draft is an array of float64 with shape",
    ),
    ({"chat": "yes"}, "chat is 'yes': it must be True or False"),
    ({"references": [5], "method": "llma"}, r"references\[0\] is 5"),
    (
        {"references": [[5], [6, 2**40]], "method": "llma"},
        r"references\[1\]\[1\] is 1099511627776: it must be a token id, from 0 to 2147483647",
    ),
    ({"references": [[-1]], "method": "llma"}, r"references\[0\]\[0\] is -1"),
    ({"method": None}, "method is None: it must be the name of a technique"),
    (
        {"draft": 5, "method": "speculative_decoding"},
        "draft is 5: it must be a loaded model, a name, a path",
    ),
    ({"draft": ["x", 5], "method": "speculative_decoding"}, "draft is 5"),
    (
        {"draft": [], "method": "speculative_decoding"},
        "draft is an empty list: name a model, or leave draft out",
    ),
    ({"gamma": True, "method": "speculative_decoding"}, "gamma is True: it must be a number"),
    ({"temprature": 0.8}, "there is no argument 'temprature': did you mean 'temperature'"),
]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("options", "words"),
    WRONG_OPTIONS,
    ids=[f"{n} {' '.join(options)}" for n, (options, _) in enumerate(WRONG_OPTIONS)],
)
def test_a_wrong_option_is_named_in_one_line(
    model: Model, options: dict[str, Any], words: str
) -> None:
    for prompt in ("the cat", ["the cat", "the dog"]):
        with pytest.raises(TinyspecError, match=f"^{words}") as caught:
            tinyspec.generate(model, prompt, **options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [None, 5, torch.nn.Linear(1, 1)])
def test_what_is_no_model_is_named(given: Any) -> None:
    with pytest.raises(
        TinyspecError,
        match=r"^model is .*: it must be a name, a path, or what tinyspec.load returned",
    ):
        tinyspec.generate(given, "the cat")
    with pytest.raises(
        TinyspecError,
        match=r"^model is .*: it must be a name, a folder, or what tinyspec.load_trans",
    ):
        tinyspec.translate(given, "A dog.")


WRONG_LOADS: list[tuple[dict[str, Any], str]] = [
    ({"device": []}, r"unknown device \[\]: expected cpu, cuda, or cuda:0"),
    ({"device": None}, "unknown device None"),
    ({"device": "meta"}, "unknown device 'meta'"),
    ({"dtype": [1]}, r"dtype is \[1\]: it must be one of"),
    ({"dtype": "x" * 5000}, "dtype 'xxx"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_LOADS)
def test_a_wrong_device_or_dtype_is_named(zoo: Zoo, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TinyspecError, match=f"^{words}"):
        tinyspec.load(zoo.big, **options)


@pytest.mark.parametrize(
    "name", [None, 5, ["x"], b"x", "\x00", "a\nb", "x" * 10**5, "~no-such-user/x"]
)
def test_what_is_no_name_of_a_model_is_an_error(name: Any) -> None:
    for load in (tinyspec.load, tinyspec.load_translator):
        with pytest.raises(TinyspecError, match="is no name of a model and no path"):
            load(name)


@pytest.mark.parametrize("method", [5, np.array([1, 2]), ["plain"]])
def test_a_method_of_a_translation_that_is_no_text_is_named(method: Any) -> None:
    sizes = {"d_model": 8, "n_heads": 2, "d_ff": 8, "encoder_layers": 1, "decoder_layers": 1}
    translator = Seq2Seq.create(Seq2SeqConfig(20, **sizes), torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match=r"^method is "):
        tinyspec.translate(translator, [5, 6], method=method)


@pytest.mark.parametrize(
    "ids", [np.array([5, 6], dtype=np.int32), torch.tensor([5, 6]), (5, 6), [np.int64(5), 6]]
)
def test_ids_may_be_any_whole_numbers_in_a_row(model: Model, ids: Any) -> None:
    expected = tinyspec.generate(model, [5, 6], max_new_tokens=4).tokens
    assert tinyspec.generate(model, ids, max_new_tokens=4).tokens == expected
    assert [row.tokens for row in tinyspec.generate(model, [ids, ids], max_new_tokens=4)] == [
        expected
    ] * 2


# ---------------------------------------------------------------------- names of other libraries


@pytest.mark.parametrize("name", familiar.ARGUMENTS)
def test_an_argument_of_another_library_gets_a_hint(model: Model, name: str) -> None:
    with pytest.raises(TinyspecError, match=f"^{name}: "):
        tinyspec.generate(model, "the cat", **{name: 1})
    flag = f"--{name.replace('_', '-')}"
    if name not in ("device", "dtype"):  # options of the command line
        assert failed(run("generate", "the cat", f"{flag}=1")).startswith(f"tinyspec: {flag}: ")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"do_sample": True, "temperature": 0.7}, "leave it out: temperature=0.7 samples already"),
        ({"do_sample": True}, "write temperature=0.8, or another above 0"),
        ({"do_sample": False, "temperature": 1}, "write temperature=0, or leave temperature out"),
        ({"do_sample": False}, "leave it out: temperature=0 is greedy already"),
    ],
    ids=str,
)
def test_do_sample_says_what_to_write(model: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(TinyspecError, match=f"^do_sample: {says}"):
        tinyspec.generate(model, "the cat", **options)


def test_a_call_without_its_arguments_shows_the_call() -> None:
    """`generate("The dragon")`: the prompt is missing, and an example follows."""
    example = r"write tinyspec\.generate\('storyteller', 'The dragon', max_new_tokens=20\)"
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (
            ("The dragon",),
            {},
            f"generate needs model and prompt, and prompt is missing: {example}$",
        ),
        ((), {"prompt": "The dragon"}, "generate needs model and prompt, and model is missing"),
        (
            ("x",),
            {"input_ids": [1]},
            rf"prompt is missing: {example} \(input_ids: give the token ids",
        ),
        (
            ("x", "y", 20),
            {},
            f"generate takes model and prompt by position, and all .*: {example}$",
        ),
    ]
    for given, options, says in calls:
        with pytest.raises(TinyspecError, match=says) as caught:
            tinyspec.generate(*given, **options)
        assert "\n" not in str(caught.value)
    face: Any = tinyspec
    for name in ("load", "stream", "translate", "load_translator"):
        with pytest.raises(
            TinyspecError, match=f"^{name} needs .* is missing: write tinyspec.{name}"
        ):
            getattr(face, name)()


def test_a_hint_says_what_the_argument_is_called_here() -> None:
    assert familiar.hint_argument("max_length") == "use max_new_tokens (it counts new tokens only)"
    assert failed(run("generate", "x", "--max-length", "5")).startswith(
        "tinyspec: --max-length: use --max-new-tokens"
    )
    assert failed(run("generate", "x", "--do-sample")).startswith(
        "tinyspec: --do-sample: --temperature decides"
    )


def test_hints_name_only_arguments_that_exist() -> None:
    known = {
        *inspect.signature(tinyspec.generate).parameters,
        *inspect.signature(tinyspec.load).parameters,
    }
    known |= {knob.name for card in load_techniques().values() for knob in card.knobs}
    for name, hint in familiar.ARGUMENTS.items():
        assert set(re.findall(r"\{(\w+)\}", hint)) <= known, name
        assert name not in inspect.signature(generation.start_generation).parameters


def test_other_names_of_techniques_run_them() -> None:
    assert (
        find_technique("prompt_lookup")
        is find_technique("ngram")
        is find_technique("Prompt-Lookup-Decoding")
        is find_technique("llma")
    )
    assert (
        find_technique("assisted")
        is find_technique("draft_model")
        is find_technique("speculative_decoding")
    )
    assert set(familiar.METHODS.values()) <= set(load_techniques())
    assert not (set(familiar.METHODS) | set(familiar.ABSENT)) & set(load_techniques()), (
        "a technique's own name comes first"
    )


@pytest.mark.parametrize("name", ["mtp"])
def test_a_technique_that_is_not_here_says_so_and_what_is_nearest(name: str) -> None:
    with pytest.raises(TinyspecError, match=r"no such technique is here yet; nearest: \w+"):
        find_technique(name)


def test_the_nearest_technique_exists() -> None:
    for hint in familiar.ABSENT.values():
        assert hint.partition("nearest: ")[2].partition(" ")[0] in load_techniques()


def test_the_command_line_says_which_technique_another_name_is() -> None:
    result = run("generate", "the cat", "--method", "prompt_lookup", "-n", "2", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == "tinyspec: prompt_lookup is called llma here\n"
    assert '"method": "llma"' in result.stdout


def test_a_model_by_another_librarys_name_says_what_it_is_called_here() -> None:
    with pytest.raises(
        TinyspecError, match=r"^unknown model 'gpt2': it is called openai-community/gpt2 here$"
    ):
        tinyspec.load("gpt2")


# ---------------------------------------------------------------------- models by name


def test_a_name_is_loaded_once_and_read_again_when_its_files_have_changed(zoo: Zoo) -> None:
    first = models.load_once(zoo.small)
    assert models.load_once(zoo.small) is first
    assert models.load_once(zoo.small, dtype="float64") is not first
    config = Path(zoo.small) / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert models.load_once(zoo.small) is not first


def test_at_most_four_models_are_kept(zoo: Zoo) -> None:
    first = models.load_once(zoo.big)
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        models.load_once(zoo.big, dtype=dtype)
    assert models.load_once(zoo.big) is not first


def test_a_name_generates_what_the_loaded_model_does(zoo: Zoo, model: Model) -> None:
    expected = tinyspec.generate(model, "the cat", max_new_tokens=6)
    for given in (zoo.big, str(zoo.big)):
        assert tinyspec.generate(given, "the cat", max_new_tokens=6).tokens == expected.tokens
        assert "".join(tinyspec.stream(given, "the cat", max_new_tokens=6)) == expected.text
    drafted = tinyspec.generate(
        zoo.big, "the cat", max_new_tokens=6, method="assisted", draft=zoo.small
    )
    assert drafted.tokens == expected.tokens


@pytest.mark.parametrize("function", [tinyspec.load, tinyspec.generate])
def test_an_unknown_name_says_what_there_is(function: Any) -> None:
    with pytest.raises(
        TinyspecError, match=r"^unknown model 'storyteler': did you mean 'storyteller'"
    ):
        function("storyteler", *([] if function is tinyspec.load else ["x"]))


# ---------------------------------------------------------------------- the public face


def test_dir_shows_only_public_names() -> None:
    assert [name for name in dir(tinyspec) if not name.startswith("__")] == sorted(tinyspec.__all__)


@pytest.mark.parametrize("name", tinyspec.__all__)
def test_help_shows_types_without_quotation_marks(name: str) -> None:
    signature = str(inspect.signature(getattr(tinyspec, name)))
    assert re.findall(r"'(\w+)'", signature) in ([], ["autoregressive"], ["cpu"]), (
        "texts are defaults alone"
    )
    assert inspect.getdoc(getattr(tinyspec, name))
