"""Settings: four ways in, one precedence, and errors that name what and where."""

from pathlib import Path
from typing import Any

import pytest

from paceline.runtime.cache import cache_dir
from paceline.runtime.errors import SettingsError
from paceline.runtime.modes import PRESETS, Mode, Preset
from paceline.runtime.settings import DEFAULTS, FIELDS, ServerArgs, help_text, resolve


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    """Each source overrides the one below, and each value knows where it came from."""
    file = tmp_path / "config.toml"
    file.write_text('port = 1\nmax_queue = 1\nlog_level = "debug"\n')
    environ = {"PACELINE_PORT": "2", "PACELINE_MAX_QUEUE": "2", "HOME": "/nowhere"}
    found = resolve({"port": 3}, environ, file)
    assert (found.args.port, found.args.max_queue, found.args.log_level) == (3, 2, "debug")
    assert found.args.host == "127.0.0.1"
    assert found.sources["port"] == "flag --port"
    assert found.sources["max_queue"] == "environment PACELINE_MAX_QUEUE"
    assert found.sources["log_level"] == f"file {file}"
    assert found.sources["host"] == "default"


@pytest.mark.parametrize("name", list(FIELDS))
def test_every_setting_can_be_given_as_text(name: str, tmp_path: Path) -> None:
    """No setting exists that flags and environment cannot set, and each has a line of help."""
    texts = {"model": "m", "host": "localhost", "numerics": "throughput", "dtype": "float32"}
    texts |= {"prefill_chunk_tokens": "64", "device_stall_s": "20.5"}
    default = DEFAULTS[name]
    text = texts.get(name) or ("1" if default is None or isinstance(default, int) else "")
    if isinstance(default, float) and name not in texts:
        text = "0.5"
    text = text or str(getattr(default, "value", default) or "a")
    environ = {f"PACELINE_{name.upper()}": text}
    found = resolve({}, environ, tmp_path / "none")
    assert found.sources[name].startswith("environment")
    assert len(help_text(name)) > 10


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("port", "99999", ["port='99999'", "<= 65535"]),
        ("port", "high", ["port='high'"]),
        ("scheduler_mode", "fast", ["scheduler_mode='fast'", "one of ar_batch, cooperative"]),
        ("decode_batch_max", "9", ["decode_batch_max='9'", "<= 8"]),
        ("batch_wait_ms", "-1", ["batch_wait_ms='-1'", ">= 0"]),
        ("nonsense", "1", ["unknown setting 'nonsense'", "config show"]),
        ("api_key", "", []),
    ],
)
def test_a_bad_value_is_named_with_its_source_and_what_is_allowed(
    name: str, text: str, words: list[str], tmp_path: Path
) -> None:
    """Key, value, source and allowed values stand in one line."""
    environ = {f"PACELINE_{name.upper()}": text}
    if not words:
        assert resolve({}, environ, tmp_path / "none").args.api_key == ()
        return
    with pytest.raises(SettingsError) as error:
        resolve({}, environ, tmp_path / "none")
    message = str(error.value)
    assert "\n" not in message
    for word in [*words, f"environment PACELINE_{name.upper()}"]:
        assert word in message


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"scheduler_mode": "hyper", "max_active_requests": 2}, "max_active_requests"),
        ({"scheduler_mode": "hyper", "decode_batch_max": 8}, "decode_batch_max"),
        ({"scheduler_mode": "hyper", "batch_wait_ms": 5}, "batch_wait_ms"),
        ({"scheduler_mode": "hyper", "preset": "agent"}, "preset"),
        ({"scheduler_mode": "hyper", "preset": "throughput"}, "preset"),
        ({"numerics": "balanced"}, "numerics"),
        ({"numerics": "b1-exact", "scheduler_mode": "ar_batch"}, "numerics"),
        ({"scheduler_mode": "mtp_batch", "mtp": False}, "mtp"),
        ({"scheduler_mode": "hyper", "mtp": False}, "mtp"),
        ({"scheduler_mode": "ar_batch", "speculative_depth": 2}, "speculative_depth"),
        ({"scheduler_mode": "ar_batch", "acceptance": "rejection"}, "acceptance"),
        ({"mtp": False, "speculative_depth": 0}, "speculative_depth"),
        ({"host": "0.0.0.0"}, "host"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The refusal names the setting, and from the command line also where it came from."""
    with pytest.raises(SettingsError, match=f"^{named}="):
        ServerArgs(**settings)
    with pytest.raises(SettingsError, match=f"{named} from flag --"):
        resolve(settings, {}, tmp_path / "none")


def test_what_contradicts_nothing_is_allowed() -> None:
    """hyper takes a wait of zero; a non-loopback address takes a key."""
    assert ServerArgs(scheduler_mode=Mode.HYPER, batch_wait_ms=0).pace.batch_wait_ms == 0
    assert ServerArgs(host="0.0.0.0", api_key=("k",)).host == "0.0.0.0"


@pytest.mark.parametrize("keys", [("",), (" ",), ("k", ""), ("\t\n", "k")])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_empty_key_is_no_key(keys: tuple[str, ...], host: str) -> None:
    """As a file has it that was rendered without its secret; everybody has that key."""
    with pytest.raises(SettingsError, match="api_key='\\*\\*\\*' holds an empty key"):
        ServerArgs(host=host, api_key=keys)


def test_without_a_home_folder_it_is_said_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's user may have none; the BLAS does without."""

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    with pytest.raises(SettingsError, match="set HOME in the environment, or PACELINE_CONFIG"):
        resolve({}, {})
    with pytest.raises(SettingsError, match="set HOME in the environment, or PACELINE_CACHE"):
        cache_dir()
    assert resolve({}, {"PACELINE_CONFIG": "/nowhere/config.toml"}).args.port == 8000


@pytest.mark.parametrize(("told", "fixed"), [("auto", None), ("0", 0), ("4", 4), (3, 3)])
def test_depth_is_a_number_or_auto(told: object, fixed: int | None, tmp_path: Path) -> None:
    """From text and from TOML alike; anything else is refused with what is allowed."""
    settings = resolve({"speculative_depth": told}, {}, tmp_path / "none")
    assert settings.args.fixed_depth == fixed
    with pytest.raises(SettingsError, match="one of 0, 1, 2, 3, 4, auto"):
        resolve({"speculative_depth": "5"}, {}, tmp_path / "none")


def test_python_callers_are_checked_and_converted_too() -> None:
    """ServerArgs turns words into what they mean and refuses what is not allowed."""
    args = ServerArgs(scheduler_mode="ar_batch", preset="agent")  # type: ignore[arg-type]
    assert args.scheduler_mode is Mode.AR_BATCH
    assert args.pace == PRESETS[Preset.AGENT]
    with pytest.raises(SettingsError, match="port=70000"):
        ServerArgs(port=70_000)


def test_an_explicit_number_beats_the_preset() -> None:
    """A preset fills only what nobody set."""
    pace = ServerArgs(preset=Preset.AGENT, decode_batch_max=2).pace
    assert pace.decode_batch_max == 2
    assert pace.prefill_chunk_tokens == PRESETS[Preset.AGENT].prefill_chunk_tokens


def test_a_file_that_is_not_toml_is_one_line(tmp_path: Path) -> None:
    """A broken file is named, not shown as a traceback."""
    file = tmp_path / "config.toml"
    file.write_text("port = = 1")
    with pytest.raises(SettingsError, match="not valid TOML"):
        resolve({}, {}, file)
