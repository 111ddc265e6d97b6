"""Every reader of files and messages that may come from a stranger: inputs to start from, and what it may raise."""

from __future__ import annotations

import functools
import gzip
import io
import json
import math
import random
import struct
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """seeds: good inputs    read: takes any bytes    refusals: what it may raise    words, make: better inputs."""

    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = ()
    make: Callable[[random.Random], bytes] | None = None


def targets(work: Path) -> dict[str, Callable[[], Target]]:
    """By name; a target is built when it is asked for. work: a folder for files, best in memory"""
    return {
        "payload": _payload,
        "mask": _mask,
        "coverage": _coverage,
        "record": _record,
        "report": _report,
        "checkpoint": lambda: _checkpoint(work),
        "store": lambda: _store(work),
        "toml": lambda: _toml(work),
        "set": _set,
        "fleet": lambda: _fleet(work),
        "idx": lambda: _dataset(work, "idx"),
        "cifar": lambda: _dataset(work, "cifar"),
        "npz": lambda: _npz(work),
        "table": lambda: _table(work),
        "image": lambda: _image(work),
        "results": lambda: _results(work),
        "archive": lambda: _archive(work),
    }


# The wire


def _model() -> Any:
    """Layers of many layouts: with statistics, grouped transposed, tied, and a scalar."""
    import torch
    from torch import nn

    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        net = nn.ModuleDict(
            {
                "conv": nn.Conv2d(1, 5, 2),
                "norm": nn.BatchNorm2d(5),
                "up": nn.ConvTranspose1d(4, 6, 2, groups=2),
                "embedding": nn.Embedding(7, 4),
                "decoder": nn.Linear(4, 7),
            }
        )
        net["decoder"].weight = net["embedding"].weight
        net.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return net


def _encoders() -> list[Callable[..., bytes]]:
    """Every way to write a payload: a new value encoding gets a line here."""
    import numpy as np

    import feddd

    coded = [functools.partial(feddd.encode, bits=bits, rng=np.random.default_rng(bits)) for bits in (8, 4, 2)]
    return [feddd.encode, *coded]


def _payload() -> Target:
    import numpy as np

    import feddd
    from feddd.wire.format import encode

    net = _model()
    table, like = feddd.units(net), dict(net.state_dict())
    encoders = _encoders()

    def random_mask(rng: random.Random) -> dict[str, Any]:
        import torch

        share = rng.random()
        return {x.name: torch.tensor([rng.random() < share for _ in range(x.units)]) for x in table.layers}

    def read(data: bytes) -> None:
        bits = {1: 8, 2: 4, 3: 2}.get(data[5], 32) if len(data) > 5 else 32
        values, mask = feddd.decode(data, like, units=table, finite=True, bits=bits)
        if data[5] == 0 and data[-1] % 16 == 0:  # float32: what is accepted is what was meant, bit for bit
            assert encode({**like, **values}, mask, units=table) == data
        assert all(bool(np.isfinite(tensor.numpy()).all()) for tensor in values.values())

    first = random.Random(0)
    masks = [table.full_mask(), *(random_mask(first) for _ in range(100))]
    seeds = [encoder(like, mask, units=table) for encoder in encoders for mask in masks]

    def make(rng: random.Random) -> bytes:
        data = rng.choice(seeds)
        start = rng.randrange(20, len(data) + 1)
        return data[:start] + rng.randbytes(len(data) - start)

    words = (b"FdDD", seeds[0][:16], b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, *(bytes([n]) for n in range(8)))
    return Target(tuple(seeds), read, (feddd.PayloadError,), words, make)


def _mask() -> Target:
    import feddd
    from feddd.wire.format import pack_mask, unpack_mask

    table = feddd.units(_model())

    def read(data: bytes) -> None:
        assert pack_mask(unpack_mask(data, table), table) == data

    full = pack_mask(table.full_mask(), table)
    return Target((full, bytes(len(full))), read, (feddd.PayloadError,), (), lambda rng: rng.randbytes(len(full)))


