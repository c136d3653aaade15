"""Techniques from outside: a file that stands anywhere, a package that announces itself."""

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import tinyspec
from tests.zoo import failed, run
from tinyspec import pairing, plugins, technique
from tinyspec.errors import TinyspecError
from tinyspec.laws import prove
from tinyspec.laws.card_laws import REQUEST_LAWS

TECHNIQUE = '''"""A draft model proposes a chain; the target samples along it."""

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import Verdict
from tinyspec.technique import Guarantee, Knob, Request, technique
from tinyspec.tree import ROOT


def match(tree, p, rng):
    path = ()
    while True:
        at = path[-1] if path else ROOT
        token = rng.draw(p[at])
        if at + 1 == len(tree.tokens) or tree.tokens[at + 1] != token:
            return Verdict(path, token, tuple(range(at + 1, len(tree.tokens)))[:1])
        path = (*path, at + 1)


@technique(title="Mine", paper="none", family="verification", guarantee=Guarantee.EXACT, drafts=1,
           knobs=(Knob("gamma", 2, "draft tokens of a round", low=1),))
def build(request: Request, *, gamma: int) -> Decoder:
    return request.decoder(ModelDrafter(request.drafts[0], gamma, request.stop.eos), match)
'''
SLIP = TECHNIQUE.replace("rng.draw(p[at])", "rng.draw(p[ROOT])")
CRASH = TECHNIQUE.replace("    path = ()\n", "    path = () if p[ROOT][0] < 0 else 1 / 0\n")
LIAR = TECHNIQUE.replace(
    "ModelDrafter(request.drafts[0], gamma, request.stop.eos)",
    "Liar(request.drafts[0], gamma, request.stop.eos)",
).replace(
    "def match",
    """from fractions import Fraction


class Liar(ModelDrafter):
    def propose(self, *given):
        tree = super().propose(*given)
        return tree._replace(draft_probs=[[Fraction(1, len(q))] * len(q) for q in tree.draft_probs])


def match""",
)


pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture
def _few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cases of each law: this tries the command, not the technique."""
    every = prove.list_questions

    def first(card: technique.Card, profile: prove.Profile) -> list[tuple[str, prove.SuiteCase]]:
        asked = every(card, profile)
        laws = dict.fromkeys(case.law for _, case in asked)
        return [entry for law in laws for entry in [e for e in asked if e[1].law == law][:3]]

    monkeypatch.setattr(prove, "list_questions", first)


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


# ---------------------------------------------------------------------- laws of a file


@pytest.mark.usefixtures("_few_cases")
def test_an_exact_technique_file_is_proved_from_wherever_it_stands(tmp_path: Path) -> None:
    result = run("laws", write(tmp_path, TECHNIQUE), "--json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["methods"]
    assert (report["method"], report["accused"], report["broken"]) == ("mine", None, [])
    assert [found["law"] for found in report["proved"]] == [
        "joint distribution", "the laws of a round", "greedy equality", *REQUEST_LAWS,
        "the contracts of a drafter",
    ]  # fmt: skip


@pytest.mark.usefixtures("_few_cases")
def test_a_slip_is_named_by_law_case_and_method_and_the_other_laws_run(tmp_path: Path) -> None:
    result = run("laws", write(tmp_path, SLIP))
    assert result.exit_code == 1
    for words in (
        "ACCUSED: joint distribution",
        "mine, case: V = 2, two tokens\nbroken: joint distribution\n",
        "expected",
        "got",
    ):
        assert words in result.output
    (report,) = json.loads(run("laws", write(tmp_path, SLIP), "--json").stdout)["methods"]
    assert report["accused"]["law"] == "joint distribution"
    assert "the contracts of a drafter" in [found["law"] for found in report["proved"]]


@pytest.mark.usefixtures("_few_cases")
def test_a_broken_contract_is_named_by_law_case_and_method_and_the_other_laws_run(
    tmp_path: Path,
) -> None:
    (report,) = json.loads(run("laws", write(tmp_path, LIAR), "--json").stdout)["methods"]
    broken = {entry["law"]: entry for entry in report["broken"]}
    assert broken["truthful drafter"]["title"] == "truthful, presence, examined tokens"
    assert broken["truthful drafter"]["expected"] == "tokens drawn from the declared distribution"
    assert report["method"] == "mine"
    assert "the laws of a round" in [found["law"] for found in report["proved"]]


@pytest.mark.usefixtures("_few_cases")
@pytest.mark.slow
def test_an_exception_is_named_by_file_and_line_and_the_other_methods_run(tmp_path: Path) -> None:
    file = write(tmp_path, CRASH)
    result = run("laws", file, "llma")
    assert result.exit_code == 1
    line = CRASH.splitlines().index("    path = () if p[ROOT][0] < 0 else 1 / 0") + 1
    assert f"raised at = {file}, line {line}" in result.output
    assert "got      ZeroDivisionError: division by zero" in result.output
    assert "llma" in result.output.partition("outcomes")[2]
    assert isinstance(run("--debug", "laws", file).exception, ZeroDivisionError)


def test_a_promise_that_no_law_can_check_is_reported(tmp_path: Path) -> None:
    result = run("laws", write(tmp_path, TECHNIQUE.replace("Guarantee.EXACT", "Guarantee.APPROX")))
    assert result.exit_code == 1
    assert "must bring an oracle of its rule" in result.output


# ---------------------------------------------------------------------- --plugin


def test_a_plugin_generates_and_is_listed(tmp_path: Path) -> None:
    file = write(tmp_path, TECHNIQUE)
    options = ("--plugin", file, "--method", "mine", "--gamma", "3", "-n", "5", "--json")
    report = json.loads(run("generate", "Once", *options).stdout)
    plain = json.loads(run("generate", "Once", "-n", "5", "--json").stdout)
    assert (report["method"], report["tokens"]) == ("mine", plain["tokens"])
    assert "mine" in run("methods", "--plugin", file).stdout
    assert "A draft model proposes a chain" in run("methods", "mine", "--plugin", file).stdout
    assert os.environ[plugins.VARIABLE] == str(Path(file).resolve())


@pytest.mark.parametrize(
    "command", [("race",), ("chat",), ("bench",), ("bench", "race"), ("translate",), ("laws",)]
)
def test_whoever_takes_a_method_takes_a_plugin(command: tuple[str, ...]) -> None:
    assert "--plugin FILE" in run(*command, "--help").stdout


@pytest.mark.slow
def test_a_child_process_knows_the_plugin_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, write(tmp_path, TECHNIQUE))
    code = "from tinyspec.technique import find_technique; print(find_technique('mine').title)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "Mine\n"
    )


def test_in_python_a_file_is_a_method(tmp_path: Path) -> None:
    (card,) = technique.load_plugin(write(tmp_path, TECHNIQUE))
    assert card in tinyspec.techniques()
    out = tinyspec.generate("storyteller", "Once", method="mine", max_new_tokens=5)
    assert out.tokens == tinyspec.generate("storyteller", "Once", max_new_tokens=5).tokens


def test_a_plugins_own_default_holds_unless_its_knob_takes_advice(tmp_path: Path) -> None:
    """The card of apprentice, storyteller's draft model, advises gamma 4."""
    drafts = [tinyspec.load("apprentice")]
    (tmp_path / "own.py").write_text(TECHNIQUE)
    (tmp_path / "advised.py").write_text(TECHNIQUE.replace("low=1)", "low=1, advised=True)"))
    for name, advice in (("own", {}), ("advised", {"gamma": 4})):
        (card,) = technique.load_plugin(tmp_path / f"{name}.py")
        assert pairing.advised_knobs(card, drafts) == advice


def test_a_guarantee_that_is_a_word_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TECHNIQUE.replace("Guarantee.EXACT", '"exact"'))
    with pytest.raises(
        TinyspecError, match=r"guarantee is 'exact': it must be one of Guarantee\.EXACT"
    ):
        technique.load_plugin(tmp_path / "mine.py")


def test_a_technique_written_in_a_notebook_is_named_by_its_function() -> None:
    exec(
        compile(TECHNIQUE.replace("def build", "def my_idea"), "cell", "exec"),
        {"__name__": "__main__"},
    )
    out = tinyspec.generate("storyteller", "Once", method="my_idea", max_new_tokens=5)
    assert out.tokens == tinyspec.generate("storyteller", "Once", max_new_tokens=5).tokens


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path, TECHNIQUE)
    (first,) = technique.load_plugin(file)
    assert technique.load_plugin(file) == [first]
    write(tmp_path, TECHNIQUE.replace('"Mine"', '"Better"'))
    os.utime(file, ns=(1, 1))
    assert technique.load_plugin(file)[0].title == "Better"


