"""POST /v1/tokenize and /v1/detokenize."""

from typing import Final

import msgspec
import trio
from quart import Response

from ..actors.house import House
from ..runtime.errors import CallerError
from .conversation import Setting, described, encode_chat
from .problems import decode, reply
from .replies import DetokenizeReply, TokenizeReply
from .schemas import DetokenizeRequest, TokenizeRequest

_TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(house: House, raw: bytes) -> Response:
    """Return the tokens of a raw prompt or of a conversation."""
    body: TokenizeRequest = decode(_TOKENIZE, raw)
    if (body.prompt is None) == (body.messages is None):
        raise CallerError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        setting = Setting(tuple(map(described, body.tools or ())))
        tokens = (await encode_chat(house.text, body.messages, setting)).tokens
    else:
        special = body.add_special_tokens is not False
        tokens = await trio.to_thread.run_sync(
            lambda: house.text.encode(body.prompt or "", add_special=special)
        )
    return reply(200, TokenizeReply(tokens, len(tokens), house.served.context))


async def detokenize(house: House, raw: bytes) -> Response:
    """Return the text of some tokens."""
    body: DetokenizeRequest = decode(_DETOKENIZE, raw)
    for at, token in enumerate(body.tokens):
        if token >= house.served.vocab_size:
            raise CallerError(
                f"tokens[{at}]: {token} is not a token id below {house.served.vocab_size}",
                param=f"tokens[{at}]",
            )
    return reply(200, DetokenizeReply(house.text.decode(body.tokens)))
