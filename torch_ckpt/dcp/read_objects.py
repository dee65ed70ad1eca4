"""Leaves that are no tensors: from the objects files to the planner."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt import _ext
from torch_ckpt.dcp.read_metadata import OBJECT
from torch_ckpt.dcp.write_files import RAW_LEAVES
from torch_ckpt.errors import CorruptError, IncompleteError
from torch_ckpt.jobs import Job
from torch_ckpt.objects import ObjectFile


class ObjectReader:
    """Reads the object items of one plan; each objects file once."""

    def __init__(
        self, path: str, described: dict[str, Any], *, verify: bool, allow_pickle: bool
    ) -> None:
        """`described` is the core's answer to "describe"; it names the save to read from."""
        self.path = path
        self.described = described
        self.verify = verify
        self.allow_pickle = allow_pickle

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        described = self.described
        files = described["files"]
        sizes = {file["name"]: file["bytes"] for file in files}
        holder = {
            name: files[parts[0]["file"]]["name"]
            for name, kind, parts in zip(
                described["names"], described["kinds"], described["placements"], strict=True
            )
            if kind == OBJECT
        }
        wanted: dict[str, list[ReadItem]] = {}
        for item in items:
            fqn = item.storage_index.fqn
            if fqn not in holder:
                raise IncompleteError("is not in the checkpoint", file=self.path, tensor=fqn)
            wanted.setdefault(holder[fqn], []).append(item)
        for name, of_file in wanted.items():
            self._deliver(name, of_file, sizes, planner)

    def _bytes(self, name: str, size: int) -> bytes:
        target = torch.empty(size, dtype=torch.uint8)
        plan = {
            "path": self.path,
            "save_id": self.described["save_id"],
            "verify": self.verify,
            "names": [name],
            "files": {"0": name},
        }
        with Job("read") as job:
            _ext.read([target], plan, job)
        # Not target.numpy(): torch does not need numpy, and neither do we.
        return bytes(target.untyped_storage())

    def _deliver(
        self, name: str, items: list[ReadItem], sizes: dict[str, int], planner: LoadPlanner
    ) -> None:
        file = ObjectFile(self._bytes(name, sizes[name]), name=f"{self.path}/{name}")
        side_name = name.removesuffix(".json") + ".bin"
        if file.side_bytes and side_name not in sizes:
            raise CorruptError("its side file is not in the checkpoint", file=file.name)
        side = self._bytes(side_name, sizes[side_name]) if file.side_bytes else b""
        stored = set(file.fqns())
        names = [item.storage_index.fqn for item in items]
        if RAW_LEAVES in stored:
            names.append(RAW_LEAVES)
        for fqn in names:
            if fqn not in stored:
                raise CorruptError("is not in its objects file", file=file.name, tensor=fqn)
        objects = file.load(names, side=side, allow_pickle=self.allow_pickle)
        raw = set(objects.get(RAW_LEAVES, ()))
        for item in items:
            fqn = item.storage_index.fqn
            _give(planner, item, objects[fqn], raw=fqn in raw)


def _give(planner: LoadPlanner, item: ReadItem, value: Any, *, raw: bool) -> None:
    load_object = getattr(planner, "load_object", None)
    if load_object is not None and not raw:
        load_object(item, value)
        return
    if raw:
        data = io.BytesIO(value)
    else:
        # Stock planners take a pickle and no object. This one is made here and now, of an object
        # that was decoded from typed JSON: nothing that came from disk is unpickled.
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
    planner.load_bytes(item, data)
