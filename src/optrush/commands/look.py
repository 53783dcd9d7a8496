"""techniques: what there is, before anything runs."""

from __future__ import annotations

import json
from typing import Any

from optrush.commands.options import Json


def techniques(as_json: Json = False) -> None:
    """List the techniques.

    What each does, what it promises about the numbers, which part of a run it owns alone (two owners of one part
    cannot be combined), and its options with their defaults. --json also names its source and its test.
    """
    import dataclasses

    from optrush.techniques import ALL

    rows: list[dict[str, Any]] = [
        {
            "name": t.name,
            "summary": t.summary,
            "source": t.source,
            "numerics": t.numerics.name,
            "claims": sorted(p.name for p in t.claims),
            "options": {f.name: {"type": str(f.type), "default": f.default} for f in dataclasses.fields(t)},  # type: ignore[arg-type]
            "proof": t.proof,
            "verified_on": list(t.verified_on),
        }
        for t in ALL
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        options = " ".join(f"{k}={v['default']}" for k, v in row["options"].items())
        print(f"{row['name']:<19} {row['summary']}")
        owns = ", ".join(row["claims"]).lower() or "nothing alone"
        promise = row["numerics"].lower().replace("_", " ")
        print(f"{'':<19} {promise}; owns {owns}" + (f"; options: {options}" if options else ""))
