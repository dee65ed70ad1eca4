"""Conversions from which a program on Megatron Core goes on."""

from __future__ import annotations

import argparse
import enum
import io
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from foreign_samples import same

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.errors import CorruptError
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing import ShardedObject, ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException, maybe_load_config
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.objects.stand_ins import StandIns
from torch_ckpt.objects.types import STOOD_FOR

FIXTURES = Path(__file__).parents[1] / "fixtures"
OF_MEGATRON = [
    FIXTURES / name / "checkpoint"
    for name in ("megatron_torch_dist_019_2ranks", "megatron_zarr_2ranks")
]
COMMON = {
    "iteration": 7,
    "args": argparse.Namespace(lr=0.1, names=["x"]),
    5: [1, None],
    "empty": {},
    "step": torch.tensor(3),
}


def state() -> dict[Any, Any]:
    return {
        **COMMON,
        "w": ShardedTensor.from_rank_offsets("model.w", torch.arange(6.0)),
        "o": ShardedObject("rng", {"x": 1}, (1,), (0,)),
    }


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    dist_checkpointing.save(state(), tmp_path / "ours", content_metadata={"v": 1})
    return tmp_path / "ours"


def check_same(path: Path, source: Path) -> None:
    """All that Megatron's calls say of a checkpoint."""
    assert dist_checkpointing.check_is_distributed_checkpoint(path)
    assert maybe_load_config(path).sharded_backend == "torch_ckpt"
    for look in (
        dist_checkpointing.load_common_state_dict,
        lambda place: dist_checkpointing.load_content_metadata(place),
        dist_checkpointing.load_plain_tensors,
    ):
        assert same(look(path), look(source))
    told = [dist_checkpointing.load_tensors_metadata(place) for place in (path, source)]
    assert told[0].keys() == told[1].keys()
    asked = [dist_checkpointing.load_sharded_metadata(place) for place in (path, source)]
    assert asked[0].keys() == asked[1].keys()
    options: Any = {"validate_access_integrity": False, "strict": "raise_all"}
    loaded = [
        dist_checkpointing.load(dict(entries), place, verify_integrity=place == path, **options)
        for entries, place in zip(asked, (path, source), strict=True)
    ]
    streams = [
        {name: each.pop(name).getvalue() for name in [*each] if isinstance(each[name], io.BytesIO)}
        for each in loaded
    ]
    assert same(*loaded) and streams[0] == streams[1]


def test_ours_stays_one_of_megatrons(ours: Path, tmp_path: Path) -> None:
    torch_ckpt.convert(ours, tmp_path / "same")  # as the source is
    torch_ckpt.convert(tmp_path / "same", tmp_path / "again", "torch_ckpt", max_shard_size=16)
    told = CliRunner().invoke(cli, ["convert", str(ours), str(tmp_path / "shell")])
    assert told.exit_code == 0, told.output
    for name in ("same", "again", "shell"):
        check_same(tmp_path / name, ours)
        assert (tmp_path / name / "metadata.json").read_text() == (
            ours / "metadata.json"
        ).read_text()


@pytest.mark.parametrize("source", OF_MEGATRON, ids=["torch_dist", "zarr"])
def test_megatrons_becomes_ours(source: Path, tmp_path: Path) -> None:
    torch_ckpt.convert(source, tmp_path / "a", "torch_ckpt")
    torch_ckpt.convert(tmp_path / "a", tmp_path / "b")
    for name in ("a", "b"):
        check_same(tmp_path / name, source)
        assert torch_ckpt.open(tmp_path / name).objects["iteration"] == 7  # leaves as before


def with_common_file(path: Path) -> None:
    """A directory as those of 0.18: the common state is a file, here with tensors, of which one is
    called as objects are."""
    torch_ckpt.convert(OF_MEGATRON[0], path, "megatron", exclude=["args", "optimizer.param*"])
    common = {
        "iteration": 7,
        "optimizer": {"step": torch.tensor(5), "empty": [], "groups": [{"lr": 0.1}]},
        "x/shard_0_1": torch.ones(2),
        "y/shard_0_1": 1,
        "layer": torch.arange(3),
    }
    torch.save(common, path / "common.pt")


