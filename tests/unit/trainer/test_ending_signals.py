"""Does a signal end a command wherever it arrives, and leave its cleaning up alone?"""

from __future__ import annotations

import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from trainer.command_cli import run_command
from trainer.ending_signals import AGAIN_SECONDS, ending_signals


class _Watched:
    pass


def in_a_callback(number: int) -> None:
    """Receive a signal where Python prints exceptions and goes on, as inside each import."""
    watched = _Watched()
    watch = weakref.ref(watched, lambda _: signal.raise_signal(number))
    del watched
    assert watch() is None


def in_a_library(number: int) -> None:
    """Receive a signal where any exception is taken for a no."""
    try:
        signal.raise_signal(number)
    except BaseException:  # noqa: BLE001 - what is to be shown
        time.sleep(2 * AGAIN_SECONDS)


def command(arrive: Callable[[], None], *, seconds: float = 1.0) -> None:
    with ending_signals():
        arrive()
        work_on(seconds)


def work_on(seconds: float = 1.0) -> None:
    """Do what a command does after that; a second is more than it may get."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep Python from printing what it swallows."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.mark.parametrize("arrive", [signal.raise_signal, in_a_callback, in_a_library])
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_is_a_swallowed_signal_raised_again(
    arrive: Callable[[int], None], number: int, ends: type[BaseException]
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    with pytest.raises(ends):
        command(lambda: arrive(number))
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert after == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_python_alone_goes_on() -> None:
    """The control: what is raised there is lost."""
    in_a_callback(signal.SIGINT)
    in_a_library(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_is_cleaning_up_left_alone() -> None:
    done: list[int] = []

    def arrive() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            for number in range(4):
                clean_up(number)
                done.append(number)

    with pytest.raises(KeyboardInterrupt):
        command(arrive)
    assert done == [0, 1, 2, 3]


def clean_up(number: int) -> None:
    try:
        raise OSError(number)
    except OSError:
        time.sleep(AGAIN_SECONDS)
    time.sleep(AGAIN_SECONDS / 2)


def test_does_what_ignores_an_interrupt_go_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command(lambda: signal.raise_signal(signal.SIGINT), seconds=0.1)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_does_a_command_end_with_the_code_of_a_swallowed_signal(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export() -> int:
        in_a_callback(number)
        work_on()
        return 0

    monkeypatch.setattr(sys, "argv", ["export"])
    with pytest.raises(SystemExit) as ended:
        run_command(export, "Export.", "export")
    assert ended.value.code == code
    assert capsys.readouterr().err == ("error: interrupted\n" if code == 130 else "")
