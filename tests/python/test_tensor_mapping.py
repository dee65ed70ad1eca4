"""tensor_mapping of load_model: pairs of views, against torch's own indexing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scaled_models import Model

import torch_ckpt
from torch_ckpt.tensor_mapping.mapping import table_names

Leaf = tuple[str, torch.Tensor]


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def load(path: Path, pairs: Any, **natives: torch.Tensor) -> dict[str, torch.Tensor]:
    model = Model(**{name: torch.full_like(value, -7) for name, value in natives.items()})
    torch_ckpt.load_model(model, path, tensor_mapping=pairs)
    return dict(model.named_parameters())


def check(path: Path, pairs: Any, wanted: dict[str, torch.Tensor]) -> None:
    for name, value in load(path, pairs, **wanted).items():
        assert torch.equal(value, wanted[name]), name


def test_every_row_of_the_table(tmp_path: Path) -> None:
    """Of the layouts that people have: stored and native."""
    experts, f, d = 3, 6, 4
    gate, up = numbered(experts, f, d), numbered(experts, f, d) + 1000
    down = numbered(experts, d, f) + 2000
    one_by_one = {
        f"l.0.e.{e}.{name}": tensor[e]
        for e in range(experts)
        for name, tensor in (("gate", gate), ("up", up), ("down", down))
    }
    path = scaled_bases.base(tmp_path / "experts", one_by_one)
    fused = torch.cat([gate, up], 1)
    check(
        path,
        [
            ("l.{i}.e.{e}.gate", "n.{i}.gate_up[{e}, 0/2]"),
            ("l.{i}.e.{e}.up", "n.{i}.gate_up[{e}, 1/2]"),
            ("l.{i}.e.{e}.down", "n.{i}.down[{e}]"),
        ],
        {"n.0.gate_up": fused, "n.0.down": down},
    )
    check(
        path,
        [
            ("l.{i}.e.{e}.gate", "n.{i}.gate_up[{e}, :, 0/2].T"),
            ("l.{i}.e.{e}.up", "n.{i}.gate_up[{e}, :, 1/2].T"),
            ("l.{i}.e.{e}.down", "n.{i}.down[{e}].T"),
        ],
        {"n.0.gate_up": fused.mT.contiguous(), "n.0.down": down.mT.contiguous()},
    )
    interleaved = torch.stack([gate, up], 2).flatten(1, 2)
    check(
        path,
        [
            ("l.{i}.e.{e}.gate", "n.{i}.gate_up[{e}, :, 0::2].T"),
            ("l.{i}.e.{e}.up", "n.{i}.gate_up[{e}, :, 1::2].T"),
            ("l.{i}.e.{e}.down", "n.{i}.down[{e}]"),
        ],
        {"n.0.gate_up": interleaved.mT.contiguous(), "n.0.down": down},
    )


def test_fused_attention(tmp_path: Path) -> None:
    heads, kv, size, d = 8, 2, 3, 5
    q, k, v = (numbered(n * size, d) + 1000 * n for n in (heads, kv, kv + 0))
    v = v + 7
    path = scaled_bases.base(tmp_path / "base", {"q": q, "k": k, "v": v})
    rows = heads * size, kv * size
    check(
        path,
        [
            ("q", f"qkv[: {rows[0]}]"),
            ("k", f"qkv[{rows[0]} : {rows[0]} + {rows[1]}]"),
            ("v", f"qkv[{rows[0] + rows[1]} :]"),
        ],
        {"qkv": torch.cat([q, k, v])},
    )
    per_group = heads // kv * size
    grouped = torch.cat(
        [
            torch.cat([q.view(kv, -1, d)[g], k.view(kv, -1, d)[g], v.view(kv, -1, d)[g]])
            for g in range(kv)
        ]
    )
    check(
        path,
        [
            (f"q[{{g}}/{kv}]", f"qkv[{{g}}/{kv}][: {per_group}]"),
            (f"k[{{g}}/{kv}]", f"qkv[{{g}}/{kv}][{per_group} : {per_group} + {size}]"),
            (f"v[{{g}}/{kv}]", f"qkv[{{g}}/{kv}][{per_group} + {size} :]"),
        ],
        {"qkv": grouped},
    )


def test_rotary_order_and_stacks_and_padding(tmp_path: Path) -> None:
    heads, size, d = 3, 4, 5
    halves = numbered(heads * size, d)
    pairs = halves.view(heads, 2, size // 2, d).transpose(1, 2).reshape(heads * size, d)
    stacked = numbered(4, 2, 3)
    vocabulary = numbered(5, 2)
    stored = {"wq": halves, "stack": stacked, "v": vocabulary}
    path = scaled_bases.base(tmp_path / "base", stored)
    check(
        path,
        [
            ("wq[{n}/3][{t}/2]", "m.wq[{n}/3][{t}::2]"),
            ("stack[{l}]", "m.{l}.w"),
            ("v", "m.v[: 5]"),
            ("0", "m.v[5 :]"),
        ],
        {
            "m.wq": pairs,
            **{f"m.{n}.w": stacked[n] for n in range(4)},
            "m.v": torch.cat([vocabulary, torch.zeros(3, 2)]),
        },
    )
    # And the other way: what is padded there has less here.
    path = scaled_bases.base(tmp_path / "padded", {"v": numbered(8, 2)})
    check(path, [("v[: 5]", "m.v"), ("v[5 :]", "0")], {"m.v": numbered(8, 2)[:5]})


def splits(data: st.DataObject, leaf: Leaf) -> list[Leaf]:
    """`leaf` in parts, each with the index that takes it."""
    text, tensor = leaf
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    before = ":, " * dim
    kind = data.draw(st.sampled_from(["index", "interval", "piece", "every", "turn"]))
    if kind == "turn":
        turned = text.endswith(".T")
        if turned or tensor.dim() < 2:
            return [leaf]
        return [(f"{text}.T", tensor.mT)]
    if text.endswith(".T"):
        return [leaf]
    if kind == "index" and size <= 4 and tensor.dim() > 1:
        return [(f"{text}[{before}{i}]", tensor.select(dim, i)) for i in range(size)]
    if kind == "interval":
        cut = data.draw(st.integers(0, size))
        parts = tensor.split([cut, size - cut], dim)
        texts = [f"[{before}: {cut}]", f"[{before}{cut} :]"]
        return [
            (text + index, part) for index, part in zip(texts, parts, strict=True) if part.numel()
        ]
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    n = data.draw(st.sampled_from(divisors))
    if kind == "piece":
        parts = tensor.chunk(n, dim)
        return [(f"{text}[{before}{k}/{n}]", part) for k, part in enumerate(parts)]
    return [
        (
            f"{text}[{before}{k}::{n}]",
            tensor.narrow(dim, k, size - k)[(slice(None),) * dim + (slice(None, None, n),)],
        )
        for k in range(n)
    ]


def drawn_parts(data: st.DataObject) -> tuple[torch.Tensor, list[Leaf]]:
    """A tensor, and views of `w` that have each of its elements once, with what they are."""
    whole = numbered(*data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    leaves: list[Leaf] = [("w", whole)]
    for _ in range(data.draw(st.integers(0, 3))):
        leaves = [part for leaf in leaves for part in splits(data, leaf)]
    return whole, leaves


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    whole, leaves = drawn_parts(data)
    order = (
        data.draw(st.permutations(range(len(leaves)))) if len(leaves) < 50 else range(len(leaves))
    )
    parts = {f"p.{n}": leaves[at][1].contiguous() for n, at in enumerate(order)}
    views = [leaves[at][0] for at in order]
    # What is stored in parts, and what is wanted in parts.
    path = scaled_bases.base(tmp_path_factory.mktemp("m") / "parts", parts)
    check(path, [(f"p.{n}", view) for n, view in enumerate(views)], {"w": whole.to(dtype)})
    path = scaled_bases.base(tmp_path_factory.mktemp("m") / "whole", {"w": whole})
    pairs = [(view, f"p.{n}") for n, view in enumerate(views)]
    check(path, pairs, {name: part.to(dtype) for name, part in parts.items()})


@pytest.mark.parametrize(
    "kind",
    [
        "float8_e4m3fn float32 m.weight_scale_inv",
        "float8_e5m2 float8_e8m0fnu mx",
        "fp4 in torch.int8",
    ],
)
def test_numbers_are_mapped_as_any_others(tmp_path: Path, kind: str) -> None:
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(2))[kind]
    path = scaled_bases.base(tmp_path / "base", stored)
    rows = whole.shape[0] // 2
    for dtype in (torch.bfloat16, torch.float32):
        check(path, [("m.weight", "w.T")], {"w": whole.T.contiguous().to(dtype)})
        check(
            path,
            [("m.weight[0/2]", "a"), ("m.weight[1/2]", "b.T")],
            {"a": whole[:rows].to(dtype), "b": whole[rows:].T.contiguous().to(dtype)},
        )


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """With transformers' own model, whose experts have other orders than the Hub's."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, vocab_size=20, head_dim=8,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).bfloat16()
    generator = torch.Generator().manual_seed(3)
    stored, wanted = {}, {}
    for name, value in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = wanted[name] = value.clone()
            continue
        experts, inner, out = value.shape
        blocks = scaled_bases.packed((experts, out, inner // 32, 16), generator)
        powers = scaled_bases.scales((experts, out, inner // 32), torch.uint8, generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": powers}
        whole = scaled_bases.numbers(scaled_bases.unpacked(blocks.flatten(-2)), powers, (1, 32))
        wanted[name] = whole.mT.bfloat16()
    path = scaled_bases.base(
        tmp_path / "base", stored, quantization_config={"quant_method": "mxfp4"}
    )
    report = torch_ckpt.load_model(model, path, tensor_mapping="gpt_oss")
    assert (report.missing, report.unexpected) == ([], [])
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def small_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=3,
        num_experts_per_tok=2,
        vocab_size=20,
        head_dim=8,
    )


def test_experts_of_transformers(tmp_path: Path) -> None:
    """As transformers itself makes them of what the Hub has."""
    config = small_moe()
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "hub")
    names = torch_ckpt.open(tmp_path / "hub")
    assert "model.layers.1.mlp.experts.2.gate_proj.weight" in names
    fresh = transformers.Qwen3MoeForCausalLM(config)
    report = torch_ckpt.load_model(fresh, tmp_path / "hub", tensor_mapping="qwen3_moe")
    assert (report.missing, report.unexpected) == ([], [])
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


BASE = {"a": numbered(4, 6), "b": numbered(4, 6)}


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", "w[0/2]"), ("b", "w[1/2")], ["'w[1/2'"]),
        ([("a", "w[0/2]"), ("b", "w[1/2]x")], ["'w[1/2]x'", "what is meant"]),
        ([("a", "w[0/2]"), ("b", "w[print(1)]")], ["what is meant by '(1)]'"]),
        ([("a", "w[0/2]"), ("b", "w[x/2]")], ["nothing says what x is"]),
        ([("a", "w[0/2]"), ("c", "w[1/2]")], ["'c'", "no tensor of the checkpoint"]),
        ([("a", "w[0/2]")], ["w", "once"]),
        ([("a", "w[0/2]"), ("b", "w[0/2]")], ["w", "once"]),
        ([("a", "w[0/2]"), ("a", "w[1/2]")], ["a", "twice"]),
        ([("a", "w[0/3]"), ("b", "w[1/3]")], ["('a', 'w[0/3]')", "8 is not divided by 3"]),
        ([("a", "w[: 3]"), ("b", "w[3 :]")], ["('a', 'w[: 3]')", "(4, 6)", "(3, 6)"]),
        ([("a", "w[0/2]"), ("b", "w[4 : 9]")], ["4:9 is not inside of 8"]),
        ([("a", "w[0/2].T"), ("b", "w[1/2]")], ["(4, 6)", "(6, 4)"]),
        ([("a{x}", "w[0/2]"), ("b", "w[1/2]")], ["placeholder"]),
        ([("a", "w[0, 0, 0]"), ("b", "w[1/2]")], ["3 indexes for 2 dimensions"]),
        ([("a[0/2]", "w[: 2]"), ("b", "w[2 : 6]"), ("0", "w[6 :]")], ["a", "12 of 24"]),
        ([("a", "w[0/2]"), ("b", "w[99999999999999999999]")], ["what is meant"]),
        ([("a", "w[0/2]"), ("b", "w[4000000000 * 4000000000 :]")], ["too large"]),
        ([("a", "w[0/2]"), ("b", "w[1/0]")], ["not divided by 0"]),
        ([("a", 3)], ["pairs of texts"]),
        ("no such table", ["no such table", "qwen3_moe"]),
        ({"pairs": [], "more": 1}, ["more"]),
    ],
)
def test_what_is_no_mapping(tmp_path: Path, pairs: Any, words: list[str]) -> None:
    path = scaled_bases.base(tmp_path / "base", BASE)
    model = Model(w=torch.zeros(8, 6))
    with pytest.raises(ValueError) as caught:
        torch_ckpt.load_model(model, path, tensor_mapping=pairs)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert not next(model.parameters()).any()


def test_pieces_of_nothing(tmp_path: Path) -> None:
    path = scaled_bases.base(tmp_path / "base", {"w": torch.ones(4)})
    nothing = "w[0:0][2::4611686018427387904][2::4611686018427387904]"
    check(path, [("w", "w"), ("0", nothing)], {"w": torch.ones(4)})


def test_as_a_dict_and_a_file(tmp_path: Path) -> None:
    path = scaled_bases.base(tmp_path / "base", BASE)
    given = {"about": "two", "pairs": [["a", "w[0/2]"], ["b", "w[1/2]"]]}
    file = tmp_path / "mapping.json"
    file.write_text(json.dumps(given))
    for pairs in (given, file, str(file)):
        check(path, pairs, {"w": torch.cat([BASE["a"], BASE["b"]])})


def test_numbers_of_the_configuration(tmp_path: Path) -> None:
    path = scaled_bases.base(tmp_path / "base", BASE, rows=4, text_config={"rows": 1, "columns": 3})
    pairs = [("a", "w[: rows]"), ("b", "w[rows : 2 * rows]")]
    check(path, pairs, {"w": torch.cat([BASE["a"], BASE["b"]])})


def test_it_excludes_other_names(tmp_path: Path) -> None:
    path = scaled_bases.base(tmp_path / "base", BASE)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="key_mapping"):
        torch_ckpt.load_model(
            Model(w=torch.zeros(8, 6)), path, key_mapping={"a": "b"}, tensor_mapping=[("a", "w")]
        )


def test_tables_are_read() -> None:
    assert table_names() == ["gpt_oss", "mixtral", "qwen3_moe"]
