"""Archives from strangers: only the wanted plain files come out, only to their places, and never without end."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from feddd.world import fetching

WANTED = "package/data/file"
GOOD = b"genuine"


def member(name: str, content: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    """One member of an archive as it lies there."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


END = bytes(1024)
Hostile = Callable[[Path], bytes]
HOSTILE: dict[str, Hostile] = {
    "an absolute name": lambda outside: member(str(outside / "evil"), b"x"),
    "a name above": lambda outside: member("../outside/evil", b"x"),
    "a name above, hidden": lambda outside: member("package/data/../../../outside/evil", b"x"),
    "a link to a folder, then a file below it": lambda outside: (
        member("package/data", kind=tarfile.SYMTYPE, link=str(outside)) + member("package/data/evil", b"x")
    ),
    "a link in the file's place": lambda outside: member(WANTED, kind=tarfile.SYMTYPE, link=str(outside / "secret")),
    "a hard link in the file's place": lambda outside: member(
        WANTED, kind=tarfile.LNKTYPE, link=str(outside / "secret")
    ),
    "a device": lambda outside: member(WANTED, kind=tarfile.CHRTYPE),
    "a pipe": lambda outside: member(WANTED, kind=tarfile.FIFOTYPE),
    "a folder": lambda outside: member(WANTED, kind=tarfile.DIRTYPE),
}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_hostile_member_is_passed_over(kind: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "archive").write_bytes(pack(HOSTILE[kind](outside) + member(WANTED, GOOD) + END))
    fetching.extract(tmp_path / "archive", {WANTED: inside / "file"})
    assert everything(inside) == {"file": GOOD}
    assert everything(outside) == {"secret": b"secret"}


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if "above" not in kind and "absolute" not in kind])
def test_a_hostile_member_does_not_stand_in_for_a_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "archive").write_bytes(HOSTILE[kind](tmp_path) + END)
    with pytest.raises(Exception, match="no file package/data/file"):
        fetching.extract(tmp_path / "archive", {WANTED: tmp_path / "file"})
    assert not (tmp_path / "file").exists()


def sparse() -> bytes:
    """A file that takes a kilobyte in the archive and says it is a terabyte of holes."""
    info = tarfile.TarInfo(WANTED)
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": WANTED}
    info.pax_headers |= {"GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,0"}
    return info.tobuf(tarfile.PAX_FORMAT) + END


def test_a_file_of_holes_is_not_filled(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(sparse())
    with tarfile.open(fileobj=io.BytesIO(sparse())) as tar:
        assert tar.getmembers()[0].issparse(), "else this is no such file"
    with pytest.raises(Exception, match="no file package/data/file"):
        fetching.extract(tmp_path / "archive", {WANTED: tmp_path / "file"})
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("name", [WANTED, "something else"])
def test_an_archive_that_unpacks_to_too_much_is_given_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "MOST_BYTES", 100_000)
    (tmp_path / "archive").write_bytes(gzip.compress(member(name, bytes(10**7)) + END))
    with pytest.raises(Exception, match="unpacks to more than 100000 bytes"):
        fetching.extract(tmp_path / "archive", {WANTED: tmp_path / "file"})
    assert not (tmp_path / "file").exists() or (tmp_path / "file").stat().st_size <= 100_000
