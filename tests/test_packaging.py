"""What an installed package holds: editable installs find modules that a wheel would lack."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"locks_hf": "locks_hf", "eval": "locks_hf.eval", "kernels/locks_kernels": "locks_hf.kernels"}


def test_every_folder_with_modules_is_a_package_of_the_distribution():
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11 and later")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {}
    for source, package in SOURCES.items():
        for module in (ROOT / source).rglob("*.py"):
            inside = module.parent.relative_to(ROOT / source).parts
            found[".".join((package, *inside))] = str(module.parent.relative_to(ROOT))
    assert set(setuptools["packages"]) == set(found)
    for package, folder in found.items():
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} has modules but no __init__.py"
        listed = setuptools["package-dir"].get(package)
        assert listed == folder or (listed is None and folder == package.replace(".", "/"))


@pytest.mark.parametrize("pattern", ["paper/*.csv"])
def test_data_that_modules_read_is_there(pattern):
    assert list((ROOT / "locks_hf/timing").glob(pattern))
