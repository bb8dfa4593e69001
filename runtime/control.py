"""Control tokens in prompts: those a chat template writes, never those that a text spells out.

Each control token has a mark, which nobody outside can know. The template is rendered with marks
in place of the tokens it spells out, and the prompt is encoded by a copy of the tokenizer that
knows the tokens by their marks alone. So whatever a caller's text is made of, and whatever the
template makes of it, it stays text; and no text needs to be changed for that.

A few templates put control tokens together from pieces ("<|" + role + "|>"). Those are told from
the caller's by rendering the conversation once more with nothing in it that could be one.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from .errors import CallerError, ModelError

_EDGE: Final = "~"  # means nothing to templates, filters and normal forms, as digits do
_DIGITS: Final = 32  # of chance in a mark
_WINDOW: Final = 1 << 18  # characters searched at a time, so that other threads run in between
# What a conversation is made of; everything else in it is the caller's.
_OWN_KEYS: Final = frozenset(
    {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "type"}
    | {"function", "name", "description", "parameters", "arguments"}
)
# What templates tell tools and schemas by; any other text under `type` is the caller's.
_TYPES: Final = frozenset(
    {"function", "object", "array", "string", "number", "integer", "boolean", "null"}
)


class Said(NamedTuple):
    """What a template is given: messages, tools, and the options it reads by name."""

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    options: Mapping[str, Any]

    def with_strings(self, change: Callable[[str], str]) -> "Said":
        """Return the same with each of the caller's strings changed, keys too."""
        # A message's role is one of a few that the API knows.
        messages = [{**_changed(m, change), "role": m["role"]} for m in self.messages]
        options = {name: _changed(value, change) for name, value in self.options.items()}
        return Said(messages, _changed(list(self.tools), change), options)


class ControlTokens:
    """The control tokens of one tokenizer.

    Args:
        tokenizer: The tokenizer, which knows them by their names.
        names: Their names by id.

    Raises:
        ModelError: When the tokenizer cannot be copied with marks for names.
    """

    def __init__(self, tokenizer: Tokenizer, names: Mapping[int, str]) -> None:
        chance = "".join(secrets.choice("0123456789") for _ in range(_DIGITS))
        self._marks = {name: f"{_EDGE}{chance}{i:09d}{_EDGE}" for i, name in names.items()}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._mark = re.compile(f"{_EDGE}{chance}[0-9]{{9}}{_EDGE}")
        self._shield = f"{_EDGE}{chance}{_EDGE}"
        self._spelled = _one_of(self._marks)
        # Names of letters alone may be words of the template's own code.
        self._in_templates = _one_of(n for n in self._marks if not n.isalnum())
        self._suspect = {ord(c): "x" for n in self._marks for c in n if not c.isalnum()}
        self._longest = max(map(len, self._marks), default=1)
        self.opening = f"{_EDGE}{chance}"
        self.size = len(self.opening) + 10
        self.tokenizer = _renamed(tokenizer, self._marks, set(names))
        for i, name in names.items():
            if self.tokenizer.token_to_id(self._marks[name]) != i:
                raise ModelError(
                    f"control token {name!r} of the tokenizer cannot be told from text"
                )

    def marked(self, template: str) -> str:
        """Return a template with marks in place of the control tokens that it spells out."""
        return self._in_templates.sub(lambda m: self._marks[m.group()], template)

    def mark_of(self, name: Any) -> Any:
        """Return the mark of a control token, those in a list too, and anything else as it is."""
        if isinstance(name, list):
            return [self.mark_of(item) for item in name]
        return self._marks.get(name, name) if isinstance(name, str) else name

    def named(self, text: str) -> str:
        """Return a text with names in place of marks."""
        if self.opening not in text:
            return text
        return self._mark.sub(lambda m: self._names.get(m.group(), ""), text)

    def settled(self, rendered: str, said: Said, render: Callable[[Said], str]) -> str:
        """Return a rendered prompt in which each control token of the template has its mark.

        Args:
            render: The template, which may raise CallerError.

        Raises:
            CallerError: When the caller's text and the template together make a control token.
        """
        if not self._found(rendered):
            return rendered
        built = self._found(render(said.with_strings(self._harmless)))
        if not built:
            return rendered  # a caller's text spells them out
        broken = said.with_strings(self._broken)
        shielded = render(broken)
        if self._found(shielded) != built:
            raise CallerError(
                "a text of this request becomes a control token of the model beside what its "
                "chat template writes; leave such names out",
                param="messages",
            )
        text = self._spelled.sub(lambda m: self._marks[m.group()], shielded)
        return text.replace(self._shield, "")

    def _found(self, text: str) -> list[str]:
        """Return the names spelled out in a text, in order."""
        found: list[str] = []
        for start in range(0, len(text), _WINDOW):
            end = start + _WINDOW
            matches = self._spelled.finditer(text, start, end + self._longest)
            found += [match.group() for match in matches if match.start() < end]
        return found

    def _harmless(self, text: str) -> str:
        """Return a text like this one that can be no part of a control token's name."""
        out = text.translate(self._suspect)
        if out == text and text and any(text in name for name in self._marks):
            return "x" * len(text)
        return out

    def _broken(self, text: str) -> str:
        return self._spelled.sub(lambda m: m.group()[0] + self._shield + m.group()[1:], text)


def _changed(value: Any, change: Callable[[str], str], key: Any = None) -> Any:
    if isinstance(value, str):
        return value if key == "type" and value in _TYPES else change(value)
    if isinstance(value, list | tuple):
        return [_changed(item, change, key) for item in value]
    if isinstance(value, Mapping):
        return {
            (change(k) if isinstance(k, str) and k not in _OWN_KEYS else k): _changed(v, change, k)
            for k, v in value.items()
        }
    return value


def _one_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of some names, which reads each character once."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branches(tree) if tree else r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    ends = "" in node
    options = [re.escape(c) + _branches(below) for c, below in node.items() if c]
    if not options:
        return ""
    joined = options[0] if len(options) == 1 and not ends else f"(?:{'|'.join(options)})"
    return joined + "?" if ends else joined


def _renamed(tokenizer: Tokenizer, marks: Mapping[str, str], ids: set[int]) -> Tokenizer:
    """Return a copy of a tokenizer that knows its control tokens by their marks."""
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    spec["post_processor"] = spec["padding"] = spec["truncation"] = None
    for added in spec["added_tokens"]:
        if added["id"] in ids:
            added["content"] = marks.get(added["content"], added["content"])
    model = spec["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {
            marks[name] if name in marks and i in ids else name: i
            for name, i in model["vocab"].items()
        }
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [
            [marks.get(piece[0], piece[0]) if i in ids else piece[0], *piece[1:]]
            for i, piece in enumerate(model["vocab"])
        ]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if not _makes(m, marks)]
    return Tokenizer.from_str(json.dumps(spec))


def _makes(merge: str | list[str], marks: Mapping[str, str]) -> bool:
    """Say whether a merge is of a control token or makes one, which no text may."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in marks or right in marks or left + right in marks
