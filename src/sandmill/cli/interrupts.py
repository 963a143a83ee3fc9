"""Ctrl-C in; a flag the training loop polls out. The second Ctrl-C stops at once.

SIGTERM counts as a request too, so that a scheduler's stop saves the run; a later Ctrl-C still stops at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

INTERRUPT_CODE = 130
TERMINATE_CODE = 143
_TELL_S = 2.0
"""How long the end waits for a person to be told; a terminal that takes no output must not hold it up."""


class NotBegun(KeyboardInterrupt):
    """Raised into a run that a person asked to stop before its first step: it has nothing to save, and a resumed run repeats what was
    done, a part of a warm start for example, bit for bit."""


class Interrupts:
    """Context manager for the main thread. `requested` turns true on the first signal; the next one raises KeyboardInterrupt."""

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self._on_request = on_request
        self._signal: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}
        self._told: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """What the process exits with after a requested stop."""
        return TERMINATE_CODE if self._signal == signal.SIGTERM else INTERRUPT_CODE

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._told is not None:
            self._told.join(_TELL_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            # The clean-up that follows must not be cut short by an impatient third press of the default handler's kind.
            raise KeyboardInterrupt
        self._signal = number
        try:
            self._on_request()
        except RuntimeError:
            # The signal came in the middle of a write of this very thread, which may not be entered again: another thread waits its turn.
            self._told = threading.Thread(target=self._on_request, daemon=True)
            self._told.start()
