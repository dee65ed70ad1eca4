"""Directories that stock DCP wrote: .metadata and .distcp files."""

from __future__ import annotations

import io
import pickle
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_samples import VALUES, Payload, same, state, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import torch_ckpt


def saved(path: Path, what: dict[str, Any] | None = None) -> Path:
    dcp.save(state() if what is None else what, storage_writer=dcp.FileSystemWriter(path))
    return path


def test_everything_comes_back(tmp_path: Path) -> None:
    loaded = torch_ckpt.load(path=saved(tmp_path / "c"))
    wanted = state()
    assert set(loaded) == set(wanted)
    for key, value in wanted["model"].items():
        assert same(value.detach(), loaded["model"][key]), key
    for key in set(wanted) - {"model"}:
        assert same(wanted[key], loaded[key]), key


def test_stock_dcp_load_reads_them_through_our_reader(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    target = {
        "model": {"weight": torch.zeros(37, 19)},
        "step": 0,
        "groups": [{"params": [], "lr": 0}],
    }
    dcp.load(target, storage_reader=torch_ckpt.HuggingFaceStorageReader(path))
    assert same(target["model"]["weight"], state()["model"]["weight"])
    assert target["step"] == 7


def test_describe_and_inspect_say_what_it_is(tmp_path: Path) -> None:
    described = torch_ckpt.Checkpoint(saved(tmp_path / "c")).describe()
    assert described.source == "dcp"
    assert {tensor.name for tensor in described.tensors} >= {"model.weight", "model.fp8"}
    assert {leaf.name for leaf in described.objects} >= {"step", "betas"}


def test_a_payload_in_the_metadata_never_runs(tmp_path: Path) -> None:
    path, marker = saved(tmp_path / "c"), tmp_path / "ran"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Payload(marker)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"posix\.system"):
        torch_ckpt.load(path=path)
    assert not marker.exists()


def test_a_payload_in_an_object_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = saved(tmp_path / "c", {"x": torch.ones(2), "evil": Payload(marker)})
    assert not marker.exists()
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"posix\.system") as error:
        torch_ckpt.load(path=path)
    assert "evil" in str(error.value)
    assert not marker.exists()
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert same(target["x"], torch.ones(2))


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def test_a_file_that_is_cut_short_or_gone_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    file = data_file(path)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(torch_ckpt.IncompleteError, match=file.name):
        torch_ckpt.load(path=path)
    file.unlink()
    with pytest.raises(torch_ckpt.IncompleteError, match=file.name):
        torch_ckpt.load(path=path)


def test_archives_that_were_swapped_are_errors(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.zeros(4), "b": torch.zeros(5)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    first, second = metadata.storage_data
    places = metadata.storage_data
    places[first], places[second] = places[second], places[first]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.CorruptError, match="where the metadata says"):
        torch_ckpt.load(path=path)


