"""Makes tests/fuzz/seeds: what each fuzz target begins with, and the words that it knows.

    .venv/bin/python tests/fuzz/make_seeds.py [DIRECTORY]
    .venv/bin/python tests/fuzz/make_seeds.py --large DIRECTORY

Run it again whenever a format changes: everything is made by saving, so that the seeds are what the
code writes today, and tests/python/test_fuzz_seeds.py fails where they are not. Beside each valid
one stand a few that are slightly broken, since the fuzzer finds the way from either side. It takes
a build with fault points (a journal is what a kill leaves).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

import numpy  # noqa: E402
import torch  # noqa: E402

from benchmarks.simulated import Box, save_as_ranks  # noqa: E402

MAGIC = b"TCKPTCAT"
CRC_BYTES = 4
RANDOM_ID = re.compile(rb"[0-9a-f]{32}")
DIGESTS = re.compile(rb'("crc32c": ")[0-9a-f]*(")')

JSON_WORDS = [
    '"',
    '\\"',
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\\\u0000",
    "\\\\ud800",
    "-1",
    "1e3",
    "null",
]
JSON_WORDS += ["18446744073709551615", "18446744073709551616", "9223372036854775807"]
WORDS = {
    "header_fuzz": [
        *("__metadata__", "dtype", "shape", "data_offsets", "torch_ckpt.file_id", "format", "pt"),
        *("DCP_VERSION", "DCP_SHARDING_INFO", "saved_offsets", "torch_ckpt.global_shapes"),
        "torch_ckpt.packed_boxes",
        *("BOOL", "U8", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F4", "F6_E2M3", "C64"),
    ],
    "manifest_fuzz": [
        *("format", "torch_ckpt", "version", "save_id", "world_size", "segment_bytes", "files"),
        *("name", "id", "role", "bytes", "crc32c", "data", "objects", "catalog", "index", "extra"),
        *("part", "rank", "run_id", "sequence", "renames", "removes", "from", "to"),
        *("container", "safetensors", "raw", "a/b.safetensors"),
    ],
    "hf_index_fuzz": ["metadata", "total_size", "weight_map", "model.safetensors"],
    "sharding_info_fuzz": ["saved_offsets"],
    "zarr_array_fuzz": [
        *("zarr_format", "shape", "chunks", "dtype", "order", "compressor", "filters"),
        *("fill_value", "dimension_separator", "bfloat16", "<f4", "|b1", "<c16", ">f4", "C", "F"),
    ],
}
# Between bytes FF the sharding info, the global shapes, and the packed boxes; the tensors are in the
# target.
SHARDING = {
    "whole": b"{}",
    "stock": b'{"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": []}}',
    "ours": b'{"a": {"saved_offsets": [2, 3]}}\xff{"a": [4, 6], "c": [0, 4]}',
    "packed": b'{}\xff{"p": [4, 5]}\xff{"p": [[0, 1, 2, 2], [3, 0, 1, 2]]}',
    "outside": b'{"a": {"saved_offsets": [2, 3]}}\xff{"a": [3, 6]}',
    "unknown_tensor": b'{"d": {"saved_offsets": [0]}}',
    "unknown_key": b'{"a": {"saved_offsets": [0, 0], "more": 1}}',
    "overflow": b'{"a": {"saved_offsets": [9223372036854775807, 0]}}\xff{"a": [9223372036854775807, 3]}',
}
KILLED = """
import sys
from torch_ckpt.export.merge import consolidate_safetensors_files
consolidate_safetensors_files(sys.argv[1], sys.argv[2], None, overwrite=True)
"""


def state() -> dict[str, object]:
    tied = torch.ones(2, 3)
    return {
        "model": {
            "w": torch.arange(24.0).reshape(4, 6).bfloat16(),
            "b": torch.arange(7.0),
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "empty": torch.zeros(0, 3, dtype=torch.int64),
            "mask": torch.tensor([True, False]),
            "eight": torch.ones(3).to(torch.float8_e4m3fn),
            'a "name" \\ é': torch.ones(1, 1, 1, 1, dtype=torch.complex64),
            "tied": tied,
            "to": tied,
        },
        "step": 7,
        "more": [{"lr": 0.1}, "text"],
    }


def part(rank: int) -> dict[str, Box]:
    """Of rank `rank` of three: rows, columns, and what others have none of."""
    return {
        "rows": Box(torch.full((2, 4), float(rank)), (2 * rank, 0), (6, 4)),
        "columns": Box(torch.full((5, 1), rank), (0, rank), (5, 3)),
        f"own.{rank}": Box.whole(torch.ones(rank)),
    }


def save_everything(folder: Path) -> None:
    """Every kind of directory that the engine writes, and stock's."""
    import torch.distributed.checkpoint as dcp

    import torch_ckpt

    torch_ckpt.save(state(), checkpoint_id=folder / "sharded", no_dist=True)
    torch_ckpt.save(
        state(),
        checkpoint_id=folder / "final",
        no_dist=True,
        layout="final",
        dtype="bf16",
        max_shard_size=100,
    )
    save_as_ranks(folder / "ranks", 3, part)
    torch_ckpt.save({"w": torch.ones(2)}, checkpoint_id=folder / "part", no_dist=True,
                    use_collectives=False)  # fmt: skip
    stock = dcp.HuggingFaceStorageWriter(str(folder / "stock"), save_distributed=True)
    dcp.save({"w": torch.ones(2, 3), "b": torch.ones(1)}, storage_writer=stock, no_dist=True)
    leave_a_journal(folder / "sharded", folder / "killed")


