"""The rooms of csrc and of torch_ckpt use only rooms before them; torch stays behind its doors.

The order is the one in docs/design.md. The checkers are functions over text,
so that the last test can show that each of them does find a breach.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The rooms of csrc, paths below it.
FORMAT_ROOMS = ("format", "format/safetensors", "format/ours", "format/torch", "format/zarr")
ENGINE_ROOMS = ("open", "read", "write", "commit", "save", "merge", "upkeep")
ROOMS = (
    *("base", "os", "runtime", *FORMAT_ROOMS, "values", "plan"),
    *(f"engine/{room}" for room in ENGINE_ROOMS),
    *("json", "capi", "ops"),
)
# The language of pickles is the most hostile of all input. Whoever includes its headers, itself or
# through others, is named here: all else goes by engine/open/archives.h and the catalog.
PICKLES = "format/torch"
PICKLE_READERS = {
    "engine/open/archives.cc",  # opens archives for who knows no pickles
    "engine/open/read_dcp.cc",  # .metadata is a pickle
    "engine/open/read_megatron.cc",  # that, and a common state in an archive
    "engine/open/read_torch.cc",  # files that are archives
    "engine/open/torch_archive.cc",  # a pickle and the storages beside it
    "engine/open/torch_archive.h",
    "engine/open/torch_leaves.cc",  # what state dicts in pickles hold
    "engine/open/torch_leaves.h",
}
# Two doors to the same rooms: neither uses the other.
STRANGERS = {("ops", "capi")}
# Of torch_ckpt: modules and packages, each of which may import those before it.
PYTHON_ROOMS = (
    *("errors", "options", "native", "checkpoint", "tensor_mapping", "objects", "ranks"),
    *(
        "export",
        "planning",
        "staging",
        "dcp",
        "calls",
        "runs",
        "conversion",
        "training",
        "patching",
    ),
    *("megatron", "integrations", "cli"),
)
# Of which none has a room: everything else has.
LOOSE = {"errors", "options"}
# What reads values needs torch, and is imported when the first value is asked for.
LATER = {("checkpoint", "torch_ckpt.calls.stored")}
# Of torch_ckpt/dcp.
DCP_ROOMS = ("node", "plan", "stager", "read", "write")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/|^Python\.h$")
STABLE_HEADER = re.compile(r"^torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/")

# Headers of system calls, which have their fault points in os/; and who includes one all the same.
SYSTEM_HEADER = re.compile(r"^(sys|linux|asm)/|^(unistd|fcntl|dlfcn|poll|dirent)\.h$")
SYSTEM_EXCEPTIONS = {
    "runtime/crc_instruction.h": {"asm/hwcap.h", "sys/auxv.h"},  # what the CPU can, no call
    "runtime/cuda_driver.cc": {"dlfcn.h"},  # the driver is there or not
}


# What reaches files without a system call's header.
FILE_CALLS = re.compile(r"#\s*include\s*<(fstream|filesystem)>|\b(fopen|freopen|std::rename)\b")


def system_breaches(file: str, text: str) -> Iterator[str]:
    """The headers of system calls that `file`, a path below csrc, must not include."""
    if file.startswith("os/"):
        return
    for found in FILE_CALLS.finditer(text):
        yield f"{found[0]}: files belong to os"
    for bracket, name in INCLUDE.findall(text):
        if bracket == "<" and SYSTEM_HEADER.match(name):
            if name not in SYSTEM_EXCEPTIONS.get(file, set()):
                yield f"{name}: system calls belong to os"


# Which way bytes go is decided in os/; jobs only pass on whether the user wants direct I/O at all.
DIRECT_IO = re.compile(
    r"\b(O_DIRECT|ProbeDirectIo|DirectIo|DirectUnit|TransferFile|memory_alignment|"
    r"offset_alignment|kMinDirect|direct)\b"
)


def direct_io_breaches(file: str, text: str) -> Iterator[str]:
    """What `file`, a path below csrc, says of direct I/O and must not."""
    if not file.startswith("os/"):
        for found in DIRECT_IO.finditer(re.sub(r"//.*", "", text)):
            yield f"{found[0]}: the way that bytes go is decided in os"


MOST_LINES = 60  # of a function of the engine
FUNCTION = re.compile(
    r"^((?:  )?)(?!(?:namespace|class|struct|enum|union)\b)[\w~][^;{}]*?\)[^;{}()]*\{\n",
    re.MULTILINE,
)


def long_functions(file: str, text: str) -> Iterator[str]:
    """The functions of `file`, a path below csrc, that are too long. clang-format has set them: a
    function ends with a brace as far from the margin as its first line."""
    if not file.startswith("engine/"):
        return
    text = re.sub(r"^(?: *\w+:|.*//.*)$", "", text, flags=re.MULTILINE)  # labels and comments
    for found in FUNCTION.finditer(text):
        end = text.find(f"\n{found[1]}}}", found.end() - 1)
        lines = text.count("\n", found.start(), end) + 2
        if lines > MOST_LINES:
            yield f"{found[0].split('(')[0].strip()} has {lines} lines, {MOST_LINES} are allowed"


# Only runtime/workers starts threads, and only from the engine on is it used: cmake/Tests.cmake goes
# by that where it leaves out tests that show nothing under the thread sanitizer.
THREADS = re.compile(
    r"std::(jthread|async)\b|std::(thread|vector<std::thread>) \w|std::thread[({]|pthread_create"
)


def thread_breaches(file: str, text: str) -> Iterator[str]:
    """The threads that `file`, a path below csrc, starts and must not."""
    if file != "runtime/workers.cc":
        yield from (f"{found[0]}: threads are workers" for found in THREADS.finditer(text))
        if not file.startswith(("engine/", "capi/")) and '"runtime/workers.h"' in text:
            yield "runtime/workers.h: is used from the engine on"


def include_breaches(room: str, text: str) -> Iterator[str]:
    """What the #include lines of a file in `csrc/<room>` break, in words."""
    for bracket, name in INCLUDE.findall(text):
        if TORCH_HEADER.match(name):
            if room != "ops":
                yield f"{name}: torch headers belong to ops"
            elif not STABLE_HEADER.match(name):
                yield f"{name}: not part of the stable ABI"
        elif bracket == '"':
            target = name.rpartition("/")[0]
            if target not in ROOMS:
                yield f"{name}: includes are written from csrc/ on, as room/file.h"
            elif ROOMS.index(target) > ROOMS.index(room) or (room, target) in STRANGERS:
                yield f"{name}: {room} may not use {target}"


