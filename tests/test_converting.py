"""Fetched data sets as plain files: speeches, tables of R's, zipped tables."""

import io
import json
import lzma
import struct
import zipfile

import pytest

from feddd.world.converting import speeches, table_of_r, unzipped

PLAY = """SCENE I. A wood.

FIRST WITCH.
When shall we three
meet again? [Thunder.]

[Enter a cat.]

Second Witch.\r
When the hurlyburly's done.\r

This is no speech. It is too long to be a name, and it goes on
with a second line.

THIRD WITCH.
[Exit.]
"""


def test_a_speech_is_a_paragraph_below_a_name() -> None:
    found = [json.loads(line) for line in speeches({"macbeth": PLAY, "a": "BOY.\nHo!"}).splitlines()]
    assert found == [
        {"play": "a", "speaker": "Boy", "text": "Ho!"},
        {"play": "macbeth", "speaker": "First Witch", "text": "When shall we three\nmeet again?"},
        {"play": "macbeth", "speaker": "Second Witch", "text": "When the hurlyburly's done."},
    ]


def test_one_file_of_a_zip_archive_is_read_up_to_a_size() -> None:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("a.csv", "x\n1\n")
    assert unzipped(packed.getvalue(), "a.csv", 4) == b"x\n1\n"
    for content, member, most in [(packed.getvalue(), "a.csv", 3), (packed.getvalue(), "b.csv", 9), (b"no", "a", 9)]:
        with pytest.raises(ValueError, match="a"):
            unzipped(content, member, most)


def string(text: str) -> bytes:
    return struct.pack(">ii", 0x40009, len(text)) + text.encode()


def symbol(text: str) -> bytes:
    return struct.pack(">i", 1) + string(text)


def strings(*texts: str) -> bytes:
    return struct.pack(">ii", 16, len(texts)) + b"".join(string(text) for text in texts)


END = struct.pack(">i", 254)
TAGGED = struct.pack(">i", 0x402)
FRAME = (
    b"RDX2\nX\n"
    + struct.pack(">iii", 2, 0x20A01, 0x20300)
    + TAGGED
    + symbol("table")
    + struct.pack(">ii", 0x313, 3)  # a list of three columns with attributes
    + (struct.pack(">iiiii", 0x30D, 3, 2, 1, 2) + TAGGED + symbol("levels") + strings("A", "B"))
    + (TAGGED + symbol("class") + strings("factor") + END)
    + struct.pack(">iiddd", 14, 3, 0.5, -1.0, 1e6)
    + struct.pack(">iiiii", 13, 3, 7, 8, 9)
    + (TAGGED + symbol("names") + strings("letter", "x", "count"))
    + (TAGGED + struct.pack(">i", 0x2FF) + strings("data.frame") + END)  # the second symbol again: class
    + END
)


def test_a_data_frame_of_rs_becomes_a_table() -> None:
    assert table_of_r(lzma.compress(FRAME), 10_000) == b"letter,x,count\nB,0.5,7\nA,-1,8\nB,1e+06,9\n"


def test_a_damaged_or_foreign_r_file_is_an_error_and_never_a_table() -> None:
    for length in range(len(FRAME) - 4):
        with pytest.raises((ValueError, TypeError, KeyError)):
            table_of_r(lzma.compress(FRAME[:length]), 10_000)
    for packed in (lzma.compress(b"RDX3\nX\n" + FRAME[7:]), lzma.compress(FRAME)[:-1], lzma.compress(bytes(20_000))):
        with pytest.raises(ValueError, match="R's binary format"):
            table_of_r(packed, 10_000)
    function = FRAME.replace(struct.pack(">ii", 13, 3), struct.pack(">ii", 3, 3))
    with pytest.raises(ValueError, match="type 3 is not known"):
        table_of_r(lzma.compress(function), 10_000)
