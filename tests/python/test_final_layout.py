"""layout="final": division into files, names, dtypes. What several ranks do is in ranks/final.py."""

from __future__ import annotations

import functools
import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sample_states import FAILED, assert_same, blank, sample

import torch_ckpt
from torch_ckpt import (
    Checkpoint,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    InvalidArgumentError,
    consolidate_safetensors_files,
)
from torch_ckpt.cli import cli

STATE = {f"layer.{n}": torch.full((100,), float(n)) for n in range(10)}  # of 400 bytes each


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def listing(path: Path) -> list[str]:
    """The names that are not ours."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith("torch_ckpt."))


@pytest.mark.parametrize(
    ("naming", "size", "names"),
    [
        ("dcp", None, ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]),
        ("hf", "5GB", ["model.safetensors"]),
        ("diffusers", "1 MB", ["diffusion_pytorch_model.safetensors"]),
        ("peft", None, ["adapter_model.safetensors"]),
        (
            "diffusers",
            2000,
            [
                "diffusion_pytorch_model-00001-of-00002.safetensors",
                "diffusion_pytorch_model-00002-of-00002.safetensors",
                "diffusion_pytorch_model.safetensors.index.json",
            ],
        ),
        (
            "hf",
            "1.6KB",
            [
                *(f"model-{n + 1:05}-of-00003.safetensors" for n in range(3)),
                "model.safetensors.index.json",
            ],
        ),
    ],
)
def test_names_and_sizes(tmp_path: Path, naming: Any, size: Any, names: list[str]) -> None:
    options: dict[str, Any] = {"naming": naming, "max_shard_size": size}
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c", layout="final", **options)
    assert listing(tmp_path / "c") == names
    assert_same(tensors_of(tmp_path / "c"), STATE)
    target = blank(STATE)
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert_same(target, STATE)
    # And by a merge of shards.
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "sharded")
    consolidate_safetensors_files(tmp_path / "sharded", tmp_path / "merged", None, **options)
    assert listing(tmp_path / "merged") == names
    for name in names:
        if name.endswith(".safetensors"):
            assert_same(load_file(tmp_path / "merged" / name), load_file(tmp_path / "c" / name))
    for path in ("c", "merged"):
        if names[-1].endswith(".json"):
            index = json.loads((tmp_path / path / names[-1]).read_text())
            for fqn, file in index["weight_map"].items():
                assert fqn in load_file(tmp_path / path / file)


def test_a_reference_index_divides_the_tensors(tmp_path: Path) -> None:
    torch_ckpt.save(
        STATE, checkpoint_id=tmp_path / "reference", layout="final", max_shard_size="1KB"
    )
    index = tmp_path / "reference" / "model.safetensors.index.json"
    mixed = dict(reversed(STATE.items()))
    for number, reference in enumerate((index, str(tmp_path / "reference"))):
        path = tmp_path / str(number)
        torch_ckpt.save(mixed, checkpoint_id=path, layout="final", fqn_to_index_mapping=reference)
        assert listing(path) == listing(tmp_path / "reference")
        written = path / "model.safetensors.index.json"
        assert json.loads(written.read_text()) == json.loads(index.read_text())
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "sharded")
    consolidate_safetensors_files(tmp_path / "sharded", tmp_path / "merged", index)
    assert listing(tmp_path / "merged") == listing(tmp_path / "reference")
    with pytest.raises(InvalidArgumentError, match="there is no such index"):
        torch_ckpt.save(
            STATE, checkpoint_id=tmp_path / "x", layout="final", fqn_to_index_mapping=tmp_path
        )
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "whole"}, "layout='whole' is none of"),
        ({"layout": "final", "save_distributed": True}, "exclude each other"),
        ({"layout": "final", "naming": "hub"}, "naming='hub' is none of"),
        ({"layout": "final", "max_shard_size": "many"}, "max_shard_size is a number"),
        ({"layout": "final", "max_shard_size": 1, "fqn_to_index_mapping": {}}, "max_shard_size"),
        ({"layout": "sharded", "max_shard_size": 1}, "of final files"),
        ({"layout": "sharded", "dtype": "bf16"}, "of final files"),
        ({"layout": "sharded", "naming": "hf"}, "of final files"),
        ({"layout": "final", "dtype": "int8"}, "no float dtype"),
        ({"layout": "final", "dtype": {"a": "bf17"}}, "'a': dtype='bf17' is no float"),
        ({"layout": "final", "keep_fp32": "norm"}, "a list of regular expressions"),
        ({"layout": "final", "keep_fp32": ["("]}, "keep_fp32: "),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        HuggingFaceStorageWriter(tmp_path, **options)


def test_writer_options_need_our_writer(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match="layout: give these to the constructor"):
        torch_ckpt.save(STATE, storage_writer=writer, layout="final")
    with pytest.raises(TypeError, match="nonsense"):
        torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c", nonsense=1)
    assert list(tmp_path.iterdir()) == []


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TARGETS = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)


def floats(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, ties between the narrow types' numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (20_011,), generator=generator, dtype=torch.int64)
    wild = bits.to(torch.int32).view(torch.float32)
    near = torch.randint(0, 4096, (20_000,), generator=generator) / 64.0
    ties = torch.ldexp(near, torch.randint(-30, 20, near.shape, generator=generator))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448, 464, 65520])
    return torch.cat([wild, ties, -ties, special]).to(dtype)


def assert_bits(saved: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, but for what a NaN looks like: torch's own differ from loop to loop."""
    assert saved.dtype == expected.dtype and saved.shape == expected.shape
    number = ~expected.float().isnan()
    assert torch.equal(~saved.float().isnan(), number)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[saved.itemsize]
    assert torch.equal(saved.view(width)[number], expected.view(width)[number])


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_casts_are_torchs(tmp_path: Path, source: torch.dtype, target: torch.dtype) -> None:
    values = floats(source)
    if target == torch.float8_e4m3fn:
        values = values.clamp(-448, 448)
    lost = values.isfinite() & ~values.to(target).float().isfinite()
    values = values.masked_fill(lost, 1)
    state = {"dense": values, "strided": values[: 2 * 30_000].view(-1, 4).t(), "one": values[7]}
    dtypes = dict.fromkeys(state, target)
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout="final", dtype=dtypes)
    torch_ckpt.save(state, checkpoint_id=tmp_path / "sharded")
    consolidate_safetensors_files(tmp_path / "sharded", tmp_path / "merged", None, dtype=dtypes)
    for path in ("c", "merged"):
        saved = tensors_of(tmp_path / path)
        for name, value in state.items():
            assert_bits(saved[name], value.to(target))
        Checkpoint(tmp_path / path).verify()


