"""Learnt factors among the other techniques; tests/parity/test_peft.py holds them against PEFT."""

from __future__ import annotations

import pytest
import torch

from optrush.decide import decide
from optrush.errors import NeedsError
from optrush.exporting import write_adapter
from optrush.technique import instantiate
from optrush.techniques import ALL
from optrush.techniques.ia3 import Ia3

from trials import assembled, first_gradients, golden_run, learnt, micro, steps, weights


def learning(box, **with_):
    """A job whose factors have left 1."""
    return learnt(assembled(golden_run(box, packed=True, **{"ia3": {}, **with_})))


def test_only_factors_move_and_only_while_they_are_on(box):
    job, base = learning(box), assembled(golden_run(box, packed=True))
    frozen = {n: p.detach().clone() for n, p in job.model.named_parameters() if not p.requires_grad}
    before = weights(job)
    assert before.keys() == {f"blocks.{i}.{n}.adapter.{p}" for i in (0, 1) for n in ("qkv", "down") for p in ("scale",)}
    list(steps(job, 5))
    assert all(torch.equal(p, frozen[n]) for n, p in job.model.named_parameters() if n in frozen) and frozen
    assert all(not torch.equal(w, before[n]) for n, w in weights(job).items())
    batch = micro(job)
    with job.adapters_disabled(), torch.no_grad():
        assert torch.equal(job.loss(batch), base.loss(batch))
    assert not torch.equal(job.loss(batch), base.loss(batch))


def test_factors_near_one_are_not_rounded_away(box):
    """In bf16 the next value after 1 is 1.0078."""
    job = assembled(golden_run(box, packed=True, ia3={}, bf16={}))
    batch, found = micro(job), []
    for factor in (1.0, 1.003):
        with torch.no_grad():
            for t in job.trained:
                t.local.fill_(factor)
            found.append(job.loss(batch).item())
    assert found[0] != found[1]


def test_auto_where_nobody_knows_the_names(box):
    made = Ia3()
    assert made._targets(["query_key_value", "dense", "dense_4h_to_h"]) == ("query_key_value", "dense_4h_to_h")
    job = assembled(golden_run(box, sets=["model.implementation=transformers"]))
    for _, linear in job.model.linears():
        assert linear.adapter is None
    for name, entry in list(job.weight_map.entries.items()):  # a family whose linears nobody has met
        pieces = tuple((hf.replace("_proj.", "_map."), n) for hf, n in entry.pieces)
        job.weight_map.entries[name] = type(entry)(entry.shape, pieces, entry.groups)
    with pytest.raises(NeedsError, match="linears with other names: q_map"):
        made.peft(job)


def test_an_adapter_of_another_kind_is_refused(box, tmp_path):
    folder = write_adapter(learning(box), tmp_path / "adapter")
    assert first_gradients(learning(box, ia3={"init": str(folder)}))[0]
    with pytest.raises(NeedsError, match=r"peft_type .IA3. in adapter_config\.json, and .LORA. here"):
        decide(golden_run(box, lora={"init": str(folder)}))
    assert instantiate(ALL, {"ia3": {"targets": ["k_proj"]}}) == [Ia3(targets=("k_proj",))]
