"""What a tensor_mapping refuses before a byte moves, and what it only looks like refusing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_scaled_models import Model
from test_tensor_mapping import numbered
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_ckpt

EXPERTS = {f"e.{e}.up": numbered(4, 6) + 100 * e for e in range(3)}
PAIRS = [("e.{e}.up", "up[{e}]")]
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"weights": {"type": "int", "num_bits": 8, "symmetric": True}},
    },
}


def untouched(*values: torch.Tensor) -> bool:
    return all(bool((value == -7).all()) for value in values)


def target(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, -7, dtype=dtype)


@pytest.mark.parametrize("config", [{}, {"quantization_config": W8A8}])
@pytest.mark.parametrize("strict", [False, True])
def test_integer_codes_are_no_weights(tmp_path: Path, config: Any, strict: bool) -> None:
    codes = {name: value.to(torch.int8) for name, value in EXPERTS.items()}
    stored = codes | {f"{name}_scale": torch.ones(4, 1) for name in codes}
    path = scaled_bases.base(tmp_path / "base", stored, **config)
    model = Model(up=target(3, 4, 6, dtype=torch.bfloat16))
    with pytest.raises(torch_ckpt.UnsupportedError) as caught:
        torch_ckpt.load_model(model, path, strict=strict, tensor_mapping=PAIRS)
    assert caught.value.tensor in ("up", "e.0.up")
    assert untouched(*model.parameters())


def test_integer_codes_of_a_method_that_have_no_scales(tmp_path: Path) -> None:
    codes = {name: value.to(torch.int8) for name, value in EXPERTS.items()}
    path = scaled_bases.base(tmp_path / "base", codes, quantization_config=W8A8)
    model = Model(up=target(3, 4, 6))
    with pytest.raises(torch_ckpt.UnsupportedError, match="compressed-tensors") as caught:
        torch_ckpt.load_model(model, path, strict=False, tensor_mapping=PAIRS)
    assert caught.value.tensor == "up"
    own = Model(up=target(3, 4, 6, dtype=torch.int8))
    torch_ckpt.load_model(own, path, tensor_mapping=PAIRS)
    assert torch.equal(next(own.parameters()), torch.stack([*codes.values()]))


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_a_plain_load_does_not_widen_them(
    tmp_path: Path, codes: torch.dtype, of: torch.dtype
) -> None:
    stored = {"w": numbered(4, 6).to(codes), "w_scale": torch.ones(4, 1)}
    path = scaled_bases.base(tmp_path / "base", stored)
    state = {"w": target(4, 6, dtype=of)}
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w_scale'") as caught:
        torch_ckpt.load(state, path)
    assert caught.value.tensor == "w"
    assert untouched(state["w"])


def save(state: Any, path: Path) -> None:
    torch_ckpt.save(state, path, tensor_mapping=PAIRS)


def save_by_stock(state: Any, path: Path) -> None:
    planner = torch_ckpt.SavePlanner(tensor_mapping=PAIRS)
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)


def load(state: Any, path: Path) -> None:
    torch_ckpt.load(state, path, tensor_mapping=PAIRS)


def load_by_stock(state: Any, path: Path) -> None:
    planner = torch_ckpt.LoadPlanner(tensor_mapping=PAIRS)
    dcp.load(state, storage_reader=FileSystemReader(path), planner=planner)


def load_into_model(state: Any, path: Path) -> None:
    torch_ckpt.load_model(Model(**state), path, strict=False, tensor_mapping=PAIRS)


def store_for(call: Any, state: Any, path: Path) -> None:
    """A checkpoint that `call` reads."""
    if call is load_by_stock:
        dcp.save(dict(state), storage_writer=FileSystemWriter(path))
    else:
        torch_ckpt.save(state, path, layout="final")


def errors(caught: Any) -> list[BaseException]:
    """What was raised, or, by stock's calls, what a rank has raised."""
    failures = getattr(caught.value, "failures", None)
    return [caught.value] if not failures else [each[0] for each in failures.values()]


@pytest.mark.parametrize("call", [save, save_by_stock])
@pytest.mark.parametrize("odd", ["sparse", "csr", "nested", "quantized"])
def test_a_save_of_what_has_no_places(tmp_path: Path, call: Any, odd: str) -> None:
    value: Any = torch.ones(3, 4, 6)
    if odd == "sparse":
        value = value.to_sparse()
    elif odd == "csr":
        value = value.to_sparse_csr()
    elif odd == "nested":
        value = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    else:
        value = torch.quantize_per_tensor(value, 0.5, 0, torch.qint8)
    with pytest.raises(BaseException, match="up") as caught:
        call({"up": value, "b": torch.ones(2)}, tmp_path / "c")
    assert all(isinstance(each, torch_ckpt.UnsupportedError) for each in errors(caught))
    assert not (tmp_path / "c" / ".metadata").exists()
    assert not (tmp_path / "c" / "torch_ckpt.manifest.json").exists()