def test_an_export_that_would_make_values_infinite_is_refused(tmp_path: Path) -> None:
    value = torch.zeros(3_000_001)
    value[[0, 1_500_000, 3_000_000]] = torch.tensor([7e4, -1e9, 65520.0])
    state = {"w": value, "kept": torch.tensor([65519.0, math.inf, -math.inf, math.nan])}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "sharded")

    def export(path: Path, **options: Any) -> None:
        torch_ckpt.save(state, checkpoint_id=path, layout="final", **options)

    def merge(path: Path, **options: Any) -> None:
        consolidate_safetensors_files(tmp_path / "sharded", path, None, overwrite=True, **options)

    for number, write in enumerate((export, merge)):
        path = tmp_path / str(number)
        with pytest.raises(
            FAILED, match="'w': at least 3 values of F32 would be out of range as F16"
        ):
            write(path, dtype="fp16")
        assert not path.exists()
        write(path, dtype="fp16", keep_fp32=["w"])
        saved = tensors_of(path)
        assert torch.equal(saved["w"], value)
        assert torch.equal(saved["kept"][:3], state["kept"][:3].half())
        with pytest.raises(FAILED, match="'kept': at least 3 values of F32 would .* F8_E4M3"):
            write(path, dtype={"kept": "fp8_e4m3"})
        assert torch.equal(tensors_of(path)["w"], value)  # the old one


