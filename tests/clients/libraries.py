"""Libraries that people write their own scripts with: a driver each, which forces its calls."""

from pathlib import Path
from typing import NamedTuple

from tests.clients.install import Client

DRIVERS = Path(__file__).parent / "drivers"


class Library(NamedTuple):
    """A client and its driver."""

    client: Client
    driver: Path


LIBRARIES = (
    Library(Client("openai", "pip", ["openai"]), DRIVERS / "openai_sdk.py"),
    Library(Client("openai-node", "npm", ["openai"]), DRIVERS / "openai_node.mjs"),
    Library(Client("anthropic", "pip", ["anthropic"]), DRIVERS / "anthropic_sdk.py"),
    Library(Client("anthropic-node", "npm", ["@anthropic-ai/sdk"]), DRIVERS / "anthropic_node.mjs"),
    Library(Client("litellm", "pip", ["litellm"]), DRIVERS / "litellm_lib.py"),
    Library(Client("langchain-openai", "pip", ["langchain-openai"]), DRIVERS / "langchain_lib.py"),
    Library(
        Client("pydantic-ai", "pip", ["pydantic-ai-slim", "pydantic-ai-slim[openai]"]),
        DRIVERS / "pydantic_ai_lib.py",
    ),
)
