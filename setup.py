"""Put the bundled models and the assignments into the wheel. pyproject.toml has all other settings.

In the repository these folders stay at the top, where a reader finds them. In an installed package
they are tinyspec/_models and tinyspec/_assignments. MANIFEST.in names the same for the sdist.
"""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "models/storyteller": "_models/storyteller",
    "models/apprentice": "_models/apprentice",
    "models/storyteller-hydra": "_models/storyteller-hydra",  # the head with most tokens per pass
    "tutorials/assignments": "_assignments",
}


class BuildWithData(build_py):
    """Copy the folders into the built package. An editable install reads them in place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in FOLDERS.items():
                copytree(source, Path(self.build_lib, "tinyspec", target), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithData})
