"""GET /v1/models and /v1/models/NAME, and whether a name is that of the loaded model."""

from collections.abc import Mapping
from datetime import UTC, datetime

from quart import Response

from ..actors.house import House
from ..runtime.errors import UnknownThing
from .anthropic.replies import AnthropicModel, AnthropicModels
from .problems import reply
from .replies import ModelEntry, ModelList


def list_models(house: House) -> Response:
    """List the one model that is loaded."""
    return reply(200, ModelList([_entry(house)]))


def list_for_anthropic(house: House, query: Mapping[str, str]) -> Response:
    """List the one model that is loaded, in Anthropic's shape and pages."""
    model = _info(house)
    turned = model.id in (query.get("after_id"), query.get("before_id"))
    models = [] if turned else [model]
    first = None if turned else model.id
    return reply(200, AnthropicModels(models, first, first))


def show_model(house: House, name: str, *, for_anthropic: bool = False) -> Response:
    """Show the loaded model under its own name.

    Raises:
        UnknownThing: When the name is another.
    """
    if name != house.served.name:
        raise _not_loaded(house, name)
    return reply(200, _info(house) if for_anthropic else _entry(house))


def check_model(house: House, name: str | None) -> None:
    """Refuse another model's name, on a server that is strict about names.

    Raises:
        UnknownThing: When the loaded model is not the one asked for.
    """
    if house.args.strict_model and name is not None and name != house.served.name:
        raise _not_loaded(house, name)


def _not_loaded(house: House, name: str) -> UnknownThing:
    return UnknownThing(
        f"model {name!r} is not loaded; this server has {house.served.name!r}",
        param="model",
        code="model_not_found",
    )


def _info(house: House) -> AnthropicModel:
    served = house.served
    created = datetime.fromtimestamp(served.created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(served.name, served.name, created, served.context, served.context)


def _entry(house: House) -> ModelEntry:
    served = house.served
    return ModelEntry(
        id=served.name,
        created=served.created,
        owned_by="paceline",
        max_model_len=served.context,
        dtype=served.dtype,
        lanes=[lane.spec.name for lane in house.lanes],
    )