def reaching(room: str, includes: dict[str, set[str]]) -> set[str]:
    """The files outside of `room` that include one of it, themselves or through others, by what
    each file includes; all are paths below csrc."""
    inside = {file for file in includes if file.rpartition("/")[0] == room}
    found = set(inside)
    while more := {file for file, names in includes.items() if names & found} - found:
        found |= more
    return found - inside


def import_breaches(
    room: str, tree: ast.AST, house: str = "torch_ckpt", rooms: tuple[str, ...] = PYTHON_ROOMS
) -> Iterator[str]:
    """The `rooms` of package `house` that a module in `room` imports, anywhere, and must not."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == house:
            names = [f"{house}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        for name in names:
            if not name.startswith(f"{house}.") or (room, name) in LATER:
                continue
            target = name.removeprefix(f"{house}.").partition(".")[0]
            if target in rooms and rooms.index(target) > rooms.index(room):
                yield f"{name}: {room} may not use {target}"


def foreign_calls(tree: ast.AST, module: str, allowed: set[str]) -> set[str]:
    """The functions of `module`, a name in the code, that it calls beside the allowed ones."""
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == module
    } - allowed


# Of tensors, modules and groups; names of ours would be found as well, and have other words.
PRIVATE_ATTRIBUTES = {"_local_tensor", "_spec", "_cdata", "_process_group"}


def torch_privates(tree: ast.AST) -> Iterator[str]:
    """The private names of torch that the code imports or looks at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))
        elif isinstance(node, ast.Attribute):
            if node.attr in PRIVATE_ATTRIBUTES:
                yield node.attr
            elif isinstance(node.value, ast.Name) and node.value.id in ("torch", "dist"):
                if node.attr.startswith("_") and not node.attr.startswith("__"):
                    yield node.attr


def uses_torch_ops(tree: ast.AST) -> bool:
    """Whether the code says `torch.ops` in any form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "ops":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                return True
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {alias.name for alias in node.names}
            if node.module.startswith("torch.ops") or (node.module == "torch" and "ops" in names):
                return True
        elif isinstance(node, ast.Import) and any(
            alias.name == "torch._ops" or alias.name.startswith("torch.ops") for alias in node.names
        ):
            return True
    return False


def imported_modules(tree: ast.Module) -> set[str]:
    """The top-level names of all absolute imports, wherever they stand."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found.add(node.module.split(".")[0])
    return found


