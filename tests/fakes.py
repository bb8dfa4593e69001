"""Stand-ins that keep the real contracts: a lane that scripts its tokens, a device in virtual time.

No mocks: the actors, the owner and the scheduler core above these are the real ones.
"""

import codecs
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import pytest
import trio
import trio.testing
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline.actors.core import Core
from paceline.actors.engine import Engine
from paceline.actors.house import House, Loaded, Served, keep_house, make_core
from paceline.actors.messages import OwnerMessage, Turn
from paceline.lanes.base import Branches, LaneSpec, Receipt, Row, RowDelta
from paceline.lanes.geometry import GEOMETRIES, lane_name
from paceline.runtime.context import RowContext, Sampling, TokenLogprob
from paceline.runtime.dialect import Dialect, Thought
from paceline.runtime.errors import FormError
from paceline.runtime.grammar import Grammars
from paceline.runtime.modes import MUST_DRAFT, Mode
from paceline.runtime.settings import ServerArgs
from paceline.runtime.text import ChatPrompt
from paceline.runtime.thread import Pulse

STEP_S = 0.010
READ_S = 0.001  # a prompt token
DRAFT_S = 0.002  # a drafted token of every row of a step
MAX_DEPTH = 4
ACCEPTED = 2  # drafts of a step that are accepted
TILE = 64
WORD_BASE = 1000  # token WORD_BASE + n reads " wn"
END = 2
_DIALECT = Dialect()
LONGEST_S = 3600  # virtual seconds no test needs


