"""Feed damaged and made-up inputs to a reader; whatever it raises besides its own errors is a finding.

    python tools/fuzz.py payload --inputs 1000000
    python tools/fuzz.py all --inputs 20000 --seed 7
    python tools/fuzz.py payload --inputs 1000000 --engine atheris     # guided by coverage; `pip install atheris`

An input may take SECONDS and the process MEMORY_MIB more than at the start; more is a finding as well. Findings are
kept as files in the folder `fuzz-findings`. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuzz_targets import Target

SECONDS = 10.0
MEMORY_MIB = 1024
MOST_FINDINGS = 10
FINDINGS = Path("fuzz-findings")
NUMBERS = (0, 1, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


class TookTooLong(BaseException):
    """An input's time is over; no reader can mistake it for an error of its own."""


class Tally:
    """What became of the inputs."""

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self.tried = self.accepted = 0
        self.refused: Counter[str] = Counter()
        self.findings: dict[str, Path] = {}

    def feed(self, data: bytes) -> None:
        """One input."""
        self.tried += 1
        try:
            self.target.read(data)
            self.accepted += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except MemoryError as error:  # also where a library's is a kind of its own errors
            self._found(data, error)
        except self.target.refusals as error:
            self.refused[_reason(error)] += 1
        except BaseException as error:
            self._found(data, error)

    def _found(self, data: bytes, error: BaseException) -> None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "feddd" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        kind = f"{type(error).__name__} at {place}"
        if kind not in self.findings:
            FINDINGS.mkdir(exist_ok=True)
            path = FINDINGS / f"{self.name}-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            self.findings[kind] = path
            print(f"FINDING {kind}: {str(error)[:200]} ({path})")

    def show(self, seconds: float) -> None:
        """The counts, and the most frequent reasons."""
        refused = sum(self.refused.values())
        print(
            f"{self.name}: {self.tried} inputs in {seconds:.0f} s, {self.accepted} accepted, {refused} refused, "
            f"{len(self.findings)} findings"
        )
        for reason, count in self.refused.most_common(12):
            print(f"  {count:>9}  {reason}")
        sys.stdout.flush()


def _reason(error: BaseException) -> str:
    """What kind of refusal it was: numbers and quoted words taken out."""
    words = re.sub(r"/\S*/\S+", "FILE", " ".join(str(error).split())[:300])
    words = re.sub(r"'[^']*'|\"[^\"]*\"", "…", words)
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'N', words)[:70]}"


def mutated(data: bytes, others: tuple[bytes, ...], words: tuple[bytes, ...], rng: random.Random) -> bytes:
    """The input with one to four changes."""
    for _ in range(rng.randint(1, 4)):
        data = _changed(data, others, words, rng)
    return data


def _changed(data: bytes, others: tuple[bytes, ...], words: tuple[bytes, ...], rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    size = min(rng.choice((1, 1, 2, 4, 8, 32, 200)), len(data) - at)
    piece, other, word = data[at : at + size], rng.choice(others), rng.choice(words or (rng.randbytes(4),))
    width = rng.choice((1, 2, 4, 8))
    number = (rng.choice(NUMBERS) % 256**width).to_bytes(width, "little" if rng.random() < 0.5 else "big")
    # What comes in, and how much goes.
    new, gone = rng.choice(
        (
            (bytes(byte ^ 1 << rng.randrange(8) for byte in piece[:1]), len(piece[:1])),
            (rng.randbytes(size), size),
            (b"", size),
            (piece * rng.choice((2, 2, 3, 100)), size),
            (b"", len(data)),
            (number, width),
            (other[rng.randrange(len(other) + 1) :], len(data)),
            (word, len(word)),
            (word, 0),
        )
    )
    return data[:at] + new + data[at + gone :]


def inputs(target: Target, count: int, rng: random.Random) -> Iterator[bytes]:
    """The seeds, then as many more: made up, or changed, or both."""
    yield from target.seeds[:count]
    for _ in range(count - len(target.seeds)):
        if target.make is None or rng.random() < 0.5:
            yield mutated(rng.choice(target.seeds), target.seeds, target.words, rng)
        else:
            made = target.make(rng)
            yield made if rng.random() < 0.5 else mutated(made, target.seeds, target.words, rng)


def limit(memory_mib: int) -> None:
    """No more memory than now and so much more; no input for longer than SECONDS."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def over(*_: object) -> None:
        raise TookTooLong(f"an input took more than {SECONDS:g} s")

    signal.signal(signal.SIGALRM, over)


def fuzz(name: str, target: Target, count: int, seed: int) -> Tally:
    """Feed so many inputs; the same seed gives the same ones."""
    tally = Tally(name, target)
    begun = time.monotonic()
    for data in inputs(target, count, random.Random(f"{name} {seed}")):
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        tally.feed(data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if len(tally.findings) >= MOST_FINDINGS:
            break
    tally.show(time.monotonic() - begun)
    return tally


def fuzz_with_atheris(name: str, count: int, seed: int, work: Path) -> None:
    """Inputs that reach new lines of ours are kept and changed further; libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["feddd"]):
        from fuzz_targets import targets

        target = targets(work)[name]()
    tally = Tally(name, target)
    corpus, words = work / "corpus", work / "words"
    corpus.mkdir()
    for number, data in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(data)
    lines = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words if 0 < len(word) <= 64]
    words.write_text("".join(f'"{line}"\n' for line in lines))
    begun = time.monotonic()

    def one(data: bytes) -> None:
        tally.feed(data)
        if tally.tried == count:
            tally.show(time.monotonic() - begun)
            shutil.rmtree(work)  # nobody else will

    limits = [
        f"-runs={count}",
        f"-seed={seed + 1}",
        f"-timeout={SECONDS:.0f}",
        "-max_len=65536",
        "-print_final_stats=1",
    ]
    atheris.Setup(["fuzz", *limits, f"-dict={words}", str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="a reader's name, or `all`; `list` prints the names")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("mutate", "atheris"), default="mutate")
    parser.add_argument("--replay", type=Path, help="read this file only, and show what is raised")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as work:
        if given.engine == "atheris":
            fuzz_with_atheris(given.target, given.inputs, given.seed, Path(work))
        return _mutate(given, Path(work))


def _mutate(given: Any, work: Path) -> int:
    import torch
    from fuzz_targets import targets

    known = targets(work)
    if given.target == "list":
        print("\n".join(known))
        return 0
    if given.target != "all" and given.target not in known:
        sys.exit(f"there is no target {given.target!r}; known are {', '.join(known)}")
    wanted = list(known) if given.target == "all" else [given.target]
    built = {name: known[name]() for name in wanted}
    if given.replay:
        built[given.target].read(given.replay.read_bytes())
        return 0
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for target in built.values():
        for data in target.seeds:
            target.read(data)  # they are good ones; and everything that is loaded on first use is loaded now
    limit(MEMORY_MIB)
    return int(any(fuzz(name, target, given.inputs, given.seed).findings for name, target in built.items()))


if __name__ == "__main__":
    sys.exit(main())
