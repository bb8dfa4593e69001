"""JSON schemas by the hundred against real servers in every mode.

    python -m tests.cost.schemas FOLDER [--modes serial,mtp_batch] [--count 300] [--tokens 128]

FOLDER holds files of the JSON Schema Test Suite (one draft), such as `json/tests/draft2020-12`
of jsonschema's source package. What a server accepts must come back as JSON that the schema
describes, what it refuses must be a 400 that says why, and every mode must say the same.
"""

import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import jsonschema
from tests.e2e.conftest import running

from paceline.runtime.modes import Mode

_TOGETHER = 8


class Verdict(NamedTuple):
    """What came of one schema in one mode."""

    kind: str
    text: str


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--modes", default=",".join(mode.value for mode in Mode))
@click.option("--count", default=300)
@click.option("--tokens", default=128)
def main(folder: Path, modes: str, count: int, tokens: int) -> None:
    schemas = _schemas(folder)[:count]
    told: dict[str, list[Verdict]] = {}
    for mode in modes.split(","):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            flags = ("--scheduler-mode", mode)
            with running(Path(home) / "log", *flags) as server, ThreadPoolExecutor(_TOGETHER) as go:
                url = f"{server.url}/v1/chat/completions"
                asks = [(url, schema, at, tokens) for at, schema in enumerate(schemas)]
                told[mode] = list(go.map(lambda ask: _ask(*ask), asks))
        kinds = dict(Counter(verdict.kind for verdict in told[mode]))
        print(
            f"{mode:24} {len(schemas)} schemas {kinds} {time.monotonic() - began:.0f} s", flush=True
        )
    first, *others = told.values()
    same = all(other == first for other in others)
    print(f"every mode says the same: {same}")
    for mode, verdicts in told.items():
        for verdict, schema in zip(verdicts, schemas, strict=False):
            if verdict.kind not in ("valid", "refused"):
                print(mode, verdict, json.dumps(schema)[:300])
    bad = any(v.kind not in ("valid", "refused") for verdicts in told.values() for v in verdicts)
    sys.exit(1 if bad or not same else 0)


def _schemas(folder: Path) -> list[Any]:
    """Return the suite's schemas, each once, in the order of its files."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            found.setdefault(json.dumps(group["schema"], sort_keys=True), group["schema"])
    return [schema for schema in found.values() if isinstance(schema, dict)]


def _ask(url: str, schema: dict[str, Any], seed: int, tokens: int) -> Verdict:
    body = {
        "messages": [{"role": "user", "content": "Give me an example of such JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "max_tokens": tokens,
        "seed": seed,
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        told = json.load(error)["error"]
        named = error.code == 400 and told["param"] == "response_format.json_schema.schema"
        return Verdict("refused" if named else f"status {error.code}", told["message"])
    text = choice["message"]["content"]
    try:
        jsonschema.validate(json.loads(text), schema, cls=_validator(schema))
    except ValueError:
        return Verdict(f"no JSON ({choice['finish_reason']})", text)
    except jsonschema.ValidationError as error:
        return Verdict(f"not as described: {error.message[:60]}", text)
    return Verdict("valid", text)


def _validator(schema: dict[str, Any]) -> Any:
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)


if __name__ == "__main__":
    main()
