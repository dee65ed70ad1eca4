"""Files of torch.save that say what is not true, or the same in very many places."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from foreign_samples import of_dcp, of_torch

import torch_ckpt
from torch_ckpt.checkpoint.description import entries_of
from torch_ckpt.native.opened import OpenedCheckpoint


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path: Path, content: dict[str, bytes], comment: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.comment = comment
    return path


def with_pickle(path: Path, source: Path, old: bytes, new: bytes) -> Path:
    """`source` with other bytes in its pickle."""
    content = entries(source)
    (name,) = [each for each in content if each.endswith("data.pkl")]
    assert old in content[name]
    content[name] = content[name].replace(old, new)
    return write(path, content)


COUNT = b"K\x08tq"  # the end of a persistent id: eight elements
WRONG = [b"K\x02tq", b"K\x09tq", b"M\xe8\x03tq", b"J\xfb\xff\xff\xfftq", b"Ntq"]


@pytest.mark.parametrize("count", WRONG)
def test_a_storage_has_as_many_elements_as_its_pickle_says(tmp_path: Path, count: bytes) -> None:
    tensor = torch.arange(8.0)
    source = of_torch(tmp_path / "a.pt", {"w": tensor, "tuple": (tensor,)})
    same = with_pickle(tmp_path / "b.pt", source, COUNT, COUNT)
    assert torch.equal(torch_ckpt.open(same)["w"][...], tensor)
    wrong = with_pickle(tmp_path / "c.pt", source, COUNT, count)
    with pytest.raises(torch_ckpt.CorruptError, match=r"w") as error:
        torch_ckpt.load({"w": torch.zeros(8)}, path=wrong, no_dist=True)
    assert "c.pt" in str(error.value)
    with pytest.raises(Exception, match="size|storage|negative|must|NoneType"):
        torch.load(wrong)


def test_a_box_of_dcp_has_as_many_elements_as_its_pickle_says(tmp_path: Path) -> None:
    path = of_dcp(tmp_path / "c", {"w": torch.arange(8.0)})
    (file,) = path.glob("*.distcp")
    content = file.read_bytes()
    assert content.count(COUNT) == 1
    at = content.index(COUNT)
    file.write_bytes(content[:at] + b"K\x09tq" + content[at + 4 :])
    # The CRC-32 of the pickle tells first; of who saves without them, the count.
    with pytest.raises(torch_ckpt.CorruptError):
        torch_ckpt.load({"w": torch.zeros(8)}, path=path, no_dist=True)


def test_a_storage_that_was_of_bytes_before(tmp_path: Path) -> None:
    """torch rounds the number of elements down, and does not read it back itself."""
    whole = torch.arange(7, dtype=torch.uint8)
    path = of_torch(tmp_path / "a.pt", {"w": whole[:4].view(torch.int32)})
    assert torch.equal(torch_ckpt.open(path)["w"][...], whole[:4].view(torch.int32))
    with pytest.raises(RuntimeError, match="record size"):
        torch.load(path)


def test_large_tensors_that_are_expanded_from_nothing(tmp_path: Path) -> None:
    """Leaves of a few bytes, each two tensors of 128 MiB: the third is refused at once."""
    large = torch.ones(1).expand(32 << 20)
    pair = (large, large)
    path = of_torch(tmp_path / "a.pt", {f"x{number:02}": pair for number in range(40)})
    assert path.stat().st_size < 5000
    objects = torch_ckpt.open(path).objects
    with pytest.raises(torch_ckpt.ExhaustedError):
        objects["x00"]
    opened = OpenedCheckpoint(str(path))
    texts = [str(each) for each in opened.archived_objects(sorted(objects))]
    assert sum("takes more work" in text for text in texts) >= 34


def test_an_archive_may_have_a_comment(tmp_path: Path) -> None:
    tensor = torch.arange(8.0)
    source = of_torch(tmp_path / "a.pt", {"w": tensor})
    for number, comment in enumerate((b"c", b"PK\x05\x06" * 100, bytes(65535))):
        path = write(tmp_path / "b.pt", entries(source), comment)
        assert torch.equal(torch_ckpt.open(path)["w"][...], tensor)
        torch_ckpt.convert(path, tmp_path / f"out{number}", "hf")
    cut = path.read_bytes()[:-1]
    path.write_bytes(cut)
    with pytest.raises(torch_ckpt.CorruptError, match="is cut short"):
        torch_ckpt.open(path)


def test_aliases_share_the_boxes_of_their_tensor(tmp_path: Path) -> None:
    tied = torch.ones(2, 3)
    path = of_torch(tmp_path / "c.pt", {"b": tied, "a": tied, "c": tied})
    listing = OpenedCheckpoint(str(path)).listing(whole=True)
    assert sorted(boxes is None for boxes in listing.placements) == [False, True, True]
    assert len({str(boxes) for boxes in listing.boxes().values()}) == 1
    tensors, _ = entries_of(listing)
    assert len({id(tensor.placements) for tensor in tensors}) == 1
    assert all(len(tensor.placements) == 1 for tensor in tensors)
    metadata = torch_ckpt.CheckpointReader(path).read_metadata()
    for name in "abc":
        assert metadata.state_dict_metadata[name].size == (2, 3)


def test_expanded_tensors_are_told_of_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = of_torch(tmp_path / "a.pt", {"w": torch.ones(1).expand(50_000), "b": torch.ones(3)})
    stored = path.stat().st_size
    torch_ckpt.convert(path, tmp_path / "quiet", "hf")
    assert not caplog.records
    monkeypatch.setattr("torch_ckpt.conversion.convert._GROWTH", 1000)
    torch_ckpt.convert(path, tmp_path / "told", "hf")
    assert f"of {stored} bytes in files 200012 will be written" in caplog.text
