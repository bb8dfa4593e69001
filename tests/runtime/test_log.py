"""Logs: one JSON object a line, and no prompt in a traceback."""

import io
import json

from paceline.runtime import log


def test_a_line_is_one_json_object_with_event_and_time() -> None:
    """Event, time and level stand on every line, and fields keep their types."""
    out = io.StringIO()
    log.configure("info", "json", out)
    try:
        log.logger().info("cohort.sealed", rows=("a", "b"), real_width=2)
        log.logger().debug("hidden")
    finally:
        log.configure("error", "json")
    (line,) = out.getvalue().splitlines()
    event = json.loads(line)
    assert list(event)[:2] == ["event", "ts"]
    assert (event["event"], event["level"]) == ("cohort.sealed", "info")
    assert (event["rows"], event["real_width"]) == (["a", "b"], 2)


def test_a_traceback_does_not_carry_local_variables() -> None:
    """An error's trace names files and lines; what a caller sent stays out of the log."""
    out = io.StringIO()
    log.configure("info", "json", out)

    def fail(prompt: str) -> None:
        raise RuntimeError("broken")

    try:
        fail("very private words")
    except RuntimeError as error:
        log.logger().error("request.crashed", exc_info=error)
    finally:
        log.configure("error", "json")
    assert "broken" in out.getvalue()
    assert "very private words" not in out.getvalue()