def test_a_method_may_be_a_file(tmp_path: Path) -> None:
    """`--method mine.py` and `methods mine.py` do what `--plugin mine.py` and the name do."""
    file = write(tmp_path, TECHNIQUE)
    result = run("generate", "Once", "--method", file, "--gamma", "3", "-n", "5", "--json")
    assert json.loads(result.stdout)["method"] == "mine"
    assert run("methods", file).stdout == run("methods", "mine", "--plugin", file).stdout
    assert os.environ[plugins.VARIABLE] == str(Path(file).resolve())


def test_a_method_that_is_no_file_says_so(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "mine.py")
    for command in (("generate", "Once", "--method", nowhere), ("methods", nowhere)):
        assert failed(run(*command)).startswith(f"tinyspec: {nowhere}: no such file")
    with pytest.raises(
        TinyspecError, match=r"--plugin mine\.py, or tinyspec\.technique\.load_plugin"
    ):
        tinyspec.generate("storyteller", "Once", method="mine.py")


BAD_FILES = [
    (
        "import nosuch_module\n",
        "mine.py",
        "mine.py, line 1: ModuleNotFoundError: No module named 'nosuch_module'",
    ),
    ("x = 1\ny = x / 0\n", "mine.py", "mine.py, line 2: ZeroDivisionError: division by zero"),
    ("def f(:\n", "mine.py", "mine.py, line 1: SyntaxError: "),
    ("import sys\nsys.exit(3)\n", "mine.py", "mine.py, line 2: SystemExit: 3"),
    ("x = 1\n", "mine.py", "mine.py registers no technique"),
    (TECHNIQUE, "llma.py", "there is a technique llma already"),
    (TECHNIQUE, "my-method.py", "a technique file is named like a technique, such as my_method.py"),
]


@pytest.mark.parametrize(("text", "name", "words"), BAD_FILES)
def test_a_file_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    file = write(tmp_path, text, name)
    for command in (("laws", file), ("methods", file), ("generate", "Once", "--plugin", file)):
        assert words in failed(run(*command))
    assert "no such file" in failed(run("laws", str(tmp_path / "other.py")))


def test_two_plugins_of_one_name_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    technique.load_plugin(write(tmp_path, TECHNIQUE))
    with pytest.raises(TinyspecError, match="another plugin has this name"):
        technique.load_plugin(write(tmp_path / "other", TECHNIQUE))


# ---------------------------------------------------------------------- packages


def install(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution as pip leaves it: a package, and metadata that announce its module."""
    package, metadata = folder / "their_package", folder / "their_package-1.0.dist-info"
    for made in (package, metadata):
        made.mkdir()
    (package / "__init__.py").touch()
    write(package, text, "theirs.py")
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n", encoding="utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        f"[{plugins.GROUP}]\ntheirs = their_package.theirs\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(folder))
    plugins.import_packages.cache_clear()


def test_an_installed_package_brings_its_technique(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, TECHNIQUE, monkeypatch)
    card = technique.find_technique("theirs")
    assert card.build.__module__ == "their_package.theirs"
    assert card in tinyspec.techniques()
    assert "theirs" in run("methods").stdout


@pytest.mark.parametrize(
    ("text", "kind"),
    [("import nosuch_module\n", "ModuleNotFoundError"), ("raise SystemExit\n", "SystemExit")],
)
def test_a_package_that_fails_is_left_out_with_a_warning(
    text: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, text, monkeypatch)
    with pytest.warns(
        UserWarning,
        match=rf"their_package\.theirs \(their-package\) is left out: {kind}",
    ):
        known = technique.load_techniques()
    assert "llma" in known
    assert "theirs" not in known
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        technique.load_techniques()  # said once


def test_entry_points_are_of_the_group_that_is_documented() -> None:
    entry = EntryPoint("theirs", "their_package.theirs", plugins.GROUP)
    assert f'"{entry.group}"' in str(plugins.__doc__)
