"""For all tests: signals as at a terminal. A shell that runs the tests in its background ignores SIGINT, and children inherit that."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
