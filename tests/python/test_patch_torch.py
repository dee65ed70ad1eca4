"""patch_torch: which names it binds, to what, and that it puts them back. The programs that it is
for are in ranks/clients.py."""

from __future__ import annotations

import abc
import copy
import inspect
import logging
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import PACKAGE
from sample_states import FAILED, assert_same
from torch.distributed.checkpoint import (
    _consolidate_hf_safetensors,
    _fsspec_filesystem,
    _storage_utils,
    filesystem,
    format_utils,
    hf_storage,
    state_dict_saver,
)

import torch_ckpt
from torch_ckpt import patch_torch
from torch_ckpt.patching import patch, storage
from torch_ckpt.patching.stand_in import StandIn

# Torch 2.15 has a public one, and keeps the old name for what is in it.
FSSPEC = sys.modules.get("torch.distributed.checkpoint.fsspec_filesystem", _fsspec_filesystem)
HF = ("HuggingFaceStorageWriter", "HuggingFaceStorageReader")
FILES = ("FileSystemWriter", "FileSystemReader")
MERGES = ("consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank")
EXECUTORS = ("_ThreadBasedAsyncCheckpointExecutor", "_ProcessBasedAsyncCheckpointExecutor")
# Where stock's names stand, by the option that rebinds them.
PLACES: dict[str, list[tuple[types.ModuleType, str]]] = {
    "hf": [
        *((module, name) for module in (dcp, hf_storage) for name in HF),
        *((_consolidate_hf_safetensors, name) for name in MERGES),
        (hf_storage, MERGES[0]),
        (state_dict_saver, EXECUTORS[0]),
    ],
    "file_system": [
        (module, name) for module in (dcp, filesystem, format_utils, FSSPEC) for name in FILES
    ],
    "default_storage": [
        *((_storage_utils, name) for name in FILES),
        (state_dict_saver, EXECUTORS[1]),
    ],
}
STOCK = {place: vars(place[0])[place[1]] for places in PLACES.values() for place in places}
# In no module, where a patch would find them.
KEPT: dict[str, Any] = {name: vars(dcp)[name] for name in (*HF, *FILES)}

STATE = {"a": torch.arange(6.0).reshape(2, 3), "n": 3, "g": {"x": [1, "two"], "l": torch.tensor(4)}}


def empty() -> dict[str, Any]:
    return {"a": torch.zeros(2, 3), "n": 0, "g": {"x": [0], "l": torch.tensor(0)}}