MIXED = {
    "w": torch.linspace(-3, 3, 50),
    "half": torch.linspace(-3, 3, 50).half(),
    "norm.weight": torch.linspace(-3, 3, 50).bfloat16(),
    "ids": torch.arange(50),
    "mask": torch.arange(50) % 2 == 0,
    "fp8": torch.linspace(-3, 3, 50).to(torch.float8_e4m3fn),
    "complex": torch.linspace(-3, 3, 50).to(torch.complex64),
}


def test_only_ordinary_floats_are_cast(tmp_path: Path) -> None:
    for dtype in ("bf16", "BF16", "bfloat16", torch.bfloat16, "torch.bfloat16"):
        torch_ckpt.save(
            MIXED,
            checkpoint_id=tmp_path / "c",
            layout="final",
            dtype=dtype,
            keep_fp32=[r"^norm\.", "nothing"],
        )
        expected = {
            **MIXED,
            "w": MIXED["w"].bfloat16(),
            "half": MIXED["half"].bfloat16(),
            "norm.weight": MIXED["norm.weight"].float(),
        }
        assert_same(tensors_of(tmp_path / "c"), expected)


def test_keep_fp32_is_looked_for_anywhere_in_a_name(tmp_path: Path) -> None:
    norm, weight = "model.layers.0.norm.weight", "model.layers.0.mlp.weight"
    state = {norm: torch.ones(4), weight: torch.ones(4)}
    torch_ckpt.save(
        state, checkpoint_id=tmp_path / "c", layout="final", dtype="bf16", keep_fp32=["norm"]
    )
    torch_ckpt.save(state, checkpoint_id=tmp_path / "in")
    torch_ckpt.consolidate_safetensors_files(
        tmp_path / "in", tmp_path / "out", None, dtype="bf16", keep_fp32=[r"norm\.weight$"]
    )
    for path in (tmp_path / "c", tmp_path / "out"):
        found = tensors_of(path)
        assert found[norm].dtype is torch.float32
        assert found[weight].dtype is torch.bfloat16


def test_the_dtypes_of_a_directory(tmp_path: Path) -> None:
    reference = {"w": torch.zeros(3, dtype=torch.float16), "ids": torch.zeros(3, dtype=torch.int64)}
    torch_ckpt.save(reference, checkpoint_id=tmp_path / "reference")
    torch_ckpt.save(
        MIXED, checkpoint_id=tmp_path / "c", layout="final", dtype=tmp_path / "reference"
    )
    assert_same(tensors_of(tmp_path / "c"), {**MIXED, "w": MIXED["w"].half()})
    torch_ckpt.save(
        {"ids": torch.zeros(3, dtype=torch.int32)}, checkpoint_id=tmp_path / "reference"
    )
    with pytest.raises(FAILED, match="'ids': is I64, which is not cast to I32"):
        torch_ckpt.save(
            MIXED, checkpoint_id=tmp_path / "x", layout="final", dtype=tmp_path / "reference"
        )
    with pytest.raises(FAILED, match="'fp8': is F8_E4M3, which is not cast to BF16"):
        torch_ckpt.save(
            MIXED, checkpoint_id=tmp_path / "x", layout="final", dtype={"fp8": torch.bfloat16}
        )
    assert not (tmp_path / "x").exists()


