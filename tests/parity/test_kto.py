"""`objective: kto` against the paper's formula in float64 and against TRL's trainer: losses, gradients, every cutting.

The oracles see documents one at a time or padded, tokenised and masked by transformers; ours see them packed or not, on
one rank and two.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_dpo import filled, filled_box, order
from transformers import AutoTokenizer

from meshes import further
from optrush.config import parse_config
from optrush.decide import decide
from optrush.errors import ConfigError, DataError
from optrush.objectives import JUDGEMENTS

from golden import make_golden
from trials import apart, assembled, metrics, published, steps

ROWS, PER_STEP, SEQ, BETA, BAD = 32, 8, 64, 0.3, 1.5
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(box):
    """The folder of pairs, with judged.jsonl: of each pair one answer, and whether it was the chosen one."""
    filled_box(box)
    rows = [json.loads(line) for line in (box / "pairs.jsonl").read_text().splitlines()]
    kinds = [("chosen", True) if i % 3 else ("rejected", False) for i in range(ROWS)]
    judged = [{"prompt": r["prompt"], "completion": r[k], "label": label} for r, (k, label) in zip(rows, kinds)]
    (box / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))
    return box


def kto_run(box, *, rows=8, packed=False, sets=(), model="moved", **with_):
    """rows: of one micro-batch of one rank; packed: 4 wider rows a step instead of 8."""
    with_ = {name.replace("_", "-"): options for name, options in with_.items()}
    if packed:
        with_["packing"] = {"window": PER_STEP}
    seq = SEQ * (1 + packed)
    document = {
        "model": str(box / model), "objective": "kto", "kto": {"beta": BETA, "undesirable_weight": BAD},
        "data": {"path": str(box / "judged.jsonl"), "cache": str(box / "cache")},
        "batch": {"seq": seq, "tokens": SEQ * PER_STEP, "micro_tokens": seq * rows},
        "optim": {"lr": 3e-3, "warmup": 0, "schedule": "constant"}, "train": {"steps": 4, "log_every": 1},
        "seed": make_golden.SEED, "output": str(box / "kto"), "with": with_,
    }  # fmt: skip
    return parse_config(json.dumps(document), "kto.yaml", sets)


def documents(box: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]]:
    """(ids, targets, mismatched ids, their targets, label) of each row, as transformers tokenises and masks."""
    tokenizer, made = AutoTokenizer.from_pretrained(box / "untied"), []
    rows = [json.loads(line) for line in (box / "judged.jsonl").read_text().splitlines()]
    for row in rows:
        turns = row["prompt"] + row["completion"]
        both = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
        made.append((torch.tensor(both["input_ids"]), torch.tensor(both["assistant_masks"], dtype=torch.bool)))
    found = []
    for i, (ids, learnt) in enumerate(made):
        other, others = made[(i + ROWS // 2) % ROWS]
        n, m = int(learnt.int().argmax()), int(others.int().argmax())
        mixed = torch.cat((ids[:n], other[m:])), torch.cat((learnt[:n], others[m:]))
        found.append((ids, learnt, *mixed, rows[i]["label"]))
    return found


def wanted(box: Path, groups: Sequence[Sequence[int]]) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """Loss, gradients and metrics of the first step in float64, each group a micro-batch with its own divergence."""
    policy, before = (make_golden.open_model(box / name).double() for name in ("moved", "untied"))
    made, loss, means = documents(box), 0.0, [0.0] * 3
    many = sum(map(len, groups))

    def ratio(ids: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        found = []
        for model in (policy, before):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(1, ids[1:, None])[learnt[1:], 0].sum())
        return found[0] - found[1].detach()

    for group in groups:
        z = torch.stack([ratio(*made[i][2:4]) for i in group]).mean().clamp(min=0).detach()
        for i in group:
            r, good = ratio(*made[i][:2]), made[i][4]
            one = 1 - torch.sigmoid(BETA * (r - z)) if good else BAD * (1 - torch.sigmoid(BETA * (z - r)))
            (one / many).backward()
            gain = (BETA * (r - z) * (1 if good else -1)).item()
            values = (z.item(), gain > 0, gain)
            loss += one.item() / many
            means = [old + value / many for old, value in zip(means, values, strict=True)]
    return loss, {name: p.grad.float() for name, p in policy.named_parameters()}, means


def ours(box: Path, how: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], list[float], list[list[int]]]:
    job = filled(kto_run(box, **how))
    job.stream.reference = filled(kto_run(box, model="untied", **how)).stream.reference
    other = filled(kto_run(box, **how))
    groups = [list(batch.samples) for batch in next(other.batches)]
    loss, grads = published(job)
    terms = job.all_reduce_int(sum(map(len, groups)))
    return loss, grads, [job.all_reduce(job.metrics[name]).item() / terms for name in JUDGEMENTS], groups


def agrees(box: Path, found: Any, groups: Sequence[Sequence[int]]) -> None:
    loss, grads, means = wanted(box, groups)
    assert found[0] == pytest.approx(loss, rel=CLOSE) and means[0] > 0.01
    assert grads.keys() == found[1].keys()
    for name, g in grads.items():
        assert apart(found[1][name], g) < CLOSE, name
    assert found[2] == pytest.approx(means, abs=2e-5)


@pytest.mark.parametrize("how", further([{"rows": 2}, {
    "packed": True, "rows": 2, "fused_loss": {"chunk": 5}, "attention": {},
}, {"rows": 8}, {"packed": True, "rows": 4}], 2), ids=["micro", "chunked", "padded", "packed"])  # fmt: skip
def test_losses_metrics_and_gradients_are_the_formula(folder, how):
    found = ours(folder, how)
    assert how.get("packed") or sorted(i for group in found[3] for i in group) == sorted(order()[0])
    agrees(folder, found, found[3])


def test_two_ranks(folder, pair):
    """Each rank's micro-batches have a divergence of their own."""
    both = pair(ours, folder, {"packed": True, "rows": 1, "ddp": {}})
    groups = [group for found in both for group in found[3]]
    for found in both:
        agrees(folder, found, groups)


