"""The group of all commands: those of `app.py`, and those that packages add as plugins."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from fedshift.plugins import COMMANDS, registered


class Commands(TyperGroup):
    """Loads plugins where a name is not of `app.py`, and where all names are listed."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        # The commands of `app.py` start without a look at installed packages.
        if cmd_name not in self.commands:
            self._add_plugins()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, in the order of `fedshift --help`."""
        self._add_plugins()
        return super().list_commands(ctx)

    def _add_plugins(self) -> None:
        """Put the plugins in front of `methods` and the other listings; none replaces a command."""
        apps = registered(COMMANDS).items()
        plugins = {name: get_command(app) for name, app in apps if name not in self.commands}
        core = list(self.commands.items())
        at = list(self.commands).index("methods")
        self.commands = dict([*core[:at], *plugins.items(), *core[at:]])
