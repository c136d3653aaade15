"""Measure the peak memory of an arm: the most that a fresh process held while it did one job."""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinyspec.bench import arms, llamacpp, peers
from tinyspec.bench.plan import ArmSpec, BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError
from tinyspec.lm.model import Model


def measure_arm_memory(
    spec: ArmSpec, settings: BenchSettings, model: Model, job: Job
) -> dict[str, int]:
    """Return {"peak": bytes of the process, "device": bytes on a CUDA device or 0} for one job.

    A .gguf file for llama.cpp is written here, outside the process that is measured.
    """
    alone = replace(
        settings,
        methods=() if spec.is_peer else (spec.label,),
        peers=(spec.label,) if spec.is_peer else (),
    )
    asked: dict[str, Any] = {"label": spec.label, "settings": alone.as_dict(), "job": job._asdict()}
    code = "from tinyspec.bench import memory; memory.print_arm_memory()"
    with tempfile.TemporaryDirectory() as folder:
        if spec.name == "llama.cpp":
            asked["file"] = str(llamacpp.export_weights(spec, settings, model, Path(folder)))
        done = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(asked), capture_output=True, text=True
        )
    try:
        found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise TinyspecError(
            f"the memory of {spec.label} was not measured: its process ended with {last}"
        ) from None
    return found


def print_arm_memory() -> None:
    """Run, in a process of its own, what standard input describes, and print the figures."""
    asked: dict[str, Any] = json.load(sys.stdin)
    settings, spec = BenchSettings.from_dict(asked["settings"]), ArmSpec.parse(asked["label"])
    job = Job(**{**asked["job"], "ids": tuple(asked["job"]["ids"])})
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    arm: arms.Arm
    if spec.name == "llama.cpp":
        room = len(job.ids) + job.tokens
        arm = llamacpp.load_arm(spec, settings, Path(asked["file"]), room)
    elif spec.is_peer:
        arm = peers.TransformersArm(
            spec, peers.load_transformers(settings.model, settings), settings
        )
    else:
        model, draft = arms.load_arm_models(settings)
        arm = arms.TechniqueArm(spec, model, settings, draft)
    arm.run(job, settings.seed, time.perf_counter)
    device = torch.cuda.max_memory_allocated() if settings.device.startswith("cuda") else 0
    print(json.dumps({"peak": peak_resident_bytes(), "device": device}))


def peak_resident_bytes() -> int:
    """Return the most memory that this process has held, in bytes.

    getrusage would also count what its parent held before it, so Linux's own figure comes first.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
