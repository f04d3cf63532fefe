"""Which parts of a model are sent and which stay on the client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedshift.arguments import check_fields
from fedshift.errors import InputError, nearest
from fedshift.tree import Params, split


def check_prefixes(what: str, prefixes: Iterable[str], names: Iterable[str]) -> None:
    """Raise InputError for a prefix that matches none of a model's names."""
    all_names = list(names)
    # Suggest a module before its parameters: users usually mean the whole module.
    parts = dict.fromkeys(f"{name.partition('.')[0]}." for name in all_names)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in all_names):
            raise InputError(
                f'{what} prefix "{prefix}" matches no parameter; '
                f"the model has {', '.join(all_names[:8])}.{nearest(prefix, [*parts, *all_names])}"
            )


@dataclass(frozen=True)
class Share:
    """Which parameters and buffers are sent: names with a `private` prefix never leave a client."""

    private: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError for a prefix that matches no name, or when nothing is left to share."""
        all_names = list(names)
        check_prefixes("private", self.private, all_names)
        if self.private and all(name.startswith(self.private) for name in all_names):
            # Sharing nothing would run, but it is another method.
            raise InputError(
                f"private prefixes {list(self.private)} cover every parameter: nothing is "
                "shared. Use local-only training instead"
            )

    def shared(self, params: Params) -> Params:
        """The entries that are sent."""
        return split(params, self.private)[1] if self.private else params

    def kept(self, params: Params) -> Params:
        """The entries that stay."""
        return split(params, self.private)[0] if self.private else {}
