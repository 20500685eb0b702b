"""What does a command end with where the operating system refuses something beside the store?"""

from __future__ import annotations

import errno
import os

import pytest

from trainer.command_cli import answer, new_app


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, 6),
        (errno.EDQUOT, 6),
        (errno.EIO, 7),
        (errno.ENOMEM, 7),
        (errno.EMFILE, 7),
        (errno.EINTR, 7),
        (errno.EROFS, 7),
        (errno.ENOENT, 2),
        (errno.EACCES, 2),
    ],
)
def test_is_a_machine_that_refuses_no_bad_input(
    number: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise OSError(number, os.strerror(number), "run/logs/steps.jsonl")

    assert answer(new_app(command, "Help."), [], "train") == code
    said = capsys.readouterr().err
    assert f"run/logs/steps.jsonl: {os.strerror(number)}" in said
    assert ("ulimit -n" in said) is (number == errno.EMFILE)