class Wear:
    """Virtual seconds the fake lanes have used and nobody has slept yet."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Nature(NamedTuple):
    """How fake lanes behave where a test needs more than the usual.

    Args:
        script: A row's next token; a negative one fails the row.
        accepts: How many drafts of a row are accepted in a step.
        position_s: What each position of a step adds.
        span_s: What each token of the longest row adds for each row of the geometry.
        cached: Tokens at the front of every prompt that come from a prefix bank.
    """

    script: Callable[[Row], int] = lambda row: WORD_BASE + len(row.generated)
    accepts: Callable[[Row], int] = lambda row: ACCEPTED
    position_s: float = 0.0
    span_s: float = 0.0
    cached: int = 0


class FakeLane:
    """A lane whose row emits the tokens WORD_BASE, WORD_BASE + 1, ... unless a script says else.

    A step takes STEP_S and a prompt token READ_S of virtual time, whatever the width; a draft
    adds DRAFT_S and is accepted when it is among the first `ACCEPTED`; see `Nature`.
    """

    def __init__(self, kind: str, geometry: int, wear: Wear, nature: Nature) -> None:
        depth = 0 if kind == "ar" else MAX_DEPTH
        self.spec = LaneSpec(
            lane_name(kind, geometry), kind, geometry, "fake", "constant-shape", 1, TILE, depth
        )
        self.receipt = Receipt((), 0.0, 0.0)
        self._wear = wear
        self._nature = nature
        self.open_rows: set[str] = set()
        self.step_widths: list[int] = []
        self.fail_next: Exception | None = None

    def open(self, key: str, context: RowContext) -> Row:
        self.open_rows.add(key)
        return Row(key, context, None)  # type: ignore[arg-type]

    def prefill(self, row: Row, count: int) -> RowDelta | None:
        assert row.key in self.open_rows
        cached = self._nature.cached if row.read == 0 else 0
        row.read += cached
        count = min(count, len(row.context.prompt) - row.read)
        self._wear.seconds += READ_S * count
        row.read += count
        if row.read < len(row.context.prompt):
            return RowDelta(row.key, cached=cached) if cached else None
        return msgspec.structs.replace(self._next(row), cached=cached)

    def step(self, rows: Sequence[Row], depths: Sequence[int]) -> list[RowDelta]:
        assert 1 <= len(rows) <= self.spec.geometry
        assert len({row.key for row in rows}) == len(rows)
        if self.fail_next is not None:
            raise self.fail_next
        self.step_widths.append(len(rows))
        assert max(depths) <= self.spec.max_depth
        longest = max(row.position for row in rows)
        self._wear.seconds += (
            STEP_S
            + max(depths) * DRAFT_S
            + sum(depths) * self._nature.position_s
            + longest * self.spec.geometry * self._nature.span_s
        )
        return [self._next(row, depth) for row, depth in zip(rows, depths, strict=True)]

    def close(self, row: Row) -> None:
        self.open_rows.discard(row.key)

    def _next(self, row: Row, depth: int = 0) -> RowDelta:
        accepted = min(depth, self._nature.accepts(row))
        tokens = []
        for _ in range(accepted + 1):
            try:
                tokens.append(self._form_or_script(row))
                if tokens[-1] >= 0:
                    row.commit(tokens[-1])
            except FormError as error:
                return RowDelta(row.key, error=str(error), code="form_failed")
            if tokens[-1] < 0:
                return RowDelta(row.key, error="scripted failure")
            if tokens[-1] in row.context.end_ids:
                break
        branches = None
        if self.spec.kind == "hyper" and depth:
            branches = Branches(2, 2 * depth, 0, depth, accepted)
        logprobs = tuple(TokenLogprob(token, -0.5 - token % 7, ()) for token in tokens)
        return RowDelta(
            row.key,
            tuple(tokens),
            logprobs if row.context.sampling.logprobs is not None else (),
            drafted=depth,
            accepted=accepted,
            branches=branches,
        )

    def _form_or_script(self, row: Row) -> int:
        """Return the script's token, or where the row's form forbids it the first it allows."""
        wanted, allowed = self._nature.script(row), row.allowed()
        if allowed is None or wanted in allowed:
            return wanted
        return int(allowed[-1]) if allowed.size else -1


class InlineDevice:
    """Runs turns as a trio task: the lanes' virtual seconds pass between run and hand-out."""

    def __init__(self, build: Callable[[], Engine], wear: Wear) -> None:
        self._build = build
        self._wear = wear
        self._inbox: list[OwnerMessage] = []
        self._wake = trio.Event()
        self._engine: Engine | None = None
        self._began: float | None = None
        self._posted_at: float | None = None

    def post(self, message: OwnerMessage) -> None:
        if not self._inbox:
            self._posted_at = trio.current_time()
        self._inbox.append(message)
        self._wake.set()

    def pulse(self) -> Pulse:
        assert self._engine is not None
        waiting_since = self._posted_at if self._inbox else None
        engine = self._engine
        return Pulse(self._began, engine.allowance_s, engine.doing, waiting_since)

    async def run(
        self,
        publish: Callable[[Turn], None],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        engine = self._engine = self._build()
        task_status.started()
        while True:
            self._began = trio.current_time()
            for message in self._inbox:
                engine.feed(message)
            self._inbox.clear()
            plan = engine.choose()
            if plan.idle:
                self._began = None
                await self._sleep(engine.wait_s())
                continue
            outcome = engine.run(plan)
            await trio.sleep(self._wear.take())
            turn = engine.hand_out(outcome)
            self._began = None
            publish(turn)
            await trio.lowlevel.checkpoint()

    async def _sleep(self, seconds: float | None) -> None:
        self._wake = trio.Event()
        with trio.move_on_after(seconds if seconds is not None else float("inf")):
            await self._wake.wait()


@lru_cache(maxsize=1)
def byte_grammars() -> Grammars:
    """Return what compiles grammars where a token is a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Bytes that are printable stand for themselves; the others take what letters are left.
    spelled = {ord(c): c for c in letters if ord(c) < 256}
    rest = iter(c for c in letters if ord(c) >= 256)
    vocab = {spelled.get(byte) or next(rest): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Grammars(tokenizer.to_str(), [bytes([byte]) for byte in range(256)], [], [END])


class FakeStream:
    """Text that grows a token at a time."""

    def __init__(self, text: "FakeText") -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._text.token_bytes(token))

    def go_on(self) -> None:
        pass


class FakeText:
    """Text where token WORD_BASE + n reads " wn", END ends, and any other token is a byte."""

    vocab_size = 100_000
    end_ids = frozenset({END})
    has_chat_template = True
    document_start = 0

    def __init__(self, dialect: Dialect = _DIALECT, thought: Thought = "over") -> None:
        self.dialect = dialect
        self.thought = thought
        self.last_setting: dict[str, Any] = {}

    @property
    def grammars(self) -> Grammars:
        return byte_grammars()

    def token_bytes(self, token: int) -> bytes:
        if token == END:
            return b"<end>"
        if token >= WORD_BASE:
            return f" w{token - WORD_BASE}".encode()
        return bytes([token]) if token < 256 else b"?"

    def is_special(self, token: int) -> bool:
        return token == END

    def stream(self) -> "FakeStream":
        return FakeStream(self)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def marks_of(self, dialect: Dialect) -> frozenset[int]:
        return frozenset()

    def chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), **setting: Any
    ) -> ChatPrompt:
        self.last_setting = setting
        told = "".join(f"tool:{tool['function']['name']}\n" for tool in tools)
        said = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return ChatPrompt(self.encode(told + said + setting["lead"]), self.thought)


class Stand:
    """A house on fakes, and a look at what is behind it."""

    def __init__(self, house: House, lanes: dict[str, FakeLane], core: Core) -> None:
        self.house = house
        self.lanes = lanes
        self.core = core

    @property
    def open_rows(self) -> set[str]:
        """Rows the lanes hold."""
        return set().union(*(lane.open_rows for lane in self.lanes.values()))


@asynccontextmanager
async def stand(
    args: ServerArgs,
    script: Callable[[Row], int] | None = None,
    context: int = 8192,
    nature: Nature | None = None,
    drafts: bool = False,
    text: FakeText | None = None,
) -> AsyncIterator[Stand]:
    """Open a real house over fake lanes in the current clock.

    Args:
        drafts: Install lanes with a head in modes that may draft; those that must, always do.
    """
    wear = Wear()
    nature = nature or (Nature(script) if script else Nature())
    kind = "mtp" if drafts or args.scheduler_mode in MUST_DRAFT else "ar"
    lanes = {lane_name(kind, g): FakeLane(kind, g, wear, nature) for g in GEOMETRIES}
    if args.scheduler_mode is Mode.HYPER:
        lanes = {name: lane for name, lane in lanes.items() if lane.spec.geometry == 1}
        lanes["hyper-b8"] = FakeLane("hyper", 8, wear, nature)
    core = make_core(args, tuple(lanes.values()))
    loaded = Loaded()
    loaded.served = Served(
        "fake", "fake", "fake", "cpu", "constant-shape", "none", context, 100_000, 1
    )
    loaded.text = text or FakeText()  # type: ignore[assignment]
    loaded.lanes = tuple(lanes.values())

    def clock() -> float:
        return trio.current_time() + wear.seconds

    device = InlineDevice(lambda: Engine(core, lanes, clock, args.device_stall_s), wear)
    # The house's heartbeat keeps virtual time moving, so what never comes must time out.
    with trio.fail_after(LONGEST_S):
        async with keep_house(args, device, loaded) as house:
            yield Stand(house, lanes, core)


def row_context(prompt: int = 1, budget: int = 8, seed: int = 0) -> RowContext:
    """Return a context with a prompt of so many tokens."""
    return RowContext(tuple([7] * prompt), Sampling(), seed, budget, frozenset({END}))


def threads_hold_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a virtual clock from jumping past every deadline while a thread works in real time."""
    run = trio.to_thread.run_sync
    working = 0

    async def waiting(*args: Any, **options: Any) -> Any:
        nonlocal working
        clock = trio.lowlevel.current_clock()
        if not isinstance(clock, trio.testing.MockClock):
            return await run(*args, **options)
        if not working:
            usual.append(clock.autojump_threshold)
            clock.autojump_threshold = math.inf
        working += 1
        try:
            return await run(*args, **options)
        finally:
            working -= 1
            if not working:
                clock.autojump_threshold = usual.pop()

    usual: list[float] = []
    monkeypatch.setattr(trio.to_thread, "run_sync", waiting)