@pytest.mark.parametrize("call", [load, load_by_stock, load_into_model])
def test_a_load_into_what_has_no_places(tmp_path: Path, call: Any) -> None:
    path = tmp_path / "c"
    store_for(call, EXPERTS, path)
    value = target(3, 4, 6).to_sparse()
    with pytest.raises(BaseException, match="up") as caught:
        call({"up": value}, path)
    assert all(isinstance(each, torch_ckpt.UnsupportedError) for each in errors(caught))
    assert untouched(value.to_dense())


def test_what_no_pair_names_may_be_anything(tmp_path: Path) -> None:
    state = {"up": torch.stack([*EXPERTS.values()]), "s": torch.eye(3)}
    save({**state, "n": {"lazy": 3}}, tmp_path / "c")
    odd = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with pytest.raises(torch_ckpt.UnsupportedError, match="nested"):
        save({**state, "odd": odd}, tmp_path / "d")  # as without a mapping


@pytest.mark.parametrize("call", [load, load_by_stock, load_into_model])
def test_an_expert_that_no_group_has(tmp_path: Path, call: Any) -> None:
    path = tmp_path / "c"
    store_for(call, EXPERTS, path)
    state = {"up": target(2, 4, 6)}
    with pytest.raises(BaseException, match=r"e\.2\.up.*|.*no place for it") as caught:
        call(state, path)
    (error,) = errors(caught)
    assert isinstance(error, torch_ckpt.InvalidArgumentError)
    assert error.tensor == "e.2.up"
    assert "'up' of (2, 4, 6) has no place for it" in str(error)
    assert untouched(state["up"])


def test_padding_says_that_it_is_left_out(tmp_path: Path) -> None:
    torch_ckpt.save(EXPERTS, tmp_path / "c")
    state = {"up": target(2, 4, 6)}
    torch_ckpt.load(state, tmp_path / "c", tensor_mapping=[*PAIRS, ("e.2.up", "0")])
    assert torch.equal(state["up"], torch.stack([EXPERTS["e.0.up"], EXPERTS["e.1.up"]]))


def test_a_target_may_lack_a_whole_layer(tmp_path: Path) -> None:
    """As in a load without a mapping."""
    stored = {f"l.{i}.e.{e}": numbered(2, 2) + i + e for i in range(2) for e in range(2)}
    torch_ckpt.save(stored, tmp_path / "c")
    state = {"n": {"1": target(2, 2, 2)}}
    torch_ckpt.load(state, tmp_path / "c", tensor_mapping=[("l.{i}.e.{e}", "n.{i}[{e}]")])
    assert torch.equal(state["n"]["1"], torch.stack([stored["l.1.e.0"], stored["l.1.e.1"]]))


CODES = torch.arange(72).reshape(3, 4, 6).to(torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("call", [save, save_by_stock])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float8_e4m3fnuz])
def test_codes_are_not_saved_without_their_scales(
    tmp_path: Path, call: Any, dtype: torch.dtype
) -> None:
    state = {"up": CODES.view(dtype), "up_scale_inv": torch.ones(3, 1, 1)}
    with pytest.raises(BaseException, match="up_scale_inv") as caught:
        call(state, tmp_path / "c")
    (error,) = errors(caught)
    assert isinstance(error, torch_ckpt.UnsupportedError)
    assert error.tensor == "up"


@pytest.mark.parametrize("call", [load, load_by_stock])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float8_e5m2fnuz])
def test_codes_are_not_loaded_without_their_scales(
    tmp_path: Path, call: Any, dtype: torch.dtype
) -> None:
    stored = {f"e.{e}.up": CODES[e].view(dtype) for e in range(3)}
    stored |= {f"e.{e}.up_scale": torch.ones(1, 1) for e in range(3)}
    path = tmp_path / "c"
    if call is load_by_stock:
        dcp.save(stored, storage_writer=FileSystemWriter(path))
    else:
        torch_ckpt.save(stored, path)
    for into in (dtype, torch.bfloat16):
        if into is torch.bfloat16 and call is load and dtype is torch.float8_e4m3fn:
            continue  # numbers
        state = {"up": torch.zeros(3, 4, 6, dtype=torch.uint8).to(into)}
        with pytest.raises(BaseException, match="_scale") as caught:
            call(state, path)
        (error,) = errors(caught)
        assert isinstance(error, torch_ckpt.UnsupportedError)
        assert error.tensor == "e.0.up"
        assert not state["up"].view(torch.uint8).any()


