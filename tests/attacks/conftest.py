"""The sandboxes that are attacked from inside."""

from __future__ import annotations

from boxes import box, make, nothing_leaks

__all__ = ["box", "make", "nothing_leaks"]
