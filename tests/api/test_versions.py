"""Doctor's comparison of what is installed with what was tested, and the file it reads."""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.api.cli import versions
from paceline.api.cli.versions import differences, pins


class _Fake(Distribution):
    """An installed package as its metadata tells of it."""

    def __init__(self, version: str, *requires: str) -> None:
        lines = [f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
        self._text = "\n".join(lines)

    def read_text(self, filename: str) -> str | None:
        """Return the metadata."""
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        """Never asked."""
        raise AssertionError(path)


PACELINE = _Fake(
    "0.1",
    "quart<0.23,>=0.22",
    "mlx>=0.32,<0.33; sys_platform == 'nowhere'",
    "blas[cpu]<2; extra == 'cpu'",
    "pytest<9; extra == 'dev'",
)
TESTED = {"quart": "0.22.0", "werkzeug": "3.1.9", "blas": "1.0", "pytest": "8.0", "inner": "1.0"}


def _differences(**installed: _Fake) -> list[tuple[str, str, bool]]:
    packages = {"paceline": PACELINE, **installed}

    def find(name: str) -> Distribution:
        if name not in packages:
            raise PackageNotFoundError(name)
        return packages[name]

    return [(one.name, one.installed, one.allowed) for one in differences(TESTED, find)]


def test_the_tested_versions_are_no_difference() -> None:
    """Nothing is said of them, nor of an extra that is not installed."""
    werkzeug = _Fake("3.1.9")
    assert _differences(quart=_Fake("0.22.0", "werkzeug>=3"), werkzeug=werkzeug) == []


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"quart": _Fake("0.23.1")}, ("quart", "0.23.1", False)),
        ({"quart": _Fake("0.22.7")}, ("quart", "0.22.7", True)),
        ({}, ("quart", "", False)),
    ],
    ids=["past its bound", "within", "missing"],
)
def test_a_package_of_ours_that_differs_is_named(
    installed: dict[str, _Fake], expected: tuple[str, str, bool]
) -> None:
    """Outside the bounds it cannot work; within them it was only never tested."""
    assert _differences(**installed) == [expected]


def test_what_a_package_of_ours_needs_counts_too() -> None:
    """Werkzeug is quart's, and inner is wanted by an extra of an extra of ours."""
    packages = {
        "quart": _Fake("0.22.0", "werkzeug>=3"),
        "werkzeug": _Fake("3.2.0"),
        "blas": _Fake("1.0", "inner; extra == 'cpu'"),
        "inner": _Fake("1.1"),
    }
    assert _differences(**packages) == [("inner", "1.1", True), ("werkzeug", "3.2.0", True)]


def test_an_optional_package_past_its_bound_cannot_work_and_tools_do_not_matter() -> None:
    """The device extras are looked at where they are installed, the test tools never."""
    packages = {"quart": _Fake("0.22.0"), "blas": _Fake("2.1"), "pytest": _Fake("9.9")}
    assert _differences(**packages) == [("blas", "2.1", False)]


def test_a_difference_is_one_line_with_what_to_do() -> None:
    """Name, installed, allowed, tested, and the command."""

    def find(name: str) -> Distribution:
        if name in ("paceline", "quart"):
            return PACELINE if name == "paceline" else _Fake("0.23.1")
        raise PackageNotFoundError(name)

    found = differences({"quart": "0.22.0"}, find)
    assert str(found[0]) == (
        "quart 0.23.1 is installed, paceline needs <0.23,>=0.22, tested with 0.22.0; "
        "`pip install 'quart==0.22.0'` mends it"
    )


def test_pins_heed_markers() -> None:
    """A line for another Python does not hold here."""
    lines = [
        "# note",
        "",
        "A_b==1",
        "c==1; python_version < '3.0'",
        "c==2; python_version >= '3.0'",
    ]
    assert pins(lines) == {"a-b": "1", "c": "2"}


def test_the_tested_versions_are_within_the_bounds() -> None:
    """Each requirement of the installed package has a pin that it allows."""
    tested = versions.tested_versions()
    needs = versions._needs(distribution("paceline"), ("", "cpu", "dev"))
    assert len(needs) > 20
    for requirement in needs:
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_constraints_name_versions_and_nothing_of_a_machine() -> None:
    """Exact versions with at most a Python marker: no index, no hash, no path, no link."""
    root = Path(__file__).parents[2]
    for line in (root / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        assert [specifier.operator for specifier in pin.specifier] == ["=="], line
        assert pin.url is None, line
        assert "--" not in line, line
