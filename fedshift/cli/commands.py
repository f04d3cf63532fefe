"""The group of all commands: those of `app.py`, and plugins of other packages."""

from __future__ import annotations

from typing import Any

from typer import Typer
from typer.core import TyperGroup
from typer.main import get_command

from fedshift.cli import console
from fedshift.errors import InputError
from fedshift.plugins import COMMANDS, loaded, registered


class Commands(TyperGroup):
    """Loads plugins only if a name is not in `app.py`, or if all names are listed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None. Raises InputError for a plugin that does not load."""
        # Commands of `app.py` start faster without a search of installed packages.
        if cmd_name not in self.commands and cmd_name in (broken := self._add_plugins()):
            raise broken[cmd_name]
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of `fedshift --help`, without plugins that do not load."""
        for error in self._add_plugins().values():
            console.tell(f"left out: {error}")
        return super().list_commands(ctx)

    def _add_plugins(self) -> dict[str, InputError]:
        """Add the plugins, in front of `methods` and the other listings; none replaces a command.

        Returns the errors of those that do not load, by name, so that a faulty package does not
        take away the commands of others.
        """
        plugins, broken = dict[str, Any](), dict[str, InputError]()
        for name, point in registered(COMMANDS).items():
            if name not in self.commands:
                try:
                    plugins[name] = _command(loaded(point, Typer, "typer.Typer"), name)
                except InputError as e:
                    broken[name] = e
        core = list(self.commands.items())
        at = list(self.commands).index("methods")
        self.commands = dict([*core[:at], *plugins.items(), *core[at:]])
        return broken


def _command(app: Typer, name: str) -> Any:
    try:
        return get_command(app)
    except RuntimeError:  # typer raises it for an app without commands
        raise InputError(f'the plugin "{name}" has no command; its package must add one') from None