@pytest.mark.parametrize("layout", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_codes_of_which_no_numbers_are_made(tmp_path: Path, layout: torch.dtype) -> None:
    stored = {f"e.{e}.up": CODES[e].view(layout) for e in range(3)}
    stored |= {f"e.{e}.up_scale": torch.ones(1, 1) for e in range(3)}
    path = scaled_bases.base(tmp_path / "base", stored)
    model = Model(up=target(3, 4, 6))
    with pytest.raises(torch_ckpt.UnsupportedError, match="_scale") as caught:
        torch_ckpt.load_model(model, path, strict=False, tensor_mapping=PAIRS)
    assert caught.value.tensor == "e.0.up"
    assert untouched(*model.parameters())


def halves(path: Path) -> Path:
    """Codes of 1, times 0.5."""
    stored = {f"e.{e}.up": torch.ones(4, 6).to(torch.float8_e4m3fn) for e in range(3)}
    scales = {f"e.{e}.up_scale_inv": torch.full((1, 1), 0.5) for e in range(3)}
    return scaled_bases.base(path, stored | scales)


@pytest.mark.parametrize(
    "pairs",
    [
        [*PAIRS, ("e.{e}.up_scale_inv", "0")],
        {"pairs": [*PAIRS, ("e.{e}.up_scale_inv", "scales[{e}]")]},
    ],
)
def test_pairs_of_scales_do_not_keep_codes_from_being_numbers(tmp_path: Path, pairs: Any) -> None:
    path = halves(tmp_path / "base")
    model = Model(up=target(3, 4, 6, dtype=torch.bfloat16))
    torch_ckpt.load_model(model, path, tensor_mapping=pairs)
    assert next(model.parameters()).eq(0.5).all()
    state = {"up": target(3, 4, 6)}
    torch_ckpt.load(state, path, tensor_mapping=pairs)
    assert state["up"].eq(0.5).all()


def test_scales_of_numbers_are_not_given_to_the_model_as_well(tmp_path: Path) -> None:
    path = halves(tmp_path / "base")
    model = Model(up=target(3, 4, 6), scales=target(3, 1, 1))
    pairs = [*PAIRS, ("e.{e}.up_scale_inv", "scales[{e}]")]
    with pytest.raises(torch_ckpt.UnsupportedError, match="'scales' as well") as caught:
        torch_ckpt.load_model(model, path, tensor_mapping=pairs)
    assert caught.value.tensor == "e.0.up"
    assert untouched(*model.parameters())
    torch_ckpt.load_model(model, path, skip="scales", tensor_mapping=pairs)
    found = dict(model.named_parameters())
    assert found["up"].eq(0.5).all() and untouched(found["scales"])


@pytest.mark.parametrize("convert", [False, True])
def test_scales_do_not_go_without_their_codes(tmp_path: Path, convert: bool) -> None:
    path = halves(tmp_path / "base")
    with pytest.raises(torch_ckpt.UnsupportedError, match="scale") as caught:
        if convert:
            pairs = [("e.{e}.up_scale_inv", "s[{e}]")]
            torch_ckpt.convert(path, tmp_path / "c", "hf", tensor_mapping=pairs)
        else:
            state = {"up": CODES, "up_scale_inv": torch.ones(3, 1, 1)}
            pairs = [("e.{e}.up_scale_inv", "up_scale_inv[{e}]")]
            torch_ckpt.save(state, tmp_path / "c", tensor_mapping=pairs)
    assert caught.value.tensor in ("up", "e.0.up")
    assert not (tmp_path / "c").exists()


def test_stocks_reader_makes_no_numbers_of_codes_whose_scales_are_mapped(tmp_path: Path) -> None:
    stored = {f"e.{e}.up": CODES[e] for e in range(3)}
    stored |= {f"e.{e}.up_scale_inv": torch.ones(1, 1) for e in range(3)}
    dcp.save(stored, storage_writer=FileSystemWriter(tmp_path / "c"))
    both = [*PAIRS, ("e.{e}.up_scale_inv", "scales[{e}]")]
    state = {"up": target(3, 4, 6), "scales": target(3, 1, 1)}
    with pytest.raises(BaseException, match="are their scales") as caught:
        dcp.load(
            state,
            storage_reader=FileSystemReader(tmp_path / "c"),
            planner=torch_ckpt.LoadPlanner(tensor_mapping=both),
        )
    (error,) = errors(caught)
    assert isinstance(error, torch_ckpt.UnsupportedError)
    assert untouched(*state.values())


def test_skipped_parts_of_what_is_loaded(tmp_path: Path) -> None:
    path = scaled_bases.base(tmp_path / "base", {"qkv": numbered(6, 3), "packed": numbered(2, 3)})
    model = Model(**{"q": target(2, 3), "k": target(2, 3), "v": target(2, 3), "l.0": target(3)})
    pairs = [(f"qkv[{at}/3]", name) for at, name in enumerate("qkv")]
    pairs += [("packed[0]", "l.0"), ("packed[1]", "0")]
    torch_ckpt.load_model(model, path, skip=["v", "l."], tensor_mapping=pairs)
    found = dict(model.named_parameters())
    assert torch.equal(torch.cat([found["q"], found["k"]]), numbered(6, 3)[:4])
    assert untouched(found["v"], found["l.0"])


def test_codes_that_are_left_out_need_no_scales(tmp_path: Path) -> None:
    path = halves(tmp_path / "base")
    state = {"up": target(2, 4, 6)}
    torch_ckpt.load(state, path, tensor_mapping=[*PAIRS, ("e.2.up", "0")])
    assert state["up"].eq(0.5).all()


def test_a_tensor_that_another_pair_takes_elsewhere(tmp_path: Path) -> None:
    """A stage of a pipeline has the stack, another the last one."""
    stored = {f"l.{i}.w": numbered(2, 2) + i for i in range(4)}
    path = scaled_bases.base(tmp_path / "base", stored)
    pairs = {"pairs": [("l.{i}.w", "stack[{i}]"), ("l.3.w", "last")]}
    stack, last = torch.stack([stored[f"l.{i}.w"] for i in range(3)]), stored["l.3.w"]
    both = {"stack": target(3, 2, 2), "last": target(2, 2)}
    torch_ckpt.load(both, path, tensor_mapping=pairs)
    assert torch.equal(both["stack"], stack) and torch.equal(both["last"], last)
    one = {"stack": target(3, 2, 2)}
    torch_ckpt.load(one, path, tensor_mapping=pairs)
    assert torch.equal(one["stack"], stack)


def test_what_a_method_leaves_plain_is_mapped(tmp_path: Path) -> None:
    said = {"quantization_config": {**W8A8, "ignore": ["re:.*"]}}
    path = scaled_bases.base(
        tmp_path / "base", {"m.gate": numbered(2, 3), "m.up": numbered(2, 3) + 9}, **said
    )
    model = Model(**{"m.gate_up": target(4, 3)})
    pairs = [("m.gate", "m.gate_up[0/2]"), ("m.up", "m.gate_up[1/2]")]
    torch_ckpt.load_model(model, path, tensor_mapping=pairs)
    wanted = torch.cat([numbered(2, 3), numbered(2, 3) + 9])
    assert torch.equal(next(model.parameters()), wanted)


def test_errors_of_a_load_name_the_directory(tmp_path: Path) -> None:
    torch_ckpt.save(EXPERTS, tmp_path / "c")
    for pairs in (PAIRS, [("e.0.up[: 2]", "up[0, : 2]"), ("e.1.up", "up[1]")]):
        with pytest.raises(torch_ckpt.InvalidArgumentError) as caught:
            torch_ckpt.load({"up": target(2, 4, 6)}, tmp_path / "c", tensor_mapping=pairs)
        assert caught.value.file == str(tmp_path / "c")


def test_codes_with_their_scales_are_as_any_others(tmp_path: Path) -> None:
    both = [*PAIRS, ("e.{e}.up_scale_inv", "up_scale_inv[{e}]")]
    state = {"up": CODES, "up_scale_inv": torch.rand(3, 1, 1)}
    torch_ckpt.save(state, tmp_path / "c", tensor_mapping=both)
    found = {"up": torch.zeros_like(CODES), "up_scale_inv": torch.zeros(3, 1, 1)}
    torch_ckpt.load(found, tmp_path / "c", tensor_mapping=both)
    assert torch.equal(found["up_scale_inv"], state["up_scale_inv"])
    assert torch.equal(found["up"].view(torch.uint8), CODES.view(torch.uint8))


def test_a_model_that_has_codes_and_scales(tmp_path: Path) -> None:
    stored = {f"e.{e}.up": CODES[e] for e in range(3)}
    scales = {f"e.{e}.up_scale_inv": torch.rand(1, 1) for e in range(3)}
    path = scaled_bases.base(tmp_path / "base", stored | scales)
    both = [*PAIRS, ("e.{e}.up_scale_inv", "scales[{e}]")]
    model = Model(up=torch.zeros_like(CODES), scales=torch.zeros(3, 1, 1))
    torch_ckpt.load_model(model, path, tensor_mapping=both)
    found = dict(model.named_parameters())
    assert torch.equal(found["scales"], torch.stack([*scales.values()]))
    assert torch.equal(found["up"].view(torch.uint8), CODES.view(torch.uint8))


@pytest.mark.parametrize("there", [False, True])
def test_what_is_skipped_is_not_mapped(tmp_path: Path, there: bool) -> None:
    heads = {f"head.{h}": torch.ones(7) for h in range(2)} if there else {}
    path = scaled_bases.base(tmp_path / "base", EXPERTS | heads)
    model = Model(**{"up": target(3, 4, 6), "lm.head": target(5, 5)})
    pairs = [*PAIRS, ("head.{h}", "lm.head[{h}]")]
    torch_ckpt.load_model(model, path, skip="lm.", tensor_mapping=pairs)
    headless = Model(up=target(3, 4, 6))
    torch_ckpt.load_model(headless, path, skip="lm.", tensor_mapping={"pairs": pairs})
    found = dict(model.named_parameters())
    assert torch.equal(found["up"], torch.stack([*EXPERTS.values()]))
    assert untouched(found["lm.head"])
    with pytest.raises(ValueError, match="head"):
        torch_ckpt.load_model(model, path, tensor_mapping=pairs)


def test_padding_of_a_model_of_a_run(tmp_path: Path) -> None:
    pairs = [("v", "m[: 5]"), ("0", "m[5 :]")]
    model = Model(m=numbered(8, 2))
    run = torch_ckpt.Checkpointer(tmp_path / "run", model, tensor_mapping=pairs)
    run.save(1).result()
    next(model.parameters()).data.fill_(-7)
    run.load()
    wanted = torch.cat([numbered(8, 2)[:5], torch.zeros(3, 2)])
    assert torch.equal(next(model.parameters()), wanted)


def test_a_model_that_changes_its_dtype(tmp_path: Path) -> None:
    model = Model(up=torch.stack([*EXPERTS.values()]))
    run = torch_ckpt.Checkpointer(tmp_path / "run", model, tensor_mapping=PAIRS)
    model.bfloat16()
    run.save(1).result()
    run.close()
    (step,) = (tmp_path / "run").glob("step-*")
    found = torch_ckpt.load(None, step / "model")
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(
        EXPERTS, torch.bfloat16
    )


def test_a_state_of_no_tensors(tmp_path: Path) -> None:
    torch_ckpt.save({"v": torch.ones(2), "step": 7}, tmp_path / "c")
    state = {"step": 0}
    torch_ckpt.load(state, tmp_path / "c", tensor_mapping=[("v", "0")])
    assert state == {"step": 7}


def test_one_memory_under_a_name_that_no_pair_has(tmp_path: Path) -> None:
    torch_ckpt.save(EXPERTS, tmp_path / "c")
    up = target(3, 4, 6)
    torch_ckpt.load({"up": up, "same": up}, tmp_path / "c", tensor_mapping=PAIRS)
    assert torch.equal(up, torch.stack([*EXPERTS.values()]))


def test_one_stored_tensor_of_two_dtypes(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(2).bfloat16()}
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="bfloat16") as caught:
        torch_ckpt.save(state, tmp_path / "c", tensor_mapping=[("w[0/2]", "a"), ("w[1/2]", "b")])
    assert caught.value.tensor == "w"
    assert not (tmp_path / "c").exists()


def test_a_sharded_tensor(tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        state = {"s": sharded_tensor.ones(spec, 4, 2), "up": torch.stack([*EXPERTS.values()])}
        torch_ckpt.save(state, tmp_path / "c", tensor_mapping=PAIRS)
        found = torch_ckpt.load(None, tmp_path / "c")
        assert torch.equal(found["s"], torch.ones(4, 2))
        assert torch.equal(found["e.1.up"], EXPERTS["e.1.up"])
        with pytest.raises(torch_ckpt.UnsupportedError, match="ShardedTensor") as caught:
            torch_ckpt.save(state, tmp_path / "d", tensor_mapping=[("t", "s")])
        assert caught.value.tensor == "s"
    finally:
        dist.destroy_process_group()
