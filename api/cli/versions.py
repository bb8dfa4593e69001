"""What is installed against what was tested together and what the package allows.

The tested versions are those of constraints.txt, which every wheel carries; the bounds are those
of the installed package's metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE: Final = "paceline"
_EXTRAS: Final = ("", "cpu", "cuda")  # what serving may need; those of the tests are not looked at

Find = Callable[[str], Distribution]


class Difference(msgspec.Struct, frozen=True):
    """One package that is not what was tested; `allowed` is false when it cannot work."""

    name: str
    installed: str
    tested: str
    bounds: str
    allowed: bool

    def __str__(self) -> str:
        has = f"{self.name} {self.installed} is installed" if self.installed else "not installed"
        was = f"tested with {self.tested}" if self.tested else "not among the tested versions"
        needs = "" if self.allowed else f", paceline needs {self.bounds or 'it'}"
        wanted = f"{self.name}=={self.tested}" if self.tested else f"{self.name}{self.bounds}"
        subject = has if self.installed else f"{self.name} is {has}"
        return f"{subject}{needs}, {was}; `pip install '{wanted}'` mends it"


def tested_versions() -> dict[str, str]:
    """Return the tested version of each package, as it holds for this Python."""
    text = resources.files(PACKAGE).joinpath("constraints.txt").read_text(encoding="utf-8")
    return pins(text.splitlines())


def pins(lines: Iterable[str]) -> dict[str, str]:
    """Return the versions of a constraints file by normalized name, markers heeded."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    for line in lines:
        words = line.partition("#")[0].strip()
        if not words:
            continue
        pin = Requirement(words)
        if pin.marker is None or pin.marker.evaluate():
            found[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return found


def differences(tested: Mapping[str, str], find: Find = distribution) -> list[Difference]:
    """Return what differs, first what cannot work.

    Raises:
        PackageNotFoundError: When paceline itself is not installed, so its bounds are not known.
    """
    from packaging.utils import canonicalize_name

    found: dict[str, Difference] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, True) for requirement in _needs(find(PACKAGE), _EXTRAS)]
    while waiting:
        requirement, direct = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, str(requirement)) in seen:
            continue
        seen.add((name, str(requirement)))
        installed = _find(find, name)
        if installed is not None:
            waiting += [(inner, False) for inner in _needs(installed, ("", *requirement.extras))]
        if direct and _is_optional(requirement) and installed is None:
            continue
        if direct or installed is not None:
            difference = _compare(requirement, name, installed, tested.get(name, ""))
            if difference is not None and (name not in found or found[name].allowed):
                found[name] = difference
    return sorted(found.values(), key=lambda difference: (difference.allowed, difference.name))


def _compare(
    requirement: Requirement, name: str, installed: Distribution | None, tested: str
) -> Difference | None:
    version = installed.version if installed else ""
    allowed = bool(version) and requirement.specifier.contains(version, prereleases=True)
    if allowed and tested in ("", version):
        return None
    return Difference(name, version, tested, str(requirement.specifier), allowed)


def _needs(installed: Distribution, extras: Iterable[str]) -> list[Requirement]:
    from packaging.requirements import Requirement

    requirements = map(Requirement, installed.requires or ())
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def _is_optional(requirement: Requirement) -> bool:
    return requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})


def _find(find: Find, name: str) -> Distribution | None:
    try:
        return find(name)
    except PackageNotFoundError:
        return None
