"""Installed in any way, the package is found from any folder, with its models and its assignments.

The builds are setuptools' own, of a copy without the compiled kernels: what lies where does not
depend on them.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CARRIED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
FOLDERS = ("tinyspec", "models", "tutorials")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder named tinyspec, as `git clone` makes it."""
    folder = tmp_path_factory.mktemp("parent") / "tinyspec"
    folder.mkdir()
    for name in CARRIED:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build", "_models", "_assignments")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    project = (folder / "pyproject.toml").read_text(encoding="utf-8")
    lean = re.sub(r"^ext-modules = \[\n.*?^\]\n", "", project, flags=re.MULTILINE | re.DOTALL)
    assert lean != project
    (folder / "pyproject.toml").write_text(lean, encoding="utf-8")
    return folder


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a wheel, an sdist or an editable wheel, as pip does: the file."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    out.mkdir(exist_ok=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def unpack(wheel: Path, site: Path) -> Path:
    """Install a wheel into a folder of site-packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_python(site: Path, cwd: Path, code: str) -> str:
    """Run code in a folder, in a Python whose only tinyspec is the one in `site`."""
    libraries = sysconfig.get_paths()["purelib"]
    start = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({libraries!r})\n"
    command = [sys.executable, "-S", "-c", start + code]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LISTED = (
    "import runpy; sys.argv[1:] = ['models', 'list', '--json']; runpy.run_module('tinyspec', "
    "run_name='__main__')"
)


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("editable")
    return unpack(build("editable", clone, out), out / "site")


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", clone, tmp_path_factory.mktemp("wheel"))


def test_an_editable_install_is_a_plain_path(clone: Path, editable: Path) -> None:
    [path] = editable.glob("*.pth")
    assert path.read_text(encoding="utf-8").split() == [str(clone)]


@pytest.mark.parametrize("where", ["parent", "clone", "elsewhere"])
def test_an_editable_install_is_imported_from_anywhere(
    clone: Path, editable: Path, tmp_path: Path, where: str
) -> None:
    cwd = {"parent": clone.parent, "clone": clone, "elsewhere": tmp_path}[where]
    printed = run_python(
        editable, cwd, "import tinyspec; print(tinyspec.__file__, callable(tinyspec.load))"
    )
    assert printed.split() == [str(clone / "tinyspec" / "__init__.py"), "True"]
    listed = {
        model["name"]: model["path"] for model in json.loads(run_python(editable, cwd, LISTED))
    }
    assert listed["storyteller"] == str(clone / "models" / "storyteller")


@pytest.mark.slow
def test_a_wheel_carries_two_models_a_head_and_the_assignments(
    clone: Path, wheel: Path, tmp_path: Path
) -> None:
    site = unpack(wheel, tmp_path / "site")
    listed = {
        model["name"]: model["path"] for model in json.loads(run_python(site, clone.parent, LISTED))
    }
    carried = {"storyteller", "apprentice", "storyteller-hydra"}
    assert {name for name, path in listed.items() if path and str(site) in path} == carried
    for name in carried:
        kept = {path.name for path in (clone / "models" / name).iterdir()}
        assert {path.name for path in (site / "tinyspec" / "_models" / name).iterdir()} == kept
    code = (
        "import tinyspec; t = tinyspec.load('storyteller'); print(tinyspec.generate(t, 'It was', "
    )
    code += "method='hydra', max_new_tokens=8).tokens)"
    assert len(json.loads(run_python(site, clone.parent, code))) == 8
    code = "from tinyspec.grade import starter; print(starter.assignment_folder('A2'))"
    assert run_python(site, clone.parent, code).split() == [
        str(site / "tinyspec" / "_assignments" / "A2")
    ]


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_holds_the_same_files(
    clone: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(build("sdist", clone, tmp_path)) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    [unpacked] = tmp_path.glob("tinyspec-*/")
    with (
        zipfile.ZipFile(wheel) as one,
        zipfile.ZipFile(build("wheel", unpacked, tmp_path / "out")) as other,
    ):
        assert sorted(one.namelist()) == sorted(other.namelist())
