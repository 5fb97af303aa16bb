"""What is installed, with all that is in the checkout: the package list, the wheel and the source archive."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


def listed_packages() -> set[str]:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    return set(settings["tool"]["setuptools"]["packages"])


def folders_on_disk() -> set[str]:
    """Return the packages below aiockpt/, the one behind the symlink included; setuptools counts a folder of data as one."""
    found = set()
    for folder, children, files in os.walk(CHECKOUT / "aiockpt", followlinks=True):
        children[:] = [child for child in children if child != "__pycache__"]
        if files:
            found.add(".".join(Path(folder).relative_to(CHECKOUT).parts))
    return found


def modules_of(packages: set[str]) -> set[str]:
    """Return the paths, as an installation has them, of every module of *packages*."""
    folders = [CHECKOUT.joinpath(*package.split(".")) for package in packages]
    return {str(path.relative_to(CHECKOUT)) for folder in folders for path in folder.glob("*.py")}


def data_files() -> set[str]:
    """Return the paths of the files that are no modules, as an installation has them."""
    templates = (CHECKOUT / "aiockpt" / "monitor" / "html" / "templates").iterdir()
    return {"aiockpt/py.typed", *(str(path.relative_to(CHECKOUT)) for path in templates)}


def build(kind: str, target: Path) -> Path:
    """Build a wheel or an sdist of a copy of the checkout, so that nothing is left behind in the checkout itself."""
    tree = target / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_bytes((CHECKOUT / name).read_bytes())
    (tree / "backends").mkdir()
    for name in sorted(modules_of(listed_packages()) | data_files()):
        copy = tree / name
        if name.startswith("aiockpt/backends/"):
            copy = tree / name.removeprefix("aiockpt/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((CHECKOUT / name).read_bytes())
    (tree / "aiockpt" / "backends").symlink_to("../backends")
    command = [sys.executable, "-c", BUILD, kind, str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stderr
    return target / done.stdout.splitlines()[-1]


def test_the_package_list_names_every_folder_on_disk_and_no_other() -> None:
    assert listed_packages() == folders_on_disk()


def test_backends_is_one_folder_reached_through_a_relative_link() -> None:
    link = CHECKOUT / "aiockpt" / "backends"
    assert link.is_symlink()
    assert link.readlink() == Path("../backends")


def test_the_wheel_holds_every_module_and_puts_nothing_but_aiockpt_into_site_packages(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(build("wheel", tmp_path)).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert code == modules_of(listed_packages()) | data_files()


def test_the_source_archive_holds_what_the_wheel_is_built_from(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        name.removeprefix("aiockpt/") if name.startswith("aiockpt/backends/") else name
        for name in modules_of(listed_packages())
    }
    assert sources | data_files() | {"pyproject.toml", "LICENSE", "README.md"} <= names
