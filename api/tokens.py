"""POST /v1/tokenize and /v1/detokenize."""

from typing import Final

import msgspec
from quart import Response

from ..actors.house import House
from ..runtime.errors import CallerError
from .conversation import Setting, described, encode_chat
from .offload import COUNTS, at_length, is_long
from .problems import decoded, reply
from .replies import DetokenizeReply, TokenizeReply
from .schemas import DetokenizeRequest, TokenizeRequest

_TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)
_INLINE_TOKENS: Final = 4_096


async def tokenize(house: House, raw: bytes) -> Response:
    """Return the tokens of a raw prompt or of a conversation."""
    body: TokenizeRequest = await decoded(_TOKENIZE, raw, COUNTS)
    del raw  # not kept while the prompt is tokenized
    if (body.prompt is None) == (body.messages is None):
        raise CallerError("give either prompt or messages", param="prompt")
    if body.messages is not None and body.add_special_tokens:
        raise CallerError(
            "add_special_tokens: the chat template writes what opens a prompt",
            param="add_special_tokens",
        )
    if body.messages is not None:
        setting = Setting(tuple(map(described, body.tools or ())))
        tokens = (await encode_chat(house.text, body.messages, setting)).tokens
    else:
        special = body.add_special_tokens is not False
        prompt = body.prompt or ""
        tokens = await at_length(
            lambda: house.text.encode(prompt, add_special=special), is_long(prompt), COUNTS
        )
    return reply(200, TokenizeReply(tokens, len(tokens), house.served.context))


async def detokenize(house: House, raw: bytes) -> Response:
    """Return the text of some tokens."""
    body: DetokenizeRequest = await decoded(_DETOKENIZE, raw, COUNTS)
    del raw
    most = max(body.tokens, default=0)
    if most >= house.served.vocab_size:
        at = body.tokens.index(most)
        raise CallerError(
            f"tokens[{at}]: {most} is not a token id below {house.served.vocab_size}",
            param=f"tokens[{at}]",
        )
    long = len(body.tokens) > _INLINE_TOKENS
    text = await at_length(lambda: house.text.decode(body.tokens), long, COUNTS)
    return reply(200, DetokenizeReply(text))