def _coverage() -> Target:
    import torch

    import feddd
    from feddd.wire.format import decode_coverage, encode_coverage

    table = feddd.units(_model())
    share = {x.name: torch.linspace(0.1, 1.0, x.units) for x in table.layers}
    seed = encode_coverage(share, table)

    def read(data: bytes) -> None:
        assert encode_coverage(decode_coverage(data, table), table) == data

    def make(rng: random.Random) -> bytes:
        return seed[:16] + struct.pack(f"<{table.total_units}f", *(rng.random() for _ in range(table.total_units)))

    return Target((seed,), read, (feddd.PayloadError,), (b"\0\0\xc0\x7f", b"\0\0\x80\x3f", bytes(4)), make)


_VALUES: tuple[Any, ...] = (
    0,
    1,
    -1,
    2**62,
    0.0,
    -1.0,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    "",
    "ok",
    "\n\x1b[2J",
    [],
    ["a"],
    [1],
    True,
    b"x",
)


def _record_read(good: Mapping[str, Any], read: Callable[[dict[str, Any]], None]) -> Callable[[bytes], None]:
    """Each two bytes change a field of a good record: which one, and to what (or take it away)."""
    keys = [*good, "protocol", "more"]

    def fed(data: bytes) -> None:
        fields = dict(good)
        for which, what in zip(data[::2], data[1::2], strict=False):
            if what % (len(_VALUES) + 1) == len(_VALUES):
                fields.pop(keys[which % len(keys)], None)
            else:
                fields[keys[which % len(keys)]] = _VALUES[what % (len(_VALUES) + 1)]
        read(fields)

    return fed


def _record() -> Target:
    from feddd.flower.api import ConfigRecord, RecordDict
    from feddd.flower.records import ORDER, Order, RecordError, read_record, write_record

    content = RecordDict()
    write_record(content, ORDER, Order("train", 3, "a", "b", "[]", "{}", 7, 2, True, False, rules=("a",)))

    def read(fields: dict[str, Any]) -> None:
        assert isinstance(read_record(RecordDict({ORDER: ConfigRecord(fields)}), ORDER, Order), Order)

    fed = _record_read(content.config_records[ORDER], read)
    return Target((b"",), fed, (RecordError,), (), lambda rng: rng.randbytes(rng.choice((2, 2, 2, 4, 8))))


def _report() -> Target:
    """A report as an introduction and as the answer to a task."""
    import torch

    import feddd
    from feddd.flower.api import ConfigRecord, RecordDict
    from feddd.flower.checks import read_answer, read_introduction, read_report
    from feddd.flower.records import REPORT, RecordError, Report, write_payload, write_record
    from feddd.strategies.checks import Limits, Refused
    from feddd.strategies.protocol import Task

    like = {"fc.weight": torch.ones(4, 2)}
    table = feddd.units(like)
    content = RecordDict()
    write_record(content, REPORT, Report("7", "ok", "", 0, 1.0, 1.0, 10, 3.0, 2.0, 1e6, 1e6))
    write_payload(content, feddd.encode(like, table.full_mask(), units=table))

    def read(fields: dict[str, Any]) -> None:
        content[REPORT] = ConfigRecord(fields)
        read_introduction(content, 1, Limits())
        found = read_answer(content, read_report(content), Task(0), table, Limits())
        assert 1 <= found.report.samples <= Limits().samples
        assert 0.0 <= found.report.train_loss <= Limits().loss

    fed = _record_read(dict(content.config_records[REPORT]), read)
    return Target((b"",), fed, (RecordError, Refused), (), lambda rng: rng.randbytes(rng.choice((2, 2, 2, 4, 8))))


# Files of a deployment


