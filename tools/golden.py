"""Pin the numbers of tests/golden_cases.py again: python tools/golden.py

Prints what changed. What other machines have pinned stays, except for cases that changed here: they are compared there
by their fingerprints until somebody runs this on such a machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from golden_cases import CASES, FILE, changed_columns, digests, fingerprint, machine, read_golden


def main() -> None:
    """Run all cases and write what they gave."""
    old: dict[str, Any] = read_golden() if FILE.is_file() else {"cases": {}, "machines": {}}
    here, cases = machine(), {}
    machines = {key: {c: d for c, d in pinned.items() if c in CASES} for key, pinned in old["machines"].items()}
    mine = machines.setdefault(here, {})
    for name, run in CASES.items():
        columns = run()
        found, cases[name] = digests(columns), fingerprint(columns)
        if name in mine:
            changed = changed_columns(found, mine[name])
        else:
            changed = changed_columns(cases[name], old["cases"].get(name, {}))
        if changed:
            print(f"{name}: {', '.join(changed)}")
            for pinned in machines.values():
                pinned.pop(name, None)
        elif name in old["cases"]:
            cases[name] = old["cases"][name]
        mine[name] = found
    document = {"cases": cases, "machines": machines}
    FILE.write_text(_compact(document), encoding="utf-8")
    print(f"{len(cases)} cases are pinned for {here}")


def _compact(document: dict[str, Any]) -> str:
    """Write one case a line, so that a change shows as what it is."""

    def lines(cases: dict[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(facts)}" for name, facts in cases.items())

    machines = ",\n".join(
        f"  {json.dumps(name)}: {{\n{lines(cases, '   ')}\n  }}" for name, cases in document["machines"].items()
    )
    return f'{{\n "cases": {{\n{lines(document["cases"], "  ")}\n }},\n "machines": {{\n{machines}\n }}\n}}\n'


if __name__ == "__main__":
    main()
