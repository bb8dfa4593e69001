"""Agents: each reads a file by a tool of its own, in a folder and a home of its own."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.gateway import Wanted
from tests.clients.install import Client, Installed

SECRET = "heron-4711"
TASK = "Show what is in note.txt."
_SECONDS = 900
_READ = "cat note.txt"


class Place(NamedTuple):
    """Where an agent runs.

    Args:
        url: The server as the agent is to see it, without /v1.
    """

    home: Path
    work: Path
    url: str


class Start(NamedTuple):
    """How an agent is started."""

    command: Sequence[object]
    env: Mapping[str, str] = {}


class Agent(NamedTuple):
    """A client that works by itself.

    Args:
        wanted: The call that shows it the file; None for one that uses no tools.
        start: Writes its settings and returns how to start it.
    """

    client: Client
    wanted: Wanted | None
    start: Callable[[Installed, Place], Start]


def run(agent: Agent, installed: Installed, place: Place) -> str:
    """Run an agent to its end and return what it printed.

    Raises:
        RuntimeError: When it did not end well.
    """
    (place.work / "note.txt").write_text(f"The word is {SECRET}.\n")
    start = agent.start(installed, place)
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR", "TERM")}
    try:
        done = subprocess.run(
            [str(part) for part in start.command],
            cwd=place.work,
            env={**kept, "HOME": str(place.home), "NO_COLOR": "1", **start.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"did not end within {_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    return done.stdout + done.stderr


def _write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def _opencode(installed: Installed, place: Place) -> Start:
    limit = {"context": 32_768, "output": 1_024}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": place.url + "/v1", "apiKey": "any"},
        "models": {"m": {"limit": limit}},
    }
    settings = {"provider": {"local": provider}, "model": "local/m", "small_model": "local/m"}
    _write(place.work / "opencode.json", settings)
    env = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return Start([installed.command("opencode"), "run", TASK], env)


def _pi(installed: Installed, place: Place) -> Start:
    model = {
        "id": "m",
        "name": "m",
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": 32_768,
        "maxTokens": 1_024,
    }
    provider = {
        "baseUrl": place.url + "/v1",
        "apiKey": "any",
        "api": "openai-completions",
        "models": [model],
    }
    _write(place.home / ".pi/agent/models.json", {"providers": {"local": provider}})
    command = [installed.command("pi"), "--provider", "local", "--model", "m", "-p", TASK]
    return Start(command, {"PI_OFFLINE": "1"})


def _qwen(installed: Installed, place: Place) -> Start:
    env = {
        "OPENAI_BASE_URL": place.url + "/v1",
        "OPENAI_API_KEY": "any",
        "OPENAI_MODEL": "m",
        "QWEN_SYSTEM_MD": str(_write(place.home / "system.md", "You help with files.")),
    }
    return Start([installed.command("qwen"), "--auth-type", "openai", "-y", "-p", TASK], env)


def _cline(installed: Installed, place: Place) -> Start:
    program = str(installed.command("cline"))
    url = place.url + "/v1"
    script = (
        f"'{program}' auth -p openai-compatible -k any -m m -b '{url}' && "
        f"'{program}' -P openai-compatible -m m --json -t 600 '{TASK}'; end=$?; "
        f"pkill -f '{installed.folder}.*[-]-cline-hub-daemon'; exit $end"
    )
    return Start(["sh", "-c", script])


def _continue(installed: Installed, place: Place) -> Start:
    model = {
        "name": "m",
        "provider": "openai",
        "model": "m",
        "apiBase": place.url + "/v1",
        "apiKey": "any",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    settings = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    config = _write(place.home / "config.yaml", settings)  # JSON is YAML too
    return Start([installed.command("cn"), "--config", config, "--auto", "-p", TASK])


def _codex(installed: Installed, place: Place) -> Start:
    _write(
        place.home / ".codex/config.toml",
        'model = "m"\nmodel_provider = "local"\n\n[model_providers.local]\nname = "local"\n'
        f'base_url = "{place.url}/v1"\nwire_api = "responses"\n'
        "request_max_retries = 0\nstream_max_retries = 0\nstream_idle_timeout_ms = 600000\n",
    )
    program = installed.command("codex")
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Start([program, "exec", *flags, TASK])


def _claude(installed: Installed, place: Place) -> Start:
    env = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": "any",
        "ANTHROPIC_MODEL": "m",
        "ANTHROPIC_SMALL_FAST_MODEL": "m",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    command = [installed.command("claude"), "-p", TASK, "--allowedTools", "Bash(cat:*)"]
    return Start(command, env)


def _mini(installed: Installed, place: Place) -> Start:
    env = {
        "OPENAI_API_BASE": place.url + "/v1",
        "OPENAI_API_KEY": "any",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    command = [installed.command("mini"), "-y", "--exit-immediately", "-m", "openai/m", "-t", TASK]
    return Start(command, env)


def _aider(installed: Installed, place: Place) -> Start:
    env = {
        "OPENAI_API_BASE": place.url + "/v1",
        "OPENAI_API_KEY": "any",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    flags = [
        "--no-check-update",
        "--no-gitignore",
        "--no-git",
        "--no-analytics",
        "--no-show-model-warnings",
        "--yes-always",
        "--no-auto-commits",
        "--no-pretty",
        "--map-tokens",
        "0",
    ]
    command = [installed.command("aider"), "--model", "openai/m", *flags]
    return Start([*command, "--message", "Say hello.", "note.txt"], env)


def _llm(installed: Installed, place: Place) -> Start:
    entry = [{"model_id": "local-m", "model_name": "m", "api_base": place.url + "/v1"}]
    _write(place.home / "llm/extra-openai-models.yaml", entry)
    env = {"LLM_USER_PATH": str(place.home / "llm"), "OPENAI_API_KEY": "any"}
    return Start([installed.command("llm"), "-m", "local-m", "Say hello."], env)


def _sgpt(installed: Installed, place: Place) -> Start:
    env = {
        "OPENAI_API_KEY": "any",
        "API_BASE_URL": place.url + "/v1",
        "DEFAULT_MODEL": "m",
        "PRETTIFY_MARKDOWN": "false",
    }
    return Start([installed.command("sgpt"), "--no-cache", "Say hello."], env)


AGENTS = (
    Agent(
        Client("opencode", "npm", ["opencode-ai"]),
        Wanted("bash", {"command": _READ, "description": "show the note"}),
        _opencode,
    ),
    Agent(
        Client("pi", "npm", ["@mariozechner/pi-coding-agent"]),
        Wanted("bash", {"command": _READ}),
        _pi,
    ),
    Agent(
        Client("qwen-code", "npm", ["@qwen-code/qwen-code"]),
        Wanted("run_shell_command", {"command": _READ, "is_background": False}),
        _qwen,
    ),
    Agent(Client("cline", "npm", ["cline"]), Wanted("run_commands", {"commands": [_READ]}), _cline),
    Agent(
        Client("continue", "npm", ["@continuedev/cli"]),
        Wanted("Bash", {"command": _READ}),
        _continue,
    ),
    Agent(
        Client("codex", "npm", ["@openai/codex"]), Wanted("exec_command", {"cmd": _READ}), _codex
    ),
    Agent(
        Client("claude-code", "npm", ["@anthropic-ai/claude-code"]),
        Wanted("Bash", {"command": _READ, "description": "show the note"}),
        _claude,
    ),
    Agent(
        Client("mini-swe-agent", "pip", ["mini-swe-agent"]),
        Wanted("bash", {"command": _READ}),
        _mini,
    ),
    Agent(Client("aider", "pip", ["aider-chat"]), None, _aider),
    Agent(Client("llm", "pip", ["llm"]), None, _llm),
    Agent(Client("shell-gpt", "pip", ["shell-gpt", "click"]), None, _sgpt),
)
