"""Files of torch.save: zip archives with a pickle."""

from __future__ import annotations

import argparse
import json
import pickle
import tarfile
import tempfile
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_samples import VALUES, Payload, same, state, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import torch_ckpt


class Options(argparse.Namespace):
    pass


def saved(path: Path, what: Any = None, **options: Any) -> Path:
    torch.save(state() if what is None else what, path, **options)
    return path


def training_state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_everything_comes_back(tmp_path: Path, protocol: int) -> None:
    loaded = torch_ckpt.load(path=saved(tmp_path / "a.pt", pickle_protocol=protocol))
    wanted = state()
    assert set(loaded) == set(wanted)
    for key, value in wanted["model"].items():
        assert same(value.detach(), loaded["model"][key]), key
    for key in set(wanted) - {"model"}:
        assert same(wanted[key], loaded[key]), key


def test_a_training_state_comes_back_with_its_containers_and_keys(tmp_path: Path) -> None:
    what = {
        **training_state(),
        "histories": defaultdict(list, a=[1]),
        "counts": Counter("aab"),
        "recent": deque([1, 2], 5),
        "empty": {},
        "mixed": {1: torch.ones(2), None: 2, False: 3},
        "list": [torch.zeros(1), {"deep": [{"x": torch.ones(1)}]}],
    }
    loaded = torch_ckpt.load(path=saved(tmp_path / "a.ckpt", what))
    assert same(loaded, what)
    assert type(loaded["model"]) is OrderedDict
    assert loaded["histories"].default_factory is list
    assert loaded["recent"].maxlen == 5
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def test_the_structure_is_that_of_our_own_saves(tmp_path: Path) -> None:
    what = {**training_state(), "counts": Counter("ab"), "empty": {"e": {}}, 3: 1}
    torch_ckpt.save(what, tmp_path / "ours")
    ours, theirs = (
        torch_ckpt.HuggingFaceStorageReader(path).read_metadata()
        for path in (tmp_path / "ours", saved(tmp_path / "a.pt", what))
    )
    assert theirs.planner_data == ours.planner_data
    assert theirs.state_dict_metadata.keys() == ours.state_dict_metadata.keys()


def test_tied_tensors_and_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    what = {"a": base, "b": base, "t": base.t(), "part": base[1:3, 2:4], "flat": base.view(-1)[7:]}
    path = saved(tmp_path / "a.pth", what)
    assert same(torch_ckpt.load(path=path), what)
    described = torch_ckpt.Checkpoint(path).describe()
    assert {each.name: each.alias_of for each in described.tensors if each.alias_of} == {"b": "a"}
    target = {"part": torch.zeros(2, 2)}
    torch_ckpt.load(target, path)
    assert same(target["part"], base[1:3, 2:4])


@settings(max_examples=60)
@given(
    what=st.recursive(
        tensors() | st.integers() | st.text(max_size=3) | st.none() | st.floats(allow_nan=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("abc0", min_size=1, max_size=2) | st.integers(0, 9), inner)
        ),
        max_leaves=8,
    ),
    protocol=st.sampled_from([2, 4]),
)
def test_any_state(what: Any, protocol: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder) / "a.pt", {"x": what}, pickle_protocol=protocol)
        try:
            loaded = torch_ckpt.load(path=path)
        except torch_ckpt.ConflictError as error:
            assert "have this name" in str(error)  # {"0": ..., 0: ...}
            return
        assert same(loaded, {"x": what})


@pytest.mark.parametrize("name", VALUES)
def test_objects_come_back_equal_in_value_and_type(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "a.pt", {"x": torch.ones(1), "leaf": VALUES[name]})
    assert repr(torch_ckpt.load(path=path)["leaf"]) == repr(VALUES[name])


