"""The time of day for entries that outlive the service."""

import time
from datetime import UTC, datetime

_LATEST = datetime(9999, 12, 31, tzinfo=UTC)


class WallClock:
    """Seconds since 1970, as they were at the start and counted from there.

    When somebody sets the machine's clock, weights must not expire at once, nor stay for years.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


def date_of(seconds: float) -> str:
    """The date in ISO 8601; for times behind the year 9999, its end."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return _LATEST.isoformat()