def test_the_command(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "in")
    words = ["consolidate", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bf16"]
    words += ["--max-shard-size", "1KB", "--naming", "hf", "--keep-fp32", "layer.3"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    expected = {name: value.bfloat16() for name, value in STATE.items()}
    expected["layer.3"] = STATE["layer.3"]
    assert_same(tensors_of(tmp_path / "out"), expected)
    assert len(listing(tmp_path / "out")) == 4
    for wrong in (["--dtype", "int8"], ["--max-shard-size", "x"], ["--naming", "x"]):
        assert CliRunner().invoke(cli, [*words[:3], *wrong]).exit_code == 2


def test_a_mapping_of_more_than_there_is(tmp_path: Path) -> None:
    """As the index of a larger model is: the directory would lack tensors without a word."""
    state = {"w": torch.arange(5.0), "v": torch.ones(3)}
    mapping = {"w": 1, "v": 2, "absent": 2}
    options: dict[str, Any] = {"layout": "final", "fqn_to_index_mapping": mapping}
    with pytest.raises(FAILED, match="'absent': is in fqn_to_index_mapping but not in the state"):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c", **options)
    assert list(tmp_path.iterdir()) == []
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", strict=False, **options)
    assert_same(tensors_of(tmp_path / "c"), state)
    tied = {"w": state["w"], "absent": state["w"], "v": state["v"]}
    torch_ckpt.save(tied, checkpoint_id=tmp_path / "tied", **options)  # a name of a tensor, too


@pytest.mark.parametrize("dtype", [None, {"another": "bf16"}])
def test_a_cached_plan_of_stock(tmp_path: Path, dtype: Any) -> None:
    if not hasattr(dcp.SavePlanner, "_cached_global_plan"):
        pytest.skip("stock's planners of this torch cache no plans")
    state = {"w": torch.arange(5.0)}
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = HuggingFaceStorageWriter(tmp_path / "a", layout="final", dtype=dtype)
    for name in ("a", "b"):
        dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=writer, planner=planner)
        assert_same(tensors_of(tmp_path / name), state)
    # The cache knows no dtypes: what is laid out is for another tensor now.
    other = {"w": state["w"].double()}
    with pytest.raises(FAILED, match=r"'w'.*F64.*F32.*a plan for other tensors"):
        dcp.save(other, checkpoint_id=tmp_path / "c", storage_writer=writer, planner=planner)
    assert not (tmp_path / "c").exists()
    writer = HuggingFaceStorageWriter(tmp_path / "d", layout="final")  # another one
    dcp.save(state, checkpoint_id=tmp_path / "d", storage_writer=writer, planner=planner)
    assert_same(tensors_of(tmp_path / "d"), state)

    class Other(dcp.DefaultSavePlanner):
        pass

    for name in "ef":
        writer = HuggingFaceStorageWriter(tmp_path / name, layout="final")
        save = functools.partial(dcp.save, state, storage_writer=writer)
        if name == "e":
            save(planner=Other(enable_plan_caching=True))
        else:
            with pytest.raises(FAILED, match="planners of several classes"):
                save(planner=Other(enable_plan_caching=True))
            assert not (tmp_path / "f").exists()


def test_what_final_files_are_like_where_they_are_made_of_shards(tmp_path: Path) -> None:
    for dtype, naming, size in (("bf16", "hf", None), (None, "diffusers", "1KB")):
        path = tmp_path / naming
        options: dict[str, Any] = {"dtype": dtype, "naming": naming, "max_shard_size": size}
        writer = HuggingFaceStorageWriter(
            path, save_distributed=True, enable_consolidation=True, **options
        )
        torch_ckpt.save(STATE, storage_writer=writer)
        torch_ckpt.save(STATE, checkpoint_id=tmp_path / "direct", layout="final", **options)
        assert [*listing(tmp_path / "direct"), "sharded"] == sorted(listing(path))
        assert_same(tensors_of(path), tensors_of(tmp_path / "direct"))


@pytest.mark.parametrize("options", [{"layout": "final"}, {"enable_consolidation": True}])
def test_casts_that_there_are_not(tmp_path: Path, options: dict[str, Any]) -> None:
    """Refused before anything is written."""
    options = {"save_distributed": True, **options} if "layout" not in options else options
    writer = HuggingFaceStorageWriter(tmp_path / "c", dtype={"step": "bf16"}, **options)
    with pytest.raises(FAILED, match="'step': is I64, which is not cast"):
        torch_ckpt.save({"step": torch.arange(3), "w": torch.ones(3)}, storage_writer=writer)
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dtype": "bf16", "keep_fp32": ["head"]}, "stored as F32, but is tied to 'emb'.*as BF16"),
        ({"dtype": "bf16", "keep_fp32": ["ead$"]}, "stored as F32, but is tied to 'emb'.*as BF16"),
        ({"dtype": {"head": "bf16"}}, "stored as BF16, but is tied to 'emb'.*as F32"),
    ],
)
def test_what_is_said_of_one_of_two_tied_names(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    w = sample(torch.float32, 4, 5)
    with pytest.raises(FAILED, match=f"'head': is to be {says}"):
        torch_ckpt.save(
            {"emb": w, "head": w}, checkpoint_id=tmp_path / "c", layout="final", **options
        )
    assert list(tmp_path.glob("*/*")) == []
    mapping = {"emb": 1, "head": 1}  # both are stored then
    torch_ckpt.save(
        {"emb": w, "head": w},
        checkpoint_id=tmp_path / "c",
        layout="final",
        fqn_to_index_mapping=mapping,
        **options,
    )
    dtypes = {name: value.dtype for name, value in tensors_of(tmp_path / "c").items()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}


def test_a_dtype_is_no_directory_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_ckpt.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "bf16", layout="final")
    monkeypatch.chdir(tmp_path)
    torch_ckpt.save({"w": torch.ones(3)}, checkpoint_id="c", layout="final", dtype="bf16")
    assert tensors_of(tmp_path / "c")["w"].dtype is torch.bfloat16


