"""Resolve every dependency to the newest version allowed, and rewrite constraints.txt.

    python3 .ci/upgrade.py [PYTHON ...]

Each Python named, or each from 3.11 up that the machine has, resolves the package with its test
and device extras in a scratch virtualenv. A newer Python first tries the versions of the oldest,
so that one set is tested on all of them; where that cannot be, a marker tells them apart.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "constraints.txt"
OLDEST_MINOR, NEWEST_MINOR = 11, 30
EXTRAS = ("dev,cpu", "dev,cuda")  # those of one line do not exclude each other
HEADER = """\
# The versions that were tested together, on every Python from 3.11 up.
# `make serve` and `make test` install these; `make upgrade` moves them.
"""

Versions = dict[str, str]


def main() -> None:
    """Resolve for each Python and write the file."""
    pythons = sorted(_named(sys.argv[1:]) or _found())
    if not pythons:
        sys.exit("paceline: no Python from 3.11 up was found; name one: make upgrade PYTHONS=...")
    resolved: dict[int, Versions] = {}
    for minor, python in pythons:
        print(f"Python 3.{minor}: resolving", file=sys.stderr)
        resolved[minor] = _resolve(python, next(iter(resolved.values()), {}))
    missing = _minors(FILE) - set(resolved)
    if missing:
        absent = ", ".join(f"3.{minor}" for minor in sorted(missing))
        print(f"not found, so not resolved: Python {absent}", file=sys.stderr)
    FILE.write_text(HEADER + _tried(resolved) + "\n".join(_lines(resolved)) + "\n")
    print(f"{FILE.name} is written; `make test` on each Python tests it", file=sys.stderr)


def _named(names: Iterable[str]) -> list[tuple[int, str]]:
    return [(_minor(name), name) for name in names]


def _found() -> list[tuple[int, str]]:
    """Return each minor release of Python 3 on this machine, on PATH or kept by pyenv."""
    kept = sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"))
    places: dict[int, str] = {}
    for candidate in (sys.executable, *map(str, kept), *_on_path()):
        minor = _minor(candidate)
        if minor >= OLDEST_MINOR:
            places[minor] = candidate
    return list(places.items())


def _on_path() -> list[str]:
    names = (f"python3.{minor}" for minor in range(OLDEST_MINOR, NEWEST_MINOR))
    return [place for place in map(shutil.which, names) if place]


def _minor(python: str) -> int:
    """Return the minor release of a Python 3; -1 for one that does not run."""
    question = "import sys; print(sys.version_info[1] if sys.version_info[0] == 3 else -1)"
    asked = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 else -1


def _resolve(python: str, preferred: Mapping[str, str]) -> Versions:
    """Return the versions pip chooses, each of `preferred` where that works at all."""
    with tempfile.TemporaryDirectory() as scratch:
        venv = Path(scratch, "venv")
        subprocess.run([python, "-m", "venv", venv], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "--upgrade", "pip"], check=True)
        wish = Path(scratch, "wish.txt")
        wish.write_text("".join(f"{name}=={version}\n" for name, version in preferred.items()))
        found: Versions = {}
        for extras in EXTRAS:
            same = _report(pip, extras, ["--constraint", str(wish)]) if preferred else None
            found |= same or _report(pip, extras, []) or _failed(python, extras)
        return found


def _failed(python: str, extras: str) -> Versions:
    sys.exit(f"paceline: pip could not resolve .[{extras}] with {python}; its lines are above")


def _report(pip: list[str], extras: str, more: list[str]) -> Versions | None:
    """Return what pip would install on an empty machine, the tools of the build included."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [
        *(*pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"),
        *(*more, f"{ROOT}[{extras}]", *build),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return None
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {_plain(one["name"]): one["version"] for one in chosen if one["name"] != "paceline"}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tried(resolved: Mapping[int, Versions]) -> str:
    return f"# Python: {', '.join(f'3.{minor}' for minor in resolved)}\n"


def _minors(file: Path) -> set[int]:
    """Return the Pythons that a file was resolved for."""
    line = next((one for one in _text(file).splitlines() if one.startswith("# Python: ")), "")
    return {int(minor) for minor in re.findall(r"3\.(\d+)", line)}


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _lines(resolved: Mapping[int, Versions]) -> list[str]:
    """Return one line a package and version; a marker only where Pythons differ."""
    names = sorted({name for versions in resolved.values() for name in versions})
    return [line for name in names for line in _pins(name, resolved)]


def _pins(name: str, resolved: Mapping[int, Versions]) -> list[str]:
    """Return a package's lines, the first and last of them open towards older and newer."""
    runs: list[tuple[int, str]] = []  # the Python each version begins with
    for minor in sorted(resolved):
        version = resolved[minor].get(name)
        if version is not None and (not runs or runs[-1][1] != version):
            runs.append((minor, version))
    lines = []
    for index, (minor, version) in enumerate(runs):
        limits = [f"python_version >= '3.{minor}'"] if index else []
        if index + 1 < len(runs):
            limits.append(f"python_version < '3.{runs[index + 1][0]}'")
        lines.append(f"{name}=={version}" + (f"; {' and '.join(limits)}" if limits else ""))
    return lines


if __name__ == "__main__":
    main()
