"""torch-ckpt layout: boxes of real checkpoints and of random tilings, as tables, maps and pictures."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_ranks
from matplotlib import image
from safetensors.torch import save_file

import torch_ckpt
from torch_ckpt.checkpoint.description import Placement, TensorInfo, topology_of
from torch_ckpt.cli import cli, layout
from torch_ckpt.cli.layout_svg import svg
from torch_ckpt.cli.picture import write_picture
from torch_ckpt.cli.plane import Box, Plane, Slice, boxes_of, plane_of

WORLD = 4
PACKAGE = str(Path(torch_ckpt.__file__).parents[1])
SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks/pictures.py saves."""
    folder = tmp_path_factory.mktemp("pictures")
    outcome = run_ranks("pictures", WORLD, folder)
    assert set(outcome.values()) == {"ok"}, outcome
    return folder


# --- pictures -----------------------------------------------------------------


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def rectangles(picture: str) -> Iterator[tuple[ElementTree.Element, list[tuple[float, ...]]]]:
    """The frame of each slice in a picture, and its boxes as fractions of it: rows and columns."""
    boxes: list[ElementTree.Element] = []
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        if rect.get("class") == "box":
            boxes.append(rect)
        elif rect.get("fill") == "none":
            left, top, wide, high = (number(rect, each) for each in ("x", "y", "width", "height"))
            found = []
            for box in boxes:
                x, y = (number(box, "x") - left) / wide, (number(box, "y") - top) / high
                ends = x + number(box, "width") / wide, y + number(box, "height") / high
                found.append((y, ends[1], x, ends[0]))
            yield rect, found
            boxes = []


def check_picture(picture: str, plane: Plane, slices: list[Slice]) -> None:
    """Every rectangle stands where its box does, and those of a slice tile it."""
    drawn = list(rectangles(picture))
    assert len(drawn) == len(slices)
    for (_, found), part in zip(drawn, slices, strict=True):
        expected = [
            (
                *(border / plane.height for border in each.rows),
                *(border / plane.width for border in each.columns),
            )
            for each in part.rectangles
        ]
        for have, want in zip(sorted(found), sorted(expected), strict=True):
            assert have == pytest.approx(want, abs=1e-4)
        areas = [(bottom - top) * (right - left) for top, bottom, left, right in found]
        assert sum(areas) == pytest.approx(1, abs=1e-3)
    root = ElementTree.fromstring(picture)
    width, height = number(root, "width"), number(root, "height")
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + number(rect, "width") <= width
        assert float(rect.get("y", 0)) + number(rect, "height") <= height


TENSORS = {
    "rows": ((50, 20), 4),
    "columns": ((16, 12), 4),
    "grid": ((11, 7), 4),
    "line": ((1001,), 4),
    "experts": ((8, 3, 32), 4),
    "thin": ((1, 100_000), 4),
    "scalar": ((), 1),
    "empty": ((0, 4), 1),
}


@pytest.mark.parametrize("name", TENSORS)
def test_layouts_of_real_saves(saved: Path, tmp_path: Path, name: str) -> None:
    shape, count = TENSORS[name]
    picture = tmp_path / "picture.svg"
    fields = json.loads(run("layout", saved / "sharded", name, "--svg", picture, "--json").stdout)
    assert fields["shape"] == list(shape) and len(fields["boxes"]) == count
    assert fields["svg"] == str(picture)
    for box in fields["boxes"]:
        assert box["file"].startswith(f"shard-{box['rank'] + 1:05d}-")
        assert box["bytes"] == 4 * math.prod(box["sizes"])
    assert sum(box["bytes"] for box in fields["boxes"]) == fields["bytes"]
    boxes = [
        Box(*(box[key] for key in ("rank", "file", "at", "offsets", "sizes", "bytes")))
        for box in fields["boxes"]
    ]
    plane = plane_of(shape, boxes)
    text = picture.read_text()
    if 0 in shape:
        assert "no elements" in text and not list(rectangles(text))[0][1]
    else:
        check_picture(text, plane, list(plane.slices()))
    words = "".join(ElementTree.fromstring(text).itertext())
    for box in fields["boxes"]:
        assert f"rank {box['rank']}" in words
    for dimension in (plane.rows, plane.columns):
        if dimension is not None:
            assert f"dimension {dimension}" in words and f"{shape[dimension]:,}" in words


