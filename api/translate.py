"""From a request body to a generation: tokens, sampling, seed, budget, stops."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec

from ..actors.house import Served
from ..actors.request import Generation
from ..runtime.context import SEED_MASK, RowContext, Sampling, row_seed
from ..runtime.dialect import Dialect
from ..runtime.errors import CallerError, ContextOverflow
from ..runtime.grammar import Grammar, Thinking
from ..runtime.modes import PRIORITY_MODES, Priority
from ..runtime.parts import Manner
from ..runtime.settings import ServerArgs
from ..runtime.sources import Source
from ..runtime.text import ChatPrompt, Text
from .conversation import Setting, encode_chat
from .forms import GUIDES, Form, chat_form, guided
from .offload import COUNTS, FORMS, at_length, is_long
from .schemas import ChatRequest, CompletionRequest, SamplingFields

LEGACY_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions
PRIORITY_HEADER: Final = "X-Paceline-Priority"
_MAX_ROWS: Final = 128
_MOST_DIGITS: Final = 10  # of a token's id
_AS_IT_IS: Final = Manner(behind=True)
# What rendering a prompt sets itself.
_OWN_OPTIONS: Final = frozenset(
    {
        "add_generation_prompt",
        "additional_special_tokens",
        "bos_token",
        "chat_template",
        "cls_token",
        "continue_final_message",
        "conversation",
        "documents",
        "eos_token",
        "extra_special_tokens",
        "mask_token",
        "max_length",
        "messages",
        "pad_token",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "sep_token",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "unk_token",
    }
)


class Order(msgspec.Struct, frozen=True):
    """A generation and what its answer must say of it.

    Args:
        prompts: Tokens of each prompt; rows come prompt by prompt, `n` for each.
        kept: How many of those `n` are answered with: the likeliest.
        alternatives: Alternatives to report beside each token, None for no log probabilities.
        max_tokens: The budget that holds, clamped to what the context leaves.
    """

    generation: Generation
    prompts: tuple[tuple[int, ...], ...]
    n: int
    kept: int
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
    *,
    where: str = "messages",
    go_on: bool = False,
) -> Order:
    """Translate a chat request.

    Args:
        header: The priority its header names, if any.
        where: The field of the caller's own body that holds the messages, for errors.
        go_on: Let the answer go on with the last message, which is the assistant's.

    Raises:
        CallerError: For what cannot be served as it was asked.
    """
    form, prompt = await chat_prompt(body, text, where=where, go_on=go_on, most=served.context)
    thinking = text.dialect.thinking(prompt.thought)
    alternatives = None
    if body.logprobs:
        alternatives = body.top_logprobs or 0
    elif body.top_logprobs:
        raise CallerError("top_logprobs needs logprobs: true", param="top_logprobs")
    asked = body.max_completion_tokens or body.max_tokens or args.default_max_tokens or None
    grammars = await _compiled(text, form.source, body.n or 1, thinking)
    manner = msgspec.structs.replace(form.manner, thinking=prompt.thought == "begun", behind=go_on)
    make = partial(
        _order,
        body,
        request_id,
        [tuple(prompt.tokens)],
        text,
        served,
        _priority(body, header, args),
        asked=asked,
        alternatives=alternatives,
        prompt_param=where,
        grammars=grammars,
        manner=manner,
    )
    return await at_length(make, is_long(body.logit_bias))


async def chat_prompt(
    body: ChatRequest,
    text: Text,
    *,
    where: str = "messages",
    go_on: bool = False,
    most: int | None = None,
) -> tuple[Form, ChatPrompt]:
    """Return the form that a chat request asks for and its prompt; see `chat_order`.

    Args:
        most: The tokens there is room for; None where they are only counted.

    Raises:
        CallerError: For what cannot be served as it was asked.
    """
    shaped = body.tools or body.response_format or any(getattr(body, name) for name in GUIDES)
    form = await at_length(
        lambda: chat_form(body, text.dialect), bool(shaped), COUNTS if most is None else FORMS
    )
    options = _template_options(body, text.dialect)
    setting = Setting(form.tools, options, form.lead, go_on, where, most)
    return form, await encode_chat(text, body.messages, setting)


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
    best_of = body.best_of if body.best_of != (body.n or 1) else None
    if best_of is not None and best_of < (body.n or 1):
        raise CallerError("best_of must be at least n", param="best_of")
    if best_of is not None and body.stream:
        raise CallerError("the best of several cannot be streamed", param="best_of")
    shaped = any(getattr(body, name) for name in GUIDES)
    source = await at_length(lambda: guided(body), shaped, FORMS)
    if source is not None and body.ignore_eos:
        raise CallerError(f"{source.param} cannot be kept with ignore_eos", param="ignore_eos")
    prompts = await _encode_prompts(text, body, served)
    asked = LEGACY_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo = bool(body.echo)
    if asked == 0 and not echo:
        raise CallerError("max_tokens must be at least 1 unless echo is true", param="max_tokens")
    grammars = await _compiled(text, source, (best_of or body.n or 1) * len(prompts))
    make = partial(
        _order,
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
        best_of=best_of,
        grammars=grammars,
    )
    return await at_length(make, is_long(body.logit_bias))


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
    best_of: int | None = None,
    grammars: Sequence[Grammar] = (),
    manner: Manner = _AS_IT_IS,
) -> Order:
    n = best_of or body.n or 1
    _check_rows(n * len(prompts))
    scored = 0 if best_of is not None and alternatives is None else alternatives
    sampling = _sampling(body, scored, served.vocab_size)
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
                grammar=grammars[len(rows) + choice] if grammars else None,
            )
            for choice in range(n)
        ]
    return Order(
        generation=Generation(request_id, tuple(rows), _stops(body), manner, priority),
        prompts=tuple(prompts),
        n=n,
        kept=body.n or 1,
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
        known = len(key) <= _MOST_DIGITS and key.isascii() and key.isdigit()
        token = int(key) if known else -1
        if not 0 <= token < vocab_size:
            raise CallerError(
                f"logit_bias: {key[:80]!r} is not a token id below {vocab_size}", param="logit_bias"
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


def _template_options(body: ChatRequest, dialect: Dialect) -> dict[str, Any]:
    """Return the chat template's variables that a request sets.

    Raises:
        CallerError: For a variable that is not the request's to set.
    """
    options = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in _OWN_OPTIONS or not name.isidentifier():
            where = f"chat_template_kwargs.{name}"
            raise CallerError(f"{where} cannot be set by a request", param=where)
    if body.reasoning_effort is not None and dialect.think_open:
        options.setdefault("enable_thinking", body.reasoning_effort != "none")
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return options


async def _compiled(
    text: Text, source: Source | None, rows: int, thinking: Thinking | None = None
) -> Sequence[Grammar]:
    """Compile a grammar for each row off the event loop, and see that it lets a token through."""
    if source is None:
        return ()
    _check_rows(rows)

    grammar = await FORMS.do(lambda: text.grammars.compile(source, thinking))
    text.grammars.check_rows(grammar, rows)
    found: list[Grammar] = []
    while len(found) < rows:  # one after another, so that others have their turns in between
        found += await FORMS.do(lambda: text.grammars.for_rows(grammar, 1))
    return found


def _prompt_items(body: CompletionRequest) -> list[str] | list[list[int]]:
    """Sort the four legacy forms out: text, texts, token ids, lists of token ids.

    Raises:
        CallerError: For a mixture, and for more prompts than one request may have.
    """
    prompt: Any = body.prompt
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise CallerError("prompt: an empty list holds no prompt", param="prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise CallerError("prompt: token ids and texts cannot be mixed", param="prompt")
    _check_rows((body.best_of or body.n or 1) * len(prompt))
    return list(prompt)


def _check_rows(rows: int) -> None:
    if rows > _MAX_ROWS:
        raise CallerError(f"n times prompts must be at most {_MAX_ROWS}", param="n")


async def _encode_prompts(
    text: Text, body: CompletionRequest, served: Served
) -> list[tuple[int, ...]]:
    items, special = _prompt_items(body), body.add_special_tokens is not False

    def work() -> list[tuple[int, ...]]:
        return [_encode_prompt(text, item, special, served) for item in items]

    return await at_length(work, is_long(items))


def _encode_prompt(
    text: Text, item: str | list[int], special: bool, served: Served
) -> tuple[int, ...]:
    if isinstance(item, str):
        tokens = text.encode(item, add_special=special, most=served.context)
        return tuple(tokens) or (text.document_start,)
    if not item:
        raise CallerError("prompt: a list of token ids is empty", param="prompt")
    if len(item) >= served.context:
        raise ContextOverflow(len(item), served.context, param="prompt")
    for token in (min(item), max(item)):
        if not 0 <= token < served.vocab_size:
            raise CallerError(
                f"prompt: {token} is not a token id below {served.vocab_size}", param="prompt"
            )
    return tuple(item)