@pytest.mark.parametrize("what", ["place", "chunk", "object"])
def test_metadata_that_does_not_add_up_is_refused(tmp_path: Path, what: str) -> None:
    path = saved(tmp_path / "c", {"a": torch.zeros(4)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    stored: Any = metadata.state_dict_metadata["a"]
    if what == "place":
        metadata.storage_data = {}
    elif what == "chunk":
        stored.chunks = []
    else:
        metadata.state_dict_metadata["o"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises((torch_ckpt.CorruptError, torch_ckpt.IncompleteError)):
        torch_ckpt.load(path=path)


def test_attributes_stand_in_any_order_and_among_others(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {name: torch.arange(3.0) + i for i, name in enumerate("abcdef")})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    for i, (index, place) in enumerate(metadata.storage_data.items()):
        for value in (index, place, metadata.state_dict_metadata[index.fqn].chunks[0]):  # type: ignore[union-attr]
            attributes = dict(value.__dict__)
            value.__dict__.clear()
            if i % 3 == 1:
                attributes = dict(reversed(attributes.items()))
            value.__dict__.update(attributes)
            if i % 3 == 2:
                value.__dict__.update({f"later{j}": j for j in range(20 * (i - 2))}, last=None)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = torch_ckpt.load(path=path)
    assert all(same(loaded[name], torch.arange(3.0) + i) for i, name in enumerate("abcdef"))
    del metadata.storage_data[index].__dict__["offset"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.CorruptError, match="no offset"):
        torch_ckpt.load(path=path)


def test_chunks_have_the_dimensions_of_their_tensor(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.zeros(4)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    stored: Any = metadata.state_dict_metadata["a"]
    stored.chunks[0].sizes = torch.Size([2, 2])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.CorruptError, match="no box of a chunk") as error:
        torch_ckpt.load(path=path)
    assert error.value.tensor == "a"


def test_merging_reads_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(2)})
    torch_ckpt.consolidate_safetensors_files_on_every_rank(path, tmp_path / "hf", None)
    loaded = torch_ckpt.load(path=tmp_path / "hf")
    assert same(loaded["a"], torch.arange(12.0).view(3, 4).t())


def test_ordered_dicts_and_tensors_inside_of_objects(tmp_path: Path) -> None:
    value = {"o": OrderedDict(a=torch.arange(6).view(2, 3).t()), "s": {1, 2}, "b": b"\xff\0"}
    path = saved(tmp_path / "c", {"leaf": [(value,)]})
    ((loaded,),) = torch_ckpt.load(path=path)["leaf"]
    assert same(loaded["o"]["a"], value["o"]["a"])  # type: ignore[index]
    assert loaded["s"] == {1, 2} and loaded["b"] == b"\xff\0"


def test_verify_finds_every_flipped_byte_of_what_archives_hold(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.randn(64), "step": 3})
    report = torch_ckpt.Checkpoint(path).verify()
    assert report.files == 1 and report.bytes > 256
    file = data_file(path)
    whole = file.read_bytes()
    wrong = []
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            torch_ckpt.Checkpoint(path).verify()
        except torch_ckpt.CheckpointError as error:
            assert file.name in str(error)
            wrong.append(at)
    file.write_bytes(whole)
    content = torch_ckpt.load(path=path)["a"].numpy().tobytes()
    begin = whole.index(content)
    assert {at for at in range(0, len(whole), 7) if begin <= at < begin + len(content)} <= set(
        wrong
    )
    # Beside it: padding, and fields of zip headers that say nothing.
    assert len(wrong) > len(content) // 7


def test_blobs_of_safetensors_which_stock_cannot_read_back(tmp_path: Path) -> None:
    what = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16(), "step": 7}
    writer = dcp.FileSystemWriter(
        tmp_path / "c", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save(what, storage_writer=writer)
    loaded = torch_ckpt.load(path=tmp_path / "c")
    assert all(same(what[key], loaded[key]) for key in what)
    with pytest.raises(torch_ckpt.UnsupportedError, match="'[ab]': has no digest"):
        torch_ckpt.Checkpoint(tmp_path / "c").verify()
    file = data_file(tmp_path / "c")
    file.write_bytes(file.read_bytes().replace(b'"a"', b'"x"'))
    with pytest.raises(torch_ckpt.CorruptError, match="'a'"):
        torch_ckpt.load(path=tmp_path / "c")


@settings(max_examples=40)
@given(
    state=st.dictionaries(st.sampled_from("abcdefgh"), tensors(), min_size=1),
    threads=st.integers(1, 3),
    blobs=st.booleans(),
)
def test_any_tensors(state: dict[str, torch.Tensor], threads: int, blobs: bool) -> None:
    kind = SerializationFormat.SAFETENSORS if blobs else SerializationFormat.TORCH_SAVE
    if blobs:  # safetensors writes dense tensors only
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    with tempfile.TemporaryDirectory() as folder:
        writer = dcp.FileSystemWriter(folder, thread_count=threads, serialization_format=kind)
        dcp.save(state, storage_writer=writer)
        loaded = torch_ckpt.load(path=folder)
        if not blobs:
            torch_ckpt.Checkpoint(folder).verify()
        elif state:
            with pytest.raises(torch_ckpt.UnsupportedError, match="has no digest"):
                torch_ckpt.Checkpoint(folder).verify()
    assert set(loaded) == set(state)
    for name, tensor in state.items():
        assert same(tensor, loaded[name]), name


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_views_that_torch_changes_when_it_reads_them_are_refused(tmp_path: Path, view: Any) -> None:
    tensor = view(torch.tensor([1 + 2j, 3 - 1j]))
    assert tensor.is_conj() or tensor.is_neg()
    path = saved(tmp_path / "c", {"w": tensor})
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'.*negates or conjugates"):
        torch_ckpt.load(path=path)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_come_back_equal_in_value_and_type(
    tmp_path: Path, name: str, protocol: int
) -> None:
    def packed(value: Any) -> io.BytesIO:
        out = io.BytesIO()
        torch.save(value, out, pickle_protocol=protocol)
        return out

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return packed(value) if isinstance(found, io.BytesIO) else found

    value = VALUES[name]
    dcp.save(
        {"x": torch.ones(1), "leaf": value},
        storage_writer=dcp.FileSystemWriter(tmp_path / "c"),
        planner=Planner(),
    )
    assert repr(torch_ckpt.load(path=tmp_path / "c")["leaf"]) == repr(value)


def test_an_object_of_a_later_save_is_not_mixed_in(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"x": torch.ones(1), "step": 7})
    reader = torch_ckpt.HuggingFaceStorageReader(path)
    reader.read_metadata()
    saved(path, {"x": torch.ones(1), "step": 8})
    with pytest.raises(torch_ckpt.ConflictError):
        reader._open().archived_objects(["step"])