@pytest.mark.parametrize("merged", [False, True])
def test_a_file_that_transformers_would_read_instead(tmp_path: Path, merged: bool) -> None:
    path = tmp_path / "c"
    path.mkdir()
    save_file({"w": torch.zeros(3)}, path / "model.safetensors")
    state = {"w": torch.ones(3)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "in")

    def write(naming: str) -> None:
        if merged:
            consolidate_safetensors_files(
                tmp_path / "in", path, None, naming=naming, overwrite=True
            )
        else:
            torch_ckpt.save(state, checkpoint_id=path, layout="final", naming=naming)

    with pytest.raises(FAILED, match=r"model\.safetensors: .*transformers would read it instead"):
        write("dcp")
    assert listing(path) == ["model.safetensors"]
    write("hf")
    assert_same(tensors_of(path), state)
    write("dcp")  # it is ours now
    assert listing(path) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_more_files_than_a_process_may_have_open(tmp_path: Path) -> None:
    """A reader keeps 512 descriptors at most."""
    state = {f"t{number}": torch.full((300,), float(number)) for number in range(700)}
    mapping = {name: number + 1 for number, name in enumerate(state)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 600, hard))
    try:
        for name, options in {
            "final": {"layout": "final", "max_shard_size": "1KB"},
            "shards": {"fqn_to_index_mapping": mapping},
        }.items():
            torch_ckpt.save(state, checkpoint_id=tmp_path / name, sync_files=False, **options)
        consolidate_safetensors_files(tmp_path / "shards", tmp_path / "merged", mapping)
        for name in ("final", "shards", "merged"):
            torch_ckpt.Checkpoint(tmp_path / name).verify()
            target = blank(state)
            torch_ckpt.load(target, checkpoint_id=tmp_path / name)
            assert_same(target, state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for name in ("final", "merged"):
        assert len(list((tmp_path / name).glob("*.safetensors"))) == len(state)


@st.composite
def states(draw: Any) -> dict[str, torch.Tensor]:
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
    state = {}
    for number in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 70), max_size=3))
        value = sample(draw(dtypes), *shape)
        if draw(st.booleans()) and value.dim() > 1:
            value = value.transpose(0, -1)
        state[f"t{number}"] = value
    return state


@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(state=states(), size=st.sampled_from([None, 100, 5000, "1MB"]))
def test_any_state_comes_back(
    tmp_path: Path, state: dict[str, torch.Tensor], size: int | str | None
) -> None:
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout="final", max_shard_size=size)
    assert_same(tensors_of(tmp_path / "c"), state)
    target = blank(state)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(tmp_path / "c"), no_dist=True)
    assert_same(target, state)


def test_a_memory_budget_bounds_the_threads(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "in")
    for budget in (16 << 20, "33MiB"):
        consolidate_safetensors_files(
            tmp_path / "in", tmp_path / "out", None, 8, memory_budget=budget, overwrite=True
        )
        assert_same(tensors_of(tmp_path / "out"), STATE)
    with pytest.raises(InvalidArgumentError, match="memory_budget='1MiB' is less than"):
        consolidate_safetensors_files(tmp_path / "in", tmp_path / "x", None, memory_budget="1MiB")
