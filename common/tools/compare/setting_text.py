"""Formats the settings of runs as text."""

from common.track.names import UNKNOWN


def value_text(value: object) -> str:
    """Format a setting of a run, a JSON value, for a table's cell."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value)) or UNKNOWN
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