def test_a_payload_never_runs_and_is_named(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    what = {"x": torch.ones(2), "evil": Payload(marker), "deep": [(Payload(marker),)]}
    path = saved(tmp_path / "a.pt", what)
    for name in ("evil", "deep"):
        target = {"x": torch.zeros(2), name: None}
        with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'{name}'.*posix\.system"):
            torch_ckpt.load(target, path)
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert same(target["x"], torch.ones(2))
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"posix\.system and no state dict"):
        torch_ckpt.load(path=saved(tmp_path / "b.pt", Payload(marker)))
    assert not marker.exists()


def test_a_class_that_is_not_known_spoils_its_own_leaf_only(tmp_path: Path) -> None:
    what = {**training_state(), "args": Options(lr=1.0, w=torch.ones(1))}
    path = saved(tmp_path / "a.pt", what)
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'args'.*test_\w+\.Options"):
        torch_ckpt.load(path=path)
    del what["args"]
    model = torch_ckpt.load(
        {"model": {k: torch.zeros_like(v) for k, v in what["model"].items()}}, path
    )
    assert same(model, {"model": what["model"]})


WHOLE = {
    "a module": (torch.nn.Linear(1, 1), r"Linear and no state dict"),
    "a tensor": (torch.ones(1), "holds a tensor and no state dict"),
    "a list": ([torch.ones(1)], "holds a list and no state dict"),
    "a tuple key": ({(1, 2): torch.ones(1)}, "key of type tuple"),
    "a reserved name": ({"torch_ckpt.structure": 1}, "reserved for torch_ckpt"),
    "one name twice": ({"a": {"b": 1}, "a.b": 2}, "two leaves of the state dict"),
}


@pytest.mark.parametrize("what", WHOLE)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, what: str) -> None:
    value, message = WHOLE[what]
    path = saved(tmp_path / "a.pt", value)
    with pytest.raises(torch_ckpt.CheckpointError, match=message) as error:
        torch_ckpt.load(path=path)
    assert str(path) in str(error.value)


def test_what_is_no_archive_is_refused_in_clear_words(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"

    def refusal() -> str:
        with pytest.raises(torch_ckpt.CheckpointError) as error:
            torch_ckpt.load(path=path)
        assert str(path) in str(error.value)
        return str(error.value)

    saved(path, {"a": torch.ones(1)}, _use_new_zipfile_serialization=False)
    assert "before torch 1.6, or without zip" in refusal()
    path.write_bytes(pickle.dumps({"a": 1}))
    assert "a bare pickle" in refusal()
    with tarfile.open(path, "w") as tar:
        tar.add(__file__, "pickle")
    assert "a tar archive" in refusal()
    torch.jit.script(torch.nn.Linear(1, 1)).save(path)
    assert "compressed" in refusal()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
    assert "compressed" in refusal()
    path.write_bytes(b"")
    assert "is empty" in refusal()
    path.write_text("hello, world")
    assert "no archive of torch.save" in refusal()


def test_archives_of_other_zip_writers(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.arange(5.0), "n": 1})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as entry:
                entry.write(old.read(name))
    loaded = torch_ckpt.load(path=tmp_path / "b.pt")
    assert same(loaded, {"a": torch.arange(5.0), "n": 1})


def test_damage_is_found_and_nothing_crashes(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.randn(64), "step": 3})
    whole = path.read_bytes()
    content = torch_ckpt.load(path=path)["a"].numpy().tobytes()
    begin = whole.index(content)
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            torch_ckpt.Checkpoint(path).verify()
            wrong = False
        except torch_ckpt.CheckpointError as error:
            assert "a.pt" in str(error)
            wrong = True
        assert wrong or not begin <= at < begin + len(content)
    for size in range(0, len(whole), 13):
        path.write_bytes(whole[:size])
        with pytest.raises(torch_ckpt.CheckpointError):
            torch_ckpt.load(path=path)


def test_verify_counts_the_bytes_of_all_entries(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.zeros(1000)})
    report = torch_ckpt.Checkpoint(path).verify()
    with zipfile.ZipFile(path) as archive:
        entries = sum(entry.file_size for entry in archive.infolist())
    assert (report.files, report.bytes) == (1, entries)


