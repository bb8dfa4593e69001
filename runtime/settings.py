"""Every setting once: one struct for flags, environment, file and Python, checked and then frozen.

Precedence: command line, then `PACELINE_*`, then the TOML file, then defaults. A preset fills
only what nobody set. Each value remembers where it came from, so an error can say so.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from . import modes
from .cache import home
from .errors import SettingsError
from .modes import DEFAULT_PRESET, PRESETS, CohortPolicy, Mode, Preset

Parsed = TypeVar("Parsed")

ENV_PREFIX: Final = "PACELINE_"
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})

# Environment variables with our prefix that are no settings of the server.
NOT_SETTINGS: Final = frozenset({"PACELINE_CONFIG", "PACELINE_CACHE"})


def _help(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


class ServerArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of one server: `ServerArgs(model="dir", scheduler_mode="ar_batch")`.

    Raises:
        SettingsError: On creation, for a value that is not allowed or contradicts another.
    """

    model: Annotated[
        str, _help("model directory or Hugging Face id; 'starter' is SmolLM2-135M-Instruct")
    ] = "starter"
    served_name: Annotated[str, _help("model name shown to clients; empty: from the model")] = ""
    strict_model: Annotated[
        bool, _help("refuse requests that name another model; otherwise any name is served")
    ] = False
    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _help("port to listen on; 0 picks a free one", ge=0, le=65535)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        _help("accepted API keys, none of them empty; required when host is not loopback"),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], _help("web origins allowed besides loopback ones; '*' allows all")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...], _help("Host header names accepted besides loopback ones")
    ] = ()
    scheduler_mode: Annotated[Mode, _help("how requests share the model")] = Mode.SERIAL
    preset: Annotated[Preset, _help("fills the four scheduling numbers below")] = DEFAULT_PRESET
    max_active_requests: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None, _help("rows open in turns (mode cooperative)")
    ] = None
    decode_batch_max: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None, _help("rows stepping together (batch modes)")
    ] = None
    batch_wait_ms: Annotated[
        Annotated[float, Meta(ge=0, le=10_000)] | None,
        _help("how long a first row waits for company, in ms"),
    ] = None
    prefill_chunk_tokens: Annotated[
        Annotated[int, Meta(ge=64, le=65_536)] | None,
        _help("the most prompt tokens read in one turn"),
    ] = None
    prefill_share: Annotated[
        float,
        _help("share of a turn that reading prompts may take while rows decode", ge=0.05, le=0.95),
    ] = 0.5
    mtp: Annotated[
        bool, _help("draft with the model's MTP head, where the mode drafts and there is one")
    ] = True
    speculative_depth: Annotated[
        Literal["auto", 0, 1, 2, 3, 4],
        _help("tokens drafted a step; auto: what pays by measured acceptance and cost"),
    ] = "auto"
    acceptance: Annotated[
        Literal["coupled", "rejection"],
        _help("coupled: same tokens by seed at every depth; rejection: accepts more when hot"),
    ] = "coupled"
    numerics: Annotated[
        Literal["throughput", "balanced", "b1-exact"],
        _help("arithmetic of the mtp batch lanes"),
    ] = "throughput"
    cohort_policy: Annotated[CohortPolicy, _help("how mtp_cohort_experimental forms cohorts")] = (
        CohortPolicy.DEPTH
    )
    context_tokens: Annotated[
        int, _help("context window; 0 takes the model's own", ge=0, le=10_000_000)
    ] = 0
    prefix_cache_bytes: Annotated[
        int, _help("bytes of read prompts' keys and values kept for reuse; 0: none", ge=0)
    ] = 1 << 30
    max_queue: Annotated[
        int, _help("rows that may wait; beyond it a request gets 503", ge=0, le=10_000)
    ] = 64
    default_max_tokens: Annotated[
        int, _help("budget of a chat that sets none; 0: what the context leaves", ge=0)
    ] = 0
    request_timeout_s: Annotated[
        float, _help("deadline of a whole request in seconds; 0: none", ge=0)
    ] = 0.0
    client_stall_s: Annotated[
        float, _help("a client that reads nothing for so long is cut", gt=0, le=3600)
    ] = 30.0
    parked_rows_max: Annotated[
        int,
        _help(
            "rows that may stay open without a place while their clients read slowly",
            ge=0,
            le=10_000,
        ),
    ] = 8
    parked_timeout_s: Annotated[
        float,
        _help("how long a row may wait for its client in all, and 1 s a token", gt=0, le=86_400),
    ] = 300.0
    device_stall_s: Annotated[
        float,
        _help("least time of one turn of the device before health says stalled", ge=15, le=3600),
    ] = 30.0
    drain_timeout_s: Annotated[
        float, _help("how long open streams may finish after SIGTERM", ge=0, le=3600)
    ] = 30.0
    keep_alive_s: Annotated[
        float, _help("how long an idle connection stays open", gt=0, le=3600)
    ] = 75.0
    body_limit_mb: Annotated[int, _help("largest request body in MiB", ge=1, le=1024)] = 64
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "checkpoint"],
        _help("weights' type; auto takes what is fastest on this machine"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "gpu"], _help("where MLX computes")] = "auto"
    exact_widths: Annotated[
        bool,
        _help("a lone row has the bits of any width; off, it uses quicker products of its own"),
    ] = True
    fast_blas: Annotated[bool, _help("load a faster BLAS before MLX on Linux CPUs")] = True
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _help("least level that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "pretty"], _help("auto: pretty on a terminal, else JSON")
    ] = "auto"
    log_content: Annotated[bool, _help("log prompts and answers too")] = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not DEFAULTS.get(name):
                msgspec.structs.force_setattr(self, name, parse(name, value, "ServerArgs"))
        clash = _clash(self)
        if clash is not None:
            raise SettingsError(clash[1])

    @property
    def fixed_depth(self) -> int | None:
        """The depth of every step, or None for auto."""
        return None if self.speculative_depth == "auto" else self.speculative_depth

    @property
    def pace(self) -> modes.Pace:
        """The four scheduling numbers: explicit where set, else the preset's."""
        preset = PRESETS[self.preset]
        chosen = {
            name: value if (value := getattr(self, name)) is not None else getattr(preset, name)
            for name in modes.Pace.__struct_fields__
        }
        return modes.Pace(**chosen)