def loaded(load: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    target = empty()
    load(target)
    return target


def rebound() -> set[str]:
    """The options by which names are bound to ours; all names of one, or none."""
    found = set()
    for option, places in PLACES.items():
        ours = {vars(module)[name] is not STOCK[module, name] for module, name in places}
        assert len(ours) == 1, option
        if ours == {True}:
            found.add(option)
            for module, name in places:
                bound = vars(module)[name]
                assert isinstance(bound, StandIn) or bound.__module__ == storage.__name__
    return found


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    assert rebound() == set()
    yield
    assert rebound() == set()


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """One that is imported, and binds what a test says."""
    made = types.ModuleType("a_client")
    sys.modules["a_client"] = made
    yield made
    del sys.modules["a_client"]


def test_each_option_binds_its_names_until_it_is_undone() -> None:
    for options in ((), ("file_system",), ("default_storage",), ("file_system", "default_storage")):
        active = patch_torch(**dict.fromkeys(options, True))
        assert rebound() == {"hf", *options}
        active.undo()
        assert rebound() == set()
        active.undo()  # does nothing
    assert all(vars(module)[name] is stock for (module, name), stock in STOCK.items())


def test_a_block_that_raises_is_undone() -> None:
    with pytest.raises(KeyError), patch_torch(file_system=True) as active:
        assert isinstance(active, torch_ckpt.TorchPatch)
        raise KeyError
    assert rebound() == set()


def test_names_that_other_modules_have_bound(module: types.ModuleType) -> None:
    before = (
        "from torch.distributed.checkpoint import FileSystemWriter as Writer\n"
        "from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader\n"
        "class Own(Writer): pass\n"
        "kept = {'writer': Writer}\n"
    )
    exec(before, vars(module))
    own = module.Own
    with patch_torch(file_system=True):
        assert module.Writer is dcp.FileSystemWriter is not KEPT["FileSystemWriter"]
        assert module.HuggingFaceStorageReader is dcp.HuggingFaceStorageReader
        assert module.Own is own and module.kept["writer"] is KEPT["FileSystemWriter"]
        # One that is imported, or binds a name, while the patch is active.
        exec("from torch.distributed.checkpoint import FileSystemReader as late", vars(module))
        assert module.late is dcp.FileSystemReader is not KEPT["FileSystemReader"]
    assert module.Writer is KEPT["FileSystemWriter"]
    assert module.HuggingFaceStorageReader is KEPT["HuggingFaceStorageReader"]
    assert module.late is KEPT["FileSystemReader"]


def test_our_own_names_are_left(module: types.ModuleType) -> None:
    from torch_ckpt.dcp.read import reader
    from torch_ckpt.dcp.write import writer

    vars(module)["own"] = torch_ckpt.HuggingFaceStorageWriter
    with patch_torch(file_system=True, default_storage=True):
        assert writer.StockWriter is KEPT["HuggingFaceStorageWriter"]
        assert reader.StockReader is KEPT["HuggingFaceStorageReader"]
        assert module.own is torch_ckpt.HuggingFaceStorageWriter
    assert module.own is torch_ckpt.HuggingFaceStorageWriter


def test_what_somebody_else_has_bound_meanwhile_is_left(
    module: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    vars(module).update(dict.fromkeys("abc", KEPT["FileSystemWriter"]))
    with patch_torch(file_system=True):
        module.a, module.c = object, None
        del module.b
    assert module.a is object and module.c is None and not hasattr(module, "b")
    warned = {record.message for record in caplog.records if record.levelno >= logging.WARNING}
    assert warned == {
        f"a_client.{name} has been rebound by other code meanwhile: it is left" for name in "ac"
    }


def test_modules_that_are_imported_during_the_walk() -> None:
    """By other threads, as it were: one before each step of it."""
    made: list[types.ModuleType] = []
    bind = patch._TABLE._rebind_in

    def importing(module: types.ModuleType) -> None:
        made.append(types.ModuleType(f"a_client_{len(made)}"))
        sys.modules[made[-1].__name__] = made[-1]
        exec("from torch.distributed.checkpoint import FileSystemReader as late", vars(made[-1]))
        bind(module)

    with mock.patch.dict(sys.modules):
        with mock.patch.object(patch._TABLE, "_rebind_in", importing):
            active = patch_torch(file_system=True)
            assert {each.late for each in made} == {dcp.FileSystemReader}
            made.clear()
            active.undo()
            assert {each.late for each in made} == {KEPT["FileSystemReader"]}


@pytest.mark.parametrize("at", [0, 5, 500])
def test_ctrl_c_in_the_walk(at: int, module: types.ModuleType) -> None:
    module.a = KEPT["FileSystemWriter"]
    bind = patch._TABLE._rebind_in
    step = 0

    def interrupted(module: types.ModuleType) -> None:
        nonlocal step
        step += 1
        if step == at + 1:
            raise KeyboardInterrupt
        bind(module)

    with mock.patch.object(patch._TABLE, "_rebind_in", interrupted):
        with pytest.raises(KeyboardInterrupt):
            patch_torch(file_system=True)
        assert rebound() == set() and module.a is KEPT["FileSystemWriter"]
        active = patch_torch(file_system=True)
        assert module.a is dcp.FileSystemWriter
        step = 0
        with pytest.raises(KeyboardInterrupt):
            active.undo()
        active.undo()
    assert rebound() == set() and module.a is KEPT["FileSystemWriter"]


def test_a_signal_handler_patches_during_the_walk() -> None:
    bind = patch._TABLE._rebind_in

    def handler(module: types.ModuleType) -> None:
        with mock.patch.object(patch._TABLE, "_rebind_in", bind), patch_torch(default_storage=True):
            pass
        patch._TABLE._rebind_in = bind  # once
        bind(module)

    def work() -> None:
        with mock.patch.object(patch._TABLE, "_rebind_in", handler), patch_torch(file_system=True):
            assert rebound() == {"hf", "file_system"}
            done.set()

    done = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert done.is_set()


def test_a_patch_that_is_over_is_not_entered_again() -> None:
    active = patch_torch(file_system=True)
    with active:
        pass
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="over"), active:
        pass


def test_what_is_kept_of_ours_makes_stocks_when_the_patch_is_over(tmp_path: Path) -> None:
    with patch_torch(file_system=True):

        def write(path: Path, cls: Any = dcp.FileSystemWriter) -> Any:
            return cls(path)

        registry = {name: vars(dcp)[name] for name in KEPT}
        merges = [vars(_consolidate_hf_safetensors)[name] for name in MERGES]
        assert type(write(tmp_path)) is storage.FileSystemWriter
    with patch_torch(default_storage=True):  # which does not want it
        assert type(write(tmp_path)) is KEPT["FileSystemWriter"]
        choice, executor = (
            _storage_utils.FileSystemWriter,
            vars(state_dict_saver)[EXECUTORS[0]],
        )
        assert type(choice(tmp_path)) is storage.FileSystemWriter
    assert type(choice(tmp_path)) is KEPT["FileSystemWriter"]
    for name in KEPT:
        assert type(registry[name](str(tmp_path))) is KEPT[name]
    executor().execute_save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path / "c")).result()
    assert torch_ckpt.Checkpoint(tmp_path / "c").format == "dcp"
    writer = KEPT["HuggingFaceStorageWriter"](str(tmp_path / "in"), save_distributed=True)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    for number, merge in enumerate(merges):
        (tmp_path / f"{number}").mkdir()
        merge(str(tmp_path / "in"), str(tmp_path / f"{number}"), {"a": 1})
        assert not (tmp_path / f"{number}" / "torch_ckpt.json").exists()