def _stored(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save

    return bytes(save(dict(tensors), dict(metadata)))


def _checkpoint(work: Path) -> Target:
    """A file begins with eight bytes that say how long its JSON header is: kept right half of the time."""
    import torch

    import feddd
    from feddd.flower.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from feddd.flower.registry import Member
    from feddd.strategies.oort import Pacer
    from feddd.strategies.protocol import start

    like = {"fc.weight": torch.ones(4, 2), "fc.bias": torch.zeros(4), "steps": torch.tensor(3)}
    members = (Member("a", 0), Member("b", 0))
    import dataclasses

    state = dataclasses.replace(start(like, 2), round=3, masks=(b"\x0f\0\0\0", None), memory=Pacer(30.0, (1.0, 2)))
    path = work / "checkpoint"
    save_checkpoint(path, Checkpoint("token", 1.5, members, ("token.3.0", ""), state))
    seed = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = load_checkpoint(path, like)
        clients = len(found.members)
        assert len(found.versions) == len(found.state.masks) == clients
        assert all(getattr(found.state, name).shape == (clients,) for name in ("losses", "samples", "last_round"))

    words = (b"null", b"{}", b"[]", b"1e999", b"-1", b'"F64"', b'"I64"', b'"BF16"', b"[0]", b"\\u0000", b"[" * 2000)
    return Target((seed,), read, (feddd.InputError,), words, lambda rng: _with_new_header(seed, words, rng))


def _with_new_header(seed: bytes, words: tuple[bytes, ...], rng: random.Random) -> bytes:
    """Change a value in the JSON of a safetensors file, or of the document in its metadata, and keep it a file."""
    size = int.from_bytes(seed[:8], "little")
    header = json.loads(seed[8 : 8 + size])
    if rng.random() < 0.7:
        metadata = header["__metadata__"]
        key = rng.choice(list(metadata))
        if metadata[key].startswith("{"):
            document = json.loads(metadata[key])
            _spoil(document, rng)
            metadata[key] = json.dumps(document)
        else:
            metadata[key] = rng.choice(("", "00", "ff" * 4, "0f000000", "not hex", "é", "1" * 5000))
    else:
        _spoil(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + seed[8 + size :]


def _spoil(document: Any, rng: random.Random) -> None:
    """Change, drop or add one value somewhere inside."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(document[key], dict | list) and document[key] and rng.random() < 0.8:
            document = document[key]
            continue
        if rng.random() < 0.2:
            del document[key]
        else:
            document[key] = rng.choice(
                [None, rng.choice(_VALUES[:-1]), {}, [[]], {"pacer": {}}, [None, None], "F64", 10**30]
            )
        return


def _store(work: Path) -> Target:
    import torch

    import feddd
    from feddd.flower.store import ClientStore
    from feddd.wire.difference import RESIDUAL
    from feddd.wire.down import Values
    from feddd.wire.download_format import HELD, HELD_NUMBER, TOLD_COVERAGE, held_reference
    from feddd.wire.format import pack_mask
    from feddd.wire.select import MASK, OWN, split_mask

    like = {"fc.weight": torch.ones(4, 2), "fc.bias": torch.zeros(4)}
    table = feddd.units(like)
    store = ClientStore(work, "client")
    state = {
        MASK: torch.tensor([True, False, True, False]),
        OWN: torch.arange(6.0),
        RESIDUAL: torch.zeros(12),
        HELD: torch.ones(12),
        HELD_NUMBER: torch.tensor([3]),
        TOLD_COVERAGE: torch.tensor([1.0, 0.5, 0.5, 0.25], dtype=torch.float64),
    }
    store.save("run.1.0", state, table)
    seed = store.path.read_bytes()

    def read(data: bytes) -> None:
        store.path.write_bytes(data)
        assert isinstance(store.version(), str)
        found = store.load("run", table)
        if MASK not in found or HELD not in found:
            raise feddd.InputError("nothing that can be used")
        down = Values(pack_mask(split_mask(found[MASK], table), table))
        stack = {name: tensor[None].clone() for name, tensor in like.items()}
        down.local(stack, [down], [found], table)
        assert all(bool(tensor.isfinite().all()) for tensor in stack.values())
        held = held_reference(found, table)
        assert held is not None
        assert all(tensor.shape == like[name].shape for name, tensor in held.items())

    words = (b'"F32"', b'"F64"', b'"I64"', b"[0]", b"[6]", b"coverage.", b"\0\0\xc0\x7f")
    return Target((seed,), read, (feddd.InputError,), words, lambda rng: _with_new_header(seed, words, rng))


# Files of people

_TOML = (
    *(
        b"[data]\n",
        b"[[strategy]]\n",
        b"[strategy]\n",
        b"[fleet]\n",
        b"[model]\n",
        b"[training]\n",
        b'name = "feddd"\n',
    ),
    *(b'label = "a"\n', b"rounds = 2\n", b"seed = 1\n", b"budget = 0.5\n", b"targets = [0.5]\n", b"clients = 9\n"),
    *(
        b'file = "a\\u0000b"\n',
        b'dataset = "mnist"\n',
        b"= nan\n",
        b"= -inf\n",
        b"= 1979-05-27\n",
        b"= {a = 1}\n",
        b"[" * 900,
    ),
    *(
        b"9" * 5000,
        b"0x" + b"f" * 5000,
        b'"""',
        b"'",
        b"\\u2028",
        b"1e400",
        b"true",
        b"= []\n",
        b'= ""\n',
        b"x.y.z = 1\n",
    ),
    *(b"always_send", b"broadcast_later", b"uplink_bits_per_s", b"gain", b'= "package.module:function"\n', b"strategy"),
)


