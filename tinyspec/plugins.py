"""Load technique files from outside: a file that stands anywhere, or a package that announces
itself.

A file is given to `--plugin FILE`, to `tinyspec laws FILE`, to `tinyspec.technique.load_plugin`, or
is named in TINYSPEC_PLUGINS (several with the separator of PATH). A package names its modules as
entry points:

    [project.entry-points."tinyspec.techniques"]
    mine = "my_package.mine"

Importing the module registers its technique under the module's name.
"""

import os
import sys
import traceback
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tinyspec.errors import TinyspecError

GROUP = "tinyspec.techniques"
VARIABLE = "TINYSPEC_PLUGINS"
NAMESPACE = "tinyspec_plugins"  # files are modules of this name: tinyspec_plugins.mine


def paths_in_environment() -> list[Path]:
    """Return the files that TINYSPEC_PLUGINS names, as `--plugin` does for child processes."""
    return [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def add_to_environment(path: Path) -> None:
    """Name a file in TINYSPEC_PLUGINS, once."""
    paths = [str(known) for known in paths_in_environment()]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*paths, str(path.resolve())]))


def import_file(path: str | Path) -> str:
    """Import a Python file and return its module's name. One that did not change is not run again.

    Raises TinyspecError, one line that names file and line, if it cannot be run.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise TinyspecError(f"{path}: no such file")
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise TinyspecError(
            f"{path}: a technique file is named like a technique, such as my_method.py"
        )
    name, stamp = f"{NAMESPACE}.{file.stem}", file.stat().st_mtime_ns
    known = sys.modules.get(name)
    if known is not None and Path(str(known.__file__)) != file:
        raise TinyspecError(f"{path}: another plugin has this name ({known.__file__}): rename one")
    if known is not None and known.__dict__.get("__stamp__") == stamp:
        return name
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    module.__dict__["__stamp__"] = stamp
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TinyspecError(f"{locate_error(error, file)}: {describe_error(error)}") from error
    return name


@cache
def import_packages() -> None:
    """Import the modules that installed packages announce. A warning names each that fails."""
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            warnings.warn(
                f"plugin {_origin(entry)} is left out: {describe_error(error)}", stacklevel=3
            )


def _origin(entry: EntryPoint) -> str:
    return f"{entry.value} ({entry.dist.name})" if entry.dist is not None else entry.value


def locate_error(error: BaseException, file: Path) -> str:
    """Return `file, line n`: the last line of this file that the error came through, or of any."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{error.filename}, line {error.lineno}"
    every = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in every if Path(frame.filename) == file] or every
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else str(file)


def describe_error(error: BaseException) -> str:
    """Return an error on one line, with its kind where it is not one of ours."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    kind = "" if isinstance(error, TinyspecError) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{text}".split())