def leave_a_journal(source: Path, target: Path) -> None:
    """A consolidation over an older checkpoint that was killed behind its commit point, which
    follows one of the renames."""
    import torch_ckpt

    for fault in [f"{call}:{n}:kill" for call in ("renameat", "renameat2") for n in range(1, 9)]:
        torch_ckpt.save({"old": torch.ones(5)}, checkpoint_id=target, no_dist=True)
        subprocess.run(
            [sys.executable, "-c", KILLED, str(source), str(target)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "TORCH_CKPT_FAULTS": fault,
            },
            check=False,
        )
        if list(target.rglob("committed/commit.json")):
            return
        shutil.rmtree(target)
    raise SystemExit("no kill leaves a journal: are there fault points in this build?")


def header_input(file: bytes) -> bytes:
    """A data file as header_fuzz takes it: two bytes of the size of its data, and the header
    without the spaces that fill a block."""
    header_bytes = int.from_bytes(file[:8], "little")
    data_bytes = len(file) - 8 - header_bytes
    return data_bytes.to_bytes(2, "little") + file[8 : 8 + header_bytes].rstrip(b" ")


def catalog_input(file: bytes) -> bytes:
    """A catalog as catalog_fuzz takes it: what stands between the magic and the checksum."""
    assert file.startswith(MAGIC), "the catalog begins with something else now"
    return file[len(MAGIC) : -CRC_BYTES]


def metadata(count: int = 2) -> Iterator[tuple[str, bytes]]:
    """What stock DCP writes as .metadata, of tensors in `count` chunks."""
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunks = [
        dcp.ChunkStorageMetadata(torch.Size([2 * row, 0]), torch.Size([2, 3]))
        for row in range(count)
    ]
    stored: dict[str, object] = {
        "model.w": dcp.TensorStorageMetadata(
            dcp.TensorProperties(torch.bfloat16), torch.Size([2 * count, 3]), chunks
        ),
        "step": dcp.BytesStorageMetadata(),
    }
    places = {
        dcp.MetadataIndex("model.w", chunk.offsets, i): _StorageInfo(f"__{i}_0.distcp", 0, 900)
        for i, chunk in enumerate(chunks)
    }
    places[dcp.MetadataIndex("step")] = _StorageInfo("__0_0.distcp", 900, 100)
    paths: dict[str, tuple[str | int, ...]] = {"model.w": ("model", "w"), "step": ("step",)}
    meta = dcp.StorageMeta("a", "b", "c")
    yield "two", pickle.dumps(dcp.Metadata(stored, paths, places, meta, "1.0.0"), 4)
    # What Megatron adds, an optimizer's numbers in the path, and dtypes of few.
    stored["common_state"] = dcp.BytesStorageMetadata()
    places[dcp.MetadataIndex("common_state")] = _StorageInfo("common.distcp", 0, 100)
    for name, dtype in (("four", torch.float4_e2m1fn_x2), ("complex", torch.complex128)):
        (box,) = [dcp.ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
        stored[name] = dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype), torch.Size([4]), [box]
        )
        places[dcp.MetadataIndex(name, box.offsets, None)] = _StorageInfo("__0_0.distcp", 0, 999)
        paths[name] = ("optimizer", 0, name)
    yield "odd", pickle.dumps(dcp.Metadata(stored, paths, places), 2)


def pickles() -> Iterator[tuple[str, bytes]]:
    """Pickles of values that are no tensors, and those in files of torch.save."""
    values = {
        "plain": [None, True, -1, 1 << 70, 0.5, float("nan"), "a\ud800", b"\xff", (1,), {2}],
        "torch": [torch.Size([1]), torch.float32, torch.device("cuda", 1), torch.strided],
        "numpy": [numpy.float32(1.5), numpy.arange(3)],
        "dicts": [OrderedDict(a=1), {1: {"x": []}}],
    }
    values["namespaces"] = [argparse.Namespace(a=1), types.SimpleNamespace(b=[2])]
    for protocol in (2, 4):
        yield f"values-{protocol}", pickle.dumps(values, protocol)
    yield "dtensors", pickle_in(dtensors())
    for name, data in saved_files():
        yield name, pickle_in(data)


