"""The import rules: calls go down, values come back.

Owns who may import whom, which module may touch files, which may touch CUDA, and which may know
the command line library. Knows nothing of style.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache

from tests.tidy.source import PACKAGES, REPOSITORY, Source, dotted

# What each part of the house may import of this project. A prefix admits the modules below it.
MAY_IMPORT = {
    "shardb": ("shardb",),
    "trainer": ("trainer", "shardb"),
    "export": (
        *("export", "shardb", "trainer.model", "trainer.errors", "trainer.command_cli"),
        "trainer.entry_cli",
        "trainer.sizes",  # so that every command reads sizes alike
    ),
    "serve": (
        *("serve", "shardb", "trainer.model", "trainer.device"),
        # What a server shows of a run is what its report shows.
        *("trainer.errors", "trainer.command_cli", "trainer.report_html_data", "trainer.sizes"),
        "trainer.entry_cli",
        "trainer.data.chat_environment",  # a model is asked as it was taught
    ),
    "tools": ("tools", "shardb", "trainer", "export", "serve", "tests.support"),
}
# The extras whose libraries a part may use; without them it has to say what is missing.
EXTRAS = {
    "trainer": ("hf",),
    "export": ("hf", "gguf"),
    "serve": ("serve",),
    "tools": ("hf", "gguf", "fuse"),
}
STORE_LIBRARIES = {"lmdb", "msgpack", "xxhash", "zstandard", "numpy"}
ONLY_HERE = {
    "torch": ("shardb/torch_adaptor.py",),
    "lmdb": ("shardb/index.py",),
    "obstore": ("shardb/remote/cloud.py",),
}
# Commands may speak to a person; nothing else may.
COMMAND_LIBRARIES = {"typer", "click", "rich"}
TALKING_STEMS = {"progress", "report"}

FILE_MODULES = {"shutil", "tempfile", "fcntl", "glob", "fileinput"}
FILE_CALLS = {
    "open", "io.open", "mmap.mmap", "np.load", "np.save", "np.savez", "np.memmap", "np.fromfile",
    "numpy.load", "numpy.save", "numpy.savez", "numpy.memmap", "numpy.fromfile",
    "pathlib.Path", "Path",
}  # fmt: skip
# What is left of `os` after everything that touches a file is taken away.
OS_ALLOWED = {
    "os.environ", "os.getenv", "os.getpid", "os.getppid", "os.strerror", "os.urandom",
    "os.cpu_count", "os.PathLike", "os.fspath", "os.fsencode", "os.fsdecode", "os.sep",
    "os.register_at_fork", "os.path.join", "os.path.basename", "os.path.dirname",
    "os.path.normpath", "os.path.split", "os.path.splitext", "os.path.relpath", "os.path.isabs",
    "os.path.commonpath", "os.path.abspath", "os.path.expanduser", "os.kill", "os.getcwd",
    "os.uname", "os.name", "os.sched_getaffinity", "os.getuid", "os.geteuid", "os._exit",
}  # fmt: skip
FILE_SEAM = "shardb/filesystem.py"
# What the seam asks the system for beside files' bytes and names; nobody else imports it.
SEAM_PARTS = (FILE_SEAM, "shardb/attributes.py")
CUDA_SEAM = ("trainer/device.py", "trainer/device_lanes.py")


def imported(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Give every imported module by its full name, with `from m import n` as m.n and as m."""
    parts = source.path.removesuffix(".py").split("/")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = parts[: -node.level] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:
                yield node, f"{module}.{alias.name}"


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def upward_imports(source: Source) -> list[str]:
    """Refuse an import of a part of the house that stands above, or of tests and tools."""
    if source.package not in MAY_IMPORT:
        return []
    allowed = MAY_IMPORT[source.package]
    house = (*PACKAGES, "tools", "tests")
    return [
        source.at(node, f"{source.package} must not import {name}; allowed: {', '.join(allowed)}")
        for node, name in imported(source)
        if name.split(".")[0] in house and not _within(name, allowed)
    ]


def command_imports(source: Source) -> list[str]:
    """Refuse an import of a command line module by anything but a command, and of test doubles."""
    found = []
    for node, name in imported(source):
        if source.package not in PACKAGES or name.split(".")[0] not in PACKAGES:
            continue
        words = name.split(".")
        if not source.is_command and any(w == "cli" or w.endswith("_cli") for w in words[1:]):
            found.append(source.at(node, f"{name} is a command line; nothing imports it"))
        in_doubles = source.path.startswith("shardb/testing/")
        if _within(name, ("shardb.testing",)) and not in_doubles:
            found.append(source.at(node, f"{name} is for tests and tools only"))
    return found