def test_a_module_that_is_gone_is_put_right_as_well(module: types.ModuleType) -> None:
    module.a = KEPT["FileSystemWriter"]
    with patch_torch(file_system=True):
        assert module.a is dcp.FileSystemWriter
        with mock.patch.dict(sys.modules):
            del sys.modules["a_client"]
            patch_torch().undo()
            assert module.a is dcp.FileSystemWriter
    assert module.a is KEPT["FileSystemWriter"]


def test_patches_nest_in_any_order() -> None:
    first = patch_torch(file_system=True)
    second = patch_torch(default_storage=True)
    third = patch_torch(file_system=True)
    first.undo()
    assert rebound() == {"hf", "file_system", "default_storage"}
    third.undo()
    assert rebound() == {"hf", "default_storage"}
    first.undo()
    assert rebound() == {"hf", "default_storage"}
    second.undo()
    assert rebound() == set()


def test_threads_patch_at_the_same_time() -> None:
    errors = []

    def work() -> None:
        try:
            for _ in range(5):
                with patch_torch(file_system=True):
                    assert dcp.FileSystemWriter is not KEPT["FileSystemWriter"]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("option", ["file_system", "default_storage"])
def test_what_a_save_writes_by_option(option: str, tmp_path: Path) -> None:
    with patch_torch(**{option: True}):
        dcp.save(STATE, checkpoint_id=str(tmp_path / "bare"))
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "given"))
        ours, stocks = ("given", "bare") if option == "file_system" else ("bare", "given")
        assert torch_ckpt.Checkpoint(tmp_path / ours).format == "torch_ckpt"
        assert torch_ckpt.Checkpoint(tmp_path / stocks).format == "dcp"
        read = dcp.FileSystemReader(tmp_path / "given")
        assert_same(loaded(lambda target: dcp.load(target, storage_reader=read)), STATE)
        bare = str(tmp_path / "bare")
        assert_same(loaded(lambda target: dcp.load(target, checkpoint_id=bare)), STATE)


