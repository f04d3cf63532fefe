"""Methods that leave every client with a model of its own."""

from __future__ import annotations

__all__: list[str] = []