def test_the_table_and_the_map(saved: Path) -> None:
    text = run("layout", saved / "sharded", "grid").stdout
    lines = text.splitlines()
    assert lines[0] == "grid  F32[11, 7]  308 B, 4 boxes of 4 ranks"
    table = lines[2:7]
    assert len({len(line) for line in table}) == 1  # sizes stand on the right
    assert table[1].split()[:2] == ["0", "0"] and "[6, 4]" in table[1] and "96 B" in table[1]
    assert "dimension 1 to the right, dimension 0 downwards" in lines
    drawn = [line.split("|")[1] for line in lines if "|" in line]
    assert drawn == ["0000111"] * 6 + ["2222333"] * 5


def test_more_dimensions_are_named(saved: Path) -> None:
    text = run("layout", saved / "sharded", "experts").stdout
    assert "every box has all of dimension 1" in text
    assert "dimension 2 to the right, dimension 0 downwards" in text


def test_final_files_have_no_ranks(saved: Path) -> None:
    fields = json.loads(run("layout", saved / "final", "grid", "--json").stdout)
    (box,) = fields["boxes"]
    assert box["rank"] is None and box["file"] == "model-00001-of-00001.safetensors"
    text = run("layout", saved / "final", "grid").stdout
    assert "1 box in 1 file" in text and "map" not in text and "|" not in text


def test_stock_dcp(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3, 4)}, storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    fields = json.loads(run("layout", tmp_path / "c", "w", "--json").stdout)
    assert [(box["rank"], box["file"]) for box in fields["boxes"]] == [(0, "__0_0.distcp")]


def test_where_the_bytes_are(tmp_path: Path) -> None:
    """Of hand-made shards, by what safetensors itself has written."""
    parts = {1: torch.arange(6.0).reshape(2, 3), 2: torch.arange(6.0, 9.0).reshape(1, 3)}
    for rank, part in parts.items():
        sharding = json.dumps({"w": {"saved_offsets": [2 * (rank - 1), 0]}})
        save_file(
            {"w": part},
            tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": sharding},
        )
    fields = json.loads(run("layout", tmp_path, "w", "--json").stdout)
    assert [box["rank"] for box in fields["boxes"]] == [0, 1]
    for box, part in zip(fields["boxes"], parts.values(), strict=True):
        data = (tmp_path / box["file"]).read_bytes()[box["at"] :][: box["bytes"]]
        assert data == part.numpy().tobytes()


# --- errors -------------------------------------------------------------------


def test_a_name_that_is_not_there_and_names_near_it(saved: Path) -> None:
    done = run("layout", saved / "sharded", "gird")
    assert done.exit_code == 3 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "tensor 'gird'" in line and "near: 'grid'" in line
    assert "near" not in run("layout", saved / "sharded", "?????").stderr


def test_a_shard_that_is_missing_is_named(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved / "sharded", tmp_path / "c"))
    gone = "shard-00002-model-00001-of-00001.safetensors"
    (copy / gone).unlink()
    done = run("layout", copy, "grid")
    assert done.exit_code == 3 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert gone in line