def hub(folder: Path, parts: dict[str, dict[str, torch.Tensor]], index: bool = True) -> Path:
    folder.mkdir()
    for name, part in parts.items():
        torch.save(part, folder / name)
    if index:
        names = {name: file for file, part in parts.items() for name in part}
        text = json.dumps({"metadata": {"total_size": 0}, "weight_map": names})
        (folder / "pytorch_model.bin.index.json").write_text(text)
    (folder / "config.json").write_text("{}")
    return folder


PARTS = {
    "pytorch_model-00001-of-00002.bin": {"a": torch.arange(4.0), "b": torch.ones(2, 3).t()},
    "pytorch_model-00002-of-00002.bin": {"c": torch.zeros(2).bfloat16()},
}
ALL = {name: tensor for part in PARTS.values() for name, tensor in part.items()}


@pytest.mark.parametrize("index", [True, False])
def test_hub_directories(tmp_path: Path, index: bool) -> None:
    path = hub(tmp_path / "m", PARTS, index)
    torch.save({"lr": 1}, path / "training_args.bin")
    assert same(torch_ckpt.load(path=path), ALL)
    torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out", naming="hf")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), ALL)
    torch_ckpt.Checkpoint(path).verify()


def test_a_hub_directory_of_one_file(tmp_path: Path) -> None:
    path = hub(tmp_path / "m", {"pytorch_model.bin": OrderedDict(ALL)}, index=False)
    assert same(torch_ckpt.load(path=path), OrderedDict(ALL))
    assert torch_ckpt.Checkpoint(path).describe().source == "torch"


def test_hub_directories_that_are_not_whole(tmp_path: Path) -> None:
    def refused(path: Path, kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            torch_ckpt.load(path=path)

    first, second = PARTS
    path = hub(tmp_path / "index", PARTS)
    (path / second).rename(path / "x")
    refused(path, torch_ckpt.IncompleteError, f"{second}.*missing")
    torch.save({"d": torch.ones(1)}, path / second)
    assert "c" not in torch_ckpt.open(path)  # which the index names, and a warning says so
    torch.save({"a": torch.ones(1), "c": torch.ones(1)}, path / second)
    refused(path, torch_ckpt.ConflictError, "'a'.*and in another file")
    path = hub(tmp_path / "numbers", PARTS, index=False)
    (path / first).unlink()
    refused(path, torch_ckpt.IncompleteError, "file 1 of 2 is missing")
    path = hub(tmp_path / "both", {**PARTS, "pytorch_model.bin": {}})
    refused(path, torch_ckpt.ConflictError, "pytorch_model.bin.*does not name it")
    path = hub(tmp_path / "two", {"pytorch_model.bin": {}, "adapter_model.bin": {}}, index=False)
    refused(path, torch_ckpt.ConflictError, "more than once")
    path = hub(tmp_path / "none", {"optimizer.pt": {}}, index=False)
    refused(path, torch_ckpt.IncompleteError, "such as optimizer.pt, give the path")


def test_safetensors_win_over_torch_files(tmp_path: Path) -> None:
    path = hub(tmp_path / "m", {"pytorch_model.bin": {"a": torch.zeros(1)}}, index=False)
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    assert same(torch_ckpt.load(path=path), {"a": torch.ones(1)})
    assert torch_ckpt.Checkpoint(path).describe().beside == ("pytorch_model.bin",)


def test_single_files_of_the_other_formats(tmp_path: Path) -> None:
    path = hub(tmp_path / "m", {"pytorch_model.bin": {}}, index=False)
    save_file({"a": torch.ones(1)}, path / "other.safetensors")
    assert same(torch_ckpt.load(path=path / "other.safetensors"), {"a": torch.ones(1)})
    assert torch_ckpt.load(path=path / "pytorch_model.bin") == {}
    with pytest.raises(torch_ckpt.IncompleteError, match="no such file or directory"):
        torch_ckpt.load(path=path / "gone.pt")


def test_a_file_that_is_replaced_is_not_mixed_in(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"x": torch.ones(1), "step": 7})
    reader = torch_ckpt.HuggingFaceStorageReader(path)
    reader.read_metadata()
    saved(path, {"x": torch.ones(1), "step": 8})
    with pytest.raises(torch_ckpt.ConflictError):
        reader._open().archived_objects(["step"])


