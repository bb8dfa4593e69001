"""From a request body to a generation: tokens, sampling, seed, budget, stops."""

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from ..actors.house import Served
from ..actors.request import Generation
from ..runtime.context import SEED_MASK, RowContext, Sampling, row_seed
from ..runtime.errors import CallerError, ContextOverflow
from ..runtime.modes import PRIORITY_MODES, Priority
from ..runtime.settings import ServerArgs
from ..runtime.text import Text
from .schemas import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Content,
    DeveloperMessage,
    Message,
    RefusalPart,
    SamplingFields,
    TextPart,
    Tool,
    ToolMessage,
)

LEGACY_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions
_INLINE_CHARACTERS: Final = 16_384  # longer prompts are tokenized off the event loop
PRIORITY_HEADER: Final = "X-Paceline-Priority"
_MAX_ROWS: Final = 128


class Order(msgspec.Struct, frozen=True):
    """A generation and what its answer must say of it.

    Args:
        prompts: Tokens of each prompt; rows come prompt by prompt, `n` for each.
        alternatives: Alternatives to report beside each token, None for no log probabilities.
        max_tokens: The budget that holds, clamped to what the context leaves.
    """

    generation: Generation
    prompts: tuple[tuple[int, ...], ...]
    n: int
    seed: int
    alternatives: int | None
    max_tokens: int
    stream: bool
    include_usage: bool
    echo: bool = False
    drop_completion: bool = False


async def chat_order(
    body: ChatRequest,
    request_id: str,
    text: Text,
    served: Served,
    args: ServerArgs,
    header: str | None = None,
) -> Order:
    """Translate a chat request.

    Args:
        header: The priority its header names, if any.

    Raises:
        CallerError: For what cannot be served as it was asked.
    """
    _refuse_unsupported(body)
    tools = body.tools if body.tools and body.tool_choice != "none" else None
    prompt = await encode_chat(text, body.messages, tools)
    alternatives = None
    if body.logprobs:
        alternatives = body.top_logprobs or 0
    elif body.top_logprobs:
        raise CallerError("top_logprobs needs logprobs: true", param="top_logprobs")
    asked = body.max_completion_tokens or body.max_tokens or args.default_max_tokens or None
    return _order(
        body,
        request_id,
        [prompt],
        text,
        served,
        _priority(body, header, args),
        asked=asked,
        alternatives=alternatives,
        prompt_param="messages",
    )


async def completion_order(
    body: CompletionRequest,
    request_id: str,
    text: Text,
    served: Served,
    args: ServerArgs,
    header: str | None = None,
) -> Order:
    """Translate a legacy completion request; see `chat_order`.

    Raises:
        CallerError: For what cannot be served as it was asked.
    """
    if body.suffix:
        raise CallerError("suffix (fill in the middle) is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise CallerError("best_of other than n is not supported", param="best_of")
    prompts = [await _encode_prompt(text, item, served) for item in _prompt_items(body.prompt)]
    asked = LEGACY_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo = bool(body.echo)
    if asked == 0 and not echo:
        raise CallerError("max_tokens must be at least 1 unless echo is true", param="max_tokens")
    return _order(
        body,
        request_id,
        prompts,
        text,
        served,
        _priority(body, header, args),
        asked=max(1, asked),
        alternatives=body.logprobs,
        prompt_param="prompt",
        echo=echo,
        drop_completion=asked == 0,
    )


async def encode_chat(
    text: Text, messages: Sequence[Message], tools: Sequence[Tool] | None
) -> tuple[int, ...]:
    """Return the tokens of a conversation, long ones worked out off the event loop.

    Raises:
        CallerError: For content that a text model cannot take.
    """
    plain = [plain_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    described = [msgspec.to_builtins(t) for t in tools] if tools else None
    size = sum(len(str(m["content"])) for m in plain)
    if size <= _INLINE_CHARACTERS and not described:
        return tuple(text.encode_chat(plain))
    return tuple(await trio.to_thread.run_sync(text.encode_chat, plain, described))


def plain_message(message: Message, where: str) -> dict[str, Any]:
    """Return what a chat template reads of a message; developer is its name for system.

    Raises:
        CallerError: When a part is neither text nor refusal.
    """
    role = "system" if isinstance(message, DeveloperMessage) else _role(message)
    plain: dict[str, Any] = {"role": role, "content": _flat(message.content, where)}
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _order(
    body: SamplingFields,
    request_id: str,
    prompts: Sequence[tuple[int, ...]],
    text: Text,
    served: Served,
    priority: Priority,
    *,
    asked: int | None,
    alternatives: int | None,
    prompt_param: str,
    echo: bool = False,
    drop_completion: bool = False,
) -> Order:
    n = body.n or 1
    if n * len(prompts) > _MAX_ROWS:
        raise CallerError(f"n times prompts must be at most {_MAX_ROWS}", param="n")
    sampling = _sampling(body, alternatives, served.vocab_size)
    seed = _seed(body.seed)
    end_ids = frozenset[int]() if body.ignore_eos else text.end_ids
    rows: list[RowContext] = []
    budget = 0
    for prompt in prompts:
        room = served.context - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), served.context, param=prompt_param)
        budget = min(asked, room) if asked is not None else room
        rows += [
            RowContext(
                prompt=prompt,
                sampling=sampling,
                seed=row_seed(seed, len(rows) + choice),
                budget=budget,
                end_ids=end_ids,
                score_prompt=echo and alternatives is not None,
            )
            for choice in range(n)
        ]
    return Order(
        generation=Generation(request_id, tuple(rows), _stops(body), priority),
        prompts=tuple(prompts),
        n=n,
        seed=seed,
        alternatives=alternatives,
        max_tokens=budget,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echo=echo,
        drop_completion=drop_completion,
    )


