"""Directories in which files of others stand: what is read, what goes, what is refused."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from sample_states import FAILED, assert_same, stock_rows

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageWriter, consolidate_safetensors_files
from torch_ckpt.cli import cli
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.merge import merge_request
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.sessions import end_session

STATE = {"a": torch.linspace(-1, 1, 100), "b": torch.arange(30.0).reshape(5, 6)}
OLD = {name: torch.zeros_like(value) for name, value in STATE.items()}
STEMS = ("model", "diffusion_pytorch_model", "adapter_model")
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def as_transformers(path: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """What `from_pretrained` takes: one file before an index of several."""
    if (path / f"{stem}.safetensors").exists():
        return load_file(path / f"{stem}.safetensors")
    index = json.loads((path / f"{stem}.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(path / file)[name] for name, file in index.items()}


def hub(path: Path, stem: str = "model", state: dict[str, torch.Tensor] = OLD) -> None:
    """A Hugging Face directory of several files, as others write it."""
    path.mkdir(exist_ok=True)
    files = {name: f"{stem}-{n + 1:05}-of-00002.safetensors" for n, name in enumerate(state)}
    for name, file in files.items():
        save_file({name: state[name]}, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")


def test_a_second_consolidation_in_place_hides_no_first_one(tmp_path: Path) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(STATE, checkpoint_id=path, no_dist=True)
    (path / "config.json").write_text("{}")
    consolidate_safetensors_files(path, path, None, naming="hf")
    assert_same(as_transformers(path), STATE)
    half = {name: value.bfloat16() for name, value in STATE.items()}
    consolidate_safetensors_files(path, path, None, naming="dcp", dtype="bf16")
    assert_same(as_transformers(path), half)
    final = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    ours = ["torch_ckpt.catalog", "torch_ckpt.json"]
    assert names_in(path) == sorted(["config.json", *final, SHARD, *ours])
    assert {file.name for file in Checkpoint(path).describe().files} == {
        *(final[0], final[1], SHARD, "torch_ckpt.catalog")
    }
    # And back: the index goes with the files that it names.
    consolidate_safetensors_files(path, path, None, naming="hf")
    assert_same(as_transformers(path), half)
    assert names_in(path) == sorted(["config.json", "model.safetensors", SHARD, *ours])
    Checkpoint(path).verify()


def test_what_a_consolidation_in_place_leaves_out_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(STATE, checkpoint_id=path, layout="final", naming="hf", no_dist=True)
    before = names_in(path)
    options: dict[str, Any] = {"fqn_to_index_mapping": {"a": 1}, "strict": False}
    with pytest.raises(FAILED, match=r"model\.safetensors: .*transformers would read it instead"):
        consolidate_safetensors_files(path, path, naming="dcp", **options)
    assert names_in(path) == before
    consolidate_safetensors_files(path, path, naming="diffusers", **options)
    assert_same(as_transformers(path), STATE)
    assert_same(as_transformers(path, "diffusion_pytorch_model"), {"a": STATE["a"]})


class NeverWrites(HuggingFaceStorageWriter):
    def write_data(self, *_: Any) -> Any:
        raise AssertionError("the save goes on")


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("single", [False, True])
def test_shards_beside_a_model_of_others(tmp_path: Path, stem: str, single: bool) -> None:
    """Whoever goes by the index, or takes the single file, would read the old weights."""
    path = tmp_path / "c"
    if single:
        path.mkdir()
        save_file(OLD, path / f"{stem}.safetensors")
        name = f"{stem}.safetensors"
    else:
        hub(path, stem)
        name = f"{stem}.safetensors.index.json"
    before = names_in(path)
    with pytest.raises(FAILED, match=rf"/{stem}\..*is of no save of torch_ckpt") as caught:
        torch_ckpt.save(
            STATE, storage_writer=NeverWrites(path, save_distributed=True), no_dist=True
        )
    assert name in str(caught.value)
    assert names_in(path) == before
    (path / name).unlink()
    torch_ckpt.save(STATE, checkpoint_id=path, no_dist=True)
    target = {name: torch.zeros_like(value) for name, value in STATE.items()}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    assert_same(target, STATE)


@pytest.mark.parametrize("naming", ["dcp", "hf"])
def test_a_final_save_is_refused_before_it_writes(tmp_path: Path, naming: Any) -> None:
    path = tmp_path / "c"
    path.mkdir()
    if naming == "dcp":
        save_file(OLD, path / "model.safetensors")
    else:
        hub(path)
    before = names_in(path)
    match = "model.safetensors" if naming == "dcp" else r"model\.safetensors\.index\.json"
    writer = NeverWrites(path, layout="final", naming=naming)
    with pytest.raises(FAILED, match=rf"/{match}: is of no save of torch_ckpt"):
        torch_ckpt.save(STATE, storage_writer=writer, no_dist=True)
    assert names_in(path) == before


@pytest.mark.parametrize("naming", ["dcp", "hf"])
def test_a_merge_is_refused_before_it_writes(tmp_path: Path, naming: Any) -> None:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "in", no_dist=True)
    path = tmp_path / ("in" if naming == "dcp" else "out")
    if naming == "dcp":  # in place
        save_file(OLD, path / "model.safetensors")
    else:
        hub(path)
    before = names_in(path)
    done: list[int] = []
    with pytest.raises(FAILED, match="is of no save of torch_ckpt"):
        consolidate_safetensors_files(
            tmp_path / "in",
            path,
            naming=naming,
            overwrite=True,
            progress=lambda now, _: done.append(now),
        )
    assert names_in(path) == before
    assert not any(done)


def test_a_consolidating_save_is_refused_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    save_file(OLD, path / "model.safetensors")
    writer = NeverWrites(path, save_distributed=True, enable_consolidation=True)
    with pytest.raises(FAILED, match=r"/model\.safetensors: is of no save of torch_ckpt"):
        torch_ckpt.save(STATE, storage_writer=writer, no_dist=True)
    assert names_in(path) == ["model.safetensors"]


def test_what_comes_while_a_save_goes_on_is_refused_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()

    class Meanwhile(HuggingFaceStorageWriter):
        def write_data(self, *args: Any) -> Any:
            save_file(OLD, path / "model.safetensors")
            return super().write_data(*args)

    with pytest.raises(FAILED, match=r"/model\.safetensors: is of no save of torch_ckpt"):
        torch_ckpt.save(STATE, storage_writer=Meanwhile(path, save_distributed=True), no_dist=True)
    assert names_in(path) == ["model.safetensors"]


def test_shards_of_others_that_a_save_does_not_replace(tmp_path: Path) -> None:
    """Stock's reader takes all files of a directory: those of a larger world too."""
    path = tmp_path / "c"
    stock_rows(path, torch.zeros(12, 2), 3)
    state = {"w": torch.ones(12, 2)}
    with pytest.raises(FAILED, match=r"/shard-0000[23]-.*is of no save of torch_ckpt"):
        torch_ckpt.save(
            state, storage_writer=NeverWrites(path, save_distributed=True), no_dist=True
        )
    for file in names_in(path)[1:]:
        (path / file).unlink()
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)
    assert_same(load_file(path / SHARD), state)


