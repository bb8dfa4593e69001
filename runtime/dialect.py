"""How a model family writes thoughts and calls, and what its chat template can show of tools.

Marks and parsers are mlx-lm's, found from the tokenizer. A model whose template knows nothing of
tools is told of them in words, in the form that Hermes models made common: JSON between
<tool_call> marks (Teknium et al. 2024).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from .errors import CallerError
from .grammar import Thinking
from .sources import Source, embedded, lark, sized

Parser = Callable[[str, Any], Any]
Conversation = list[dict[str, Any]]
# At the start of an answer: a thought was begun by the prompt, is free to begin, or is over.
Thought = Literal["begun", "free", "over"]

CALL_OPEN: Final = "<tool_call>"
CALL_CLOSE: Final = "</tool_call>"
LEAD: Final = "\n"  # what stands between a call's opening mark and its JSON
_MISTRAL: Final = "[TOOL_CALLS]"
_PROBE: Final = "probe_of_the_template"


class Dialect(msgspec.Struct, frozen=True):
    """What one model's texts look like.

    Args:
        think_open: What begins a thought; empty for a model that has no marks for it.
        opens: The token of `think_open`, where it is a single one.
        closes: The tokens of `think_close`.
        call_close: What ends a call; empty where only the answer's end does.
        json_calls: Whether a call is a JSON object with a name and arguments.
        parse: Reads what stands between the marks of a call.
        shows_tools: Whether the chat template shows tools to the model.
        shows_calls: Whether it shows calls and their results.
        control: The control tokens that the marks of calls are made of, by their names.
    """

    think_open: str = ""
    think_close: str = ""
    opens: int | None = None
    closes: tuple[int, ...] = ()
    call_open: str = CALL_OPEN
    call_close: str = CALL_CLOSE
    json_calls: bool = True
    parse: Parser | None = None
    shows_tools: bool = False
    shows_calls: bool = False
    control: tuple[tuple[str, int], ...] = ()

    def thinking(self, thought: Thought) -> Thinking | None:
        """Return how an answer may think before it takes its form."""
        if thought == "begun":
            return Thinking(None, self.closes)
        if thought == "free" and self.opens is not None:
            return Thinking(self.opens, self.closes)
        return None

    def thought_at(self, prompt: str) -> Thought:
        """Return where a rendered prompt leaves the model's thinking."""
        end = prompt.rstrip()
        if not self.think_open or end.endswith(self.think_close):
            return "over"
        return "begun" if end.endswith(self.think_open) else "free"


def dialect_of(
    path: Path, render: Callable[[Conversation, Any], str], special: Mapping[str, int]
) -> Dialect:
    """Find a model's dialect.

    Args:
        render: Its chat template, given messages and tools.
        special: The tokenizer's control tokens by their names.
    """
    from mlx_lm.tokenizer_utils import load  # imports MLX, which must find its BLAS loaded

    known = load(path)
    shows_tools = _shows(render, _SHORT, [_TOOL])
    marks: dict[str, Any] = {}
    if known.has_tool_calling:
        marks = {
            "call_open": known.tool_call_start,
            "call_close": known.tool_call_end or "",
            "json_calls": known.tool_parser.__module__.endswith(".json_tools"),
            "parse": known.tool_parser,
        }
    if known.has_thinking:
        opens = tuple(known.think_start_tokens)
        marks |= {
            "think_open": known.think_start,
            "think_close": known.think_end,
            "opens": opens[0] if len(opens) == 1 else None,
            "closes": tuple(known.think_end_tokens),
        }
    calls = marks.get("call_open", CALL_OPEN) + marks.get("call_close", CALL_CLOSE)
    return Dialect(
        shows_tools=shows_tools,
        shows_calls=shows_tools and _shows(render, _WITH_CALL, [_TOOL]),
        control=tuple((name, token) for name, token in special.items() if name and name in calls),
        **marks,
    )