def imported_files(text: str, modules: set[str]) -> set[str]:
    """The `modules` that a module of this text imports when it runs."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named & modules or {node.module}
    return found & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


LISTED = re.compile(r"`(?:(?:csrc|torch_ckpt)/)?([\w/]+?)(?:/|\.py)`")


def listed_rooms(house: str, text: str) -> list[str]:
    """The rooms of `house`, "csrc" or "torch_ckpt", that a table lists, in its order."""
    rows = re.findall(rf"^\| (`{house}/[^|]*) \|", text, re.MULTILINE)
    return [room for row in rows for room in LISTED.findall(row)]


def room_of(path: Path) -> str:
    return path.parent.relative_to(ROOT / "csrc").as_posix()


def core_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.h")) + sorted((ROOT / "csrc").rglob("*.cc"))


def python_sources() -> list[Path]:
    return sorted((ROOT / "torch_ckpt").rglob("*.py"))


def test_no_room_includes_a_later_one() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in core_sources()
        for breach in include_breaches(room_of(path), path.read_text(encoding="utf-8"))
    ]
    assert core_sources(), "no sources found"
    assert not breaches, "\n".join(breaches)


def test_the_design_lists_the_rooms_in_their_order() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert listed_rooms("csrc", text) == list(ROOMS)
    assert listed_rooms("torch_ckpt", text) == list(PYTHON_ROOMS)
    of_dcp = re.search(r"^\| `torch_ckpt/dcp/` \| (.*) \|$", text, re.MULTILINE)
    assert of_dcp is not None
    assert LISTED.findall(of_dcp[1]) == list(DCP_ROOMS)


def test_pickles_are_reached_by_their_readers_alone() -> None:
    includes = {
        path.relative_to(ROOT / "csrc").as_posix(): {
            name
            for bracket, name in INCLUDE.findall(path.read_text(encoding="utf-8"))
            if bracket == '"'
        }
        for path in core_sources()
    }
    assert reaching(PICKLES, includes) == PICKLE_READERS


def test_threads_are_started_by_workers_alone() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in core_sources()
        for breach in thread_breaches(str(path.relative_to(ROOT / "csrc")), path.read_text())
    ]
    assert breaches == []


def test_every_source_lies_in_a_room() -> None:
    assert {room_of(path) for path in core_sources()} == set(ROOMS)


def test_no_python_room_imports_a_later_one() -> None:
    package = ROOT / "torch_ckpt"
    breaches, rooms = [], set()
    for path in python_sources():
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        rooms.add(room)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        breaches += [f"{path.relative_to(ROOT)}: {b}" for b in import_breaches(room, tree)]
    assert rooms == set(PYTHON_ROOMS)
    assert {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"} == LOOSE
    assert not breaches, "\n".join(breaches)


def test_no_file_imports_what_imports_it() -> None:
    # With what is imported late, but not for types alone.
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in python_sources()
    }
    graph = {
        module: imported_files(path.read_text(encoding="utf-8"), set(modules)) - {"torch_ckpt"}
        for module, path in modules.items()
    }
    assert circle(graph) == []


def test_no_room_of_dcp_imports_a_later_one() -> None:
    house = ROOT / "torch_ckpt" / "dcp"
    breaches, rooms = [], set()
    for path in sorted(house.rglob("*.py")):
        room = path.relative_to(house).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        rooms.add(room)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        breaches += [
            f"{path.relative_to(ROOT)}: {breach}"
            for breach in import_breaches(room, tree, "torch_ckpt.dcp", DCP_ROOMS)
        ]
    assert rooms == set(DCP_ROOMS)
    assert not breaches, "\n".join(breaches)


def test_ranks_talk_through_ranks_alone() -> None:
    # Whatever else calls a collective would leave the others waiting when it fails on one rank.
    looks = {"is_available", "is_initialized", "get_rank", "get_world_size"}
    looks.add("get_process_group_ranks")
    for path in python_sources():
        if path.parent.name == "ranks" or path.parent.name == "cli":
            continue
        more = {
            "process.py": {"TCPStore", "init_process_group"},  # of the process that saves
            "own_group.py": {"new_group", "is_gloo_available"},  # for calls of stock's
        }
        allowed = looks | more.get(path.name, set())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert foreign_calls(tree, "dist", allowed) == set(), path.name


def test_private_names_of_torch_stand_in_one_file() -> None:
    users = {
        path.relative_to(ROOT).as_posix(): sorted(found)
        for path in python_sources()
        if (found := set(torch_privates(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert users.pop("torch_ckpt/native/torch_private.py")
    assert users == {}


def test_only_operators_says_torch_ops() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in python_sources()
        if uses_torch_ops(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert users <= {"torch_ckpt/native/operators.py"}


def test_the_ctypes_door_works_without_torch() -> None:
    # Merge, verify and describe run in processes that never import torch.
    path = ROOT / "torch_ckpt/native/core.py"
    assert "torch" not in imported_modules(ast.parse(path.read_text(encoding="utf-8")))


def test_python_never_unpickles() -> None:
    # Reading a checkpoint must not run code. Only the leaves that are no tensors
    # have a door for it, and it opens for callers who asked. crossing.py unpickles what a process
    # has sent to one that it has started itself; exchange.py what other ranks of the job have sent, as
    # torch's own all_gather_object does.
    for path in python_sources():
        if path.parent.name == "objects" or path.name in ("crossing.py", "exchange.py"):
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pickle\.(load|Unpickler)|torch\.load\(", text), path


def test_every_source_is_built() -> None:
    listed: set[str] = set()
    for file in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake")]:
        listed |= set(re.findall(r"(?:csrc|tests)/[\w/]+\.cc", file.read_text(encoding="utf-8")))
    present = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "tests")
        for path in (ROOT / folder).rglob("*.cc")
    }
    assert sorted(present - listed) == [], "not in CMake's lists"
    assert sorted(listed - present) == [], "listed, but not there"


def test_system_calls_are_made_in_os() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in sorted((ROOT / "csrc").rglob("*.*"))
        for breach in system_breaches(str(path.relative_to(ROOT / "csrc")), path.read_text())
    ]
    assert breaches == []


def calls(text: str) -> set[str]:
    return foreign_calls(ast.parse(text), "dist", {"get_rank"})


def imports(room: str, text: str) -> list[str]:
    return list(import_breaches(room, ast.parse(text)))


def dcp_imports(room: str, text: str) -> list[str]:
    return list(import_breaches(room, ast.parse(text), "torch_ckpt.dcp", DCP_ROOMS))


def test_direct_io_is_decided_in_os() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in core_sources()
        for breach in direct_io_breaches(str(path.relative_to(ROOT / "csrc")), path.read_text())
    ]
    assert breaches == []


def test_functions_of_the_engine_are_short() -> None:
    breaches = [
        f"{path.relative_to(ROOT)}: {breach}"
        for path in core_sources()
        for breach in long_functions(str(path.relative_to(ROOT / "csrc")), path.read_text())
    ]
    assert breaches == []


SHORT = "Status Run(int a,\n           int b) {\n" + "  Step();\n" * 57 + "}\n"
LONG = SHORT.replace("}", "  Step();\n}")
STABLE = "#include <torch/csrc/stable/library.h>\n"
# What a checker is given, and whether it is to find something.
CHECKED = [
    (list(system_breaches("runtime/arena.cc", "#include <sys/mman.h>\n")), True),
    (list(system_breaches("runtime/cuda_driver.cc", "#include <unistd.h>\n")), True),
    (list(system_breaches("plan/runs.cc", "#include <fstream>\n")), True),
    (list(system_breaches("plan/runs.cc", 'std::FILE* f = fopen("x", "r");\n')), True),
    (list(system_breaches("os/memory.cc", "#include <sys/mman.h>\n")), False),
    (list(system_breaches("plan/runs.cc", "#include <vector>\n")), False),
    (list(direct_io_breaches("engine/x.cc", "options.direct = true;\n")), True),
    (list(direct_io_breaches("engine/x.cc", "open(path, O_RDONLY | O_DIRECT);\n")), True),
    (list(direct_io_breaches("engine/x.cc", "bool direct_io = true;  // direct I/O\n")), False),
    (list(direct_io_breaches("os/x.cc", "O_DIRECT\n")), False),
    (list(thread_breaches("plan/runs.cc", '#include "runtime/workers.h"\n')), True),
    (list(thread_breaches("engine/x.cc", "std::thread leading([&] {});\n")), True),
    (list(thread_breaches("os/x.cc", "std::vector<std::thread> threads;\n")), True),
    (list(thread_breaches("os/x.cc", "std::this_thread::sleep_for(wait);\n")), False),
    (list(thread_breaches("engine/x.cc", '#include "runtime/workers.h"\n')), False),
    (list(thread_breaches("runtime/workers.cc", "std::vector<std::thread> threads;\n")), False),
    (list(long_functions("engine/x.cc", LONG)), True),
    (list(long_functions("engine/x.cc", SHORT)), False),
    (list(long_functions("plan/x.cc", LONG)), False),
    (list(include_breaches("os", '#include "plan/runs.h"\n')), True),
    (list(include_breaches("os", '  #  include "ops/register.h"\n')), True),
    (list(include_breaches("plan", '#include "base/box.h"\n#include <vector>\n')), False),
    (list(include_breaches("engine/open", STABLE)), True),
    (list(include_breaches("engine/open", '#include "engine/commit/journal.h"\n')), True),
    (list(include_breaches("engine/commit", '#include "engine/open/scan.h"\n')), False),
    (list(include_breaches("engine/commit", '#include "engine/scan.h"\n')), True),
    (list(include_breaches("ops", STABLE)), False),
    (list(include_breaches("ops", '#include "json/fields.h"\n')), False),
    (list(include_breaches("ops", '#include "capi/requests.h"\n')), True),
    (list(include_breaches("ops", "#include <ATen/ATen.h>\n")), True),
    (list(include_breaches("ops", "#include <torch/extension.h>\n")), True),
    (list(include_breaches("runtime", "#include <Python.h>\n")), True),
    (list(include_breaches("os", '#include "file.h"\n')), True),
    (list(include_breaches("os", '#include "../os/file.h"\n')), True),
    (reaching("c", {"a/x": {"b/y"}, "b/y": {"c/z"}, "c/z": set()}) ^ {"a/x", "b/y"}, False),
    (reaching("c", {"a/x": {"b/y"}, "b/y": set(), "c/z": {"b/y"}}), False),
    (imports("dcp", "from torch_ckpt.runs.directory import x"), True),
    (imports("dcp", "def f():\n    import torch_ckpt.cli.output"), True),
    (imports("dcp", "from torch_ckpt import cli"), True),
    (
        imports("dcp", "from torch_ckpt.native import core\nfrom torch_ckpt.export import merge"),
        False,
    ),
    (dcp_imports("plan", "from torch_ckpt.dcp.write.writer import x"), True),
    (dcp_imports("plan", "from torch_ckpt.dcp import plan, stager"), True),
    (dcp_imports("write", "from torch_ckpt.dcp.plan import rings"), False),
    (listed_rooms("csrc", "| `csrc/b/c/` | `csrc/d/` |\n| `e/` | x |\n") != ["b/c"], False),
    (listed_rooms("csrc", "| `csrc/b.py`, `c/` | x |\n") != ["b", "c"], False),
    (circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}), True),
    (circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}), False),
    (imported_files("def f():\n    from a import b", {"a", "a.b"}) ^ {"a.b"}, False),
    (imported_files("from a.b import f", {"a", "a.b"}) ^ {"a.b"}, False),
    (imported_files("if TYPE_CHECKING:\n    import a", {"a"}), False),
    (calls("dist.get_rank()\ndist.barrier(group)"), True),
    (calls("dist.get_rank()"), False),
    (list(torch_privates(ast.parse("from torch.a._b import c"))), True),
    (list(torch_privates(ast.parse("from torch.a import _c as c"))), True),
    (list(torch_privates(ast.parse("x._local_tensor"))), True),
    (list(torch_privates(ast.parse("from torch_ckpt.native import core\nself._x"))), False),
    (uses_torch_ops(ast.parse("import torch\ntorch.ops.dcp_ext.version()")), True),
    (uses_torch_ops(ast.parse("from torch import ops")), True),
    (uses_torch_ops(ast.parse("import torch.ops")), True),
    (uses_torch_ops(ast.parse("import torch\nself.ops.append(1)")), False),
    ("torch" in imported_modules(ast.parse("def f():\n    import torch.nn")), True),
    ("torch" in imported_modules(ast.parse("from os import path\nfrom . import torch")), False),
]


def test_the_checkers_find_breaches_and_nothing_else() -> None:
    assert [number for number, (found, due) in enumerate(CHECKED) if bool(found) != due] == []
