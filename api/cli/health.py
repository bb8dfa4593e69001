"""`paceline health`: ask a running server how it is."""

import http.client
import json
from typing import Any

import click

from ...runtime.settings import resolve

_TIMEOUT_SECONDS = 5.0


@click.command("health")
@click.option("--host", default=None, help="address of the server")
@click.option("--port", default=None, type=int, help="port of the server")
@click.option("--json", "as_json", is_flag=True, help="print the whole answer")
def command(host: str | None, port: int | None, as_json: bool) -> None:
    """Ask a running server how it is; exit status 0 when it serves, 1 otherwise."""
    args = resolve({}).args
    where = (host or args.host, port or args.port)
    connection = http.client.HTTPConnection(*where, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        body: dict[str, Any] = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise click.ClickException(
            f"no paceline answers at {where[0]}:{where[1]} ({error})"
        ) from None
    finally:
        connection.close()
    click.echo(json.dumps(body, indent=1) if as_json else _summary(body))
    if body.get("status") != "ok":
        raise click.exceptions.Exit(1)


def _summary(body: dict[str, Any]) -> str:
    scheduler, telemetry = body["scheduler"], body["scheduler"]["telemetry"]
    lanes = ", ".join(lane["name"] for lane in scheduler["installed_lanes"])
    return (
        f"{body['status']}: {body['model']['name']} ({body['model']['dtype']}), "
        f"mode {scheduler['mode']}, lanes {lanes}\n"
        f"{telemetry['state']}, {telemetry['active_rows']} rows active, "
        f"{telemetry['queue_depth']} queued, last width {telemetry['last_real_width']}, "
        f"{telemetry['tokens_committed']} tokens in {telemetry['steps']} steps"
    )