def test_a_common_state_in_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "megatrons", tmp_path / "ours"
    with_common_file(source)
    torch_ckpt.convert(source, target, "torch_ckpt")
    check_same(target, source)
    torch_ckpt.convert(target, tmp_path / "back", "megatron")
    back = tmp_path / "back"
    for look in (
        dist_checkpointing.load_common_state_dict,
        dist_checkpointing.load_plain_tensors,
    ):
        assert same(look(back), look(source))
    asked = dist_checkpointing.load_sharded_metadata(source)
    assert dist_checkpointing.load_sharded_metadata(back).keys() == asked.keys()


def test_objects_of_zarr_come_back_as_they_were(tmp_path: Path) -> None:
    """They are no lists of one there, and are in torch_dist."""
    torch_ckpt.convert(OF_MEGATRON[1], tmp_path / "ours", "torch_ckpt")
    torch_ckpt.convert(tmp_path / "ours", tmp_path / "back", "megatron")
    (name,) = [
        name
        for name in dist_checkpointing.load_sharded_metadata(tmp_path / "back")
        if name.startswith("rng_state/shard_0.0")
    ]
    for path in (OF_MEGATRON[1], tmp_path / "back"):
        asked = dist_checkpointing.load_sharded_metadata(path)[name]
        found = dist_checkpointing.load({"x": asked}, path, validate_access_integrity=False)
        assert found["x"] == [{"rank": 0, "word": "rng-0"}]


def test_with_fewer_keys_and_other_names(ours: Path, tmp_path: Path) -> None:
    torch_ckpt.convert(OF_MEGATRON[0], tmp_path / "a", exclude=["args", "f64"], to="torch_ckpt")
    common = dist_checkpointing.load_common_state_dict(tmp_path / "a")
    assert "args" not in common and common["iteration"] == 7
    wanted = dist_checkpointing.load_tensors_metadata(OF_MEGATRON[0]).keys() - {"f64"}
    assert dist_checkpointing.load_tensors_metadata(tmp_path / "a").keys() == wanted
    with_common_file(tmp_path / "file")
    torch_ckpt.convert(
        tmp_path / "file", tmp_path / "b", "torch_ckpt", key_mapping=[("^", "new.")], dtype="bf16"
    )
    entries = dist_checkpointing.load_tensors_metadata(tmp_path / "b")
    assert "new.rows" in entries and "new.layer" not in entries
    assert dist_checkpointing.load_common_state_dict(tmp_path / "b")["iteration"] == 7
    torch_ckpt.convert(ours, tmp_path / "c", exclude=["common_state*"])
    assert dist_checkpointing.load_common_state_dict(tmp_path / "c") == {
        "content_metadata": {"v": 1}
    }
    for source, name in ((ours, "d"), (OF_MEGATRON[0], "e")):
        torch_ckpt.convert(
            source, tmp_path / name, "torch_ckpt", objects=False, exclude=["common_state*"]
        )
        loaded = dist_checkpointing.load_plain_tensors(tmp_path / name)
        assert loaded.keys() == dist_checkpointing.load_tensors_metadata(source).keys()


def test_tensors_are_removed_from_it(tmp_path: Path) -> None:
    torch_ckpt.convert(OF_MEGATRON[0], tmp_path / "a", "torch_ckpt")
    dist_checkpointing.remove_sharded_tensors(tmp_path / "a", "f64")
    assert "f64" not in dist_checkpointing.load_tensors_metadata(tmp_path / "a")
    assert dist_checkpointing.load_common_state_dict(tmp_path / "a")["iteration"] == 7


def test_a_save_over_it_is_as_any(tmp_path: Path) -> None:
    torch_ckpt.convert(OF_MEGATRON[0], tmp_path / "a", "torch_ckpt")
    dist_checkpointing.save(state(), tmp_path / "a")
    assert same(dist_checkpointing.load_common_state_dict(tmp_path / "a"), COMMON)


