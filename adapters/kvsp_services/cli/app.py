"""The frame of ``kvsp``: where its commands are found, and how their errors are said."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Final

import click

from kvsp_core.errors import KVSPError
from kvsp_services.cli import importing

__all__ = ["COMMANDS", "ENTRY_POINTS", "SECTIONS", "kvsp", "run"]

COMMANDS: Final = {
    "backup": "kvsp_services.cli.storage:backup",
    "compat": "kvsp_services.cli.values:compat",
    "demo": "kvsp_services.cli.demo:demo",
    "drain": "kvsp_services.cli.operator:drain",
    "get": "kvsp_services.cli.data:get",
    "index": "kvsp_services.cli.operator:index",
    "inspect": "kvsp_services.cli.values:inspect",
    "keys": "kvsp_services.cli.values:keys",
    "lease": "kvsp_services.cli.data:lease",
    "leases": "kvsp_services.cli.operator:leases",
    "lookup": "kvsp_services.cli.data:lookup",
    "pki": "kvsp_services.cli.pki:pki",
    "purge": "kvsp_services.cli.storage:purge",
    "put": "kvsp_services.cli.data:put",
    "reshard": "kvsp_services.cli.operator:reshard",
    "scope": "kvsp_services.cli.values:scope",
    "serve": "kvsp_services.cli.serve:serve",
    "sessions": "kvsp_services.cli.operator:sessions",
    "status": "kvsp_services.cli.operator:status",
    "top": "kvsp_services.cli.top:top",
    "wake": "kvsp_services.cli.operator:wake",
}
"""The commands of this package. A module is imported when its command is asked for, so that ``kvsp``
starts fast."""

SECTIONS: Final = {
    "Begin": ("demo", "pki", "model", "serve"),
    "Look at a cluster": ("status", "sessions", "index", "leases", "top"),
    "Change it": ("drain", "wake", "reshard"),
    "Prompts and blocks": ("compat", "scope", "keys", "lookup", "get", "put", "lease", "inspect"),
    "Files of a role": ("backup", "purge"),
    "Find faults": ("simulate", "explore"),
}
"""How ``kvsp --help`` lists the commands; those of other packages come last."""

ENTRY_POINTS: Final = "kvsp.commands"
NO, USAGE, INTERRUPTED = 1, 2, 130


class _Commands(click.Group):
    """A group that finds its commands by name, here and among the entry points, and says which one may have
    been meant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *(point.name for point in entry_points(group=ENTRY_POINTS))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if target := COMMANDS.get(cmd_name):
            module, _, name = target.partition(":")
            with importing():
                found = getattr(importlib.import_module(module), name)
        else:
            points = entry_points(group=ENTRY_POINTS, name=cmd_name)
            with importing():
                found = next(iter(points)).load() if points else None
        if found is not None and not isinstance(found, click.Command):
            raise click.ClickException(f"the entry point {cmd_name} of {ENTRY_POINTS} is no click command")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        named = {name for section in SECTIONS.values() for name in section}
        others = {"Other commands": tuple(name for name in names if name not in named)}
        widest = max(map(len, names))
        for title, section in (SECTIONS | others).items():
            found = {name: self.get_command(ctx, name) for name in section if name in names}
            rows = [
                (f"{name:<{widest}}", made.get_short_help_str(80)) for name, made in found.items() if made
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"there is no command {args[0]!r}{meant}", ctx)
        return super().resolve_command(ctx, args)


_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="kvsp", prog_name="kvsp")
def kvsp() -> None:
    """Tools of the KV Cache Storage Protocol.

    To begin: kvsp demo --fast shows a cluster at work; pki, model prepare and serve make one of your own.
    kvsp COMMAND --help has the options of a command, and the variables that say one for all.

    Exit status: 0 is yes. 1 is no: refused, not reached, not there, not what it should be. 2 is a wrong call,
    of which nothing was done. 130 is interrupted.
    """


_IN_THE_POLICY: Final = "the policy of that role has to name the URI of your certificate, in"
_ADVICE: Final = {
    ": the service cannot be reached": "; is it running, and is this its base URI?",
    "there is no such resource below this base URI": "; is it the base URI of another role?",
    "403 the client has no role that may make this request": f"; {_IN_THE_POLICY} [principals], with a role"
    " that may, such as operator",
    "403 the client has no such permission in this scope": f"; {_IN_THE_POLICY} the scope's table",
}
"""What to do about an error, by how it ends."""
_CANNOT_BE_OPENED: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def _say(text: str) -> None:
    click.echo(f"kvsp: {' '.join(text.split())}", err=True)


def run(arguments: list[str]) -> int:
    """Run one command line and return the exit status; whatever goes wrong is said in one line."""
    if sys.stdin is None:  # it was closed, and holds as little as an empty file
        sys.stdin = open(os.devnull)  # noqa: SIM115
    try:
        outcome = kvsp.main(arguments, prog_name="kvsp", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        command, said = error.ctx.command_path if error.ctx else "kvsp", error.format_message().rstrip(".")
        _say(f"{said}{'' if said.endswith('?') else '.'} See: {command} --help")
        return USAGE
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except KVSPError as error:
        said = str(error)
        _say(said + next((advice for end, advice in _ADVICE.items() if said.endswith(end)), ""))
        return NO
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvsp"):
            raise
        _say(f"this command needs {error.name}; in a checkout run: pip install '.[all]'")
        return USAGE
    except OSError as error:
        unnamed = "standard output" if error.errno == errno.ENOSPC else "operating system"
        _say(f"{error.filename or unnamed}: {error.strerror or error}")
        return USAGE if isinstance(error, _CANNOT_BE_OPENED) and error.filename else NO
    return outcome if isinstance(outcome, int) else 0
