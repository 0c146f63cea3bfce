"""Groups of commands. Without settings and their modules, so that `breadbox --help` is quick."""

import click


class Unusable(click.ClickException):
    """Something that the user can mend; printed as one line."""

    exit_code = 2


class Bug(click.ClickException):
    """Something that the user can only report; printed as one line."""

    exit_code = 70


class Group(click.Group):
    """Commands by name; a name that is almost one of them is told which."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names.

        Raises:
            UsageError: There is none; names those that are spelt alike.
        """
        name = args[0]
        command = self.get_command(ctx, name)
        if command is not None or ctx.resilient_parsing or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        alike = " or ".join(map(repr, get_close_matches(name, self.list_commands(ctx))))
        hint = f" Did you mean {alike}?" if alike else ""
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx)

    def add(self, command: click.Command) -> click.Command:
        """Take a command in, as a decorator."""
        self.add_command(command)
        return command
