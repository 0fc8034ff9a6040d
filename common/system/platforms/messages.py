"""Texts about errors and limits of this system."""

import os

from common.system.platforms import current, files, signals


def error_texts(*numbers: int) -> tuple[str, ...]:
    """Return the system's texts for error numbers; numbers without a text are left out.

    The texts help to recognise an error that a library raises without its number. Windows calls
    every network error "Unknown error".
    """
    return tuple(
        message
        for message in map(os.strerror, numbers)
        if not message.lower().startswith("unknown error")
    )


def system_limits() -> str | None:
    """Return one line about what runs lack on this system and have on Linux; None on Linux."""
    if current.IS_LINUX:
        return None
    sentences = ["the loader's workers take seconds to start"]
    if not files.CAN_SYNC_FOLDERS:
        sentences.append("after a loss of power the newest checkpoint may be missing")
    if "SIGUSR1" not in signals.STOP_SIGNAL_NAMES.values():
        sentences.append("only Ctrl-C and Ctrl-Break stop a run with everything saved")
    return "; ".join(sentences)