class Settings(msgspec.Struct, frozen=True):
    """Checked settings and, for each, where its value came from."""

    args: ServerArgs
    sources: dict[str, str]


def _clash(args: ServerArgs) -> tuple[tuple[str, ...], str] | None:
    """Return the settings that contradict each other and a line that says so, or None."""
    mode = args.scheduler_mode
    if args.numerics != "throughput" and mode not in modes.NUMERICS_MODES:
        allowed = " or ".join(sorted(modes.NUMERICS_MODES))
        return ("numerics",), (
            f"numerics={args.numerics!r} needs scheduler_mode {allowed}, not {mode.value!r}"
        )
    if not args.mtp and mode in modes.MUST_DRAFT:
        return ("mtp",), (
            f"mtp=False cannot be used with scheduler_mode {mode.value!r}, which drafts; "
            "use serial, cooperative or ar_batch"
        )
    if not args.mtp or mode in modes.NEVER_DRAFT:
        why = "mtp=False" if not args.mtp else f"scheduler_mode {mode.value!r}, which never drafts"
        for name in ("speculative_depth", "acceptance"):
            if getattr(args, name) != DEFAULTS[name]:
                return (name,), f"{name}={getattr(args, name)!r} cannot be used with {why}"
    if args.cohort_policy is not DEFAULTS["cohort_policy"] and mode not in modes.EXPERIMENTAL:
        return ("cohort_policy",), (
            f"cohort_policy={args.cohort_policy.value!r} needs scheduler_mode "
            f"{Mode.MTP_COHORT_EXPERIMENTAL.value}, not {mode.value!r}"
        )
    if mode is Mode.HYPER and args.acceptance != "coupled":
        return ("acceptance",), (
            f"acceptance={args.acceptance!r} cannot be used with scheduler_mode 'hyper', whose "
            "branches are told apart by coupled choices"
        )
    if mode is Mode.HYPER:
        for name in modes.HYPER_REFUSES:
            if getattr(args, name):
                return (name,), (
                    f"{name}={getattr(args, name)!r} cannot be used with scheduler_mode 'hyper', "
                    "which runs one request at a time; leave it out"
                )
        if args.preset in modes.HYPER_REFUSES_PRESETS:
            return ("preset",), (
                f"preset={args.preset.value!r} cannot be used with scheduler_mode 'hyper'; "
                "use 'solo' or 'latency'"
            )
    if not all(key.strip() for key in args.api_key):
        return ("api_key",), "api_key='***' holds an empty key, which anybody has; leave it out"
    if args.host not in LOOPBACK and not args.api_key:
        return ("host",), (
            f"host={args.host!r} is reachable from other machines and needs an API key; "
            "set api_key or listen on 127.0.0.1"
        )
    return None


