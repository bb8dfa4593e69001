"""Building a house: what no request should wait for is there when the model is."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from tests.fakes import FakeLane, Nature, Wear

from paceline.actors.house import Loaded, _build
from paceline.lanes import install
from paceline.lanes.install import Installed
from paceline.runtime import model
from paceline.runtime.blas import Blas
from paceline.runtime.grammar import Grammars
from paceline.runtime.settings import ServerArgs
from paceline.runtime.text import Text


def _loaded(patch: pytest.MonkeyPatch, path: Path) -> Loaded:
    """Return what is left of a build whose model and lanes are stand-ins."""
    card = SimpleNamespace(
        name="m", family="f", dtype="d", device="cpu", context=64, vocab_size=9, created=0, why=""
    )
    card.end_ids = frozenset({2})
    lane = FakeLane("ar", 1, Wear(), Nature())
    patch.setattr(model, "load", lambda *_: SimpleNamespace(card=card))
    patch.setattr(install, "install", lambda *_: Installed((lane,), "a", "w", "none"))
    patch.setattr("gc.freeze", lambda: None)
    loaded = Loaded()
    _build(ServerArgs(), path, Blas("b", "", True), loaded, trio.current_time)
    return loaded


def test_what_compiles_grammars_is_built_with_the_model(
    starter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request with a form finds it there, and no loop stands still while it is built."""
    loaded = _loaded(monkeypatch, starter_path)
    assert isinstance(vars(loaded.text)["grammars"], Grammars)


def test_a_tokenizer_without_grammars_is_served_all_the_same(
    starter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compiles grammars may fail to be built; only who asks for a form is told."""

    def broken(_: Text) -> Grammars:
        raise ValueError("no grammar over this tokenizer")

    monkeypatch.setattr(Text, "grammars", property(broken))
    assert _loaded(monkeypatch, starter_path).served.name == "m"