def pickle_in(data: bytes) -> bytes:
    """Of a file of torch.save; Python misses its checksum."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (entry,) = [each for each in archive.infolist() if each.filename.endswith("data.pkl")]
    at = entry.header_offset + 26
    begin = at + 4 + sum(int.from_bytes(data[p : p + 2], "little") for p in (at, at + 2))
    return data[begin : begin + entry.file_size]


def saved(value: object, protocol: int = 2) -> bytes:
    """A file of torch.save, without checksums, which no fuzzer finds."""
    out = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, out, pickle_protocol=protocol)
    finally:
        torch.serialization.set_crc32_options(True)
    return out.getvalue()


def saved_files() -> Iterator[tuple[str, bytes]]:
    """The kinds of files that torch.save writes: a tensor, as DCP does of each box, the states of a
    model and of its optimizer, and leaves that are no tensors."""
    yield "tensor", saved(torch.arange(6.0).reshape(2, 3))
    base = torch.arange(12.0)
    model = OrderedDict(
        {
            "a.weight": torch.nn.Parameter(base[:6].view(2, 3).t()),
            "tied": base[:6].view(2, 3).t(),
            "expanded": base[:1].expand(3, 2),
            "eight": torch.ones(2).to(torch.float8_e4m3fn),
            "unsigned": torch.arange(3).to(torch.uint16),
        }
    )
    yield "model", saved(model)
    optimizer = {
        "state": {0: {"step": torch.tensor(5.0), "exp_avg": torch.zeros(0, 3)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
    }
    objects = {"text": "a", "array": numpy.arange(3), "inside": ({"t": torch.ones(2)},)}
    yield "training", saved({"optimizer": optimizer, "objects": objects, 7: None}, 4)


def dtensors() -> bytes:
    """A file of torch.save that has DTensors."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (2, 3))
        state = {
            str(number): distribute_tensor(torch.ones(7, 5), mesh, places, src_data_rank=None)
            for number, places in enumerate(
                (
                    [Shard(0), Shard(1)],
                    [_StridedShard(0, split_factor=3), Shard(0)],
                    [Replicate()] * 2,
                )
            )
        }
        mesh._hash = 0  # of text, and so another one in each process
        for tensor in state.values():
            tensor._spec._hash = None
        return saved(state)
    finally:
        dist.destroy_process_group()


def archives() -> Iterator[tuple[str, bytes]]:
    """Zip archives of stored entries, and one of a compressed one."""
    for name, method in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", method) as archive:
            for entry, data in (("a/data.pkl", b"\x80\x02N."), ("a/data/0", bytes(40))):
                archive.writestr(zipfile.ZipInfo(entry), data, method)
            with archive.open(zipfile.ZipInfo("a/big"), "w", force_zip64=True) as big:
                big.write(b"x")
        yield name, out.getvalue()


