"""What form an answer must have: response formats, guided decoding, and calls that must come."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..runtime import sources
from ..runtime.dialect import LEAD, Dialect, call_or, forced_call, strict_calls
from ..runtime.errors import CallerError
from ..runtime.parts import Manner
from ..runtime.sources import Source
from .conversation import described
from .schemas import (
    AllowedToolsChoice,
    ChatRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    SamplingFields,
    TextFormat,
    Tool,
)

GUIDES: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")

_MOST_REFS: Final = 8  # followed to tell what the root of a tool's schema is
_MOST_BRANCHES: Final = 8  # looked at for the same


class Form(msgspec.Struct, frozen=True):
    """What a chat request asks of its answer's form.

    Args:
        source: The grammar it must have.
        manner: How to read it.
        tools: The functions the model is told of.
        lead: What the answer is made to begin with.
    """

    source: Source | None
    manner: Manner
    tools: tuple[dict[str, Any], ...] = ()
    lead: str = ""


def chat_form(body: ChatRequest, dialect: Dialect) -> Form:
    """Return the form of a chat request.

    Raises:
        CallerError: When tools and formats contradict each other, or cannot be enforced.
    """
    asked = _format(body) or guided(body)
    named: dict[str, int] = {}
    for at, tool in enumerate(body.tools or []):
        if (first := named.setdefault(tool.function.name, at)) != at:
            where = f"tools[{at}].function.name"
            raise CallerError(
                f"{where}: {tool.function.name!r} is the name of tools[{first}] as well; a call "
                "could mean either",
                param=where,
            )
        _check_root(tool, f"tools[{at}].function.parameters")
    sources.bounded([tool.function.parameters for tool in body.tools or []], "tools")
    tools, must = _callable(body)
    if asked is not None and body.ignore_eos:
        raise CallerError(f"{asked.param} cannot be kept with ignore_eos", param="ignore_eos")
    if not tools:
        return Form(asked, Manner(dialect))
    shown = tuple(described(tool) for tool in tools)
    if must:
        if asked is not None:
            raise CallerError(
                f"{asked.param} cannot be kept by an answer that must be a call (tool_choice)",
                param=asked.param,
            )
        source = forced_call(_strictness(tools, shown), "tools")
        lead = dialect.call_open + LEAD if dialect.call_open else ""
        return Form(source, Manner(dialect, calling="always", tools=shown), shown, lead)
    most = 1 if body.parallel_tool_calls is False else None
    manner = Manner(dialect, calling="maybe", most_calls=most, tools=shown)
    strict = _strictness(tools, shown)
    if asked is not None:
        asked = call_or(asked, dialect, strict)
    else:
        asked = strict_calls(dialect, strict, "tools")
    return Form(asked, manner, shown)


def guided(body: SamplingFields) -> Source | None:
    """Return the grammar that one of the guided_* extensions asks for.

    Raises:
        CallerError: For more than one, or for what is no grammar.
    """
    given = [name for name in GUIDES if getattr(body, name) is not None]
    if len(given) > 1:
        raise CallerError(f"{given[1]} cannot be kept together with {given[0]}", param=given[1])
    if body.guided_json is not None:
        return sources.json_schema(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        return sources.regex(body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        return sources.choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        return sources.written(body.guided_grammar, "guided_grammar")
    return None


def _format(body: ChatRequest) -> Source | None:
    match body.response_format:
        case TextFormat() as form:
            for given, name in ((form.schema, "schema"), (form.json_schema, "json_schema")):
                if given:
                    raise CallerError(
                        f"response_format.{name} cannot be kept by type text; ask for json_schema",
                        param=f"response_format.{name}",
                    )
            return None
        case JsonObjectFormat() as form:
            source = _object_source(form)
        case JsonSchemaFormat(named, beside):
            if beside:
                raise CallerError(
                    "response_format.schema cannot be kept together with "
                    "response_format.json_schema",
                    param="response_format.schema",
                )
            schema = {"type": "object"} if named.schema is None else named.schema
            source = sources.json_schema(schema, "response_format.json_schema.schema")
        case _:
            return None
    if guide := next((name for name in GUIDES if getattr(body, name) is not None), None):
        raise CallerError(f"{guide} cannot be kept together with response_format", param=guide)
    return source


def _object_source(form: JsonObjectFormat) -> Source:
    """Return the grammar of an object, or of the schema that stands beside its type."""
    named = form.json_schema.schema if form.json_schema is not None else None
    if form.schema and named:
        raise CallerError(
            "response_format.schema cannot be kept together with response_format.json_schema",
            param="response_format.schema",
        )
    if form.schema:
        return sources.json_schema(form.schema, "response_format.schema")
    if named:
        return sources.json_schema(named, "response_format.json_schema.schema")
    return sources.json_object("response_format")


def _callable(body: ChatRequest) -> tuple[list[Tool], bool]:
    """Return the tools that may be called, and whether one must be."""
    tools, choice = body.tools or [], body.tool_choice
    match choice:
        case None | "auto":
            return tools, False
        case "none":
            return [], False
        case "required":
            names, must = None, True
        case NamedToolChoice(function):
            names, must = {function.name}, True
        case AllowedToolsChoice(allowed):
            names = {tool.function.name for tool in allowed.tools}
            must = allowed.mode == "required"
    if not tools:
        raise CallerError("tool_choice needs tools to choose from", param="tool_choice")
    known = {tool.function.name for tool in tools}
    for name in names or ():
        if name not in known:
            raise CallerError(
                f"tool_choice: {name!r} is not among the tools ({', '.join(sorted(known))})",
                param="tool_choice",
            )
    return [tool for tool in tools if names is None or tool.function.name in names], must


def _check_root(tool: Tool, param: str) -> None:
    """See that a tool takes an object.

    Raises:
        CallerError: When its schema describes no object, or is nested too deeply to say.
    """
    schema = tool.function.parameters
    if schema and not _may_be_object(sources.bounded(schema, param), schema, _MOST_REFS):
        raise CallerError(
            f"{param}: the arguments of {tool.function.name!r} must be an object "
            '(its schema needs "type": "object")',
            param=param,
        )


def _may_be_object(schema: Any, root: dict[str, Any], refs: int) -> bool:
    """Say whether a schema may describe an object; what cannot be told may."""
    if not isinstance(schema, dict):
        return schema is not False
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        return False
    if "const" in schema and not isinstance(schema["const"], dict):
        return False
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, dict) for value in values)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/") and refs:
        found: Any = root
        for name in ref[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name, True) if isinstance(found, dict) else True
        if not _may_be_object(found, root, refs - 1):
            return False
    choices = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return not refs or all(
        any(_may_be_object(each, root, refs - 1) for each in branches[:_MOST_BRANCHES])
        for branches in choices
    )


def _strictness(tools: Sequence[Tool], shown: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return described tools that say again which of them are strict."""
    return [
        {**said, "function": {**said["function"], "strict": bool(tool.function.strict)}}
        for tool, said in zip(tools, shown, strict=True)
    ]
