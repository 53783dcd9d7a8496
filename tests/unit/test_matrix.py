"""The page of what goes together is what its script writes, and its proofs are those of the tables of cases."""

import re
import runpy
from pathlib import Path

from optrush.techniques import OWN
from techniques import test_context, test_experts, test_mesh, test_tensor

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/matrix.py"))


def test_the_page_is_what_the_script_writes():
    found = SCRIPT["page"]()
    assert SCRIPT["PAGE"].read_text("utf-8") == found, "run benchmarks/matrix.py"
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|(.*)$", found, re.MULTILINE)
    assert [name for name, _ in rows] == [c.name for c in OWN]
    assert all(re.match(r" *(proven|yes|\d+)", cell) for _, cells in rows for cell in cells.split("|")[:-1])


def test_what_is_proven_is_in_a_table():
    """Every technique of a case is proven on the case's mesh, and a mesh without a case proves nothing."""
    proven = SCRIPT["proven"]()
    tables = ((test_tensor.TWO, "tensor"), (test_context.PAIRS, "context"), (test_experts.TWO, "experts"))
    for table, mesh in tables:
        assert {(name, mesh) for case in table for name in case.with_} <= proven
    grouped = {name for case in test_mesh.CASES if case.with_.get("fsdp", {}).get("replicate") for name in case.with_}
    assert {(name, "hsdp") for name in grouped} <= proven
    assert not {("muon", mesh) for mesh in SCRIPT["MESHES"]} & proven


def test_a_refusal_is_the_products():
    together = SCRIPT["together"]
    assert together(["nf4"], {}) == ("", ("lora",))
    said, needed = together(["nf4"], {"tensor": {}})
    assert "tensor" in said and "quantized weights" in said and needed == ()
    assert "both own" in together(["amp", "bf16"], {})[0]