def test_others_do_not_become_megatrons(ours: Path, tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "plain", no_dist=True)
    (tmp_path / "plain" / "metadata.json").write_text('{"sharded_backend": "torch_ckpt"}')
    torch_ckpt.convert(tmp_path / "plain", tmp_path / "a", "torch_ckpt")  # it belongs to nobody
    (tmp_path / "own").mkdir()
    for number, text in enumerate(('{"own": 1}', "1", "[1]", '{"sharded_backend": "other"}')):
        (tmp_path / "own" / "metadata.json").write_text(text)
        place = tmp_path / f"own{number}"
        torch_ckpt.save({"w": torch.ones(2)}, place, no_dist=True, extras=tmp_path / "own")
        torch_ckpt.convert(place, tmp_path / f"b{number}", "torch_ckpt")
    torch_ckpt.convert(OF_MEGATRON[0], tmp_path / "c", "torch_ckpt", format="dcp")
    torch_ckpt.convert(ours, tmp_path / "d", "hf")
    for name in ("a", "b0", "b1", "b2", "b3", "c", "d"):
        assert not (tmp_path / name / "metadata.json").exists(), name


def converted(path: Path, name: str, text: str | None) -> None:
    """Megatron's as ours, where the extra `name` says `text`, or is gone."""
    torch_ckpt.convert(OF_MEGATRON[0], path, "torch_ckpt")
    (path / name).unlink()
    if text is not None:
        (path / name).write_text(text)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_what_says_the_backend_is_damaged(tmp_path: Path, text: str | None) -> None:
    converted(tmp_path / "a", "metadata.json", text)
    for to in ("torch_ckpt", "megatron"):
        with pytest.raises(CorruptError, match=r"metadata\.json"):
            torch_ckpt.convert(tmp_path / "a", tmp_path / to, to)


def test_a_name_of_the_common_state_is_given_to_no_tensor(tmp_path: Path) -> None:
    torch_ckpt.convert(OF_MEGATRON[0], tmp_path / "a", "torch_ckpt")
    name = next(iter(torch_ckpt.open(tmp_path / "a")))
    mapping = [(f"^{name}$", "common_state/shard_0_1")]
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="common state"):
        torch_ckpt.convert(tmp_path / "a", tmp_path / "b", "torch_ckpt", key_mapping=mapping)


WRONG = (
    *("[]", "{", '{"leaves": 5}', '{"leaves": [5]}', '{"leaves": [], "bare_objects": 1}', None),
    '{"leaves": ["iteratioN"], "bare_objects": false}',
)


@pytest.mark.parametrize("text", WRONG)
def test_what_says_the_leaves_is_damaged(tmp_path: Path, text: str | None) -> None:
    converted(tmp_path / "a", "common_state.json", text)
    with pytest.raises(CheckpointingException, match=r"common_state\.json"):
        dist_checkpointing.load_common_state_dict(tmp_path / "a")


def test_a_form_that_is_not_known(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    said = {"sharded_backend": "torch_ckpt", "sharded_backend_version": 9}
    (tmp_path / "own" / "metadata.json").write_text(json.dumps(said))
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "a", no_dist=True, extras=tmp_path / "own")
    for to in ("torch_ckpt", "megatron"):
        with pytest.raises(torch_ckpt.UnsupportedError, match=r"metadata\.json.*9"):
            torch_ckpt.convert(tmp_path / "a", tmp_path / "b", to)
    torch_ckpt.convert(tmp_path / "a", tmp_path / "b", "hf")


class ModelType(enum.Enum):
    """As Megatron's."""

    encoder_or_decoder = 1
    other = "b"


class OptimizerConfig:
    """As Megatron's: a record, here of values of all kinds."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


Import = Callable[[bool], None]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Import:
    """Puts modules with these classes into the places of Megatron's, or takes away all that are."""
    # Megatron lists its own, if another test has imported it.
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)

    def put(there: bool) -> None:
        for name in {name.partition(":")[0] for name in STOOD_FOR}:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for cls, name in (
            (ModelType, "megatron.core.enums"),
            (OptimizerConfig, "megatron.core.optimizer.optimizer_config"),
        ):
            monkeypatch.setattr(cls, "__module__", name)
            parts = name.split(".")
            for end in range(1, len(parts) + 1 if there else 0):
                part = ".".join(parts[:end])
                if part == name or part not in sys.modules:
                    monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
            if there:
                setattr(sys.modules[name], cls.__name__, cls)

    return put