def in_words(dialect: Dialect, messages: Conversation, tools: Sequence[Any]) -> Conversation:
    """Return a conversation that says of tools and calls what the template itself cannot."""
    if dialect.shows_calls:
        return with_short_ids(messages) if dialect.call_open == _MISTRAL else messages
    told = [_call_in_words(message, dialect) for message in messages]
    if not tools or dialect.shows_tools:
        return told
    words = _tools_in_words(tools, dialect)
    if told and told[0]["role"] == "system":
        content = f"{told[0]['content']}\n\n{words}"
        return [{**told[0], "content": content}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def simplified(messages: Conversation) -> Conversation:
    """Return a conversation for templates that know two roles in turn and no others.

    Instructions become the user's, and neighbours of one role become one message.
    """
    out: Conversation = []
    for message in messages:
        if message["role"] == "system":
            message = {**message, "role": "user"}
        last = out[-1] if out else None
        if last and last["role"] == message["role"] and not (_calls_in(last) or _calls_in(message)):
            content = f"{last['content']}\n\n{message['content']}"
            out[-1] = {**last, "content": content}
        else:
            out.append(message)
    return out


def _calls_in(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls")) or message["role"] == "tool"


def with_short_ids(messages: Conversation) -> Conversation:
    """Return a conversation whose calls have ids of nine characters, as Mistral's templates ask."""
    out = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**c, "id": _short(c["id"])} for c in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        out.append(message)
    return out


def _short(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def forced_call(tools: Sequence[Mapping[str, Any]], param: str) -> Source:
    """Return the grammar of one call of one of some functions, as JSON without marks.

    Tools that are not strict lose the keywords of their schemas that nothing can enforce.
    """
    rules = "start: " + " | ".join(_names(tools))
    parts = tuple(
        Source(lark(_calls("start: call_0", [tool])), f"{param}[{at}].function.parameters")
        for at, tool in enumerate(tools)
    )
    return Source(lark(_calls(rules, tools)), param, parts)


def strict_calls(dialect: Dialect, tools: Sequence[Mapping[str, Any]], param: str) -> Source | None:
    """Return the grammar of text in which calls are as strict tools say; None where none is.

    Only JSON between two marks can be held to a schema while the model is free to call or not.
    """
    strict = any(tool["function"].get("strict") for tool in tools)
    if not strict or not dialect.json_calls or not dialect.call_close:
        return None
    parts = _spelled(dialect.call_open, dialect)
    first = next((at for at, part in enumerate(parts) if _is_control(part)), None)
    # Text ends before a control token of itself; a mark that is text has to be looked for.
    head = f"head[lazy]: TAIL {' '.join(parts)}"
    if first is not None:
        head = f"head: TAIL {' '.join(parts[first:])}"
    rules = (
        f"start: (call)* TAIL\ncall: head ({' | '.join(_names(tools))})\n{head}\nTAIL: /(.|\\n)*/"
    )
    return Source(lark(_calls(rules, tools, dialect)), param)


def call_or(answer: Source, dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> Source:
    """Return the grammar of calls, or else of an answer in its own form.

    Raises:
        CallerError: When the model's calls are not JSON between two marks.
    """
    if not dialect.json_calls or not dialect.call_close:
        raise CallerError(
            f"{answer.param} cannot be kept while this model may call tools; set tool_choice",
            param=answer.param,
        )
    mark = " ".join(_spelled(dialect.call_open, dialect))
    call = f"{mark} ({' | '.join(_names(tools))})"
    rules = f"start: @answer | {call} (/\n{{0,2}}/ {call})*"
    calls = _calls(rules, tools, dialect)
    grammars = [{"name": "calls", "lark_grammar": calls}, answer.named("answer")]
    return Source(json.dumps({"grammars": grammars}), answer.param)


def _spelled(mark: str, dialect: Dialect) -> list[str]:
    """Return a mark as a Lark grammar writes it: control tokens by number, the rest as text."""
    control = dict(dialect.control)
    names = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
    parts = re.split(f"({names})", mark) if names else [mark]
    return [f"<[{control[p]}]>" if p in control else json.dumps(p) for p in parts if p]


def _is_control(part: str) -> bool:
    return part.startswith("<[")


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"call_{at}" for at in range(len(tools))]


def _calls(start: str, tools: Sequence[Mapping[str, Any]], marks: Dialect | None = None) -> str:
    """Return a Lark grammar with one rule a tool, each a call.

    Args:
        marks: The dialect whose opening mark stands before a call, and whose closing mark is to
            be said behind it; None for a call without marks.

    Raises:
        CallerError: When it is too large to compile.
    """
    schemas = [tool["function"].get("parameters") for tool in tools]
    sized(msgspec.json.encode(schemas).decode(), "tools")
    lines = ["%llguidance {}", start]
    lead = LEAD if marks else ""
    close = " ".join([json.dumps(LEAD), *_spelled(marks.call_close, marks)]) if marks else ""
    for at, tool in enumerate(tools):
        function = tool["function"]
        # Whatever else it may be, what a function takes is an object.
        schema = {**(function.get("parameters") or {}), "type": "object"}
        opening = json.dumps(f'{lead}{{"name": {json.dumps(function["name"])}, "arguments": ')
        value = embedded(schema, lenient=not function.get("strict"))
        lines += [f'call_{at}: {opening} args_{at} "}}" {close}']
        lines += [f"args_{at}: {value}"]
    return sized("\n".join(lines), "tools")


def _tools_in_words(tools: Sequence[Any], dialect: Dialect) -> str:
    described = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    return (
        "You may call functions to help with the request. Each line between the marks describes "
        f"one:\n<tools>\n{described}\n</tools>\nTo call a function, answer with its name and "
        f'arguments as JSON:\n{dialect.call_open}\n{{"name": "...", "arguments": {{...}}}}\n'
        f"{dialect.call_close}\nEach result comes back between <tool_response> marks."
    )


def _call_in_words(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        f"{dialect.call_open}\n{json.dumps(call['function'], ensure_ascii=False)}\n"
        f"{dialect.call_close}"
        for call in calls
    ]
    lines = [message["content"], *written] if message["content"] else written
    return {"role": message["role"], "content": "\n".join(lines)}


_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_SHORT: Final[Conversation] = [{"role": "user", "content": "u"}]
_WITH_CALL: Final[Conversation] = [
    *_SHORT,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "x", "arguments": {"a": _PROBE}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "name": "x", "content": "r" + _PROBE},
]


def _shows(render: Callable[[Conversation, Any], str], messages: Conversation, tools: Any) -> bool:
    try:
        text = render(messages, tools)
    except CallerError:
        return False
    said = json.dumps(messages).count(_PROBE)
    return text.count(_PROBE) > said if not said else text.count(_PROBE) >= said