def test_what_stock_wrote_is_read(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    with patch_torch(file_system=True, default_storage=True):
        assert_same(loaded(lambda target: dcp.load(target, checkpoint_id=tmp_path / "c")), STATE)
        reader = dcp.FileSystemReader(tmp_path / "c")
        assert isinstance(reader, torch_ckpt.CheckpointReader)
        assert_same(loaded(lambda target: dcp.load(target, storage_reader=reader)), STATE)


def test_checkpoint_id_overrides_the_path_of_a_writer(tmp_path: Path) -> None:
    with patch_torch(file_system=True):
        writer = dcp.FileSystemWriter(tmp_path / "a")
        dcp.save(STATE, checkpoint_id=tmp_path / "b", storage_writer=writer)
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b" / ".metadata").is_file()


def test_async_saves(tmp_path: Path) -> None:
    with patch_torch(file_system=True, default_storage=True):
        dcp.async_save(STATE, checkpoint_id=tmp_path / "bare").result()
        writer = dcp.FileSystemWriter(tmp_path / "given")
        dcp.async_save(STATE, storage_writer=writer).result()
    for name in ("bare", "given"):
        assert_same(torch_ckpt.load(path=tmp_path / name), STATE)


def test_urls_stay_with_stock() -> None:
    url = "memory://test_patch_torch"
    with patch_torch(file_system=True, default_storage=True):
        dcp.save(STATE, checkpoint_id=url)
        dcp.async_save(STATE, checkpoint_id=f"{url}_async").result()
        for each in (url, f"{url}_async"):
            assert_same(
                loaded(lambda target, each=each: dcp.load(target, checkpoint_id=each)), STATE
            )
        writer = _fsspec_filesystem.FsspecWriter(url)
        assert isinstance(writer, dcp.FileSystemWriter)  # as it is without the patch
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="is a URL"):
            dcp.FileSystemWriter(url)


def test_urls_stay_with_stock_where_one_is_first_used_under_the_patch() -> None:
    script = (
        "import sys, torch, torch.distributed.checkpoint as dcp, torch_ckpt\n"
        "assert 'torch.distributed.checkpoint._fsspec_filesystem' not in sys.modules\n"
        "stock = (dcp.FileSystemWriter,)\n"
        "torch_ckpt.patch_torch(file_system=True, default_storage=True)\n"
        "from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter\n"
        "assert FsspecWriter.__bases__ == stock\n"
        "dcp.save({'a': torch.ones(2)}, checkpoint_id='memory://x')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, env=environment)


def test_classes_derived_meanwhile_are_stocks(tmp_path: Path) -> None:
    with patch_torch(file_system=True, default_storage=True):

        class Writer(dcp.FileSystemWriter):
            def __init__(self, path: Path) -> None:
                super().__init__(path, single_file_per_rank=False)

        class Reader(dcp.HuggingFaceStorageReader):
            def __init__(self, path: Path) -> None:
                dcp.HuggingFaceStorageReader.__init__(self, path)  # by name, not by super()

            def read_metadata(self) -> Any:
                return dcp.HuggingFaceStorageReader.read_metadata(self)

        class Both(dcp.FileSystemReader, abc.ABC):  # of another metaclass than type
            pass

        assert Both.__bases__ == (KEPT["FileSystemReader"], abc.ABC)
        assert isinstance(Both(tmp_path), dcp.FileSystemReader)
        assert Writer.__bases__ == (KEPT["FileSystemWriter"],)
        assert Reader.__bases__ == (KEPT["HuggingFaceStorageReader"],)
        assert Writer.__module__ == __name__ and Writer.__qualname__.endswith("<locals>.Writer")
        writer = Writer(tmp_path / "c")
        assert isinstance(writer, dcp.FileSystemWriter) and issubclass(Writer, dcp.FileSystemWriter)
        assert not issubclass(dict, dcp.FileSystemWriter)
        assert not isinstance(writer, dcp.HuggingFaceStorageWriter)
        dcp.save(STATE, storage_writer=writer)
        dcp.save({"a": torch.ones(2)}, storage_writer=dcp.HuggingFaceStorageWriter(tmp_path / "h"))
        target = {"a": torch.zeros(2)}
        dcp.load(target, storage_reader=Reader(tmp_path / "h"))
        assert target["a"].tolist() == [1, 1]
        assert isinstance(KEPT["FileSystemReader"](tmp_path), dcp.FileSystemReader)
        assert isinstance(dcp.FileSystemWriter(tmp_path), KEPT["FileSystemWriter"])
        # ... and stock's are none of ours.
        assert not isinstance(writer, torch_ckpt.HuggingFaceStorageWriter)
        assert not isinstance(KEPT["FileSystemReader"](tmp_path), torch_ckpt.CheckpointReader)
    assert len(list((tmp_path / "c").glob("*.distcp"))) > 1


def test_a_class_goes_where_stocks_goes() -> None:
    with patch_torch(file_system=True):
        assert "torch_ckpt" in repr(dcp.FileSystemWriter)
        assert dcp.FileSystemWriter.__qualname__ == "FileSystemWriter"
        assert dcp.FileSystemWriter.validate_checkpoint_id("x")
        assert isinstance(dcp.FileSystemWriter | None, types.UnionType)
        assert copy.deepcopy(dcp.FileSystemWriter) is dcp.FileSystemWriter
        sent = pickle.dumps(dcp.FileSystemWriter)
        assert pickle.loads(sent) is dcp.FileSystemWriter
    assert pickle.loads(sent) is KEPT["FileSystemWriter"]


def test_attributes_are_set_on_stocks_class(tmp_path: Path) -> None:
    stock = KEPT["FileSystemWriter"]
    before = dict(vars(stock))
    with patch_torch(file_system=True):
        dcp.FileSystemWriter.is_set = 1
        assert stock.is_set == 1 and dcp.FileSystemWriter.is_set == 1
        del dcp.FileSystemWriter.is_set
        assert not hasattr(stock, "is_set")
        # `stage` is of the class itself, `finish` of a base.
        for name in ("stage", "finish"):
            with mock.patch.object(dcp.FileSystemWriter, name) as mocked:
                assert getattr(stock, name) is mocked
    assert dict(vars(stock)) == before


def test_a_writer_crosses_to_another_process(tmp_path: Path) -> None:
    with patch_torch(file_system=True):
        sent = pickle.dumps(dcp.FileSystemWriter(tmp_path, sync_files=False, overwrite=False))
    writer = pickle.loads(sent)
    assert type(writer) is storage.FileSystemWriter
    assert (writer.path, writer.sync_files, writer.overwrite) == (tmp_path, False, False)


def test_arguments_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with patch_torch(file_system=True):
        with pytest.raises(torch_ckpt.UnsupportedError, match="_extensions"):
            dcp.FileSystemWriter(tmp_path, _extensions=[mock.Mock()])
        with pytest.raises(torch_ckpt.UnsupportedError, match="_extension_registry"):
            dcp.FileSystemReader(tmp_path, _extension_registry=mock.Mock())
        with pytest.raises(TypeError, match="unheard_of"):
            dcp.FileSystemWriter(tmp_path, unheard_of=1)
        # Those that say how stock writes its own files change nothing.
        writer = dcp.FileSystemWriter(
            tmp_path,
            False,
            False,
            2,
            1,
            True,
            True,
            None,
            filesystem.SerializationFormat.SAFETENSORS,
        )
        assert (writer.thread_count, writer.sync_files) == (2, False)
        assert (writer.single_file_per_rank, writer.per_thread_copy_ahead) == (False, 1)
        assert writer.cache_staged_state_dict is True
        assert writer.serialization_format is filesystem.SerializationFormat.SAFETENSORS
        dcp.save(STATE, storage_writer=writer)
        with pytest.raises(FAILED, match="holds a checkpoint"):
            dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))


