"""Which operating system this is. Only this package asks; other code asks its functions."""

import sys

SYSTEM = sys.platform
IS_LINUX = SYSTEM == "linux"
IS_WINDOWS = SYSTEM == "win32"
