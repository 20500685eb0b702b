"""From flags to a listening server.

Owns the checks before anything is opened, the order in which parts begin and end, and what is said
meanwhile. Knows nothing of requests. Invariants: what is wrong with a flag or a file is said before
the port is opened; when the server ends, its answers have ended, then its leases.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from serve.catalogue import Catalogue, StoreSource
from serve.chat_template import ChatFormat, TemplateFormat, adapter
from serve.errors import ApiError
from serve.limits import Limits
from serve.package_files import json_of, text_of
from serve.scheduler import Scheduler, SchedulerOptions
from serve.service import Service
from serve.web_server import make_server
from serve.weights import stage_places
from trainer.data.chat_environment import special_tokens_of
from trainer.errors import InputError
from trainer.sizes import size_of

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
# Less holds the keys and values of no request worth the name.
KV_CACHE_BYTES_MIN = 1 << 20
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartOptions:
    """The flags of `serve`, as they were given."""

    store: str
    ref: str | None = None
    follow: bool = False
    backup_store: str | None = None
    backup_ref: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    chat_adapter: str = "plain"
    host: str = "127.0.0.1"
    port: int = 8010
    device: str = "cpu"
    dtype: str = "fp32"
    max_resident_bytes: str = "all"
    kv_cache_bytes: str = "1GiB"
    preload: bool = False
    prefill_chunk: int = 512
    max_running: int = 64
    ngram_speculation: int = 0
    api_key: Sequence[str] | None = None
    api_key_file: str | None = None
    max_queue: int = 256
    max_tokens: int = 0
    max_body_bytes: str = "4MiB"
    max_connections: int = 1024
    request_seconds: float = 600.0
    reader_seconds: float = 30.0
    drain_seconds: float = 30.0
    allow_network: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that no server can keep to."""
        least = {
            "port": 0, "prefill_chunk": 1, "max_running": 1, "ngram_speculation": 0,
            "max_queue": 0, "max_tokens": 0, "max_connections": 1, "request_seconds": 0.001,
            "reader_seconds": 0.001, "drain_seconds": 0,
        }  # fmt: skip
        for name, low in least.items():
            if not getattr(self, name) >= low:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} is {getattr(self, name)}: give {low} or more")
        if self.port > 65535:
            raise InputError(f"--port is {self.port}: give 0 to 65535")


def serve(options: StartOptions, say: Say) -> int:
    """Serve until a signal; give the exit code."""
    limits = limits_of(options)
    keys = api_keys_of(options)
    scheduler_options = scheduler_options_of(options)
    sources = sources_of(options)
    files = tokenizer_files_of(options)
    catalogue = Catalogue(
        sources,
        follow=options.follow,
        chat=adapter(options.chat_adapter),
        template=template_of_flag(options),
        tokenizer_files=files,
    )
    with closing(catalogue), closing(listening_socket(options.host, options.port)) as listener:
        if not keys and not is_loopback(options.host):
            say(
                f"warning: {options.host} can be reached from other machines, and no key is asked"
                " for: give --api-key-file, or listen on 127.0.0.1"
            )
        check_served(catalogue)
        first = catalogue.acquire("primary")
        scheduler = Scheduler(scheduler_options)
        try:
            if options.preload:
                say("reading the stages")
                scheduler.preload(first.pinned)
            commit = first.pinned.commit
            first.release()
            service = Service(
                catalogue=catalogue, scheduler=scheduler, limits=limits, api_keys=keys
            )
            server = make_server(
                service,
                host=options.host,
                port=options.port,
                drain_seconds=options.drain_seconds,
            )
            logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            say(
                f"serving step {commit.step} (commit {commit.id}) on http://{shown}:{port}/"
                f"{' and following' if options.follow else ''}"
            )
            asyncio.run(server.serve(sockets=[listener]))
        finally:
            # Answers that were still being made when the time to drain was over end here.
            scheduler.close(drain=False)
        if server.stop_signal is not None:
            say(f"{server.stop_signal.name}: stopped")
        return server.exit_code


