"""An import: every check, then every tensor into one transaction, a shard in memory at a time.

Owns the order. Knows nothing of the command line. Invariants: nothing is written before everything
that can be checked without reading the tensors is; the commit is the only moment at which anything
becomes visible, so a killed import leaves the store as it was and is begun again; what is stored
has the package's own bytes unless another form was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import shardb
from export.families import Place, places
from export.import_config import CONFIG, ReadConfig, read_model_config
from export.import_files import StoredTensor, open_package, read_json
from export.import_names import Match, match
from export.import_tensors import Filler, stored_dtype
from export.import_tokenizer import TokenizerFiles, read_tokenizer
from export.source_package import SourcePackage, SourceTensor, write_source
from shardb import Commit, Store, TensorSpec, Transaction
from shardb.errors import ConflictError, StorageFullError
from shardb.filesystem import RealFileSystem
from shardb.layout import check_name
from shardb.refs import STEP_PATTERN
from shardb.state import DEFAULT_BRANCH
from trainer.errors import InputError
from trainer.model.stored import SOURCE_SHARD, TOKENIZER_SHARD, write_bytes, write_model

# What the log, the index and the rounding up to pages take beside the tensors.
SPARE_BYTES = 64 << 20
DTYPES: Mapping[str, str] = MappingProxyType(
    {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """A package that is checked and may be imported."""

    directory: Path
    read: ReadConfig
    source: SourcePackage
    stored: Mapping[str, StoredTensor]
    places: Mapping[str, Place]
    tokenizer: TokenizerFiles
    dtype: str | None
    notes: tuple[str, ...]

    @property
    def parameter_count(self) -> int:
        """Numbers that are stored."""
        return sum(_count(place.shape) for place in self.places.values())

    def specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Give every shard's tensors as they are stored, in the package's order of stages."""
        found: dict[str, dict[str, TensorSpec]] = {}
        for name, place in self.places.items():
            dtype = stored_dtype(self.stored[name], self.dtype)
            spec = TensorSpec(dtype=dtype, shape=place.shape)
            found.setdefault(place.shard, {})[place.tensor] = spec
        return found


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What an import made."""

    commit: Commit
    snapshot: str
    stored_bytes: int
    notes: tuple[str, ...]


def plan_import(directory: Path, *, dtype: str | None = None, stages: str = "auto") -> ImportPlan:
    """Check a package; InputError names the file, the field or the tensor that is wrong."""
    config = read_json(directory / CONFIG)
    if config is None:
        raise InputError(f"{directory}: there is no {CONFIG}: give the folder of a whole package")
    try:
        read = read_model_config(config, stages=stages)
        files = open_package(directory)
        wanted = places(read.family, read.model)
        found = match(wanted, files.tensors, tied=read.model.tied_embeddings)
    except InputError as error:
        if str(directory) in error.message:
            raise
        raise InputError(f"{directory}: {error.message}") from error
    tokenizer = read_tokenizer(directory, read.model.vocab_size)
    return ImportPlan(
        directory=directory,
        read=read,
        source=_source(directory, config, found, files.tensors),
        stored=files.tensors,
        places=wanted,
        tokenizer=tokenizer,
        dtype=dtype,
        notes=(
            *read.notes,
            *files.notes,
            *found.notes,
            *_dtype_notes(config, wanted, files.tensors),
            *tokenizer.notes,
        ),
    )


def _dtype_notes(
    config: Mapping[str, object], wanted: Mapping[str, Place], stored: Mapping[str, StoredTensor]
) -> list[str]:
    """Say so where readers that follow config.json would round the weights."""
    told = config.get("dtype") or config.get("torch_dtype")
    forms = {stored[name].spec.dtype for name in wanted}
    if told is None or forms == {DTYPES.get(str(told))}:
        return []
    return [f"{CONFIG} says {told}, the tensors are {', '.join(sorted(forms))}: they are kept"]


def _source(
    directory: Path,
    config: Mapping[str, object],
    found: Match,
    stored: Mapping[str, StoredTensor],
) -> SourcePackage:
    tensors = tuple(
        SourceTensor(
            name=name,
            shard=place.shard,
            tensor=place.tensor,
            dtype=stored[name].spec.dtype,
            shape=place.shape,
        )
        for name, place in sorted(found.places.items())
    )
    return SourcePackage(
        config=config,
        generation_config=read_json(directory / "generation_config.json"),
        tensors=tensors,
        aliases=found.aliases,
    )


def run_import(
    plan: ImportPlan,
    store_path: Path,
    *,
    branch: str = DEFAULT_BRANCH,
    allow_network: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Make the package the first commit of a branch, and pin it as a snapshot.

    Raises ConflictError when the branch exists, StorageFullError before anything is written.
    """
    check_name(branch, "branch")
    if STEP_PATTERN.match(branch):
        raise InputError(f"--branch {branch}: names of the form step-N mean steps; choose another")
    _check_place(store_path)
    store_path.absolute().parent.mkdir(parents=True, exist_ok=True)
    specs = plan.specs()
    whole = sum(spec.bytes for shard in specs.values() for spec in shard.values())
    _check_space(store_path, whole)
    with shardb.open(
        store_path,
        create=True,
        cache_bytes=1,
        writer_threads=0,
        max_pending_writes=1,
        allow_network=allow_network,
    ) as store:
        snapshot = "imported" if branch == DEFAULT_BRANCH else f"imported-{branch}"
        _refuse_history(store, branch, snapshot)
        with store.begin(branch) as txn:
            if txn.base is not None:
                raise _taken(store, branch, txn.base)
            notes = _stage(plan, specs, txn, whole, progress)
            commit = txn.commit(step=0, state=_state(plan), metrics={})
        store.create_snapshot(snapshot, commit.id)
        return Imported(commit=commit, snapshot=snapshot, stored_bytes=whole, notes=notes)