def test_the_formula_is_trls(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from trl import KTOConfig, KTOTrainer

        row = {"prompt": "w1 ", "completion": "w2", "label": True}
        settings = KTOConfig(
            output_dir=str(folder / "trl"), beta=BETA, undesirable_weight=BAD, report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, disable_tqdm=True, per_device_train_batch_size=8, max_length=None,
        )  # fmt: skip
        trainer = KTOTrainer(
            model=make_golden.open_model(folder / "moved"), ref_model=make_golden.open_model(folder / "untied"),
            args=settings, processing_class=AutoTokenizer.from_pretrained(folder / "untied"),
            train_dataset=Dataset.from_list([row] * 8),
        )  # fmt: skip
        chosen = order()[0]
        made = [documents(folder)[i] for i in chosen]
        inputs: dict[str, Any] = {"label": [m[4] for m in made]}
        inputs["label"] = torch.tensor(inputs["label"])
        for prefix, at in (("", 0), ("KL_", 2)):
            width = max(len(m[at]) for m in made)
            for name, values in (
                ("input_ids", [m[at] for m in made]), ("completion_mask", [m[at + 1].long() for m in made]),
                ("attention_mask", [torch.ones(len(m[at])).long() for m in made]),
            ):  # fmt: skip
                inputs[prefix + name] = torch.stack([F.pad(v, (0, width - len(v))) for v in values])
        loss = trainer.compute_loss(trainer.model.train(), inputs)
        loss.backward()
    want, grads, _ = wanted(folder, [chosen])
    assert loss.item() == pytest.approx(want, rel=CLOSE)
    for name, p in trainer.model.named_parameters():
        assert apart(p.grad, grads[name]) < CLOSE, name


def test_an_adapter_is_its_own_reference(folder):
    lines = [
        metrics(kto_run(folder, packed=True, rows=2, sets=[f"kto.reference={how}", "optim.lr=3e-2"], lora={"rank": 4}))
        for how in ("adapter", "precomputed")
    ]
    for one, other in zip(*lines, strict=True):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=2e-5, abs=5e-5), (one["step"], key)
    assert lines[0][-1]["reward_margin"] > 0.05, "it moves"


@pytest.mark.parametrize("kind", ["pairs", "messages", "kto_tag", "evaluated"])
def test_rows(folder, tmp_path, kind):
    """Pairs are two judged answers; chats have a label too; a part is held out."""
    rows = [json.loads(line) for line in (folder / "judged.jsonl").read_text().splitlines()]
    if kind == "messages":
        rows = [{"messages": r["prompt"] + r["completion"], "label": int(r["label"])} for r in rows]
    if kind == "kto_tag":
        rows = [{"prompt": r["prompt"], "completion": r["completion"], "kto_tag": r["label"]} for r in rows]
    if kind == "pairs":
        rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [f"data.path={tmp_path}/rows.jsonl", *(["data.eval=0.25"] if kind == "evaluated" else [])]
    job = filled(kto_run(folder, sets=sets))
    source = job.sources.train
    if kind == "pairs":
        assert len(source) == 2 * ROWS
        labels = [source.documents(i)[0].desirable for i in range(len(source))]
        assert labels == [True, False] * ROWS
    else:
        plain = filled(kto_run(folder)).sources.train
        assert len(source) == (24 if kind == "evaluated" else ROWS)
        for i in range(len(source) if kind != "evaluated" else 0):
            for one, other in zip(source.documents(i), plain.documents(i), strict=True):
                assert one.ids.tolist() == other.ids.tolist() and one.desirable == other.desirable
    assert next(steps(job, 1))[0] > 0


@pytest.mark.parametrize(("row", "found"), [
    ({"prompt": "a", "completion": "b"}, "no 'label'"),
    ({"prompt": "a", "completion": "b", "label": "maybe"}, "neither true nor false"),
    ({"prompt": "a", "completion": "b", "label": True, "kto_tag": False}, "contradict"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "label": True}, "and a label; keep one"),
    ({"text": "a", "label": True}, "a text"), ({"prompt": "w1 " * 30, "completion": "w2", "label": True}, "tokens"),
])  # fmt: skip
def test_rows_refused(folder, tmp_path, row, found):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=found):
        assembled(kto_run(folder, sets=[f"data.path={tmp_path}/rows.jsonl", "batch.seq=32", "batch.micro_tokens=32"]))


def test_bad_answers_are_refused_elsewhere_and_streams_here(folder):
    with pytest.raises(DataError, match="a judged answer"):
        assembled(kto_run(folder, sets=["objective=sft", "kto=null"]))
    with pytest.raises(ConfigError, match="KTO pairs each prompt with another"):
        decide(kto_run(folder, sets=["data.stream=true"]))