def _toml(work: Path) -> Target:
    import feddd
    from feddd.experiments.config import parse_experiment
    from feddd.experiments.presets import presets
    from feddd.files import parse_toml

    path = work / "experiment.toml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        experiment = feddd.load_experiment(path)
        # inf and nan have no place in an experiment, so that equality means what it says.
        assert parse_experiment(parse_toml(experiment.to_toml())) == experiment

    seeds = [presets()[name].toml.encode() for name in ("quickstart", "mnist-noniid-b-budgets", "cifar10-imbalanced")]
    seeds += [
        b'[fleet]\nbandwidth_hz = 1e6\npower_w = 0.1\ngain = [1e-9, 1e-8]\nnoise_w = 1e-12\n[model]\nname = "cnn2/4"\n'
    ]
    return Target(tuple(seeds), read, (feddd.InputError,), _TOML)


def _set() -> Target:
    import feddd

    def read(data: bytes) -> None:
        feddd.load_experiment("quickstart", [data.decode("utf-8", "replace")])

    seeds = (b"rounds=3", b"strategy.feddd.budget=0.4", b"fleet.uplink_bits_per_s=[1e4, 2e4]", b"data.partition=iid")
    keys = ("strategy", "strategy.feddd.", "data", "fleet.file", "name", "strategy.feddd.label", "a.b.c", "targets", "")
    values = ("{}", "[]", "5", "nan", '"\\u0000"', "word", "[[1]]", "1\n[x]", "9" * 5000, "[" * 5000, "{a=1}", "")

    def make(rng: random.Random) -> bytes:
        return f"{rng.choice(keys)}={rng.choice(values)}".encode()

    return Target(seeds, read, (feddd.InputError,), _TOML, make)


def _fleet(work: Path) -> Target:
    import feddd
    from feddd.experiments.planning import plan_fleet
    from feddd.world.fleets import REQUIRED

    path = work / "fleet.csv"
    head = ",".join((*REQUIRED, "model_bits", "samples", "label_coverage", "loss"))
    seed = f"{head}\na,1e4,4e4,1.5,1e6,600,5,2.3\nb,5e4,2e5,0.5,1e6,600,2,0.1\n".encode()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        plan_fleet(path, budget=0.6, max_dropout=0.8, penalty=0.1, model_bits=None)

    words = (b"nan", b"inf", b"-1", b"0", b"1e308", b"1e-320", b'"', b"\n", b"\r", b",", b"\0", b"\xef\xbb\xbf", b"1_0")
    return Target((seed,), read, (feddd.InputError,), words)


