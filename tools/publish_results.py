"""Put what `feddd reproduce` wrote into the documentation, and collect every claim on the page of numbers.

python tools/publish_results.py runs/reproduce/full FIGURE …     copies those figures; without any only the page

The rounds of every cell come too: `feddd reproduce FIGURE --draw-only --out docs/results` draws from them again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from feddd.paper.catalogue import FIGURES
from feddd.paper.claims import CLAIMS
from feddd.paper.tables import as_markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCALES = ("full", "small")  # a claim measured at both is taken from the first
HEAD = """# Every number

What the paper claims and what was measured here, claim by claim. The pages of the figures have the tables and pictures
behind each number, and say what to make of it. In square brackets: Student's 95 % interval over the seeds. A range over
settings is given end by end, and so is its difference from the paper's.
[Scales, statistics, learning rates](reproduce.md).

To repeat a number: its command, with the data sets fetched (`feddd data fetch mnist`, `fashion-mnist`, `cifar10`).
"""


def publish(folder: Path, names: list[str]) -> None:
    """Copy the figures' files into the documentation."""
    target = DOCS / "results" / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        for suffix in ("md", "json", "png", "svg"):
            shutil.copy(folder / f"{name}.{suffix}", target / f"{name}.{suffix}")


def publish_cells(cells: Path) -> None:
    """Copy what figures are drawn from: rounds, and accuracy per class where a figure shows it."""
    for config in cells.glob("*/*/config.toml"):
        source, target = config.parent, DOCS / "results" / "cells" / config.parent.relative_to(cells)
        if source.suffix == ".partial":
            continue
        names = ["config.toml", "environment.json", "rounds.parquet"]
        names += ["classes.parquet"] if "-imbalanced-" in source.parent.name else []
        names += ["clients.parquet"] if source.parent.name.startswith("cifar10-iid-heterogeneous-b") else []
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(source / name, target / name)


def numbers_page(docs: Path = DOCS) -> str:
    """The page of numbers, from the results that are published."""
    parts = [HEAD]
    for figure in FIGURES:
        claims = [claim for claim in CLAIMS if claim.figure == figure.name]
        if not claims:
            continue
        found = [document for scale in SCALES if (document := _read(docs / "results" / scale / f"{figure.name}.json"))]
        number = f" (the paper's figure {figure.number})" if figure.number else ""
        parts.append(f"\n## {figure.title}{number}\n\n[{figure.name}](figures/{figure.name}.md)")
        parts += [f"    {document['command']}" for document in found]
        head = ["the paper says", "paper", "ours", "ours − paper", "seeds", "scale"]
        parts.append(as_markdown([head, *(_row(claim.says, claim.paper, found) for claim in claims)]))
    return "\n".join(f"{part}\n" for part in parts)


def _row(says: str, paper: str, documents: list[dict[str, Any]]) -> list[str]:
    for document in documents:
        for entry in document["claims"]:
            if entry["claim"] == says and entry["ours"]["seeds"]:
                ours = entry["ours"]
                scale = document["command"].partition("--scale ")[2].split()[0]
                return [says, paper, ours["words"], entry["difference"], str(ours["seeds"]), scale]
    return [says, paper, "not measured yet", "", "", ""]


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def main() -> None:
    """Publish what was asked for, then write the page."""
    if len(sys.argv) > 1:
        publish(Path(sys.argv[1]), sys.argv[2:])
        publish_cells(Path(sys.argv[1]).parent / "cells")
        shutil.copytree(Path(sys.argv[1]).parent / "label-share", DOCS / "results" / "label-share", dirs_exist_ok=True)
    (DOCS / "numbers.md").write_text(numbers_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