@pytest.mark.parametrize("name", [*FILES, *MERGES])
def test_storage_take_what_stock_takes(name: str) -> None:
    stock = KEPT.get(name) or vars(_consolidate_hf_safetensors)[name]
    wanted = inspect.signature(stock).parameters
    found = inspect.signature(vars(storage)[name]).parameters
    assert list(found)[: len(wanted)] == list(wanted)
    for key, parameter in wanted.items():
        assert found[key].default == parameter.default, key
    assert all(found[key].default is not found[key].empty for key in set(found) - set(wanted))


def test_stock_refuses_our_directory(tmp_path: Path) -> None:
    with patch_torch(file_system=True):
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert b"torch_ckpt.load" in (tmp_path / ".metadata").read_bytes()
    with pytest.raises(pickle.UnpicklingError, match="invalid load key, '#'"):
        dcp.FileSystemReader(tmp_path).read_metadata()


def test_both_have_saved_to_one_directory(tmp_path: Path) -> None:
    new = {**STATE, "n": 4}
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
    with patch_torch(file_system=True):
        dcp.save(new, storage_writer=dcp.FileSystemWriter(tmp_path))
        reader = dcp.FileSystemReader(tmp_path)
        assert_same(loaded(lambda target: dcp.load(target, storage_reader=reader)), new)
    with pytest.raises(pickle.UnpicklingError):  # and not the older one
        dcp.FileSystemReader(tmp_path).read_metadata()
    newest = {**STATE, "n": 5}
    dcp.save(newest, storage_writer=dcp.FileSystemWriter(tmp_path))
    with patch_torch(file_system=True):
        with pytest.raises(torch_ckpt.ConflictError, match="holds two checkpoints"):
            dcp.FileSystemReader(tmp_path).read_metadata()
        for ours in (*tmp_path.glob("torch_ckpt.*"), *tmp_path.glob("objects-*")):
            ours.unlink()
        for ours in tmp_path.glob("*.safetensors"):
            ours.unlink()
        reader = dcp.FileSystemReader(tmp_path)
        assert_same(loaded(lambda target: dcp.load(target, storage_reader=reader)), newest)