def test_verify_needs_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "c", {"x": torch.ones(1)})
    finally:
        torch.serialization.set_crc32_options(True)
    for share in ((0, 1), (0, 2)):
        with pytest.raises(torch_ckpt.UnsupportedError, match="no checksums"):
            torch_ckpt.Checkpoint(path).verify(share=share)


def test_an_object_that_is_no_archive_any_more(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"x": torch.ones(1), "step": 7})
    file = data_file(path)
    content = file.read_bytes()
    begins = [
        at for at in range(len(content)) if content.startswith(b"PK\x03\x04archive/data.pkl", at)
    ]
    for at in [content.find(b"PK\x03\x04"), *begins]:
        file.write_bytes(content[:at] + b"X" + content[at + 1 :])
        with pytest.raises(torch_ckpt.CheckpointError):
            torch_ckpt.Checkpoint(path).verify()


def test_all_of_a_tensor_that_is_not_read_is_verified(tmp_path: Path) -> None:
    """Its first chunk stands for it, and the others have digests too."""
    parts = [torch.full((2,), value, dtype=torch.complex128) for value in (1.5, 2.5)]
    boxes = torch_ckpt.LocalBoxes((4,), [((0,), parts[0]), ((2,), parts[1])])
    path = saved(tmp_path / "c", {"z": boxes, "w": torch.ones(2)})
    torch_ckpt.Checkpoint(path).verify()
    file = data_file(path)
    content = file.read_bytes()
    for part in parts:
        at = content.find(part.numpy().tobytes())
        assert at > 0
        file.write_bytes(content[:at] + b"X" + content[at + 1 :])
        with pytest.raises(torch_ckpt.CorruptError, match="CRC-32"):
            torch_ckpt.Checkpoint(path).verify()


def test_blobs_under_other_names(tmp_path: Path) -> None:
    what = {"a": torch.ones(2), "b": torch.zeros(3)}
    writer = dcp.FileSystemWriter(
        tmp_path / "c", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save(what, storage_writer=writer)
    torch_ckpt.consolidate_safetensors_files(
        tmp_path / "c", tmp_path / "hf", None, key_mapping={"^a$": "b", "^b$": "a"}
    )
    loaded = torch_ckpt.load(path=tmp_path / "hf")
    assert same(loaded["b"], what["a"]) and same(loaded["a"], what["b"])


def test_chunks_that_several_ranks_have(tmp_path: Path) -> None:
    """As DCP wrote them before it dropped replicas."""
    path = saved(tmp_path / "c", {"a": torch.arange(4.0)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    stored: Any = metadata.state_dict_metadata["a"]
    stored.chunks = stored.chunks * 3
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert same(torch_ckpt.load(path=path)["a"], torch.arange(4.0))


def test_one_chunk_said_very_often(tmp_path: Path) -> None:
    """The pickle says the same object again, in two bytes, and then the list of them under many
    names. Time does not grow with the square, and what is kept of them is bounded."""
    path = saved(tmp_path / "c", {"a": torch.arange(4.0)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    stored: Any = metadata.state_dict_metadata["a"]
    stored.chunks = stored.chunks * 600_000
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert same(torch_ckpt.load(path=path)["a"], torch.arange(4.0))
    metadata.state_dict_metadata = {f"{number}": stored for number in range(20)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.ExhaustedError, match="says more than fits"):
        torch_ckpt.load(path=path)


def test_two_checkpoints_in_one_directory_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.ones(4)})
    save_file({"z": torch.ones(1)}, path / "extra.safetensors")
    with pytest.raises(torch_ckpt.ConflictError, match="two checkpoints"):
        torch_ckpt.load(path=path)


def test_a_small_file_does_not_make_large_tensors(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.ones(4)})
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    stored: Any = metadata.state_dict_metadata["a"]
    stored.size = stored.chunks[0].sizes = torch.Size([1 << 30])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(torch_ckpt.UnsupportedError, match="something else than its elements"):
        torch_ckpt.load(path=path)
