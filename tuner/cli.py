"""The command line `pagedtune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from . import cli_check, cli_emulate, cli_explain, cli_export, cli_replay, cli_report, cli_show, cli_tune
from .errors import UsageError

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
# Typer has carried its own copy of click since 0.20 or so; its errors are found through the one it exports.
_COMMAND_LINE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def make_app() -> typer.Typer:
    """The application with all commands."""
    app = typer.Typer(
        name="pagedtune",
        help="Find, prove and ship the fastest correct paged-attention kernel for a device and a model shape.\n\n"
        "Start with `pagedtune tune`: it takes about five minutes with its set-up.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for part in (cli_show, cli_check, cli_emulate, cli_tune, cli_explain, cli_report, cli_export, cli_replay):
        part.register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 ok, 1 failure found, 2 usage or environment.

    Wrong input is one line on stderr.
    """
    command = typer.main.get_command(make_app())
    try:
        code = command.main(args=arguments, prog_name="pagedtune", standalone_mode=False)
        sys.stdout.flush()  # a pipe that nobody reads any more is noticed here, not at the interpreter's end
    except UsageError as error:
        return _refuse(str(error))
    except _COMMAND_LINE_ERROR as error:
        return _refuse_command_line(error)
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)  # from outside a command: typer makes code 130 of one inside
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:  # `pagedtune winners | head`: click and rich exit, with code 1
        if not isinstance(error, BrokenPipeError) and not isinstance(error.__context__, BrokenPipeError):
            raise
        # What is still buffered must find an open pipe when the interpreter ends, or the exit code is 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return EXIT_USAGE


def _refuse_command_line(error: Any) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "pagedtune"
    text = " ".join(error.format_message().split())
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        print(error.format_message())
        return EXIT_USAGE
    return _refuse(f"{text.rstrip('.')} (`{path} --help` shows what there is)")


if __name__ == "__main__":
    sys.exit(main())
