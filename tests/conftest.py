"""What all tests share: the BLAS before MLX, and the starter model loaded once."""

import os
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Tests run side by side, one a core. A product over two threads waits for the slower of the two,
# which made a start five times as long beside a busy core as it is with one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from paceline.runtime import blas, log

blas.preload()
log.configure("error", "json")

from paceline.lanes.install import Installed, Wanted, install
from paceline.runtime.model import LoadedModel, find_model, load
from paceline.runtime.modes import Mode
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

# What an example takes says what else the machine does, and nothing of the code.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")

_session: list[pytest.Session] = []


def pytest_sessionstart(session: pytest.Session) -> None:
    _session.append(session)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Leave as paceline does: these tests have MLX's threads in their process, too."""
    if _session:
        leave(int(_session[0].exitstatus))


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep a developer's own settings out of the tests; the model cache stays."""
    for name in list(os.environ):
        if name.startswith("PACELINE_") and name != "PACELINE_CACHE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PACELINE_CONFIG", str(tmp_path / "no-config.toml"))


@pytest.fixture(scope="session")
def starter_path() -> Path:
    return find_model("starter")


@pytest.fixture(scope="session")
def starter(starter_path: Path) -> LoadedModel:
    return load(starter_path, "auto", "cpu", 0, "")


@pytest.fixture(scope="session")
def text(starter: LoadedModel) -> Text:
    return Text(starter.card.path, starter.card.end_ids)


@pytest.fixture(scope="session")
def installed(starter: LoadedModel) -> Installed:
    return install(starter, Wanted(Mode.AR_BATCH))


@pytest.fixture(scope="session")
def drafting(starter_path: Path) -> Installed:
    """The speculative lanes, on a model of their own: a trunk takes its model over."""
    return install(load(starter_path, "auto", "cpu", 0, ""), Wanted(Mode.MTP_BATCH))