def valid_seeds(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Target, name and bytes."""
    save_everything(folder)
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        # Staged names end in a random id.
        stem = re.sub(r"\.?[0-9a-f]{32}", "", path.name)
        name = f"{path.relative_to(folder).parts[0]}-{stem}"
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            made = header_input(data)
            if name.startswith("stock"):  # whose order is another one each time
                made = made[:2] + json.dumps(json.loads(made[2:]), sort_keys=True).encode()
            yield "header_fuzz", name, made
        elif data.startswith(MAGIC):
            yield "catalog_fuzz", name, catalog_input(data)
        elif path.name.endswith(".index.json"):
            yield "hf_index_fuzz", name, data
        elif data.startswith(b'{\n"format": "torch_ckpt'):
            yield "manifest_fuzz", name, data
    for name, data in SHARDING.items():
        yield "sharding_info_fuzz", name, data
    for name, data in pickles():
        yield "pickle_fuzz", name, data
    for name, data in metadata():
        yield "dcp_metadata_fuzz", name, data
    for name, data in (*saved_files(), ("dtensors", dtensors())):
        yield "torch_archive_fuzz", name, data
    for name, data in archives():
        yield "zip_fuzz", name, data
    for name, data in zarr_arrays():
        yield "zarr_array_fuzz", name, data


def zarr_arrays() -> Iterator[tuple[str, bytes]]:
    """As Megatron writes them; one of no dimensions; and one that is compressed."""
    checkpoint = ROOT / "tests" / "fixtures" / "megatron_zarr_2ranks" / "checkpoint"
    for path in sorted(checkpoint.rglob(".zarray")):
        name = "-".join(path.parent.relative_to(checkpoint).parts)
        yield name, path.read_bytes()
    said = json.loads((checkpoint / "vocab" / ".zarray").read_bytes())
    for name, changed in (
        ("scalar", {"shape": [], "chunks": []}),
        ("compressed", {"compressor": {"id": "zlib", "level": 1}}),
        ("chunk", {"shape": [1 << 40] * 8, "chunks": [1] * 8}),
    ):
        yield name, json.dumps({**said, **changed}).encode()
    yield "name", b"2.0.11"


def large_seeds(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Target, name and bytes of inputs of some 100 KB to a megabyte, which are not kept: of real
    files with much in them, and of those that say the same in very many places."""
    import torch_ckpt

    text, many = "k" * 60_000, 20_000
    shared = {"a": 1, text: 2}
    hostile = {
        "keys": {str(number): {text: 1} for number in range(many)},
        "mixed": {str(number): {1: 1, **shared} for number in range(many)},
        "dicts": dict.fromkeys(map(str, range(many)), {str(i): i for i in range(2000)}),
        "lists": dict.fromkeys(map(str, range(many)), [*range(9000), {}]),
        "texts": (text,) * 100_000,
        "path": Path(*[text] * 3),
        "plain": {f"layer.{number}.bias": number for number in range(many)},
    }
    for name, value in hostile.items():
        yield "pickle_fuzz", name, pickle.dumps(value, 4)
        yield "torch_archive_fuzz", name, saved(value if isinstance(value, dict) else {"a": value})
    large = torch.ones(1).expand(1 << 16)
    yield "torch_archive_fuzz", "views", saved({str(i): (large,) for i in range(2000)})
    yield "torch_archive_fuzz", "tensors", saved({str(i): torch.ones(1) for i in range(1500)})
    for name, data in metadata(4000):
        yield "dcp_metadata_fuzz", name, data
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(4000):
            archive.writestr(zipfile.ZipInfo(f"a/data/{number}"), b"1234")
    yield "zip_fuzz", "many", out.getvalue()
    tied = torch.ones(2)
    state = {f"{number:05}": tied if number % 2 else torch.ones(1) for number in range(8000)}
    torch_ckpt.save(state, checkpoint_id=folder / "many", no_dist=True)
    save_as_ranks(folder / "ranks", 64, lambda rank: {"w": Box(torch.ones(1), (rank,), (64,))})
    for name in ("many", "ranks"):
        data = (folder / name / "torch_ckpt.catalog").read_bytes()
        yield "catalog_fuzz", name, catalog_input(data)


def make_large(directory: Path) -> None:
    """Writes those below `directory`, which may exist."""
    with tempfile.TemporaryDirectory() as made:
        for target, name, data in large_seeds(Path(made)):
            (directory / target).mkdir(parents=True, exist_ok=True)
            (directory / target / name).write_bytes(data)


def the_same_in_every_run(data: bytes) -> bytes:
    """Without what is random: ids, and the digests of files that hold them."""
    ids: dict[bytes, bytes] = {}

    def replaced(found: re.Match[bytes]) -> bytes:
        number = len(ids)
        return ids.setdefault(found[0], b"%032x" % number)

    def zeroed(found: re.Match[bytes]) -> bytes:
        return found[1] + b"0" * (len(found[0]) - len(found[1]) - len(found[2])) + found[2]

    return DIGESTS.sub(zeroed, RANDOM_ID.sub(replaced, data))


def broken(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A few that are nearly right."""
    yield "cut", data[: len(data) * 2 // 3]
    yield "longer", data + data[-5:]
    for number in (1, 3):
        at = number * len(data) // 4
        yield f"flip{number}", data[:at] + bytes([data[at] ^ (1 << number)]) + data[at + 1 :]
    numbers = list(re.finditer(rb"(?<=[ \[:,])\d+(?=[,\]}\n])", data))
    if numbers:
        middle = numbers[len(numbers) // 2]
        yield "number", data[: middle.start()] + b"4294967296" + data[middle.end() :]


def make(directory: Path) -> None:
    """Writes all seeds and dictionaries below `directory`, which must not exist."""
    directory.mkdir()
    with tempfile.TemporaryDirectory() as made:
        for target, name, random in valid_seeds(Path(made)):
            data = the_same_in_every_run(random)
            (directory / target).mkdir(exist_ok=True)
            (directory / target / name).write_bytes(data)
            for how, bytes_ in broken(data):
                (directory / target / f"{name}.{how}").write_bytes(bytes_)
    for target, words in WORDS.items():
        lines = [json.dumps(word) for word in words]
        # A quote in a dictionary is escaped as in JSON; the JSON words stand there as they are.
        lines += ['"' + word.replace('"', '\\"') + '"' for word in JSON_WORDS if "\\" not in word]
        (directory / f"{target}.dict").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--large"]:
        make_large(Path(arguments[1]))
        return 0
    directory = Path(arguments[0]) if arguments else HERE / "seeds"
    shutil.rmtree(directory, ignore_errors=True)
    make(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
