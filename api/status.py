"""GET /health and /metrics: proof of what ran, read from the meter and never from the device."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from quart import Response

from ..actors.house import House
from ..runtime.log import dropped
from ..runtime.modes import EXPERIMENTAL, Mode
from .problems import reply


class StatusPage:
    """What /health and /metrics say.

    Args:
        now: The clock the meter was written with.
    """

    def __init__(self, house: House, now: Callable[[], float]) -> None:
        self._house = house
        self._now = now
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_MeterCollector(house))

    def health(self) -> Response:
        """Return 200 while requests are served, 503 while draining, stalled or dead."""
        status = self._status()
        body = {
            "status": status,
            "model": msgspec.to_builtins(self._house.served),
            "open_requests": self._house.open_requests,
            "log_lines_dropped": dropped(),
            "scheduler": self._scheduler(),
        }
        return reply(200 if status == "ok" else 503, body)

    def metrics(self) -> Response:
        """Return the meter in Prometheus' text format."""
        return Response(
            generate_latest(self._registry), content_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _status(self) -> str:
        if self._house.owner.dead:
            return "failed"
        if self._house.draining:
            return "draining"
        return "stalled" if self._state() == "stalled" else "ok"

    def _state(self) -> str:
        owner = self._house.owner
        return "stalled" if owner.stalled(self._now()) else owner.state()

    def _idle_s(self) -> float:
        return max(0.0, self._now() - self._house.meter.last_progress)

    def _hyper(self) -> dict[str, Any]:
        """Return the section that mode hyper alone has."""
        if self._house.args.scheduler_mode is not Mode.HYPER:
            return {}
        meter = self._house.meter
        return {
            "hyper": {
                "admission_limit": 1,
                "queue_depth": meter.queue_depth,
                "reserved_width": max(lane.spec.geometry for lane in self._house.lanes),
                "receipts": msgspec.to_builtins(list(meter.branches)),
            }
        }

    def _scheduler(self) -> dict[str, Any]:
        args, meter = self._house.args, self._house.meter
        pace = args.pace
        return {
            "mode": args.scheduler_mode.value,
            "experimental": args.scheduler_mode in EXPERIMENTAL,
            "active_lane": meter.active_lane,
            "installed_lanes": [
                {**msgspec.to_builtins(lane.spec), "receipt": msgspec.to_builtins(lane.receipt)}
                for lane in self._house.lanes
            ],
            "config": {
                **msgspec.to_builtins(pace),
                "preset": args.preset.value,
                "prefill_share": args.prefill_share,
                "numerics": args.numerics,
                "mtp": args.mtp,
                "speculative_depth": args.speculative_depth,
                "acceptance": args.acceptance,
                "cohort_policy": args.cohort_policy.value,
                "max_queue": args.max_queue,
                "parked_rows_max": args.parked_rows_max,
                "parked_timeout_s": args.parked_timeout_s,
                "device_stall_s": args.device_stall_s,
                "prefix_cache_bytes": args.prefix_cache_bytes,
            },
            "telemetry": {
                "state": self._state(),
                "last_real_width": meter.last_real_width,
                "batch_histogram": {str(k): v for k, v in sorted(meter.batch_histogram.items())},
                "rows_peak": meter.rows_peak,
                "active_rows": meter.active_rows,
                "parked_rows": meter.parked_rows,
                "queue_depth": meter.queue_depth,
                "queue_wait_s": msgspec.to_builtins(meter.queue_wait),
                "time_to_first_token_s": msgspec.to_builtins(meter.time_to_first_token),
                "steps": meter.steps,
                "tokens_committed": meter.tokens_committed,
                "prompt_tokens": meter.prompt_tokens,
                "cached_tokens": meter.cached_tokens,
                "acceptance_by_depth": {
                    str(depth): round(share, 4)
                    for depth, share in meter.acceptance_by_depth.items()
                },
                "mean_accepted": _rounded(meter.mean_accepted),
                "steps_by_depth": {str(k): v for k, v in sorted(meter.steps_by_depth.items())},
                "drafted_tokens": meter.drafted_tokens,
                "accepted_tokens": meter.accepted_tokens,
                "draft_failures": meter.draft_failures,
                "cohorts_sealed": meter.cohorts_sealed,
                "seconds_since_progress": round(self._idle_s(), 3),
                "requests": dict(sorted(meter.requests.items())),
            },
            **self._hyper(),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class _MeterCollector(Collector):
    """Reads the meter when it is scraped; names follow vLLM's under our prefix."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterable[Metric]:
        meter = self._house.meter
        gauges = {
            "requests_open": ("Requests whose actors live", self._house.open_requests),
            "rows_active": ("Rows that have a place and can go on", meter.active_rows),
            "rows_parked": ("Rows that wait for their readers", meter.parked_rows),
            "rows_queued": ("Rows that wait for a place", meter.queue_depth),
            "last_real_width": ("Real rows of the last step", meter.last_real_width),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"paceline_{name}", text, value)
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": ("Prompt tokens computed", meter.prompt_tokens),
            "cached_tokens": ("Prompt tokens taken from the prefix bank", meter.cached_tokens),
            "generation_tokens": ("Tokens committed", meter.tokens_committed),
            "steps": ("Lockstep steps", meter.steps),
            "row_steps": ("Rows summed over steps", meter.row_steps),
            "step_seconds": ("Time spent in steps", meter.step_seconds),
            "prefill_seconds": ("Time spent reading prompts", meter.read_seconds),
            "cohorts_sealed": ("Cohorts sealed", meter.cohorts_sealed),
            "drafted_tokens": ("Tokens drafted", meter.drafted_tokens),
            "accepted_tokens": ("Drafted tokens that were accepted", meter.accepted_tokens),
            "log_lines_dropped": ("Lines of the log that could not be written", dropped()),
        }
        for name, (text, total) in counters.items():
            yield CounterMetricFamily(f"paceline_{name}", text, total)
        ended = CounterMetricFamily(
            "paceline_requests_ended", "Requests by how they ended", labels=["outcome"]
        )
        for outcome, count in sorted(meter.requests.items()):
            ended.add_metric([outcome], count)
        yield ended
        widths = CounterMetricFamily(
            "paceline_cohorts_by_width", "Cohorts of two or more rows", labels=["width"]
        )
        for width, count in sorted(meter.batch_histogram.items()):
            widths.add_metric([str(width)], count)
        yield widths
        depths = CounterMetricFamily(
            "paceline_steps_by_depth", "Lockstep steps by tokens drafted", labels=["depth"]
        )
        for depth, count in sorted(meter.steps_by_depth.items()):
            depths.add_metric([str(depth)], count)
        yield depths
        for name, found in (
            ("queue_wait_seconds", meter.queue_wait),
            ("time_to_first_token_seconds", meter.time_to_first_token),
        ):
            family = GaugeMetricFamily(
                f"paceline_{name}", "Percentile over recent requests", labels=["quantile"]
            )
            for quantile, seen in (("0.5", found.p50), ("0.9", found.p90), ("0.99", found.p99)):
                if seen is not None:
                    family.add_metric([quantile], seen)
            yield family