def test_one_file_that_is_alone_in_its_directory_is_not_whole(tmp_path: Path) -> None:
    first, second = PARTS
    path = hub(tmp_path / "m", {first: PARTS[first]}, index=False)
    (path / "config.json").unlink()
    with pytest.raises(torch_ckpt.IncompleteError, match="file 2 of 2 is missing"):
        torch_ckpt.load(path=path)
    path = hub(tmp_path / "two", {first: PARTS[first], "pytorch_model-00001-of-00001.bin": {}})
    (path / "pytorch_model.bin.index.json").unlink()
    torch.save({}, path / second)
    with pytest.raises(torch_ckpt.ConflictError, match="more than once"):
        torch_ckpt.load(path=path)
    path = hub(tmp_path / "swapped", PARTS)
    (path / first).rename(path / "x")
    (path / second).rename(path / first)
    (path / "x").rename(path / second)
    assert same(torch_ckpt.load(path=path), ALL)  # as transformers reads them


def test_odd_leaves_spoil_nothing_else(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    itself: list[Any] = []
    itself.append(itself)
    good = {"w": torch.ones(3), "pairs": {(1, 2): 3, 2.5: torch.ones(1)}, "big": {2**70: 1}}
    bad = {
        "complex": torch.ones(2, dtype=torch.complex128),
        "deep": deep,
        "itself": itself,
        "sparse": torch.ones(2).to_sparse(),
    }
    path = saved(tmp_path / "a.pt", {**good, **bad})
    checkpoint = torch_ckpt.open(path)
    assert same(checkpoint["w"][...], good["w"])
    assert same(
        {name: checkpoint.objects[name] for name in ("pairs", "big")},
        {name: good[name] for name in ("pairs", "big")},
    )
    for name in ("deep", "itself"):
        with pytest.raises(torch_ckpt.CheckpointError, match=f"'{name}'"):
            checkpoint.objects[name]
    for name in ("complex", "sparse"):
        with pytest.raises(torch_ckpt.UnsupportedError, match=f"'{name}'"):
            checkpoint[name].read()
    with pytest.raises(torch_ckpt.UnsupportedError, match="ComplexDoubleStorage"):
        checkpoint["complex"][...]


def test_honest_files_with_much_structure(tmp_path: Path) -> None:
    nested: Any = [True] * 20_000 + [torch.ones(1)]
    for _ in range(6):
        nested = [nested]
    what = {"n": nested, "k" * 400: {number: number for number in range(3000)}}
    loaded = torch_ckpt.load(path=saved(tmp_path / "a.pt", what))
    assert same(loaded, what)


def test_what_shared_containers_say_is_bounded(tmp_path: Path) -> None:
    inner = {f"k{number}": number for number in range(1000)}
    path = saved(tmp_path / "a.pt", {f"x{number}": inner for number in range(3000)})
    with pytest.raises(torch_ckpt.ExhaustedError, match=r"a\.pt.*holds more than"):
        torch_ckpt.load(path=path)
    text: Any = "x" * 1000
    for _ in range(16):
        text = (text, text)
    path = saved(path, {f"x{number}": (text,) for number in range(6)})
    with pytest.raises(torch_ckpt.ExhaustedError, match="left of 16 MiB"):
        torch_ckpt.load(path=path)


def test_names_of_classes_are_printable(tmp_path: Path) -> None:
    program = b"\x80\x02}X\x01\x00\x00\x00ac\x1b[31m\xff\nC\n)\x81s."
    saved(tmp_path / "a.pt", {"a": 1})
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as new, zipfile.ZipFile(tmp_path / "a.pt") as old:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"\?\[31m\?\.C") as error:
        torch_ckpt.load(path=tmp_path / "b.pt")
    assert str(error.value).isprintable()
