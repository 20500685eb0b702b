"""Is the first stop signal noted, and only a second SIGINT deadly?"""

from __future__ import annotations

import os
import signal

import pytest

from trainer.signals import StopRequest, stop_requests


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_real_signal_is_noted_and_the_old_handler_comes_back(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with stop_requests() as request:
        assert request.exit_code == 0
        os.kill(os.getpid(), number)
        assert request.exit_code == code
    assert signal.getsignal(number) is before


def test_only_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    request = StopRequest()
    put_back: list[bool] = []
    request.before_abort = lambda: put_back.append(True)
    request.receive(signal.SIGINT)
    request.receive(signal.SIGTERM)
    assert ended == put_back == []
    request.receive(signal.SIGINT)
    assert ended == [130]
    assert put_back == [True]
    assert request.stop_signal is signal.SIGINT
