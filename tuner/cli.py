"""The command line `pagedtune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from . import cli_check, cli_explain, cli_show, cli_tune
from .errors import UsageError

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def make_app() -> typer.Typer:
    """The application with all commands."""
    app = typer.Typer(
        name="pagedtune",
        help="Find, prove and ship the fastest correct paged-attention kernel for a device and a model shape.\n\n"
        "Start with `pagedtune tune`; it takes three minutes.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for part in (cli_show, cli_check, cli_tune, cli_explain):
        part.register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 ok, 1 failure found, 2 usage or environment.

    Wrong input is one line on stderr.
    """
    command = typer.main.get_command(make_app())
    try:
        code = command.main(args=arguments, prog_name="pagedtune", standalone_mode=False)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("stopped; what was recorded stays, and the same command goes on from there", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
