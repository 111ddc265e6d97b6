"""Pin what every preset says again, in tests/presets.json: python tools/pin_presets.py

Prints which presets are new, changed or gone: nothing else should be.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from preset_pins import FILE, pins


def main() -> None:
    """Write the digests of all presets and the defaults that they rest on."""
    old = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"defaults": {}, "presets": {}}
    new = pins()
    for kind, found in new.items():
        before = old[kind]
        for name in sorted(found.keys() | before.keys()):
            if found.get(name) != before.get(name):
                what = "gone" if name not in found else "changed" if name in before else "new"
                print(f"{kind}: {name} is {what}")
    blocks = (
        f' "{kind}": {{\n'
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items())
        + "\n }"
        for kind, rows in new.items()
    )
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
    print(f"{len(new['presets'])} presets are pinned")


if __name__ == "__main__":
    main()
