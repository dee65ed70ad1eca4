"""convert under a tensor_mapping: there, and back by the same pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import transformers
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_tensor_mapping import drawn_parts, numbered, small_moe

import torch_ckpt
from torch_ckpt.cli import cli


def converted(source: Path, target: Path, pairs: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch_ckpt.convert(source, target, "hf", tensor_mapping=pairs, **options)
    return load_file(target / "model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Put together and taken apart, in several dtypes."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
    whole, leaves = drawn_parts(data)
    whole = whole.to(dtype)
    parts = {f"p.{n}": leaf[1].to(dtype).contiguous() for n, leaf in enumerate(leaves)}
    pairs = [(f"p.{n}", leaf[0]) for n, leaf in enumerate(leaves)]
    if data.draw(st.booleans()):
        pairs = [(native, stored) for stored, native in pairs]
    folder = tmp_path_factory.mktemp("m")
    other = {"b": numbered(3)}
    torch_ckpt.save(parts | other, folder / "parts")
    same(converted(folder / "parts", folder / "whole", pairs), {"w": whole} | other)
    same(converted(folder / "whole", folder / "again", pairs), parts | other)


def test_tensors_that_pieces_of_the_output_cut(tmp_path: Path) -> None:
    """Files are written in pieces of 4 MiB; tests/cpp/engine_made_tensors_test.cc cuts elements."""
    odd = torch.randint(0, 99, (3,), dtype=torch.uint8)
    experts = torch.randn(5, 601, 803).double()
    torch_ckpt.save({"a": odd, "w": experts}, tmp_path / "c")
    pairs = [("w[{n}]", "e.{n}.T")]
    found = converted(tmp_path / "c", tmp_path / "out", pairs)
    same(found, {"a": odd} | {f"e.{n}": experts[n].T.contiguous() for n in range(5)})
    narrow = converted(tmp_path / "c", tmp_path / "bf16", pairs, dtype="bf16")
    same(narrow, {"a": odd} | {f"e.{n}": experts[n].T.bfloat16() for n in range(5)})


def test_experts_of_transformers(tmp_path: Path) -> None:
    model = transformers.Qwen3MoeForCausalLM(small_moe())
    torch_ckpt.save(model.state_dict(), tmp_path / "native")
    model.save_pretrained(tmp_path / "hub")
    hub = load_file(tmp_path / "hub/model.safetensors")
    same(converted(tmp_path / "native", tmp_path / "ours", "qwen3_moe"), hub)
    same(converted(tmp_path / "hub", tmp_path / "back", "qwen3_moe"), dict(model.state_dict()))


@pytest.mark.parametrize("to", ["torch_ckpt", "dcp", "torch"])
def test_every_target(tmp_path: Path, to: Any) -> None:
    experts = numbered(3, 4, 5)
    torch_ckpt.save({"e": {"w": experts}, "step": 7}, tmp_path / "c")
    pairs = [("e.w[{e}]", "x.{e}.w.T")]
    torch_ckpt.convert(tmp_path / "c", tmp_path / "out", to, tensor_mapping=pairs)
    found = torch_ckpt.load(None, tmp_path / "out")
    flat = {".".join(map(str, path)): value for path, value in leaves_of(found)}
    assert flat.pop("step") == 7
    same(flat, {f"x.{e}.w": experts[e].T for e in range(3)})


def leaves_of(state: Any, path: tuple[Any, ...] = ()) -> Any:
    if not isinstance(state, dict):
        yield path, state
        return
    for key, value in state.items():
        yield from leaves_of(value, (*path, key))


KINDS = [
    "float8_e4m3fn float32 m.weight_scale_inv",
    "float8_e5m2 float8_e8m0fnu mx",
    "fp4 in torch.int8",
]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_codes(tmp_path: Path, kind: str) -> None:
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(2))[kind]
    path = scaled_bases.base(tmp_path / "base", stored)
    pairs = [("m.weight[0/2]", "a.T"), ("m.weight[1/2]", "b")]
    rows = whole.shape[0] // 2
    found = converted(path, tmp_path / "out", pairs, dtype="bf16")
    wanted = {"a": whole[:rows].T.contiguous().bfloat16(), "b": whole[rows:].bfloat16()}
    same({name: found[name] for name in wanted}, wanted)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_codes_do_not_go_without_their_scales(tmp_path: Path, kind: str) -> None:
    stored, _ = scaled_bases.kinds(torch.Generator().manual_seed(2))[kind]
    path = scaled_bases.base(tmp_path / "base", stored)
    pairs = [("m.weight", "w.T")]
    with pytest.raises(torch_ckpt.UnsupportedError, match="scales.*no pair") as caught:
        converted(path, tmp_path / "out", pairs)
    assert caught.value.tensor == "m.weight"
    assert not (tmp_path / "out").exists()
    scales = next(name for name in stored if name != "m.weight")
    both = [*pairs, (scales, "w_scale")]
    found = converted(path, tmp_path / "out", both)
    assert torch.equal(found["w"].view(torch.uint8), stored["m.weight"].T.view(torch.uint8))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("e[{e}]", "x.{e}"), ("f", "y")], ["('f', 'y')", "no tensor"]),
        ([("e[0]", "x.0"), ("e[2]", "x.2")], ["e", "once"]),
        ([("e[{e}]", "b")], ["b"]),
        ([("e[{e}", "x")], ["e[{e}"]),
        ([("e", "x[5]")], ["6 elements", "x"]),
        ([("e", "x"), ("y", "b")], ["which are to be made"]),
        ([("e[: n]", "x")], ["n"]),
    ],
)
def test_what_is_no_mapping(tmp_path: Path, pairs: Any, words: list[str]) -> None:
    torch_ckpt.save({"e": numbered(3, 2), "b": numbered(4)}, tmp_path / "c")
    with pytest.raises(ValueError) as caught:
        converted(tmp_path / "c", tmp_path / "out", pairs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "out").exists()


def test_two_renamings_exclude_each_other(tmp_path: Path) -> None:
    torch_ckpt.save({"e": numbered(3, 2)}, tmp_path / "c")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="exclude"):
        converted(tmp_path / "c", tmp_path / "out", [("e", "x")], key_mapping={"e": "y"})


def test_what_is_left_out_is_not_mapped(tmp_path: Path) -> None:
    state = {"model": {"e": numbered(3, 2)}, "optim": {"e": numbered(3, 2)}, "step": 3}
    torch_ckpt.save(state, tmp_path / "c")
    pairs = [("model.e[{n}]", "e.{n}")]
    found = converted(tmp_path / "c", tmp_path / "out", pairs, exclude="optim*")
    same(found, {f"e.{n}": numbered(3, 2)[n] for n in range(3)})
    assert torch_ckpt.open(tmp_path / "out").objects["step"] == 3


def test_numbers_of_a_table(tmp_path: Path) -> None:
    torch_ckpt.save({"qkv": numbered(8, 2)}, tmp_path / "c")
    (tmp_path / "c/config.json").write_text(json.dumps({"num_attention_heads": 3}))
    table = {
        "numbers": {"q": "num_attention_heads", "d": 2},
        "pairs": [["q", "qkv[: q * d]"], ["v", "qkv[q * d :]"], ["never", "never"]],
    }
    found = converted(tmp_path / "c", tmp_path / "out", table)
    same(found, {"q": numbered(8, 2)[:6], "v": numbered(8, 2)[6:]})
    table["numbers"] = {"q": "heads", "d": 2}
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"'q' is 'heads'"):
        converted(tmp_path / "c", tmp_path / "other", table)


def test_the_command(tmp_path: Path) -> None:
    torch_ckpt.save({"e": numbered(3, 2)}, tmp_path / "c")
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"pairs": [["x.{n}", "e[{n}]"]]}))
    arguments = [
        "convert",
        tmp_path / "c",
        tmp_path / "out",
        "--to",
        "hf",
        "--tensor-mapping",
        table,
    ]
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    same(
        load_file(tmp_path / "out/model.safetensors"),
        {f"x.{n}": numbered(3, 2)[n] for n in range(3)},
    )


def test_a_value_that_a_dtype_loses(tmp_path: Path) -> None:
    experts = numbered(3, 4, 5)
    experts[2, 3, 4] = 1e6
    torch_ckpt.save({"e": experts}, tmp_path / "c")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="float16|F16"):
        converted(tmp_path / "c", tmp_path / "out", [("e[{n}]", "x.{n}.T")], dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    torch_ckpt.save({"e": torch.randn(4, 300, 200)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    shard.write_bytes(damaged)
    with pytest.raises(torch_ckpt.CorruptError, match=shard.name):
        converted(tmp_path / "c", tmp_path / "out", [("e[{n}]", "x.{n}.T")])
    assert not (tmp_path / "out").exists()