def test_what_has_no_boxes(saved: Path) -> None:
    done = run("layout", saved / "sharded", "step")
    assert done.exit_code == 2 and "is no tensor" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_picture_that_cannot_be_written(saved: Path, tmp_path: Path) -> None:
    done = run("layout", saved / "sharded", "grid", "--svg", tmp_path / "no" / "a.svg")
    assert done.exit_code == 1 and str(tmp_path / "no" / "a.svg") in done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_a_picture_replaces_pictures_only(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved / "sharded", tmp_path / "c"))
    shard = copy / "shard-00001-model-00001-of-00001.safetensors"
    before = shard.read_bytes()
    for target in (shard, tmp_path / "a.png", tmp_path / "svg"):
        done = run("layout", copy, "grid", "--svg", target)
        assert done.exit_code == 2 and "must end with .svg" in done.stderr and done.stdout == ""
    assert shard.read_bytes() == before
    # A link of that name is replaced, and not what it leads to.
    (tmp_path / "a.svg").symlink_to(shard)
    assert run("layout", copy, "grid", "--svg", tmp_path / "a.svg").exit_code == 0
    assert shard.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.svg", "c"]


def test_a_picture_is_written_wholly_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "a.svg"
    write_picture(str(picture), b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full") as raised:
        write_picture(str(picture), b"new")
    assert raised.value.filename == str(picture)
    assert picture.read_bytes() == b"old" and list(tmp_path.iterdir()) == [picture]


def test_quiet_draws_all_the_same(saved: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    assert run("layout", "-q", saved / "sharded", "grid", "--svg", picture).output == ""
    assert ElementTree.fromstring(picture.read_text()).tag == f"{SVG}svg"


def test_tied_tensors(tmp_path: Path) -> None:
    w = torch.ones(4, 2)
    torch_ckpt.save({"a": w, "b": w}, tmp_path / "c", layout="final", naming="hf")
    assert "stored as a" in run("layout", tmp_path / "c", "b").stdout


# --- terminals ----------------------------------------------------------------


def drawn_on_a_terminal(*arguments: Any) -> str:
    """What a command prints on one."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "torch_ckpt", *(str(each) for each in arguments)]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": PACKAGE}
    with subprocess.Popen(words, stdout=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
            while part := terminal.read(1 << 16):  # an OSError at its end
                said += part
    assert process.returncode == 0
    return said.decode()


def test_colours_on_a_terminal_only(saved: Path) -> None:
    log = saved / "log.jsonl"
    for arguments in (
        ("layout", saved / "sharded", "grid"),
        ("timeline", log),
        ("doctor", saved, "--mib", 0),
    ):
        said = drawn_on_a_terminal(*arguments)
        assert "\x1b[" in said and "\x1b" not in run(*arguments).stdout
        assert "\x1b" not in drawn_on_a_terminal(*arguments, "--json")


# --- tilings ------------------------------------------------------------------


def tensor_of(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], name: str = "w"
) -> tuple[TensorInfo, list[Box]]:
    """A tensor with boxes of one rank each."""
    files = [f"shard-{n + 1:05d}-model-00001-of-00001.safetensors" for n in range(len(boxes))]
    placements = tuple(
        Placement(file, 8 * n, *box) for n, (file, box) in enumerate(zip(files, boxes, strict=True))
    )
    size = 4 * math.prod(shape)
    tensor = TensorInfo(name, "F32", shape, size, (name,), placements)
    return tensor, boxes_of(tensor, topology_of(None, files))


def text_of(tensor: TensorInfo, boxes: list[Box], plane: Plane, slices: list[Slice]) -> str:
    return click.unstyle(layout._text(tensor, boxes, plane, slices))


def grid_of(
    shape: tuple[int, ...], parts: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """As torch shards evenly: ceiling of the size by the number of parts."""
    sides = []
    for size, count in zip(shape, parts, strict=True):
        step = -(-size // count)
        sides.append([(at, min(step, size - at)) for at in range(0, size, step)])
    return [
        (tuple(at for at, _ in choice), tuple(size for _, size in choice))
        for choice in itertools.product(*sides)
    ]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Any]]:
    """A shape, and boxes that tile it: cut in two again and again, anywhere."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        at, side = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes[at]
        if sizes[side] < 2:
            continue
        cut = draw(st.integers(1, sizes[side] - 1))
        first, rest, later = list(sizes), list(sizes), list(offsets)
        first[side], rest[side], later[side] = cut, sizes[side] - cut, offsets[side] + cut
        boxes[at] = offsets, tuple(first)
        boxes.append((tuple(later), tuple(rest)))
    return shape, boxes


@settings(max_examples=150)
@given(tilings())
def test_slices_tile_every_tensor(tiling: Any) -> None:
    shape, parts = tiling
    tensor, boxes = tensor_of(shape, parts)
    plane = plane_of(shape, boxes)
    slices = list(plane.slices())
    assert len(slices) == plane.count
    seen: dict[int, int] = {}
    for part in slices:
        thick = math.prod(end - begin for begin, end in part.fixed.values())
        for each in part.rectangles:
            area = math.prod(end - begin for begin, end in (each.rows, each.columns))
            seen[id(each.box)] = seen.get(id(each.box), 0) + area * thick
        check_picture(svg("t", plane, [part], boxes), plane, [part])
    # A box is drawn in as many slices as it reaches through; with those, it is there once.
    undrawn = math.prod(shape[dimension] for dimension in plane.whole)
    assert {key: area * undrawn for key, area in seen.items()} == {
        id(box): math.prod(box.sizes) for box in boxes
    }
    text = text_of(tensor, boxes, plane, slices[:8])
    for row in re.findall(r"\|(.*)\|", text):
        assert " " not in row


def test_hundreds_of_boxes() -> None:
    shape = (4096, 8192)
    tensor, boxes = tensor_of(shape, grid_of(shape, (16, 32)))
    plane = plane_of(shape, boxes)
    slices = list(plane.slices())
    picture = svg(layout._title(tensor, boxes), plane, slices, boxes)
    check_picture(picture, plane, slices)
    words = [
        "".join(text.itertext()) for text in ElementTree.fromstring(picture).iter(f"{SVG}text")
    ]
    assert "one in 8 of 512" in words and "rank 504" in words
    assert len(words) < 200, "labels are drawn where there is room only"
    fills = {rect.get("fill") for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")}
    assert len(fills) > 400  # nearly as many colours as ranks


def test_slices_that_are_too_many_are_counted() -> None:
    shape = (2, 2, 64)
    tensor, boxes = tensor_of(shape, grid_of(shape, (2, 2, 32)))
    plane = plane_of(shape, boxes)
    slices = list(itertools.islice(plane.slices(), 8))
    assert "the first 8 of 32 slices are drawn" in svg("t", plane, slices, boxes)
    text = text_of(tensor, boxes, plane, slices)
    assert "32 slices of dimension 2" in text and "the first 8 of them" in text
    assert text.count("where dimension 2 is") == 8


def test_what_many_share_is_said() -> None:
    shape = (1, 1000)
    tensor, boxes = tensor_of(shape, grid_of(shape, (1, 500)))
    plane = plane_of(shape, boxes)
    text = text_of(tensor, boxes, plane, list(plane.slices()))
    assert "|" + "*" * 64 + "|" in text and "*: several" in text


def test_names_are_escaped() -> None:
    tensor, boxes = tensor_of((4,), grid_of((4,), (2,)), '<w>&"\x1b[31m')
    plane = plane_of((4,), boxes)
    title = layout._title(tensor, boxes)
    assert "\x1b" not in title
    root = ElementTree.fromstring(svg(title, plane, list(plane.slices()), boxes))
    assert any("<w>&" in "".join(text.itertext()) for text in root.iter(f"{SVG}text"))


# --- the guide ----------------------------------------------------------------


def test_the_pictures_of_the_guide() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    shown = re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", (docs / "guide.md").read_text())
    there = sorted(path.relative_to(docs).as_posix() for path in (docs / "pictures").iterdir())
    assert sorted(shown) == there
    for name in there:
        path = docs / name
        assert path.stat().st_size < 60_000
        if path.suffix == ".svg":
            (found,) = (boxes for _, boxes in rectangles(path.read_text()))
            assert len(found) == 4
        else:
            assert image.imread(path).std() > 0.1
