"""Methods whose clients borrow from one another: heads, weights or directions."""

from __future__ import annotations

__all__: list[str] = []
