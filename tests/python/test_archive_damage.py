"""Archives whose bytes are not what their CRC-32s say, converted and loaded."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_samples import of_dcp, of_torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.values import compare
from torch_ckpt.conversion.convert import TARGETS
from torch_ckpt.native.opened import OpenedCheckpoint


def state() -> dict[str, torch.Tensor]:
    """In one piece of a merge, in several, twice, in part, and not as it stands in its file."""
    generator = torch.Generator().manual_seed(3)
    large = torch.randn(1500, 1100, generator=generator)
    shared = torch.randn(300, 200, generator=generator)
    return {
        "small": torch.arange(5),
        "large": large,
        "columns": torch.randn(1200, 1300, generator=generator).t(),
        "first": shared[:100],
        "twice": shared[50:200],
        "apart": torch.randn(40, 50, generator=generator)[::2, ::3],
    }


def archives(path: Path) -> Iterator[tuple[Path, int, bytes]]:
    """Each archive of torch.save: its file, where it begins, its bytes."""
    if path.is_file():
        yield path, 0, path.read_bytes()
        return
    for place in dcp.FileSystemReader(path).read_metadata().storage_data.values():
        file = path / place.relative_path
        content = file.read_bytes()
        yield file, place.offset, content[place.offset : place.offset + place.length]


def storages(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Where the bytes of tensors are: the file, their beginning and their end."""
    for file, begin, content in archives(path):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for entry in archive.infolist():
                if "/data/" in entry.filename and entry.file_size:
                    at = entry.header_offset + 26
                    lengths = [int.from_bytes(content[p : p + 2], "little") for p in (at, at + 2)]
                    first = begin + at + 4 + sum(lengths)
                    yield file, first, first + entry.file_size


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


def test_two_entries_that_overlap(tmp_path: Path) -> None:
    """The directory has them apart; a header says that its content begins further on."""
    path = of_torch(tmp_path / "source", {"a": torch.ones(64), "b": torch.ones(64)})
    with zipfile.ZipFile(path) as archive:
        at = next(e.header_offset for e in archive.infolist() if e.filename.endswith("data/0"))
    content = bytearray(path.read_bytes())
    (extra,) = struct.unpack_from("<H", content, at + 28)
    struct.pack_into("<H", content, at + 28, extra + 128)
    path.write_bytes(content)
    with pytest.raises(torch_ckpt.CorruptError, match="two entries that overlap at byte"):
        Checkpoint(path).verify()
    with pytest.raises(torch_ckpt.CorruptError):
        torch_ckpt.convert(path, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("saver", [of_torch, of_dcp])
def test_a_flipped_bit_of_any_storage_is_found(tmp_path: Path, saver: Any) -> None:
    source = saver(tmp_path / "source", state())
    found = list(storages(source))
    assert len(found) >= 5
    for number, (file, begin, end) in enumerate(found):
        to = TARGETS[number % len(TARGETS)]
        for at in (begin, (begin + end) // 2, end - 1):
            flip(file, at)
            with pytest.raises(torch_ckpt.CorruptError, match="does not match its CRC-32") as error:
                torch_ckpt.convert(source, tmp_path / "out", to)
            assert error.value.file is not None and error.value.file.endswith(file.name)
            assert os.listdir(tmp_path) == ["source"]
            flip(file, at)
    flip(*found[0][:2])
    for to in TARGETS:
        torch_ckpt.convert(source, tmp_path / f"unverified-{to}", to, verify=False)
    flip(*found[0][:2])
    for to in TARGETS:
        torch_ckpt.convert(source, tmp_path / f"whole-{to}", to)


ERRORS = (torch_ckpt.CorruptError, CheckpointException)  # the second is dcp.load's, around ours
READERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], Any]] = {
    "load": lambda path, target: torch_ckpt.load(target, path=path, no_dist=True),
    "everything": lambda path, _: torch_ckpt.load(path=path, no_dist=True),
    "dcp.load": lambda path, target: dcp.load(
        target, storage_reader=torch_ckpt.CheckpointReader(path), no_dist=True
    ),
    "casts": lambda path, target: dcp.load(
        {name: tensor.float() for name, tensor in target.items()},
        storage_reader=torch_ckpt.CheckpointReader(path),
        no_dist=True,
    ),
    "open": lambda path, target: [torch_ckpt.open(path)[name][...] for name in target],
    "statistics": lambda path, target: [
        torch_ckpt.open(path)[name].statistics() for name in target
    ],
    "diff": lambda path, target: compare(
        OpenedCheckpoint(str(path)), OpenedCheckpoint(str(path)), list(target)
    ),
}


@pytest.mark.parametrize("saver", [of_torch, of_dcp])
@pytest.mark.parametrize("reader", READERS)
def test_readers_compare_what_they_read_as_a_whole(tmp_path: Path, saver: Any, reader: str) -> None:
    tensors = {
        "large": torch.randn(3000, 1100),
        "half": torch.randn(70, 90).bfloat16(),
        "small": torch.arange(5.0),
    }
    source = saver(tmp_path / "source", tensors)

    def read() -> None:
        READERS[reader](source, {name: torch.zeros_like(each) for name, each in tensors.items()})

    read()
    for file, begin, end in storages(source):
        for at in (begin, end - 1):
            flip(file, at)
            with pytest.raises(ERRORS, match="does not match its CRC-32") as error:
                read()
            assert file.name in str(error.value)
            target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
            unverified = torch_ckpt.CheckpointReader(source, verify=False)
            torch_ckpt.load(target, storage_reader=unverified, no_dist=True)
            assert not all(torch.equal(target[name], tensors[name]) for name in tensors)
            # The rest of the storage is not read for it.
            torch_ckpt.open(source)["large"][1000:1001]
            flip(file, at)
    read()


