"""Are answers counted, keys compared, and is what is told of it well formed?"""

from __future__ import annotations

import re

import pytest

from serve.errors import ApiError, of_store
from serve.health import SweepWatch
from serve.limits import Admission, Limits, check_key
from serve.metrics import SECONDS_BOUNDS, Metrics
from serve.statistics import SchedulerStatistics
from shardb.errors import (
    NotFoundError,
    ObjectCorruptError,
    ShardbError,
    StorageFailedError,
)

SAMPLE = re.compile(r'([a-z_]+)(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? (\S+)\Z')


def test_is_a_full_server_honest() -> None:
    admission = Admission(Limits(answers_running=2, answers_queued=1))
    tickets = [admission.enter(1) for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        admission.enter(1)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert int(caught.value.headers["retry-after"]) >= 1
    tickets[0].leave()
    tickets[0].leave()
    assert admission.active == 2
    admission.enter(1)
    assert admission.refused == 1


def test_is_a_large_request_alone_let_in() -> None:
    admission = Admission(Limits(answers_running=2, answers_queued=0))
    ticket = admission.enter(5)
    with pytest.raises(ApiError):
        admission.enter(1)
    ticket.leave()
    assert admission.active == 0


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic secret", "secret", "Bearer secret2"]
)
def test_is_a_wrong_key_refused(given: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        check_key(["secret", "other"], given)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_are_right_keys_let_in() -> None:
    check_key([], None)
    check_key(["é", "secret"], "Bearer secret")
    check_key(["secret"], "bearer  secret ")
    with pytest.raises(ApiError):
        check_key(["secret"], "Bearer \u00e9")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ObjectCorruptError("/a/secret/path: bad"), 503, "object_corrupt"),
        (StorageFailedError("/a/secret/path: bad"), 503, "storage_failed"),
        (NotFoundError("/a/secret/path: no"), 404, "model_not_found"),
        (ShardbError("/a/secret/path"), 500, "error"),
    ],
)
def test_is_a_path_of_the_server_never_told(error: ShardbError, status: int, code: str) -> None:
    told = of_store(error, "abc")
    assert (told.status, told.code) == (status, code)
    assert "secret" not in told.message
    assert "abc" in told.message


def test_are_metrics_well_formed() -> None:
    metrics = Metrics()
    metrics.answered("/a", 200, 0.02)
    metrics.answered("/a", 200, 700.0)
    metrics.first_token.observe(0.3)
    statistics = SchedulerStatistics(sweeps=4, requests_in_sweeps=8, requests_running=3)
    steps = [({"role": "primary", "store": 'odd "name"\\'}, 7)]
    text = metrics.text(statistics, active=2, refused=1, steps=steps)
    lines = text.splitlines()
    samples = {}
    for line in lines:
        if line.startswith("#"):
            assert re.match(r"# (HELP|TYPE) [a-z_]+ \S", line), line
            continue
        if 'odd \\"name\\"' not in line:
            assert SAMPLE.match(line), line
        name, _, value = line.rpartition(" ")
        assert name not in samples
        samples[name] = float(value)
    assert samples['shardb_serve_requests_total{route="/a",status="200"}'] == 2
    assert samples['shardb_serve_request_seconds_bucket{route="/a",le="0.025"}'] == 1
    assert samples['shardb_serve_request_seconds_bucket{route="/a",le="+Inf"}'] == 2
    assert samples['shardb_serve_request_seconds_count{route="/a"}'] == 2
    assert samples["shardb_serve_scheduler_requests_per_sweep"] == 2
    assert samples["shardb_serve_scheduler_requests_running"] == 3
    assert samples["shardb_serve_scheduler_sweeps_total"] == 4
    told = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(told) == len(set(told))
    assert len(SECONDS_BOUNDS) == len(set(SECONDS_BOUNDS))


def test_is_a_scheduler_that_stands_still_noticed() -> None:
    watch = SweepWatch(stalled_seconds=10)
    busy = SchedulerStatistics(sweeps=5, requests_running=1)
    watch.check(busy, 100.0)
    watch.check(busy, 109.0)
    with pytest.raises(ApiError) as caught:
        watch.check(busy, 111.0)
    assert caught.value.code == "stalled"
    watch.check(SchedulerStatistics(sweeps=6, requests_running=1), 112.0)
    watch.check(SchedulerStatistics(sweeps=6), 500.0)
    watch.check(SchedulerStatistics(sweeps=6, requests_waiting=1), 505.0)