def _stage(
    plan: ImportPlan,
    specs: Mapping[str, Mapping[str, TensorSpec]],
    txn: Transaction,
    whole: int,
    progress: Progress | None,
) -> tuple[str, ...]:
    """Stage every shard, each let go before the next is begun; give what was noticed."""
    names = {(place.shard, place.tensor): name for name, place in plan.places.items()}
    filler = Filler()
    done = 0
    for shard, tensors in specs.items():
        staged = txn.stage(shard, tensors, trainable=False)
        with txn.filling(shard):
            for tensor in staged.specs:
                filler.fill(names[shard, tensor], plan.stored[names[shard, tensor]], staged, tensor)
        staged.seal()
        del staged
        txn.let_go(shard)
        done += sum(spec.bytes for spec in tensors.values())
        if progress is not None:
            progress(done, whole)
    write_model(txn, plan.read.model)
    write_source(txn, plan.source, plan.tokenizer.beside)
    if plan.tokenizer.tokenizer is not None:
        write_bytes(txn, TOKENIZER_SHARD, plan.tokenizer.tokenizer)
    return filler.notes()


def _state(plan: ImportPlan) -> dict[str, object]:
    return {
        "imported": {
            "model_type": plan.source.model_type,
            "parameters": plan.parameter_count,
            "dtype": plan.dtype,
        }
    }


def _refuse_history(store: Store, branch: str, snapshot: str) -> None:
    """An import begins a branch. One that was killed after its commit gets its snapshot."""
    head = store.branches().get(branch)
    if head is None:
        return
    if head.step == 0 and SOURCE_SHARD in head.shards:
        store.create_snapshot(snapshot, head.id)
    raise _taken(store, branch, head)


def _taken(store: Store, branch: str, head: Commit) -> ConflictError:
    what = "holds an imported model" if SOURCE_SHARD in head.shards else "holds a run"
    return ConflictError(
        f"{store.root}: branch {branch} {what} at step {head.step} already: give another --branch"
        " or another --store"
    )


def _check_place(path: Path) -> None:
    if not path.exists() or (path / "FORMAT").exists() or (path / "wal").is_dir():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise InputError(f"{path}: exists and holds no store: give another --store")


def _check_space(path: Path, whole: int) -> None:
    """Refuse before anything is written what cannot fit. Equal shards may need less."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    free = RealFileSystem().space(str(existing)).free_bytes
    if whole + SPARE_BYTES > free:
        raise StorageFullError(
            f"{path}: the import needs {whole + SPARE_BYTES:,} bytes, {free:,} are free: free some,"
            " or give a --store on another disk"
        )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def report_json(plan: ImportPlan, made: Imported, store: Path) -> str:
    """Give what a script reads of an import."""
    return json.dumps(
        {
            "store": str(store),
            "branch": made.commit.branch,
            "commit": made.commit.id,
            "snapshot": made.snapshot,
            "model_type": plan.source.model_type,
            "stages": "transformers" if plan.read.model.hf_config else "native",
            "parameters": plan.parameter_count,
            "tensors": len(plan.places),
            "bytes": made.stored_bytes,
            "shards": {name: entry.digest for name, entry in made.commit.shards.items()},
            "notes": [*plan.notes, *made.notes],
        },
        indent=2,
    )
