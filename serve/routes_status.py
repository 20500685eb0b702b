"""The routes that tell what the server has: /health, /models, /run, /metrics.

Owns their answers. Knows nothing of sockets.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.responses import PlainTextResponse, Response

from serve.catalogue import Catalogue, ServedStore
from serve.errors import ApiError, of_store
from serve.health import Health
from serve.incoming import Incoming
from serve.run_view import RunViews
from serve.service import Service
from serve.sse import Json
from serve.statistics import SchedulerStatistics
from shardb.errors import NotFoundError, ShardbError
from shardb.state import DEFAULT_BRANCH

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StatusRoutes:
    """The routes, with what they remember between two requests."""

    def __init__(self, service: Service) -> None:
        self.health_looks = Health(service.catalogue, service.scheduler.statistics)
        self._views = RunViews()

    async def health(self, service: Service, incoming: Incoming) -> Response:
        """Answer GET /health."""
        del incoming
        return Json({**await self.health_looks.look(), "stopping": service.is_stopping})

    async def models(self, service: Service, incoming: Incoming) -> Response:
        """Answer GET /models: every store with its roles, names and retained steps."""
        del incoming
        stores = await _in_thread(_store_rows, service.catalogue)
        now = service.scheduler.statistics()
        return Json({"models": stores, "resident": _resident(now)})

    async def run(self, service: Service, incoming: Incoming) -> Response:
        """Answer GET /run?store=…&branch=…."""
        store = _store(service.catalogue, incoming.query("store"))
        branch = incoming.query("branch") or DEFAULT_BRANCH
        try:
            view = await asyncio.to_thread(self._views.view, store, branch)
        except NotFoundError as error:
            raise ApiError(404, error.message, code="branch_not_found", param="branch") from error
        except ShardbError as error:
            raise of_store(error, branch) from error
        now = service.scheduler.statistics()
        return Json({**view, "resident": _resident(now), "scheduler": asdict(now)})

    async def metrics(self, service: Service, incoming: Incoming) -> Response:
        """Answer GET /metrics."""
        del incoming
        steps = await _in_thread(_steps, service.catalogue)
        text = service.metrics.text(
            service.scheduler.statistics(),
            active=service.admission.active,
            refused=service.admission.refused,
            steps=steps,
        )
        return PlainTextResponse(text, media_type=METRICS_TYPE)


async def _in_thread(work: Any, catalogue: Catalogue) -> Any:
    try:
        return await asyncio.to_thread(work, catalogue)
    except ShardbError as error:
        raise of_store(error, "of a served store") from error


def _store(catalogue: Catalogue, name: str | None) -> ServedStore:
    store = catalogue.stores[0] if name is None else catalogue.store(name)
    if store is None:
        raise ApiError(404, "no served store has this name", code="store_not_found", param="store")
    return store


def _steps(catalogue: Catalogue) -> list[tuple[dict[str, str], int]]:
    found = []
    for store in catalogue.stores:
        pinned = store.current()
        found.append(({"role": store.role, "store": store.name}, pinned.commit.step))
        pinned.release()
    return found


def _store_rows(catalogue: Catalogue) -> list[dict[str, Any]]:
    return [_store_row(store) for store in catalogue.stores]


def _store_row(store: ServedStore) -> dict[str, Any]:
    pinned = store.current()
    commit = pinned.commit
    pinned.release()
    looking = store.models.store
    return {
        "id": store.role,
        "store": store.name,
        "follow": store.follow,
        "commit": commit.id,
        "step": commit.step,
        "branch": commit.branch,
        "parameters_bytes": sum(
            entry.bytes for name, entry in commit.shards.items() if name.startswith("params/")
        ),
        "max_model_len": pinned.config.max_position_embeddings,
        "branches": {name: head.step for name, head in looking.branches().items()},
        "snapshots": {name: pin.step for name, pin in looking.snapshots().items()},
        "retained_steps": sorted({kept.step for kept in looking.commits()}),
    }


def _resident(now: SchedulerStatistics) -> dict[str, Any]:
    return {
        "stages": now.resident_stages,
        "bytes": now.resident_bytes,
        "kv_bytes_used": now.kv_bytes_used,
        "kv_bytes_total": now.kv_bytes_total,
    }