def test_ranks_of_a_merge_that_see_another_input(tmp_path: Path) -> None:
    """As under node-local paths: nothing but the times tells files of one layout."""
    requests = []
    for number in range(2):
        path = tmp_path / str(number)
        stock_rows(path, torch.full((12, 2), float(number)), 3)
        for file in path.iterdir():
            os.utime(file, (1e9 + number, 1e9 + number))
        requests.append(
            merge_request(
                path,
                tmp_path / "out",
                None,
                1,
                strict=True,
                max_shard_size=None,
                naming="dcp",
                policy=DtypePolicy(None, ()),
            )
        )
    begun = core.call({"op": "merge_begin", **requests[0]})
    try:
        with Job() as job:
            share = {"op": "merge_share", "job": job.id, "share": 0, "shares": 1}
            core.call({**begun, **requests[0], **share})
            with pytest.raises(torch_ckpt.ConflictError, match=r"/1: is not what the merge began"):
                core.call({**begun, **requests[1], **share})
        with pytest.raises(torch_ckpt.ConflictError, match=r"/1: is not what the merge began"):
            core.call({**begun, **requests[1], "op": "merge_commit", "shares": []})
    finally:
        end_session("save", begun["session"])
    assert not (tmp_path / "out").exists()


def test_other_weights_are_no_files_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "vae.safetensors"):
        (path / name).write_bytes(b"not read")
    torch_ckpt.save(STATE, checkpoint_id=path, no_dist=True)
    torch_ckpt.save(STATE, checkpoint_id=path, layout="final", no_dist=True)
    assert_same(as_transformers(path), STATE)
    target = {name: torch.zeros_like(value) for name, value in STATE.items()}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    assert_same(target, STATE)