def test_both_have_saved_to_one_directory_in_parts(tmp_path: Path) -> None:
    """Without collectives, with which neither writes the one file that says what is there."""
    for number, (stocks, ours) in enumerate(((True, False), (False, True), (False, False))):
        path = tmp_path / str(number)
        torch_ckpt.save(STATE, path, use_collectives=ours)
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(path), use_collectives=stocks)
        with patch_torch(file_system=True):
            reader = dcp.FileSystemReader(path)
            with pytest.raises(torch_ckpt.ConflictError, match="holds two checkpoints"):
                reader.read_metadata()


def test_a_commit_that_was_interrupted_is_ours_as_well(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
    (tmp_path / ".torch_ckpt-stage" / "committed").mkdir(parents=True)
    (tmp_path / ".torch_ckpt-stage" / "committed" / "commit.json").write_text("{}")
    with patch_torch(file_system=True):
        with pytest.raises(torch_ckpt.ConflictError, match="holds two checkpoints"):
            dcp.FileSystemReader(tmp_path).read_metadata()


def test_what_stock_saved_beside_safetensors_is_read_as_stock_does(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2)}
    weights = dcp.HuggingFaceStorageWriter(str(tmp_path))
    dcp.save(tensors, storage_writer=weights)
    dcp.save({"a": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(torch_ckpt.ConflictError):
        torch_ckpt.load(path=tmp_path)
    with patch_torch(file_system=True):
        for name, value in (("HuggingFaceStorageReader", 1), ("FileSystemReader", 0)):
            target = {"a": torch.full((2,), 5.0)}
            dcp.load(target, storage_reader=vars(dcp)[name](str(tmp_path)))
            assert target["a"].tolist() == [value] * 2
        reader = dcp.HuggingFaceStorageReader(str(tmp_path), format="dcp")
        dcp.load(target, storage_reader=reader)
        assert target["a"].tolist() == [0, 0]
    # A reader goes on to other directories.
    with patch_torch(file_system=True):
        reader = dcp.FileSystemReader(tmp_path)
        reader.read_metadata()
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "ours"))
        dcp.load(target, storage_reader=reader, checkpoint_id=str(tmp_path / "ours"))
        assert target["a"].tolist() == [1, 1]
        one = dcp.FileSystemReader(tmp_path / "model-00001-of-00001.safetensors")
        dcp.load(target, storage_reader=one)
        with pytest.raises(torch_ckpt.IncompleteError):
            dcp.FileSystemReader(tmp_path / "none").read_metadata()


@pytest.mark.parametrize("collectives", [True, False])
def test_overwrite_false_leaves_stocks_checkpoint(collectives: bool, tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path), use_collectives=collectives)
    files = sorted(tmp_path.iterdir())
    with patch_torch(file_system=True):
        with pytest.raises(FAILED, match="overwrite is False|without collectives"):
            dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path, overwrite=False))
        assert sorted(tmp_path.iterdir()) == files
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
        torch_ckpt.Checkpoint(tmp_path / "c").remove()  # which leaves our .metadata
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "c", overwrite=False))


def test_a_save_does_not_go_over_what_stock_saved_in_parts(tmp_path: Path) -> None:
    """It would succeed, and the next load refuse the directory."""
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path), use_collectives=False)
    files = sorted(tmp_path.iterdir())
    with patch_torch(file_system=True):
        with pytest.raises(FAILED, match="without collectives .__0.metadata."):
            dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert sorted(tmp_path.iterdir()) == files


