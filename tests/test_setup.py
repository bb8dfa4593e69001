"""The chores of the Makefile that need no network: the virtualenv's reasons, and pins by Python."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]


def _chore(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"chore_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("versions", "lines"),
    [
        ({11: "1", 12: "1", 13: "1"}, ["a==1"]),
        (
            {11: "1", 12: "2", 13: "2"},
            ["a==1; python_version < '3.12'", "a==2; python_version >= '3.12'"],
        ),
        (
            {11: "1", 12: "2", 13: "3"},
            [
                "a==1; python_version < '3.12'",
                "a==2; python_version >= '3.12' and python_version < '3.13'",
                "a==3; python_version >= '3.13'",
            ],
        ),
        ({11: "1", 12: None, 13: None}, ["a==1"]),
        ({11: None, 12: "2", 13: "2"}, ["a==2"]),
    ],
    ids=["one", "two", "three", "old only", "new only"],
)
def test_a_package_has_one_line_a_version_with_markers_only_where_pythons_differ(
    versions: dict[int, str | None], lines: list[str]
) -> None:
    """The last line stays open to Pythons that are still to come."""
    resolved = {minor: {"a": v} if v else {} for minor, v in versions.items()}
    assert _chore("upgrade")._lines(resolved) == lines


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtualenv as the chore leaves one, of links: nothing is installed."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("home = somewhere\n")
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".made").write_text(str(venv))
    return venv


@pytest.fixture
def chore(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The chore, with a virtualenv's Python that answers for itself."""
    module = _chore("venv")
    real = module.version_of
    monkeypatch.setattr(
        module, "version_of", lambda python: real(sys.executable) if Path(python).exists() else None
    )
    return module


def test_a_whole_virtualenv_is_kept(chore: Any, venv: Path) -> None:
    """Whether or not its own Python is asked for."""
    assert chore.reason_to_make(str(venv), this_python=False) is None
    assert chore.reason_to_make(str(venv), this_python=True) is None


def test_a_virtualenv_of_another_python_is_kept_until_one_is_asked_for(
    chore: Any, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make serve` goes on with what is there; PYTHON= changes it."""
    monkeypatch.setattr(chore, "version_of", lambda python: (3, 99))
    assert chore.reason_to_make(str(venv), this_python=False) is None
    assert "3.99" in chore.reason_to_make(str(venv), this_python=True)


def test_a_virtualenv_half_made_or_moved_or_without_its_python_is_made_anew(
    chore: Any, venv: Path
) -> None:
    """None of these could be used."""
    moved = venv.with_name("moved")
    venv.rename(moved)
    assert chore.reason_to_make(str(moved), this_python=False) == "it was made in another place"
    (moved / "bin" / "python").unlink()
    assert chore.reason_to_make(str(moved), this_python=False) == "its Python is gone"
    (moved / ".made").unlink()
    assert chore.reason_to_make(str(moved), this_python=False) == "it is not whole"


def test_a_folder_that_is_no_virtualenv_is_never_deleted(tmp_path: Path) -> None:
    """VENV=src would otherwise cost somebody their work."""
    (tmp_path / "work.txt").write_text("mine")
    chore, constraints = ROOT / ".ci" / "venv.py", ROOT / "constraints.txt"
    command = [sys.executable, str(chore), str(tmp_path), str(constraints)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no virtualenv" in done.stderr
    assert (tmp_path / "work.txt").read_text() == "mine"


def test_a_python_that_is_too_old_gets_one_line_that_names_another(
    chore: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is made."""
    monkeypatch.setattr(sys, "argv", ["venv.py", str(tmp_path / "venv"), "constraints.txt"])
    monkeypatch.setattr(sys, "version_info", (3, 9, 6, "final", 0))
    with pytest.raises(SystemExit) as leaving:
        chore.main()
    said = str(leaving.value.code)
    assert "3.9" in said
    assert "PYTHON=" in said
    assert "\n" not in said
    assert not (tmp_path / "venv").exists()
