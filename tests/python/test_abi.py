"""What the two libraries ask of the machine and of torch, read from the files.

One wheel serves every Python >= 3.10 and every torch from the floor on, CPU and
CUDA builds alike. That holds as long as these tests do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ckpt
import torch_ckpt.native.operators

PACKAGE = Path(torch_ckpt.__file__).parent
CORE, EXT = PACKAGE / "libtorch_ckpt_core.so", PACKAGE / "libtorch_ckpt_ext.so"
FLOOR = (2, 10)
SYSTEM_LIBRARIES = {
    "libstdc++.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "ld-linux-x86-64.so.2",
}
SANITIZER_LIBRARIES = re.compile(r"lib(a|t|ub)san\.so")

# Functions of torch/csrc/stable/c/shim.h that torch 2.10 has.
SHIMS_2_10 = {
    "torch_call_dispatcher",
    "torch_delete_list",
    "torch_delete_string",
    "torch_get_const_data_ptr",
    "torch_get_mutable_data_ptr",
    "torch_get_num_threads",
    "torch_get_thread_idx",
    "torch_library_impl",
    "torch_list_get_item",
    "torch_list_push_back",
    "torch_list_set_item",
    "torch_list_size",
    "torch_new_list_reserve_size",
    "torch_new_string_handle",
    "torch_parallel_for",
    "torch_parse_device_string",
    "torch_set_requires_grad",
    "torch_string_c_str",
    "torch_string_length",
}


def symbols(library: Path, *options: str) -> set[str]:
    """Names from the dynamic symbol table, versions cut off."""
    command = ["nm", "-D", "--format=posix", *options, str(library)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[0].split("@")[0] for line in out.splitlines()}


def undefined(library: Path) -> set[str]:
    return symbols(library, "--undefined-only")


def dynamic(library: Path, tag: str) -> set[str]:
    """Values of one kind of entry in the dynamic section."""
    command = ["readelf", "--wide", "--dynamic", str(library)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(rf"\({tag}\).*\[(.*)\]", out))


def functions_above(floor: tuple[int, int], header: str) -> set[str]:
    """Functions that a shim header declares only for torch newer than `floor`."""
    found: set[str] = set()
    depth: list[bool] = []
    for line in header.splitlines():
        gate = re.match(r"#\s*if TORCH_FEATURE_VERSION >= TORCH_VERSION_(\d+)_(\d+)_", line)
        if gate:
            depth.append((int(gate[1]), int(gate[2])) > floor)
        elif re.match(r"#\s*if", line):
            depth.append(False)
        elif re.match(r"#\s*endif", line):
            depth.pop()
        elif any(depth):
            found.update(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", line))
    return found


def declared(header: str) -> set[str]:
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", header))


def headers() -> dict[str, str]:
    include = Path(torch.__file__).parent / "include/torch/csrc"
    names = {"aoti": "inductor/aoti_torch/c/shim.h", "stable": "stable/c/shim.h"}
    return {key: (include / name).read_text(encoding="utf-8") for key, name in names.items()}


@pytest.mark.parametrize("library", [CORE, EXT], ids=lambda path: path.name)
def test_no_unstable_torch_and_no_python_symbol(library: Path) -> None:
    foreign = {
        name
        for name in undefined(library)
        if re.match(r"_?Py|_ZN?K?(2at|3c10|5torch|6caffe2)|cuda|cu[A-Z]|nccl", name)
    }
    assert foreign == set()


def test_core_knows_no_torch() -> None:
    assert {name for name in undefined(CORE) if "torch" in name} == set()


def test_ext_uses_only_shims_of_the_floor() -> None:
    used = {name for name in undefined(EXT) if re.match(r"(aoti_)?torch_(?!ckpt)", name)}
    text = headers()
    assert used, "the operators must use some shim"
    assert {name for name in used if name.startswith("torch_")} <= SHIMS_2_10
    newer = functions_above(FLOOR, text["aoti"]) | functions_above(FLOOR, text["stable"])
    assert used & newer == set()
    assert used <= declared(text["aoti"]) | SHIMS_2_10


def test_the_list_of_shims_agrees_with_torchs_header() -> None:
    newer = functions_above(FLOOR, headers()["stable"])
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) > FLOOR:
        assert newer, "a newer torch has newer shims, or the reader of gates is blind"
    else:
        assert newer == set()
    assert newer & SHIMS_2_10 == set()
    assert declared(headers()["stable"]) >= SHIMS_2_10


def test_the_gate_reader_finds_newer_functions() -> None:
    text = """
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
AOTITorchError torch_old(void);
#ifdef USE_CUDA
AOTITorchError torch_old_cuda(void);
#endif
#endif
#if TORCH_FEATURE_VERSION >= TORCH_VERSION_2_11_0
AOTITorchError torch_new(void);
#endif
"""
    assert functions_above((2, 10), text) == {"torch_new"}


def test_needed_libraries() -> None:
    def needed(library: Path) -> set[str]:
        names = dynamic(library, "NEEDED") - SYSTEM_LIBRARIES
        return {name for name in names if not SANITIZER_LIBRARIES.match(name)}

    assert needed(CORE) == set()
    assert needed(EXT) == {"libtorch_ckpt_core.so", "libtorch.so"}


def test_run_paths_name_no_folder_of_the_build() -> None:
    for library in (CORE, EXT):
        assert dynamic(library, "RPATH") == set()
    assert dynamic(CORE, "RUNPATH") == set()
    assert dynamic(EXT, "RUNPATH") == {"$ORIGIN"}


def test_exports() -> None:
    """Only our own names leave: no weak symbol of libstdc++ or of json."""
    core = symbols(CORE, "--defined-only")
    ours = re.compile(r"torch_ckpt_|_ZT[ISV]?N?S?_?N10torch_ckpt|_ZNK?[VKRO]*10torch_ckpt")
    assert {name for name in core if not ours.match(name)} == set()
    assert any(name.startswith("torch_ckpt_") for name in core)
    assert symbols(EXT, "--defined-only") == set()


def test_both_libraries_load_only_once() -> None:
    """A second registration of the namespace would end the process."""
    code = "import importlib, torch_ckpt.native.operators as ext; importlib.reload(ext); print('alive')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "alive", out.stderr
