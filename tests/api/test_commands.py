"""What commands say of files and options that they cannot use."""

import re
from pathlib import Path

import click
import pytest

from paceline.api.cli.commands import cli
from paceline.runtime.errors import SettingsError
from paceline.runtime.settings import resolve


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"port = = 1", "not valid TOML"),
        (b"model = '\xff'", "not UTF-8 text: invalid start byte at byte 9"),
        (b"a = " + b"[" * 5_000 + b"]" * 5_000, "not valid TOML"),
        (None, "cannot read the settings file"),
    ],
)
@pytest.mark.parametrize("command", [["show"], ["set", "port", "8001"], ["unset", "port"]])
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    said: str,
    command: list[str],
) -> None:
    """A broken file, or a folder, is named and not shown as a traceback, in all that read it."""
    file = tmp_path / "config.toml"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    with pytest.raises(SettingsError, match=said) as refusal:
        cli(["config", *command], standalone_mode=False)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(SettingsError, match=said):
        resolve({}, {}, file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "a"], "'a' is no list of whole numbers"),
        (["--concurrency", "1,0"], "'1,0' is no list"),
        (["--url", "foo"], "'foo' is not NAME=http://"),
        (["--url", "a=https://x/v1"], "is not NAME=http://"),
        (["--url", "a=http://[x"], "is not NAME=http://"),
        (["--rounds", "0"], "0 is not in the range"),
        (["--tokens", "0"], "0 is not in the range"),
    ],
)
def test_what_a_bench_cannot_do_is_a_usage_error(words: list[str], said: str) -> None:
    """It names the option, and its exit status is 2."""
    with pytest.raises(click.UsageError, match=said) as refusal:
        cli(["bench", *words], standalone_mode=False)
    assert refusal.value.exit_code == 2


def test_a_bench_without_a_server_says_so() -> None:
    """An address that nobody serves is one line."""
    said = re.escape("x: http://127.0.0.1:9/v1/models lists no model")
    with pytest.raises(click.ClickException, match=said):
        cli(["bench", "--url", "x=http://127.0.0.1:9/v1"], standalone_mode=False)
