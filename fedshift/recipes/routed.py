"""Methods that also learn which client a query belongs to."""

from __future__ import annotations

__all__: list[str] = []