def test_a_failed_save_leaves_stocks_checkpoint(tmp_path: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with patch_torch(file_system=True), pytest.raises(FAILED, match="odd"):
        dcp.save({**STATE, "odd": object()}, storage_writer=dcp.FileSystemWriter(tmp_path))
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert kept == files
    reader = dcp.FileSystemReader(tmp_path)
    assert_same(loaded(lambda target: dcp.load(target, storage_reader=reader)), STATE)


def test_metadata_is_written_last(tmp_path: Path) -> None:
    """A save that dies before it is committed all the same."""
    with patch_torch(file_system=True):
        with mock.patch.object(storage, "write_durably", side_effect=OSError(28, "no space")):
            with pytest.raises(FAILED, match="no space"):
                dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
        assert not (tmp_path / ".metadata").exists()
        assert_same(torch_ckpt.load(path=tmp_path), STATE)
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path))
        assert (tmp_path / ".metadata").exists()


def test_two_saves_leave_metadata_at_the_same_time(tmp_path: Path) -> None:
    replace = os.replace

    def meanwhile(new: str, path: str) -> None:
        with mock.patch.object(os, "replace", replace):
            storage._leave_metadata(tmp_path)
        replace(new, path)

    with mock.patch.object(os, "replace", meanwhile):
        storage._leave_metadata(tmp_path)
    assert os.listdir(tmp_path) == [".metadata"]


def test_saves_without_collectives_are_refused(tmp_path: Path) -> None:
    with patch_torch(file_system=True, default_storage=True):
        for options in ({"storage_writer": dcp.FileSystemWriter(tmp_path / "c")}, {}):
            for save in (dcp.save, torch_ckpt.save):
                if save is torch_ckpt.save and not options:
                    continue  # has a writer of its own, and one value of each name
                with pytest.raises(torch_ckpt.UnsupportedError, match="use_collectives"):
                    save(STATE, checkpoint_id=tmp_path / "c", use_collectives=False, **options)
    assert not (tmp_path / "c").exists()


def test_the_metadata_of_a_save(tmp_path: Path) -> None:
    metadata = []
    for active in (False, True):
        with patch_torch(file_system=active):
            writer = dcp.FileSystemWriter(tmp_path / str(active))
            metadata.append(dcp.save(STATE, storage_writer=writer))
            assert metadata[-1].storage_meta in (None, writer.storage_meta())
    stocks, ours = metadata
    if stocks.storage_meta is not None:  # torch 2.10 fills in a copy of what it returns
        assert getattr(ours, "version", None) == getattr(stocks, "version", None)
    assert ours.storage_meta.checkpoint_id == tmp_path / "True"


def test_format_utils(tmp_path: Path) -> None:
    with patch_torch(file_system=True):
        torch.save(STATE, tmp_path / "in.pt")
        format_utils.torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "c")
        assert torch_ckpt.Checkpoint(tmp_path / "c").format == "torch_ckpt"
        format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "out.pt")
    assert_same(torch.load(tmp_path / "out.pt"), STATE)


def test_convert_writes_stocks_format_all_the_same(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, tmp_path / "c", no_dist=True)
    with patch_torch(file_system=True, default_storage=True):
        torch_ckpt.convert(tmp_path / "c", tmp_path / "stock", "dcp")
    assert_same(loaded(lambda target: dcp.load(target, checkpoint_id=tmp_path / "stock")), STATE)


def test_consolidation(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    with patch_torch():
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "c"), save_distributed=True)
        dcp.save(tensors, storage_writer=writer)
        for name in MERGES:
            merge = vars(_consolidate_hf_safetensors)[name]
            merge(str(tmp_path / "c"), str(tmp_path / name), {"a": 1, "b": 2}, num_threads=2)
            torch_ckpt.Checkpoint(tmp_path / name).verify()
            with pytest.raises(torch_ckpt.IncompleteError):  # stock takes nothing for an answer
                merge(str(tmp_path / "none"), str(tmp_path / "x"), {"a": 1})
            merge(str(tmp_path / "c"), str(tmp_path / f"{name}-b"), {"b": 1})  # as stock does
            assert torch_ckpt.Checkpoint(tmp_path / f"{name}-b").keys() == {"b"}
