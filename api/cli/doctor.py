"""`paceline doctor`: what this machine has, and what stands in the way of serving fast."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import msgspec
from rich.console import Console

from ... import __version__
from ...runtime import blas
from ...runtime.cache import cache_dir
from ...runtime.errors import SettingsError
from ...runtime.settings import ServerArgs, config_path, resolve
from ...runtime.starter import starter_dir
from ..server import check_port


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
        Finding("blas", "ok" if products.fast else "warn", f"{products.name}: {products.detail}"),
        _guarded("device", lambda: _device(products.fast)),
        _guarded("cache", _cache),
        Finding(
            "starter model",
            "ok",
            str(starter_dir())
            if starter_dir().exists()
            else "not fetched yet (93 MB on first use)",
        ),
        _port(args),
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


def _device(fast: bool) -> Finding:
    from ...lanes.probe import product_speed

    device, gflops = product_speed()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    verdict = "ok" if fast or device == "gpu" else "warn"
    return Finding(
        "device", verdict, f"{device}, {cores} cores, float32 products {gflops:.0f} GFLOP/s"
    )


def _cache() -> Finding:
    place = cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=place):
        pass
    return Finding("cache", "ok", f"{place} can be written")


def _port(args: ServerArgs) -> Finding:
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
    console = Console()
    colours = {"ok": "green", "warn": "yellow", "bad": "red"}
    for finding in findings:
        colour = colours[finding.verdict]
        console.print(f"[{colour}]{finding.verdict:>4}[/] [bold]{finding.topic}[/]: {finding.seen}")