def _dataset(work: Path, storage: Any) -> Target:
    """The first byte says which of the files the rest is."""
    import hashlib

    import feddd
    from feddd.world import datasets
    from feddd.world.datasets import Spec

    name = "mnist" if storage == "idx" else "cifar10"
    shape = (1, 2, 2) if storage == "idx" else (3, 2, 2)
    test = 5 if storage == "idx" else 2
    spec = Spec(storage, storage, shape, 10, test, dict.fromkeys(datasets.SPECS[name].sha256, ""))
    folder = work / storage
    folder.mkdir(exist_ok=True)
    files = {file.name: file.header + bytes(file.size - len(file.header)) for file in spec.files}
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    datasets.SPECS[name] = Spec(storage, storage, shape, 10, test, digests)
    names = list(files)
    for file, content in files.items():
        (folder / file).write_bytes(content)

    def read(data: bytes) -> None:
        which = names[data[0] % len(names)] if data else names[0]
        (folder / which).write_bytes(data[1:])
        try:
            found = datasets.load(name, work, verify=bool(data[:1] and data[0] & 128))
            assert found.train_images.shape == (10, *shape)
            assert len(found.test_labels) == test
        finally:
            (folder / which).unlink()  # another one: the old may still be mapped
            (folder / which).write_bytes(files[which])

    seeds = tuple(bytes([at + 128 * verify]) + files[file] for at, file in enumerate(names) for verify in (0, 1))
    return Target(seeds, read, (feddd.InputError,), (b"\0\0\x08\x03", b"\0\0\x08\x01", b"\xff\xff\xff\xff"))


def _npz(work: Path) -> Target:
    import numpy as np

    import feddd
    from feddd.world.npz import read_npz

    path, seeds = work / "arrays.npz", []
    for write in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {f"{part}_inputs.x": np.ones((4, 3), np.float32) for part in ("train", "test")}
        arrays |= {f"{part}_targets": np.arange(4) for part in ("train", "test")}
        write(buffer, **arrays, clients=np.array(["a", "b", "a", "b"]), classes=np.array(list("wxyz")))
        seeds.append(buffer.getvalue())

    def read(data: bytes) -> None:
        path.unlink(missing_ok=True)  # another one: the old may still be mapped
        path.write_bytes(data)
        read_npz(path)

    words = (b"'descr'", b"'|O'", b"'<f8'", b"(4, 3)", b"(4294967296,)", b"(-1,)", b"True", b"\x93NUMPY", b"PK\x01\x02")
    return Target(tuple(seeds), read, (feddd.InputError,), words)


def _table(work: Path) -> Target:
    import numpy as np

    import feddd
    from feddd.world.tables import read_table

    path = work / "table.csv"
    seed = b"a,b,who,split,y\n1.5,red,me,train,1\n2,blue,you,test,2\n3,red,me,train,2\n"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for classes in (True, False):
            read_table(path, target="y", client="who", classes=classes, rng=np.random.default_rng(0))

    words = (b"nan", b"inf", b"1e999", b"2020-01-01", b"true", b'"', b"\n", b"\r", b",", b"\0", b"\xff", b"9" * 30)
    return Target((seed,), read, (feddd.InputError,), words)


def _image(work: Path) -> Target:
    import numpy as np
    from PIL import Image

    import feddd
    from feddd.world.image_folder import read_images

    folder, seeds = work / "images", []
    for part in ("train", "test"):
        (folder / part / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 5), np.uint8)).save(folder / part / "a" / "good.png")
    for kind in ("png", "jpeg"):
        buffer = io.BytesIO()
        Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)).save(buffer, kind)
        seeds.append(buffer.getvalue())

    def read(data: bytes) -> None:
        (folder / "train" / "a" / "x.png").write_bytes(data)
        read_images(folder)

    return Target(tuple(seeds), read, (feddd.InputError,), (b"IHDR", b"IDAT", b"\xff\xff\xff\xff"))


