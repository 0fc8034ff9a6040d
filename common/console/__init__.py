"""What the terminal shows, on rank 0 only: messages, and the progress of a run."""

from common.console.before_imports import begin
from common.console.messages import say, warn

__all__ = ["begin", "say", "warn"]