@pytest.mark.parametrize("stem", STEMS)
def test_hub_directories_with_more_in_them(tmp_path: Path, stem: str) -> None:
    """Mistral's second copy under names of its own, variants, other formats, what git left."""
    path = tmp_path / "c"
    hub(path, stem, STATE)
    save_file({"layers.0.w": torch.zeros(3)}, path / "consolidated.safetensors")
    save_file({n: v.half() for n, v in STATE.items()}, path / f"{stem}.fp16.safetensors")
    (path / "broken.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (path / "pytorch_model.bin").write_bytes(b"not read")
    (path / "original").mkdir()
    (path / "original" / "consolidated.00.pth").write_bytes(b"not read")
    target = {name: torch.zeros_like(value) for name, value in STATE.items()}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    assert_same(target, STATE)
    described = Checkpoint(path).describe()
    assert described.source == "index"
    beside = ["broken.safetensors", "consolidated.safetensors", f"{stem}.fp16.safetensors"]
    beside = tuple(sorted([*beside, "pytorch_model.bin"]))
    assert described.beside == beside
    done = CliRunner().invoke(cli, ["inspect", str(path)])
    assert f"not read: {', '.join(beside)}" in done.output
    fields = json.loads(CliRunner().invoke(cli, ["inspect", "--json", str(path)]).output)
    assert tuple(fields["beside"]) == beside
    # Of ours all is said by the manifest.
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert Checkpoint(tmp_path / "ours").describe().beside == ()
    assert "not read" not in CliRunner().invoke(cli, ["inspect", str(tmp_path / "ours")]).output


def test_a_variant_beside_a_single_file(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "diffusion_pytorch_model.safetensors")
    half = {name: value.half() for name, value in STATE.items()}
    save_file(half, tmp_path / "diffusion_pytorch_model.fp16.safetensors")
    assert Checkpoint(tmp_path).dtypes() == dict.fromkeys(STATE, "F32")
    assert Checkpoint(tmp_path).describe().beside == ("diffusion_pytorch_model.fp16.safetensors",)


def test_a_single_file_that_differs_from_the_index(tmp_path: Path) -> None:
    """transformers would load that one."""
    hub(tmp_path, state=STATE)
    save_file({"c": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(torch_ckpt.ConflictError, match=r"'a'.*model\.safetensors"):
        Checkpoint(tmp_path).describe()
    save_file(STATE, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).describe().source == "headers"


def test_extras_leave_out_subdirectories(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tmp_path / "model"
    hub(model)
    for name in ("original", "onnx"):
        (model / name).mkdir()
        (model / name / "params.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        torch_ckpt.save(
            STATE, checkpoint_id=tmp_path / "c", layout="final", extras=model, no_dist=True
        )
    assert "config.json" in names_in(tmp_path / "c")
    assert not {"original", "onnx", "params.json"} & set(names_in(tmp_path / "c"))
    assert [record.message for record in caplog.records if "leave out" in record.message] == [
        f"extras leave out the subdirectories of {model}: onnx, original"
    ]
