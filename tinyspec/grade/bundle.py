"""Write the zip file that Gradescope takes as an autograder: our source, and two scripts."""

from importlib.metadata import requires
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import tinyspec
from tinyspec.grade.report import CONTAINER
from tinyspec.grade.starter import extract_helpers, read_reference, task_options
from tinyspec.grade.task import Assignment

SETUP = """\
#!/usr/bin/env bash
# Run once, when Gradescope builds the container: a Python of 3.11 or newer, and what tinyspec needs.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y python3 python3-venv
python=python3
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    apt-get install -y python3.11 python3.11-venv
    python=python3.11
fi
"$python" -m venv /autograder/venv
/autograder/venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \\
    -r /autograder/source/requirements.txt
"""

RUN = """\
#!/usr/bin/env bash
# Run for every submission: the final run on /autograder/submission, its verdict into /autograder/results/results.json.
root="${{AUTOGRADER:-/autograder}}"
python="${{PYTHON:-$root/venv/bin/python}}"
results="$root/results/results.json"
mkdir -p "$root/results"
rm -f "$results" # of an earlier submission: a grader that fails must not keep its score
cd "$root/source" || exit 1
export TINYSPEC_PURE=1 # nothing is compiled here
"$python" -m tinyspec grade {name} "$root/submission"{tasks} --final --seed {seed} --quiet --gradescope "$results"
if [ ! -s "$results" ]; then
    echo '{{"score": 0, "output": "The grader itself failed. Please tell the staff."}}' > "$results"
fi
"""

README = """\
Autograder of {name}, {title}: {numbers}, {points} points. Made by: tinyspec assignment bundle {name} OUT.zip{tasks}

setup.sh          run once, when the container is built
run_autograder    run for every submission: tinyspec grade {name}{tasks} --final, with the seed of the final run
requirements.txt  what is installed from the package index
tinyspec/         the source of the grader and its laws, and those functions of the reference solution
                  that later tasks are judged with (tinyspec/_assignments); the rest of it is not in here

{container} Gradescope is one. Everything in it can be read by what a student hands in.
"""


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
    files: dict[str, tuple[bytes, int]] = {
        "setup.sh": (SETUP.encode(), 0o755),
        "run_autograder": (RUN.format(**words).encode(), 0o755),
        "README.txt": (README.format(**words).encode(), 0o644),
        "requirements.txt": (("\n".join(list_requirements()) + "\n").encode(), 0o644),
    }
    uses = {name for task in assignment.tasks for name in task.uses}
    helpers = extract_helpers(read_reference(assignment), sorted(uses))
    files[f"tinyspec/_assignments/{assignment.name}/reference.py"] = (
        (helpers + "\n").encode(),
        0o644,
    )
    package = Path(tinyspec.__file__).parent
    for path in sorted(package.rglob("*.py")):
        inner = path.relative_to(package)
        is_museum = inner.parts[:2] == ("laws", "museum")  # wrong code, and what is wrong with it
        if not (inner.parts[0].startswith("_assignments") or is_museum):
            files[f"tinyspec/{inner.as_posix()}"] = (path.read_bytes(), 0o644)
    with ZipFile(out, "w", ZIP_DEFLATED) as bundle:
        for name, (data, mode) in files.items():
            entry = ZipInfo(name)  # of 1980: the same bytes every time
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = ZIP_DEFLATED
            bundle.writestr(entry, data)
    return len(files)


def list_requirements() -> list[str]:
    """Return what this package needs at run time, as pip reads it."""
    return [line for line in requires("tinyspec") or [] if "extra ==" not in line]
