"""The date and time, as files state it."""

from datetime import UTC, datetime


def current_time() -> str:
    """Return the time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
