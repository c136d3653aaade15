"""Write the zip file that Gradescope takes as an autograder: our source, and two scripts.

The model that an assignment needs goes with it."""

from importlib.metadata import requires
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import tinyspec
from tinyspec import models
from tinyspec.files import write_whole
from tinyspec.grade.report import CONTAINER
from tinyspec.grade.starter import extract_helpers, fill_template, read_reference, task_options
from tinyspec.grade.task import Assignment


def write_bundle(assignment: Assignment, out: Path, seed: int) -> int:
    """Write the zip file, and return how many files it holds. The same seed gives the same bytes.

    The seed of the final run stands in run_autograder and nowhere else.
    """
    words = {
        "name": assignment.name,
        "title": assignment.title,
        "numbers": ", ".join(task.number for task in assignment.tasks),
        "points": assignment.points,
        "tasks": task_options(assignment),
        "seed": seed,
        "container": CONTAINER,
    }
    uses = {name for task in assignment.tasks for name in task.uses}
    helpers = extract_helpers(read_reference(assignment), sorted(uses))
    scripts = {
        "setup.sh": fill_template("setup.sh"),
        "run_autograder": fill_template("run_autograder.sh", **words),
    }
    texts = {
        "README.txt": fill_template("autograder.txt", **words),
        "requirements.txt": "\n".join(list_requirements()) + "\n",
        f"tinyspec/_assignments/{assignment.name}/reference.py": helpers + "\n",
    }
    files = {name: (text.encode(), 0o755) for name, text in scripts.items()}
    files |= {name: (text.encode(), 0o644) for name, text in texts.items()}
    package = Path(tinyspec.__file__).parent
    if assignment.model:
        folder = models.find_model(assignment.model)
        assert folder is not None  # it is bundled
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".safetensors"):
                files[f"tinyspec/_models/{folder.name}/{path.name}"] = (path.read_bytes(), 0o644)
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        is_museum = inner.parts[:2] == ("laws", "museum")  # wrong code, and what is wrong with it
        if not (inner.parts[0].startswith("_assignments") or is_museum):
            files[f"tinyspec/{inner.as_posix()}"] = (path.read_bytes(), 0o644)
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as bundle:
        for name, (data, mode) in files.items():
            entry = ZipInfo(name)  # of 1980: the same bytes every time
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = ZIP_DEFLATED
            bundle.writestr(entry, data)
    write_whole(out, packed.getvalue())
    return len(files)


def list_requirements() -> list[str]:
    """Return what this package needs at run time, as pip reads it."""
    return [line for line in requires("tinyspec") or [] if "extra ==" not in line]