def _priority(body: SamplingFields, header: str | None, args: ServerArgs) -> Priority:
    """Return what the body asks for, or else its header.

    Raises:
        CallerError: For an unknown priority, or one that this server's mode has no use for.
    """
    asked, param = body.paceline.priority if body.paceline else None, "paceline.priority"
    if asked is None and header is not None:
        param = PRIORITY_HEADER
        if header.lower() not in (known := [priority.value for priority in Priority]):
            raise CallerError(f"{param}: {header!r} is not one of {', '.join(known)}", param=param)
        asked = Priority(header.lower())
    if asked in (None, Priority.NORMAL):
        return Priority.NORMAL
    if args.scheduler_mode not in PRIORITY_MODES:
        modes = " or ".join(sorted(PRIORITY_MODES))
        raise CallerError(
            f"{param}: {asked.value!r} needs scheduler_mode {modes}; this server runs "
            f"{args.scheduler_mode.value!r}",
            param=param,
        )
    return asked


def _seed(asked: int | None) -> int:
    """Return 64 bits: the caller's own, signed or not, or fresh ones."""
    if asked is None:
        return secrets.randbits(63)
    if not -(2**63) <= asked < 2**64:
        raise CallerError("seed must fit into 64 bits", param="seed")
    return asked & SEED_MASK


def _sampling(body: SamplingFields, alternatives: int | None, vocab_size: int) -> Sampling:
    bias = []
    for key, value in (body.logit_bias or {}).items():
        token = int(key) if key.isascii() and key.isdigit() else -1
        if not 0 <= token < vocab_size:
            raise CallerError(
                f"logit_bias: {key!r} is not a token id below {vocab_size}", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise CallerError(
                f"logit_bias[{key}]: {value} is not within -100 and 100", param="logit_bias"
            )
        bias.append((token, value))
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=tuple(bias),
        logprobs=alternatives,
    )


def _stops(body: SamplingFields) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return tuple(stop for stop in stops if stop)


def _refuse_unsupported(body: ChatRequest) -> None:
    """Refuse what would change the answer and is not built, instead of ignoring it."""
    choice = body.tool_choice
    if choice not in (None, "auto", "none"):
        raise CallerError(
            "tool_choice: only 'auto' and 'none' are supported; a call cannot be enforced yet",
            param="tool_choice",
        )
    if body.response_format is not None and body.response_format.type != "text":
        raise CallerError(
            f"response_format {body.response_format.type!r} is not supported yet; use 'text'",
            param="response_format",
        )
    if body.modalities not in (None, ["text"]):
        raise CallerError("modalities: only text is supported", param="modalities")
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options"):
        if getattr(body, name) not in (None, [], "none", "auto"):
            raise CallerError(f"{name} is not supported", param=name)


def _role(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


def _flat(content: Content | None, where: str) -> str:
    """Return a message's text; parts are joined as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    pieces = []
    for at, part in enumerate(content):
        match part:
            case TextPart(text):
                pieces.append(text)
            case RefusalPart(refusal):
                pieces.append(refusal)
            case _:
                kind = type(part).__struct_config__.tag
                raise CallerError(
                    f"{where}.content[{at}]: a text model cannot take {kind!r} parts",
                    param=f"{where}.content[{at}]",
                )
    return "".join(pieces)


def _arguments(text: str) -> Any:
    """Return a call's arguments as templates read them: an object where the text is one."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _prompt_items(prompt: Any) -> list[str | list[int]]:
    """Sort the four legacy forms out: text, texts, token ids, lists of token ids."""
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise CallerError("prompt: an empty list holds no prompt", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]
    if any(isinstance(item, int) for item in prompt):
        raise CallerError("prompt: token ids and texts cannot be mixed", param="prompt")
    return list(prompt)


async def _encode_prompt(text: Text, item: str | list[int], served: Served) -> tuple[int, ...]:
    if isinstance(item, str):
        if len(item) <= _INLINE_CHARACTERS:
            ids = text.encode(item)
        else:
            ids = await trio.to_thread.run_sync(text.encode, item)
        return tuple(ids) or (text.document_start,)
    if not item:
        raise CallerError("prompt: a list of token ids is empty", param="prompt")
    for token in item:
        if not 0 <= token < served.vocab_size:
            raise CallerError(
                f"prompt: {token} is not a token id below {served.vocab_size}", param="prompt"
            )
    return tuple(item)
