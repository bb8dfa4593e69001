"""`paceline serve`: load a model and serve it until a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ...runtime.settings import resolve
from .options import given, settings_options

if TYPE_CHECKING:
    from ...actors.house import House


@click.command("serve")
@settings_options
def command(**flags: Any) -> None:
    """Serve a model at http://HOST:PORT/v1 (defaults in brackets)."""
    args = resolve(given(flags)).args
    from ...runtime import blas, log, shutdown

    log.configure(args.log_level, args.log_format)
    log.capture()
    products = blas.preload(
        args.fast_blas
    )  # before anything imports MLX, the starter's converter included
    import trio

    from ...runtime.model import find_model
    from ..server import run_server

    path = find_model(args.model)
    shutdown.hand_over()
    trio.run(run_server, args, path, products, announce)


def announce(url: str, house: House) -> None:
    """Say on standard output that the server is up, and what to try."""
    from ...runtime import log

    name = house.served.name
    log.say(
        f"\npaceline serves {name} ({house.args.scheduler_mode.value}) at {url}/v1\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{name}", "stream": true, '
        '"messages": [{"role": "user", "content": "Write one sentence about the sea."}]}\'\n'
    )
