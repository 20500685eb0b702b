"""The command `shardb`: one verb a module, put together here.

Owns the list of verbs, what their helps share, and the one place where an error becomes a line on
standard error and an exit code. Invariant: a user's error is one line, never a traceback; a mistake
of ours is a traceback, never hidden.
"""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer

import shardb
from shardb.cli import (
    branch,
    cat,
    clone,
    diff,
    fsck,
    gc,
    info,
    init,
    log,
    pack,
    policy,
    publish,
    recover,
    repair,
    rewind,
    rm,
    show,
    snapshot,
    transfer,
)
from shardb.errors import EXIT_CODES, CorruptionError, ShardbError, StorageFailedError
from shardb.filesystem import RealFileSystem, leads_nowhere
from shardb.storage_errors import reason

VERBS: dict[str, Callable[..., Any]] = {
    "init": init.init,
    "info": info.info,
    "log": log.log,
    "ls": show.ls,
    "show": show.show,
    "cat": cat.cat,
    "diff": diff.diff,
    "snapshot": snapshot.snapshot,
    "snapshots": snapshot.snapshots,
    "branch": branch.branch,
    "branches": branch.branches,
    "rewind": rewind.rewind,
    "rm": rm.rm,
    "policy": policy.policy,
    "recover": recover.recover,
    "fsck": fsck.fsck,
    "repair": repair.repair,
    "gc": gc.gc,
    "pack": pack.pack,
    "unpack": pack.unpack,
    "du": pack.du,
    "push": transfer.push,
    "pull": transfer.pull,
    "clone": clone.clone,
    "publish": publish.publish,
}
HELP = """Look at and look after a store of shards: the weights and optimizer state of a run.

\b
Examples:
  shardb log run                  every step that was committed
  shardb show run step-3000       one commit: metrics, shards, digests
  shardb snapshot run step-3000   keep the commit of step 3000 for good
  shardb rewind run main --to step-3000   go back; says how to undo it
  shardb fsck run                 read every byte and check it
  shardb repair run               say how damage would be mended, and what is lost by it
  shardb push run s3://bucket/a   copy the newest step to object storage, or to another path

STORE may be left out: then $SHARDB_STORE is meant, else the current directory if it is a store.
All verbs may run beside a live `train`, but `init`, and `repair` of a damaged log.
"""
INTERRUPTED = 130
_OS_EXIT_CODES = {
    errno.ENOSPC: 6,
    errno.EDQUOT: 6,
    errno.ENOENT: 4,
    **dict.fromkeys((errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV), 7),
}


def main() -> None:
    """Run the command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Parse and do; give the exit code, with the message of an error on standard error."""
    try:
        code = app(args=arguments, prog_name="shardb", standalone_mode=False)
    except typer.Exit as ended:
        code = ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except ShardbError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit as ended:
        # So ends the command line library, with 1, when the reader closed standard output.
        if isinstance(ended.__context__, BrokenPipeError):
            return 0
        raise
    except BrokenPipeError:
        # The reader, `head` for instance, has what it wanted. Closed, so that nothing is flushed.
        with suppress(BrokenPipeError):
            sys.stdout.close()
        return 0
    except OSError as error:
        return _fail(_os_error_text(error), _os_exit_code(error))
    except Exception as error:
        # Usage errors of the command line library know the argument and the nearest name. They are
        # recognised by this method because not every version of the library exports their class.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        called = context.command_path if context is not None else "shardb"
        return _fail(f"{error.format_message()} (see `{called} --help`)", 2)
    if code == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)  # the command line library turns SIGINT into this
    return int(code or 0)


def exit_code_table() -> str:
    """The table that every help ends with."""
    rows = "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())
    return f"\b\nExit codes:\n{rows}"


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{reason(RealFileSystem(), error)}"


def _os_exit_code(error: OSError) -> int:
    name = error.filename
    if isinstance(name, str) and leads_nowhere(RealFileSystem(), name):
        return StorageFailedError.exit_code  # something is there: it leads to what is not
    return _OS_EXIT_CODES.get(error.errno or 0, CorruptionError.exit_code)


def _whole(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if version:
        print(f"shardb {shardb.__version__}")
        raise typer.Exit(0)
    raise typer.Exit(_fail("a verb is missing (see `shardb --help`)", 2))


def _build() -> typer.Typer:
    built = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    whole = f"{HELP}\n{exit_code_table()}"
    built.callback(invoke_without_command=True, help=whole)(_whole)
    for name, verb in VERBS.items():
        built.command(name, help=f"{inspect.getdoc(verb)}\n\n{exit_code_table()}")(verb)
    return built


app = _build()