def odd_args() -> argparse.Namespace:
    kind = ModelType.encoder_or_decoder
    config = OptimizerConfig(lr=0.1, kind=kind, nested=[{"x": kind}])
    return argparse.Namespace(
        kind=kind,
        kinds=[kind, ModelType.other, kind],
        keyed={kind: 1, ModelType.other: (kind, 2)},
        config=config,
        dtype=torch.bfloat16,
    )


def check_args(found: argparse.Namespace) -> None:
    wanted = odd_args()
    for name in ("kind", "kinds", "keyed", "dtype"):
        assert getattr(found, name) == getattr(wanted, name), name
    assert type(found.config) is OptimizerConfig
    assert same(vars(found.config), vars(wanted.config))


def said_of(path: Path, names: list[str]) -> list[Any]:
    return OpenedCheckpoint(str(path)).archived_objects(names)


@pytest.mark.parametrize("to", ["megatron", "dcp", "torch"])
def test_classes_that_are_not_imported_stay(imported: Import, tmp_path: Path, to: Any) -> None:
    """An enum's member, or a record, is pickled by the name of its class, which nobody imports."""
    source = tmp_path / "source"
    torch_ckpt.convert(OF_MEGATRON[0], source, "megatron", objects=False)
    imported(True)
    torch.save({"args": odd_args(), "kind": ModelType.other}, source / "common.pt")
    imported(False)
    said = said_of(source, ["args", "kind"])
    for path in (tmp_path / "direct", tmp_path / "by ours" / "b"):
        by = source
        if path.name == "b":
            by = tmp_path / "by ours" / "a"
            torch_ckpt.convert(source, by, "torch_ckpt")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing takes the place of anything
            torch_ckpt.convert(by, path, to)
        assert said_of(path, ["args", "kind"]) == said
        # And those who have the classes.
        imported(True)
        if to != "dcp":
            file = path / "common.pt" if to == "megatron" else path
            common = torch.load(file, weights_only=False)
            check_args(common["args"])
            assert common["kind"] is ModelType.other
        check_args(torch_ckpt.open(path).objects["args"])
        imported(False)


def test_an_attribute_of_a_record_is_never_called(imported: Import) -> None:
    attributes = {"__getstate__": 1, "__reduce_ex__": 2, "__reduce__": 3, "lr": 0.1}
    stand_ins, archive = StandIns(), io.BytesIO()
    reference = "megatron.core.optimizer.optimizer_config:OptimizerConfig"
    stand_ins.save([stand_ins.record(reference, attributes)], archive)
    archive.seek(0)
    imported(True)
    (found,) = torch.load(archive, weights_only=False)
    assert type(found) is OptimizerConfig and vars(found) == attributes


def test_megatrons_own_classes_come_back(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing")
    write = """
import sys, torch, torch_ckpt
torch_ckpt.convert(sys.argv[1], sys.argv[2], "megatron")
assert "megatron" not in sys.modules
"""
    read = """
import os, sys, torch
from megatron.core.transformer.enums import AttnBackend
args = torch.load(os.path.join(sys.argv[2], "common.pt"), weights_only=False)["args"]
assert args.attention_backend is AttnBackend.auto, args
"""
    for code in (write, read):
        done = subprocess.run(
            [sys.executable, "-c", code, str(OF_MEGATRON[0]), str(tmp_path / "a")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "takes its place" not in done.stderr
    assert said_of(tmp_path / "a", ["args"]) == said_of(OF_MEGATRON[0], ["args"])


def test_to_files_without_pickles_no_warning(imported: Import, tmp_path: Path) -> None:
    """Their objects name the class."""
    imported(False)
    for to in ("torch_ckpt", "hf"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_ckpt.convert(OF_MEGATRON[0], tmp_path / to, to)


def test_an_enum_that_nobody_knows(imported: Import, tmp_path: Path) -> None:
    imported(True)
    name = "megatron.core.enums"
    sys.modules[name].Own = (own := enum.Enum("Own", ["a"], module=name))
    torch_ckpt.save({"x": own.a, "w": torch.ones(2)}, tmp_path / "a", no_dist=True)
    imported(False)
    for to in ("torch", "dcp", "megatron"):
        with pytest.raises(torch_ckpt.UnsupportedError, match=r"x.*enums:Own.*import its module"):
            torch_ckpt.convert(tmp_path / "a", tmp_path / "b", to)
        assert not (tmp_path / "b").exists()
