"""The base class of all records of an observed run, their form in a file, and shared types."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

# The phase of a run in which it evaluates: before the first update, in the loop, or after the loop.
Phase = Literal["rehearsal", "validation", "final"]
# How a run is interrupted: by SIGKILL after an update ("update"), while a checkpoint is written
# ("save"), or in an evaluation; or by SIGTERM after an update ("stop").
Manner = Literal["update", "save", "evaluation", "stop"]


class ObservedRecord(BaseModel):
    """A record of an observed run. Values must have the declared types."""

    # JSON has no NaN and no infinities, but a loss or a figure may be one. Write them as constants.
    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", ser_json_inf_nan="constants"
    )


def line_of(record: ObservedRecord) -> bytes:
    """Return a record as a line of its file."""
    return record.model_dump_json().encode() + b"\n"