@pytest.mark.parametrize("mebibytes", [1, 4, 8, 17, 64, 100])
def test_streams_compare_storages_that_they_read_in_pieces(tmp_path: Path, mebibytes: int) -> None:
    tensors = {"w": torch.zeros(mebibytes << 18)}
    source = of_torch(tmp_path / "a.pt", tensors)
    ((file, begin, end),) = storages(source)
    flip(file, (begin + end) // 2)
    for reader in ("statistics", "diff", "load"):
        with pytest.raises(torch_ckpt.CorruptError, match="does not match its CRC-32"):
            READERS[reader](source, dict(tensors))


def test_a_view_is_looked_at_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt", {"w": torch.zeros(1000, 1000)[:10]})
    ((file, begin, end),) = storages(source)
    assert end - begin == 4_000_000
    flip(file, end - 1)
    assert torch_ckpt.open(source)["w"].statistics()["max"] == 0.0
    with pytest.raises(torch_ckpt.CorruptError, match="CRC-32"):
        torch_ckpt.convert(source, tmp_path / "out", "hf")


def test_tensors_in_objects(tmp_path: Path) -> None:
    inside = {"pairs": [(torch.ones(3), 1)], "single": (torch.arange(5.0),)}
    source = of_torch(tmp_path / "a.pt", {**inside, "tensor": torch.zeros(8)})
    assert torch.equal(torch_ckpt.open(source).objects["single"][0], torch.arange(5.0))
    for file, begin, end in list(storages(source)):
        flip(file, begin)
        if end - begin < 32:  # the tensor by itself is no object
            with pytest.raises(torch_ckpt.CorruptError, match="does not match its CRC-32"):
                dict(torch_ckpt.open(source).objects)
        with pytest.raises(torch_ckpt.CorruptError, match="does not match its CRC-32"):
            torch_ckpt.convert(source, tmp_path / "out", "torch_ckpt")
        flip(file, begin)


def test_casts_and_other_names_are_compared_too(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt", state())
    file, begin, _ = next(storages(source))
    flip(file, begin)
    with pytest.raises(torch_ckpt.CorruptError, match="CRC-32"):
        torch_ckpt.convert(
            source, tmp_path / "out", "hf", dtype=torch.bfloat16, key_mapping={"^": "model."}
        )


def test_archives_without_checksums_are_taken_as_they_are(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        source = of_torch(tmp_path / "a.pt", state())
    finally:
        torch.serialization.set_crc32_options(True)
    for file, begin, _ in storages(source):
        flip(file, begin)
    torch_ckpt.convert(source, tmp_path / "out", "hf")


@pytest.mark.parametrize("saver", [of_torch, of_dcp])
def test_flipped_bits_of_pickles_are_found_by_every_reader(tmp_path: Path, saver: Any) -> None:
    source = saver(tmp_path / "source", {"rate": 0.125, "weight": torch.ones(3)})
    whole = torch_ckpt.open(source)
    assert whole.objects["rate"] == 0.125
    number = struct.pack(">d", 0.125)
    for file, begin, content in archives(source):
        at = content.find(number)
        if at < 0:
            continue
        flip(file, begin + at + 3)
        with pytest.raises(torch_ckpt.CorruptError, match="CRC-32"):
            print(torch_ckpt.open(source).objects["rate"])
        flip(file, begin + at + 3)
        break
    else:
        raise AssertionError("no pickle holds the number")


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_views_of_one_storage(tmp_path: Path, data: st.DataObject) -> None:
    """Whole storages match, however often and in whatever order their bytes are read; and one
    flipped bit in them does not."""
    rows = data.draw(st.integers(1, 40))
    base = torch.arange(rows * 30, dtype=torch.int32).view(rows, 30)
    tensors = {}
    for name in "abcd"[: data.draw(st.integers(1, 4))]:
        begin = data.draw(st.integers(0, rows - 1))
        view = base[
            begin : data.draw(st.integers(begin + 1, rows)), :: data.draw(st.integers(1, 4))
        ]
        tensors[name] = view.t() if data.draw(st.booleans()) else view
    source = of_torch(tmp_path / "a.pt", tensors)
    torch_ckpt.convert(source, tmp_path / "b.pt", "torch", overwrite=True)
    assert all(torch.equal(torch.load(tmp_path / "b.pt")[name], tensors[name]) for name in tensors)
    ((file, begin, end),) = storages(source)
    flip(file, data.draw(st.integers(begin, end - 1)))
    with pytest.raises(torch_ckpt.CorruptError, match="CRC-32"):
        torch_ckpt.convert(source, tmp_path / "b.pt", "torch", overwrite=True)
