"""What every command of the trainer shares: how an error becomes a message and an exit code.

Owns the one place where errors end. Knows nothing of what commands do. Invariant: a user's error is
one line on standard error, never a traceback; a mistake of ours is a traceback, never hidden.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, NoReturn

import typer

from shardb.errors import EXIT_CODES, ShardbError
from shardb.storage_errors import ADVICE, FULL
from trainer.ending_signals import INTERRUPTED, ending_signals
from trainer.help_cli import GroupedCommand

# What a machine refuses, not what was typed: of a missing file or a right the user is told with 2.
_MACHINE = (
    errno.EIO,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EINTR,
    errno.EROFS,
    errno.EFBIG,
)


def new_app(command: Any, help_text: str) -> typer.Typer:
    """Make the command line of one command; its help ends with the table of exit codes."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=f"{help_text}\n{exit_code_table()}", cls=GroupedCommand)(command)
    return app


def answer(app: typer.Typer, arguments: list[str], name: str) -> int:
    """Parse and do; give the exit code."""
    try:
        code = app(args=arguments, prog_name=name, standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except ShardbError as error:
        return fail(str(error), error.exit_code)
    except OSError as error:
        return fail(_os_error_text(error), _os_exit_code(error))
    except MemoryError:
        return fail("out of memory: `train --dry-run` says what needs most of it", 2)
    except Exception as error:
        # Usage errors of the command-line library know the flag and the nearest name. They are
        # recognised by their method, because their class lives elsewhere from version to version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        called = context.command_path if context is not None else name
        return fail(f"{error.format_message()} (see `{called} --help`)", 2)
    return int(code or 0)


def run_command(command: Any, help_text: str, name: str) -> NoReturn:
    """Be a command that an interrupt or SIGTERM ends through every `finally`; exits the process."""
    try:
        with ending_signals():
            let_waiting_threads_sleep()
            code = answer(new_app(command, help_text), sys.argv[1:], name)
    except KeyboardInterrupt:
        code = INTERRUPTED
    # The command line library turns the exception into the code, in some of its versions.
    sys.exit(fail("interrupted", code) if code == INTERRUPTED else code)


def let_waiting_threads_sleep() -> None:
    """Tell OpenMP, before torch loads it, not to spin at barriers; the user's own choice stays.

    Threads that spin lose their time slices to whoever else is busy: measured on two cores with
    one other busy process, a step takes up to twenty times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def fail(message: str, code: int) -> int:
    """Print an error and give its exit code."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def exit_code_table() -> str:
    """Give the table of exit codes as help text."""
    rows = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    return f"\b\nExit codes:\n{rows}"


def _os_exit_code(error: OSError) -> int:
    if error.errno in FULL:
        return 6
    return 7 if error.errno in _MACHINE else 2


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    advice = f": {ADVICE[error.errno]}" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"{where}{error.strerror or error}{advice}"
