"""What to type where the storage does not show a file: its bytes may be whole, so it is no damage.

Owns the choice of the command, by what the operating system said and whose the file is. Knows
nothing of what the file is for. No command of the store's helps here; `shardb repair` refuses.
"""

from __future__ import annotations

import errno
import os
from shlex import quote

from shardb.filesystem import FileSystem
from shardb.findings import command

REFUSED = (errno.EACCES, errno.EPERM)
READ_BY_OWNER = 0o400
# Damage has none of these: the file is where it should be, and nobody has seen what is in it.
UNSHOWN = (*REFUSED, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def command_to_see(files: FileSystem, root: str, path: str, code: int | None) -> str | None:
    """The command after which a file of the store at `root` can be read, or that says more of it.

    None where nothing that is typed helps, as with a disk that fails.
    """
    if code == errno.ENOENT:
        return f"readlink {quote(path)}"
    if code not in REFUSED:
        return None
    me, store_owner = os.geteuid(), files.status(root).owner
    try:
        status = files.status(path)
    except OSError:  # it is behind a directory that nobody but its owner looks into
        return _as_owner(root, store_owner)
    if status.owner == me and not status.mode & READ_BY_OWNER:
        return f"chmod u+r {quote(path)}"
    if store_owner == me and status.owner != me:
        return f"sudo chown {me} {quote(path)}"
    return _as_owner(root, store_owner)


def _as_owner(root: str, owner: int) -> str:
    return f"sudo -u '#{owner}' {command('fsck', root)}"