FIELDS: Final[dict[str, Any]] = get_type_hints(ServerArgs, include_extras=True)
DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default for field in msgspec.structs.fields(ServerArgs)
}


def help_text(name: str) -> str:
    """Return the one line that describes a setting."""
    meta: Meta = FIELDS[name].__metadata__[0]
    return meta.description or ""


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the TOML file's place: $PACELINE_CONFIG or ~/.paceline/config.toml."""
    named = environ.get("PACELINE_CONFIG")
    return Path(named) if named else home("PACELINE_CONFIG") / ".paceline" / "config.toml"


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    path: Path | None = None,
) -> Settings:
    """Merge the four sources and check the result.

    Args:
        flags: Settings given on the command line, by name; text or typed values.

    Raises:
        SettingsError: Naming key, value, source and what is allowed.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = dict.fromkeys(FIELDS, "default")
    for origin, found in (
        *_file_layer(path or config_path(environ)),
        *_env_layer(environ),
        *((f"flag --{name.replace('_', '-')}", {name: value}) for name, value in flags.items()),
    ):
        for name, raw in found.items():
            values[name] = parse(name, raw, origin)
            sources[name] = origin
    return Settings(_build(values, sources), sources)


def parse(name: str, raw: Any, origin: str) -> Any:
    """Turn one raw value into its typed, checked form.

    Raises:
        SettingsError: For an unknown name or a value the setting does not allow.
    """
    if name not in FIELDS:
        raise SettingsError(
            f"unknown setting {name!r} ({origin}); `paceline config show` lists them all"
        )
    hint = FIELDS[name]
    if isinstance(raw, str) and isinstance(DEFAULTS[name], tuple):
        raw = [item.strip() for item in raw.split(",") if item.strip()]
    try:
        return msgspec.convert(raw, hint, strict=not isinstance(raw, str))
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"{name}={_shown(name, raw)} ({origin}) is not allowed: {_allowed(hint, error)}"
        ) from None


def _build(values: dict[str, Any], sources: Mapping[str, str]) -> ServerArgs:
    """Make the struct; on a contradiction add to its message where the setting came from."""
    try:
        return ServerArgs(**values)
    except SettingsError as error:
        where = [
            f"{name} from {sources[name]}"
            for name in FIELDS
            if sources[name] != "default" and str(error).startswith(f"{name}=")
        ]
        raise SettingsError(f"{error}" + (f" ({', '.join(where)})" if where else "")) from None


def read_file(path: Path, parse: Callable[[str], Parsed]) -> Parsed | None:
    """Return what a settings file says, None when there is no such file.

    Args:
        parse: Reads TOML; raises a ValueError for what is none.

    Raises:
        SettingsError: When it cannot be read.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"the settings file {path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None


def _file_layer(path: Path) -> list[tuple[str, dict[str, Any]]]:
    found = read_file(path, tomllib.loads)
    return [] if found is None else [(f"file {path}", found)]


def _env_layer(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"environment {key}", {key.removeprefix(ENV_PREFIX).lower(): value})
        for key, value in sorted(environ.items())
        if key.startswith(ENV_PREFIX) and key not in NOT_SETTINGS
    ]


def _shown(name: str, raw: Any) -> str:
    return "'***'" if name == "api_key" else repr(raw)


def _allowed(hint: Any, error: msgspec.ValidationError) -> str:
    """Say what a setting allows: its choices where it has them, else the decoder's own words."""
    schema = msgspec.json.schema(hint)
    if "$ref" in schema:
        schema = next(iter(schema.get("$defs", {}).values()))
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    return str(error)