def private_imports(source: Source) -> list[str]:
    """Refuse an import of another package's private name."""
    return [
        source.at(node, f"{name} is private to its package: make it public or leave it alone")
        for node, name in imported(source)
        if source.package in MAY_IMPORT
        and name.split(".")[0] in PACKAGES
        and name.split(".")[0] != source.package
        and any(word.startswith("_") and word != "__version__" for word in name.split("."))
    ]


@cache
def declared_libraries(package: str) -> frozenset[str]:
    """Give the dependencies that pyproject.toml declares, by import name.

    A package of the house may also use what its extras declare.
    """
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = list(project["dependencies"])
    for extra in EXTRAS.get(package, ()):
        declared += project["optional-dependencies"][extra]
    names = (requirement.split(">")[0].split("=")[0] for requirement in declared)
    return frozenset(name.strip().replace("-", "_") for name in names)


def undeclared_libraries(source: Source) -> list[str]:
    """Refuse a third-party import that pyproject.toml does not name; the store may use fewer.

    A benchmark may import what it compares with: nobody who does not run it needs that.
    """
    if source.package not in MAY_IMPORT or source.path.startswith("tools/bench/"):
        return []
    store = source.package == "shardb"
    allowed = STORE_LIBRARIES if store else set(declared_libraries(source.package))
    if store and source.is_command:
        allowed = allowed | COMMAND_LIBRARIES
    found = []
    for node, name in imported(source):
        library = name.split(".")[0]
        if library in sys.stdlib_module_names or library in {*PACKAGES, "tools", "tests"}:
            continue
        if source.path in ONLY_HERE.get(library, ()) or library in allowed:
            continue
        found.append(source.at(node, f"{source.package} must not import {library}"))
    return found


def misplaced_libraries(source: Source) -> list[str]:
    """Keep torch in the store's adaptor, LMDB in its index, the terminal in commands."""
    found = []
    for node, name in imported(source):
        library = name.split(".")[0]
        if source.package == "shardb" and source.path not in ONLY_HERE.get(library, (source.path,)):
            found.append(source.at(node, f"in shardb only {ONLY_HERE[library][0]} has {library}"))
        speaks = source.is_command or source.stem in TALKING_STEMS or source.package == "tools"
        if source.package in MAY_IMPORT and library in COMMAND_LIBRARIES and not speaks:
            found.append(source.at(node, f"{library} belongs in a command line module"))
    return found


def files_beside_the_seam(source: Source) -> list[str]:
    """Refuse a file operation of the store that a simulated file system would not see."""
    # The simulated files keep images of the index in real folders, since LMDB only opens those;
    # no part of the store imports them (`command_imports`).
    is_double = source.path.startswith("shardb/testing/")
    if source.package != "shardb" or source.path in SEAM_PARTS or is_double:
        return []
    found = []
    for node, name in imported(source):
        if name.split(".")[0] in FILE_MODULES:
            found.append(source.at(node, f"{name} touches files: go through {FILE_SEAM}"))
    inner = {id(n.value) for n in ast.walk(source.tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and _opens_a_file(node):
            found.append(source.at(node, f"{dotted(node.func)}() goes past {FILE_SEAM}"))
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            name = dotted(node)
            if name.startswith("os.") and not _os_is_harmless(name):
                found.append(source.at(node, f"{name} goes past {FILE_SEAM}"))
    for node, name in imported(source):
        is_from_os = isinstance(node, ast.ImportFrom) and name.startswith("os.")
        if is_from_os and not _os_is_harmless(name):
            found.append(source.at(node, f"{name} goes past {FILE_SEAM}"))
    return found


def _opens_a_file(call: ast.Call) -> bool:
    name = dotted(call.func)
    is_plain_memory = name == "mmap.mmap" and call.args and ast.unparse(call.args[0]) == "-1"
    return name in FILE_CALLS and not is_plain_memory


def _os_is_harmless(name: str) -> bool:
    is_constant = name.startswith("os.O_")
    return is_constant or _within(name, tuple(OS_ALLOWED))


def cuda_beside_the_seam(source: Source) -> list[str]:
    """Refuse `torch.cuda` and `.cuda()` outside the device module."""
    if source.package not in MAY_IMPORT or source.path in CUDA_SEAM:
        return []
    message = f"only {' and '.join(CUDA_SEAM)} touches torch.cuda"
    found = [
        source.at(node, message) for node, name in imported(source) if _within(name, CUDA_NAMES)
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in CUDA_NAMES:
            found.append(source.at(node, message))
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_method and node.func.attr in {"cuda", "pin_memory"}:
            found.append(source.at(node, message))
    return found


CUDA_NAMES = ("torch.cuda", "torch.backends.cuda", "torch.backends.cudnn")
IMPORT_RULES = (
    upward_imports,
    command_imports,
    private_imports,
    undeclared_libraries,
    misplaced_libraries,
    files_beside_the_seam,
    cuda_beside_the_seam,
)