def check_served(catalogue: Catalogue) -> None:
    """Say now, not to a client, which role cannot be answered from.

    Raises:
        InputError: a model has no tokenizer, or one that cannot be read.
    """
    for store in catalogue.stores:
        try:
            model = catalogue.acquire(store.role)
        except ApiError as error:
            raise InputError(f"{store.role}, the store {store.name}: {error.message}") from error
        try:
            stage_places(model.pinned)
        finally:
            model.release()


def limits_of(options: StartOptions) -> Limits:
    """Give what clients may ask for."""
    return Limits(
        answers_running=options.max_running,
        answers_queued=options.max_queue,
        body_bytes=size_of(options.max_body_bytes, "--max-body-bytes"),
        request_seconds=options.request_seconds,
        reader_seconds=options.reader_seconds,
        connections=options.max_connections,
        max_tokens=options.max_tokens,
    )


def scheduler_options_of(options: StartOptions) -> SchedulerOptions:
    """Give what the scheduler may use."""
    resident = options.max_resident_bytes
    return SchedulerOptions(
        device=options.device,
        dtype=options.dtype,
        max_resident_bytes=(
            None if resident == "all" else size_of(resident, "--max-resident-bytes", least=0)
        ),
        kv_cache_bytes=size_of(
            options.kv_cache_bytes, "--kv-cache-bytes", least=KV_CACHE_BYTES_MIN
        ),
        prefill_chunk=options.prefill_chunk,
        max_requests_per_sweep=options.max_running,
        preload=options.preload,
        ngram_speculation=options.ngram_speculation,
    )


def sources_of(options: StartOptions) -> list[StoreSource]:
    """Give the stores with their roles."""
    if options.backup_ref is not None and options.backup_store is None:
        backup_store: str | None = options.store
    else:
        backup_store = options.backup_store
    named = [("primary", options.store, options.ref), ("backup", backup_store, options.backup_ref)]
    return [
        StoreSource(role=role, path=path, ref=ref, allow_network=options.allow_network)
        for role, path, ref in named
        if path is not None
    ]


def api_keys_of(options: StartOptions) -> tuple[str, ...]:
    """Give the keys of the flags and of the file."""
    keys = list(options.api_key or ())
    if options.api_key_file is not None:
        lines = _read(options.api_key_file, "--api-key-file").decode("utf-8", "replace")
        keys += [line.strip() for line in lines.splitlines() if line.strip()]
        if not keys:
            raise InputError(f"{options.api_key_file}: holds no key: write one a line")
    if any(not key for key in keys):
        raise InputError("--api-key is empty: give a key")
    return tuple(keys)


def tokenizer_files_of(options: StartOptions) -> dict[str, bytes] | None:
    """Read the folder of --tokenizer; a path of tokenizer.json itself is fine too."""
    if options.tokenizer is None:
        return None
    folder = Path(options.tokenizer)
    if folder.is_file():
        return {"tokenizer.json": folder.read_bytes()}
    found = {name: folder / name for name in TOKENIZER_FILES}
    if not found["tokenizer.json"].is_file():
        raise InputError(f"{folder}: no tokenizer.json is there: give the folder that has one")
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}


def template_of_flag(options: StartOptions) -> ChatFormat | None:
    """Read the file of --chat-template."""
    if options.chat_template is None:
        return None
    source = text_of(_read(options.chat_template, "--chat-template"), options.chat_template)
    config = json_of(tokenizer_files_of(options) or {}, "tokenizer_config.json")
    return TemplateFormat(source, special_tokens_of(config))


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int) -> socket.socket:
    """Take the port before anything slow begins; InputError where somebody has it."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # whoever is told of the address may come at once, and waits
    except OSError as error:
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror or error}: give another --host"
            " or --port"
        ) from error
    return listener


def _read(path: str, flag: str) -> bytes:
    if not Path(path).is_file():
        raise InputError(f"{flag} {path}: no such file")
    return Path(path).read_bytes()
