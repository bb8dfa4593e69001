"""`paceline doctor`: what this machine has, and what stands in the way of serving fast."""

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import msgspec

from ... import __version__
from ...runtime import blas
from ...runtime.cache import cache_dir
from ...runtime.errors import SettingsError
from ...runtime.limits import cores, memory_limit, usable_cores
from ...runtime.settings import ServerArgs, config_path, resolve
from .versions import differences, tested_versions


class Finding(msgspec.Struct):
    """One thing looked at: "ok", "warn" or "bad", and what was seen."""

    topic: str
    verdict: str
    seen: str


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def command(as_json: bool) -> None:
    """Look at this machine; exit status 1 when something stands in the way of serving."""
    args, findings = _settings()
    products = blas.preload(args.fast_blas)
    findings += [
        _versions(),
        *_differences(),
        Finding("blas", "ok" if products.fast else "warn", f"{products.name}: {products.detail}"),
        _guarded("device", lambda: _device(products.fast)),
        _memory(args),
        _guarded("cache", _cache),
        _starter(),
        _guarded("port", lambda: _port(args)),
    ]
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(findings), indent=1))
    else:
        _print(findings)
    if any(finding.verdict == "bad" for finding in findings):
        raise click.exceptions.Exit(1)


def _settings() -> tuple[ServerArgs, list[Finding]]:
    try:
        settings = resolve({})
    except SettingsError as error:
        return ServerArgs(), [Finding("settings", "bad", str(error))]
    own = sum(source != "default" for source in settings.sources.values())
    return settings.args, [Finding("settings", "ok", f"{config_path()}, {own} not default")]


def _versions() -> Finding:
    found = [f"paceline {__version__}", f"Python {platform.python_version()}"]
    for package in ("mlx", "mlx-lm", "trio", "hypercorn"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return Finding("versions", "bad", f"{package} is not installed")
    return Finding("versions", "ok", ", ".join(found) + f" on {sys.platform} {platform.machine()}")


def _differences() -> list[Finding]:
    """Return a line for each package that is not what was tested, or one when all are."""
    try:
        tested = tested_versions()
        found = differences(tested)
    except PackageNotFoundError:
        return [Finding("packages", "warn", "paceline is not installed, so nothing is compared")]
    if not found:
        return [Finding("packages", "ok", "all are the versions that were tested together")]
    return [Finding("packages", "warn" if one.allowed else "bad", str(one)) for one in found]


def _device(fast: bool) -> Finding:
    from ...lanes.probe import product_speed

    device, gflops = product_speed()
    allowed, usable = cores(), usable_cores()
    quota = f" of {usable} by a control group's quota" if allowed < usable else ""
    verdict = "ok" if fast or device == "gpu" else "warn"
    seen = f"{device}, {allowed} cores{quota}, float32 products {gflops:.0f} GFLOP/s"
    return Finding("device", verdict, seen)


def _memory(args: ServerArgs) -> Finding:
    limit = memory_limit()
    seen = f"{limit.bytes / 2**30:.1f} GiB may be used ({limit.source})"
    if args.prefix_cache_bytes > limit.bytes // 2:
        kept = f"prefix_cache_bytes lets {args.prefix_cache_bytes / 2**30:.1f} GiB be kept"
        return Finding("memory", "warn", f"{seen}, and {kept}; lower it")
    return Finding("memory", "ok", seen)


def _starter() -> Finding:
    from ...runtime.starter import starter_dir

    here = starter_dir().exists()
    seen = str(starter_dir()) if here else "not fetched yet (93 MB on first use)"
    return Finding("starter model", "ok", seen)


def _cache() -> Finding:
    place = cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=place):
        pass
    return Finding("cache", "ok", f"{place} can be written")


def _port(args: ServerArgs) -> Finding:
    from ..server import check_port

    try:
        check_port(args)
    except OSError as error:
        return Finding("port", "warn", str(error.strerror))
    return Finding("port", "ok", f"{args.host}:{args.port} is free")


def _guarded(topic: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except (OSError, ImportError, RuntimeError) as error:
        return Finding(topic, "bad", str(error))


def _print(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    colours = {"ok": "green", "warn": "yellow", "bad": "red"}
    for finding in findings:
        colour = colours[finding.verdict]
        head = f"[{colour}]{finding.verdict:>4}[/] [bold]{finding.topic}[/]: "
        console.print(head + escape(finding.seen), soft_wrap=True)
