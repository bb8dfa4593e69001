"""The whole server but for HTTP: starts everything in order, stops it in reverse."""

import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Final

import msgspec
import trio

from ..lanes.base import Lane
from ..lanes.geometry import BRANCHING
from ..runtime.blas import Blas
from ..runtime.errors import BusyError
from ..runtime.log import logger
from ..runtime.meter import Meter
from ..runtime.modes import EXPERIMENTAL, ONE_AT_A_TIME, Mode
from ..runtime.settings import ServerArgs
from ..runtime.text import Text
from ..runtime.thread import Device, DeviceThread
from .core import Core
from .engine import Engine
from .entry import Parking
from .messages import OwnerMessage, Turn
from .owner import ModelOwner
from .policies import make_depths, make_policy
from .request import Generation, RequestActor

HEARTBEAT_SECONDS: Final = 5.0  # silence lasts twice that at most, less than clients wait
_FLUSH_SECONDS = 1.0  # how long error events may take to leave at the end of a drain


class Served(msgspec.Struct, frozen=True):
    """What the model is, for the layers above; no array is in here."""

    name: str
    family: str
    dtype: str
    device: str
    arithmetic: str
    head: str
    context: int
    vocab_size: int
    created: int


class House:
    """A running model with its request actors."""

    def __init__(
        self,
        args: ServerArgs,
        served: Served,
        text: Text,
        lanes: Sequence[Lane],
        owner: ModelOwner,
        meter: Meter,
        nursery: trio.Nursery,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.args = args
        self.served = served
        self.text = text
        self.lanes = lanes
        self.owner = owner
        self.meter = meter
        self.draining = False
        self._nursery = nursery
        self._clock = clock
        self._actors: set[RequestActor] = set()
        self._empty = trio.Event()

    @property
    def open_requests(self) -> int:
        """Requests whose actors live."""
        return len(self._actors)

    def start(self, generation: Generation) -> RequestActor:
        """Spawn the actor of one request.

        Raises:
            BusyError: When the queue is full or the server is shutting down.
            CallerError: When its rows never will fit.
            OwnerDied: When there is no model any more.
        """
        if self.draining:
            raise BusyError("the server is shutting down", 5)
        actor = RequestActor(
            generation,
            self.owner,
            self.text,
            self.meter,
            mode=self.args.scheduler_mode.value,
            deadline_s=self.args.request_timeout_s or math.inf,
            stall_s=self.args.client_stall_s,
            clock=self._clock,
        )
        self._actors.add(actor)
        try:
            self._nursery.start_soon(self._live, actor, name=f"request {generation.request_id}")
        except RuntimeError:  # the nursery has ended, and the server with it
            self._actors.discard(actor)
            actor.give_up()
            raise BusyError("the server is shutting down", 5) from None
        return actor

    async def drain(self, timeout_s: float) -> None:
        """Admit nothing more, let open requests finish for a while, then end the rest."""
        self.draining = True
        logger().info("server.draining", open_requests=len(self._actors), timeout_s=timeout_s)
        with trio.move_on_after(timeout_s):
            await self._all_done()
        for actor in list(self._actors):
            actor.hang_up("server_shutdown")
        with trio.move_on_after(_FLUSH_SECONDS):
            await self._all_done()

    async def _all_done(self) -> None:
        while self._actors:
            self._empty = trio.Event()
            await self._empty.wait()

    async def beat(self) -> None:
        """Let quiet requests tell their readers that they live, for as long as the house stands."""
        while True:
            await trio.sleep(HEARTBEAT_SECONDS)
            for actor in self._actors:
                actor.beat()

    async def _live(self, actor: RequestActor) -> None:
        try:
            await actor.run()
        finally:
            self._actors.discard(actor)
            if not self._actors:
                self._empty.set()


class Loaded:
    """What the device leaves for the trio side once the model is up."""

    served: Served
    text: Text
    lanes: Sequence[Lane]


@asynccontextmanager
async def open_house(args: ServerArgs, path: Path, products: Blas) -> AsyncIterator[House]:
    """Load the model, check its lanes, and keep the house open for the body.

    Args:
        path: The model's directory.
        products: The BLAS that was loaded before MLX, for the log.

    Raises:
        ModelError: When the model or a lane is refused; nothing has been served then.
        OwnerDied: When the device broke while the house was open.
    """
    loaded = Loaded()
    clock = trio.lowlevel.current_clock().current_time  # safe to read from any thread
    device = DeviceThread[OwnerMessage, Turn](lambda: _build(args, path, products, loaded, clock))
    async with keep_house(args, device, loaded) as house:
        yield house


@asynccontextmanager
async def keep_house(
    args: ServerArgs, device: Device[OwnerMessage, Turn], loaded: Loaded
) -> AsyncIterator[House]:
    """Run the owner on a device and a nursery of request actors above it."""
    meter = Meter()
    pace = args.pace
    places = pace.decode_batch_max
    if args.scheduler_mode is Mode.COOPERATIVE:
        places = pace.max_active_requests
    elif args.scheduler_mode in ONE_AT_A_TIME:
        places = 1
    owner = ModelOwner(
        device,
        meter,
        args.scheduler_mode.value,
        places,
        args.max_queue,
        stall_s=args.device_stall_s,
    )
    async with trio.open_nursery() as root:
        await root.start(owner.run)
        meter.last_progress = trio.current_time()
        async with trio.open_nursery() as actors:
            house = House(args, loaded.served, loaded.text, loaded.lanes, owner, meter, actors)
            root.start_soon(house.beat)
            yield house
            actors.cancel_scope.cancel(reason="shutdown")
        root.cancel_scope.cancel(reason="shutdown")


def _build(
    args: ServerArgs,
    path: Path,
    products: Blas,
    loaded: Loaded,
    clock: Callable[[], float],
) -> Engine:
    """Load and check everything; runs in the device thread, which owns every array from here."""
    began = time.perf_counter()
    logger().info("owner.loading", path=str(path), mode=args.scheduler_mode.value)
    # These import MLX, which must find the BLAS already there.
    from ..lanes.install import Wanted, install
    from ..runtime.model import load

    model = load(path, args.dtype, args.device, args.context_tokens, args.served_name)
    card = model.card
    text = Text(path, card.end_ids, card.context)
    grammars = Thread(target=_prepare_grammars, args=(text,), name="grammars", daemon=True)
    grammars.start()  # beside the checks, which mostly compute
    load_s = time.perf_counter() - began
    pace = args.pace
    wanted = Wanted(
        args.scheduler_mode,
        pace.decode_batch_max,
        args.exact_widths,
        args.mtp,
        args.acceptance,
        args.numerics,
        args.fixed_depth,
        args.prefix_cache_bytes,
        pace.prefill_chunk_tokens,
    )
    installed = install(model, wanted)
    grammars.join()
    lanes = {lane.spec.name: lane for lane in installed.lanes}
    loaded.served = Served(
        name=card.name,
        family=card.family,
        dtype=card.dtype,
        device=card.device,
        arithmetic=installed.arithmetic,
        head=installed.head,
        context=card.context,
        vocab_size=card.vocab_size,
        created=card.created,
    )
    loaded.text = text
    loaded.lanes = installed.lanes
    _log_start(args, loaded, products, card.why, installed.why, load_s, began)
    # What was loaded stays for good; looking through it again and again would stall steps.
    gc.collect()
    gc.freeze()
    return Engine(make_core(args, installed.lanes), lanes, clock, args.device_stall_s)


def _prepare_grammars(text: Text) -> None:
    """Build what compiles grammars: it holds the interpreter, so no request should wait for it."""
    try:
        _ = text.grammars
    except Exception as error:  # the model serves all the same; a request with a form will be told
        logger().warning("grammars.failed", error=str(error))


def make_core(args: ServerArgs, lanes: Sequence[Lane]) -> Core:
    """Return the scheduler core of a server's mode over its lanes, narrowest first."""
    narrow, mode = lanes[0].spec, args.scheduler_mode
    branching = next((lane.spec.name for lane in lanes if lane.spec.kind == BRANCHING), None)
    depths = make_depths(
        mode, narrow.kind, narrow.max_depth, args.fixed_depth, args.cohort_policy, branching
    )
    share, tile = args.prefill_share, narrow.prefill_tile
    policy = make_policy(mode, args.pace, share, tile, args.cohort_policy)
    return Core(policy, depths, Parking(args.parked_rows_max, args.parked_timeout_s))


def _log_start(
    args: ServerArgs,
    loaded: Loaded,
    products: Blas,
    dtype_why: str,
    arithmetic_why: str,
    load_s: float,
    began: float,
) -> None:
    log = logger().bind(mode=args.scheduler_mode.value)
    if not products.fast:
        log.warning("blas.slow", blas=products.name, detail=products.detail)
    if args.scheduler_mode in EXPERIMENTAL:
        log.warning("mode.experimental", cohort_policy=args.cohort_policy.value)
    log.info(
        "owner.started",
        model=loaded.served.name,
        family=loaded.served.family,
        dtype=loaded.served.dtype,
        dtype_why=dtype_why,
        device=loaded.served.device,
        context=loaded.served.context,
        blas=products.name,
        blas_detail=products.detail,
        arithmetic=loaded.served.arithmetic,
        arithmetic_why=arithmetic_why,
        head=loaded.served.head,
        lanes=[lane.spec.name for lane in loaded.lanes],
        load_s=round(load_s, 3),
        check_s=round(time.perf_counter() - began - load_s, 3),
    )
