"""Can every flag be read in a help, and typed as it stands there, on a terminal of 80 columns?"""

from __future__ import annotations

import re

import pytest

from serve import cli as serve_cli
from tests.support.export_commands import run_here
from trainer.cli import run as train
from trainer.command_cli import answer, new_app
from trainer.help_cli import ARGUMENTS, OTHERS
from trainer.recipe_flags import FLAGS
from trainer.signals import StopRequest


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_is_no_flag_of_train_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--help"], StopRequest()) == 0
    text = capsys.readouterr().out
    told = set(re.findall(r"--[a-z][a-z0-9-]*", text))
    assert {name.partition("/")[0] for flag in FLAGS for name in flag.names} <= told
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == [*dict.fromkeys(str(flag.scope) for flag in FLAGS), OTHERS]
    assert not [line for line in text.split(f"{titles[0]}:")[1].splitlines() if len(line) > 80]


def test_do_arguments_stand_before_options(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_here(capsys, "hf", "--help")
    text = ended.out
    assert re.findall(r"^(\S.*):$", text, re.MULTILINE) == [ARGUMENTS, OTHERS]
    assert text.index("\n  store") < text.index("\n  --allow-padded-vocabulary / --no-allow-padded")
    assert answer(new_app(serve_cli.command, serve_cli.HELP), ["--help"], "serve") == 0
    assert "--ngram-speculation" in capsys.readouterr().out
