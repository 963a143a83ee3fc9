"""For all tests: signals as at a terminal. A shell that runs the tests in its background ignores SIGINT, and children inherit that."""

from __future__ import annotations

import signal
import sys

from installed import clean

__all__ = ["clean"]

signal.signal(signal.SIGINT, signal.default_int_handler)

collect_ignore = [] if any("peers" in word for word in sys.argv[1:]) else ["peers"]
"""Packages from an index, which take minutes to install, are for scripts/peers."""