def _results(work: Path) -> Target:
    """A run's folder; the first byte says which of its files the rest is. What is read is also shown."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import feddd
    from feddd.experiments.report import facts, sentences
    from feddd.experiments.report_data import page_data
    from feddd.experiments.results import SCHEMAS, load_results, summarise

    folder = work / "run"
    folder.mkdir(exist_ok=True)
    config = feddd.load_experiment("quickstart", ["rounds=2"]).to_toml().encode()
    environment = b'{"python": "3.11", "versions": {"torch": "2"}}'
    files = {"config.toml": config, "environment.json": environment, "summary.json": b'{"strategies": {}}'}
    files["data.json"] = b'{"clients": ["a", "b"], "classes": ["x"]}'

    def table(name: str, spoil: random.Random | None = None) -> bytes:
        rows = [{field.name: _cell(field, at) for field in SCHEMAS[name]} for at in range(4)]
        schema = SCHEMAS[name]
        if spoil:
            field = spoil.choice(list(schema))
            kind = spoil.choice([field.type, pa.int32(), pa.float64(), pa.string(), pa.list_(pa.int64()), pa.null()])
            schema = schema.set(schema.get_field_index(field.name), pa.field(field.name, kind))
            for row in rows:
                row[field.name] = _fitting(kind, spoil)
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer)
        return buffer.getvalue()

    files |= {f"{name}.parquet": table(name) for name in SCHEMAS}
    names = list(files)
    for name, content in files.items():
        (folder / name).write_bytes(content)

    def read(data: bytes) -> None:
        which = names[data[0] % len(names)] if data else names[0]
        (folder / which).write_bytes(data[1:])
        try:
            run = load_results(folder)
            summarise(run)
            facts([run])
            sentences([run])
            json.dumps(page_data([run]), allow_nan=False)
        finally:
            (folder / which).write_bytes(files[which])

    def make(rng: random.Random) -> bytes:
        at = rng.randrange(len(names))
        if names[at].endswith(".parquet"):
            return bytes([at]) + table(names[at].removesuffix(".parquet"), rng)
        return bytes([at]) + b"".join(rng.choice(_TOML) for _ in range(5)) if at == 0 else bytes([at]) + b"[" * 10**5

    seeds = tuple(bytes([at]) + files[name] for at, name in enumerate(names))
    return Target(seeds, read, (feddd.InputError,), _TOML, make)


def _cell(field: Any, at: int) -> Any:
    import pyarrow as pa

    if field.type == pa.string():
        return {"strategy": ("feddd", "fedavg")[at % 2], "status": "ok"}.get(field.name, "train")
    return at // 2 + 1 if field.type == pa.int64() else 0.3 * at


def _fitting(kind: Any, rng: random.Random) -> Any:
    import pyarrow as pa

    if kind == pa.string():
        return rng.choice(["", "<script>", "x" * 5000, "ok", None])
    if kind == pa.float64():
        return rng.choice([0.0, -1.0, 1e308, float("nan"), float("inf"), None])
    if pa.types.is_integer(kind):
        return (
            rng.choice([0, -1, 2**31 - 1, None]) if kind != pa.int64() else rng.choice([0, -(2**63), 2**63 - 1, None])
        )
    return None if kind == pa.null() else rng.choice([[], [1, 2], None])


def _archive(work: Path) -> Target:
    import zlib

    from feddd.world import fetching

    path, wanted = work / "archive", {"package/a": work / "a", "./b": work / "b"}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name in wanted:
            info = tarfile.TarInfo(name)
            info.size = 700
            tar.addfile(info, io.BytesIO(bytes(700)))
    seeds = (plain.getvalue(), gzip.compress(plain.getvalue()))
    before = {file.name for file in work.iterdir()} | {"archive", "a", "b"}

    def read(data: bytes) -> None:
        path.write_bytes(data)
        fetching.extract(path, wanted)
        assert {file.name for file in work.iterdir()} <= before

    def make(rng: random.Random) -> bytes:
        """One header field changed, its checksum put right."""
        data, at = bytearray(plain.getvalue()), rng.choice((0, 1536))
        field, size = rng.choice(((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
        word = rng.choice(
            (b"../../x", b"/etc/x", b"0", b"1", b"2", b"3", b"5", b"x", b"L", b"S", b"77777777777", b"\x80" * 12)
        )
        data[at + field : at + field + size] = word[:size].ljust(size, b"\0")
        total = sum(data[at : at + 148]) + 8 * 32 + sum(data[at + 156 : at + 512])
        data[at + 148 : at + 156] = b"%06o\0 " % total
        return bytes(data) if rng.random() < 0.5 else gzip.compress(bytes(data), 1)

    # A source that raises any error is passed over (`fetching.fetch`); these are what a damaged archive gives.
    refusals = (fetching.Unavailable, tarfile.TarError, OSError, EOFError, zlib.error, ValueError)
    return Target(seeds, read, refusals, (b"ustar  \0", b"ustar\x0000", b"K", b"x", b"\x1f\x8b\x08"), make)
