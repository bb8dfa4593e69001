"""GET /v1/models and /v1/models/NAME, and whether a name is that of the loaded model."""

from quart import Response

from ..actors.house import House
from ..runtime.errors import UnknownThing
from .problems import reply
from .replies import ModelEntry, ModelList


def list_models(house: House) -> Response:
    """List the one model that is loaded."""
    return reply(200, ModelList([_entry(house)]))


def show_model(house: House, name: str) -> Response:
    """Show the loaded model under its own name.

    Raises:
        UnknownThing: When the name is another.
    """
    if name != house.served.name:
        raise _not_loaded(house, name)
    return reply(200, _entry(house))


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
