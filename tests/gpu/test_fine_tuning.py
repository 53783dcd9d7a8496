"""What a fine-tuning does on the device: preferences as TRL has them, a base that stays as it was, a run to its end.

tests/gpu/test_adapters.py holds the adapters themselves against PEFT.
"""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from optrush.cli import app
from optrush.data.sample import conversations
from optrush.trainer import run as runs
from optrush.trainer.trainer import Trainer

from trials import apart, assembled, first_gradients, golden_run, steps

sys.path.append(str(Path(__file__).parents[1] / "parity"))  # which pytest has not added, where this folder runs alone

from test_objectives import CLOSE, agrees_with_trl, filled, filled_box, run_of, trls

DEVICE = torch.device("cuda")
FUSED = {"attention": {"impl": "sdpa"}, "fused_kernels": {"norm": True, "rope": True}}


# Preferences, in float32.
@pytest.fixture(scope="module")
def folder(box):
    return filled_box(box)


@pytest.fixture(scope="module")
def trainer(folder):
    pytest.importorskip("trl")
    made = trls(folder, DEVICE)
    assert made.model.device.type == made.ref_model.device.type == DEVICE.type
    return made


@pytest.mark.parametrize("with_", [{}, {**FUSED, "fused_loss": {"chunk": 64}}], ids=["plain", "fused"])
@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
@pytest.mark.parametrize("packed", [False, True])
def test_losses_rewards_and_gradients_are_trls(folder, trainer, loss, smoothing, packed, with_):
    assert torch.get_float32_matmul_precision() == "highest", "no TF32"
    agrees_with_trl(folder, trainer, loss, smoothing, packed, **with_)


@pytest.mark.parametrize("with_", [{}, {**FUSED, "fused_loss": {"chunk": 64}}], ids=["plain", "fused"])
def test_an_adapter_is_its_own_reference(folder, tmp_path, with_):
    """Turned off in every step, or asked before it had learnt anything."""
    found = []
    for how in ("adapter", "precomputed"):
        sets = [f"dpo.reference={how}", f"data.cache={tmp_path}"]
        job = filled(run_of(folder, model="untied", packed=True, rows=2, sets=sets, lora={"rank": 4}, **with_))
        with torch.no_grad():
            for t in job.trained:
                t.local.add_(0.05)
        found.append((*first_gradients(job), {name: f.item() for name, f in job.metrics.items()}))
    (loss, grads, figures), (want, wanted, rewards) = found
    assert loss == pytest.approx(want, rel=CLOSE) and figures == pytest.approx(rewards, rel=1e-4, abs=1e-3)
    assert abs(rewards["reward_margin"]) > 0.1, "the adapter does something"
    for name, g in wanted.items():
        assert apart(grads[name], g) < CLOSE, name


# What is frozen.
def raw(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of the bytes of all parameters and buffers."""
    held = [*trainer.model.named_parameters(), *trainer.model.named_buffers()]
    return {name: t.detach().contiguous().flatten().view(torch.uint8).clone() for name, t in held}


@pytest.mark.parametrize("with_", [
    {}, {"bf16": {}, **FUSED, "fused_adamw": {}}, {"nf4": {}},
    {"nf4": {}, "bf16": {}, **FUSED, "attention": {"impl": "varlen"}, "fused_adamw": {}},
    {"nf4": {"double": False}, "amp": {}}, {"int8": {}, "bf16": {}},
], ids=lambda with_: "+".join(with_) or "float32")  # fmt: skip
def test_what_is_frozen_stays_as_it_was(box, with_):
    """After five steps no bit of the base is another, and all that is trained has moved."""
    job = assembled(golden_run(box, packed=True, lora={"rank": 4}, **with_))
    assert job.world.device.type == DEVICE.type
    before, trained = raw(job), {t.name for t in job.trained}
    assert trained and all(".adapter." in name for name in trained)
    lines = list(steps(job, 5))
    assert lines[-1][0] < lines[0][0] and not any(skipped for _, _, skipped in lines)
    after = raw(job)
    assert before.keys() == after.keys() > trained
    for name, bytes_ in before.items():
        assert torch.equal(after[name], bytes_) == (name not in trained), name


# A run, by the command line.

RUN = {
    "model": "tiny", "objective": "sft", "data": {"sample": "recipes", "max_samples": 60, "too_long": "split"},
    "batch": {"seq": 256, "tokens": 1024, "micro_tokens": 512},
    "optim": {"lr": 1e-2, "schedule": "constant", "warmup": 0}, "train": {"steps": 6, "log_every": 1},
    "with": {"packing": {}, "lora": {"rank": 4}, "fused-adamw": {}, "fused-loss": {"chunk": 256}},
}  # fmt: skip
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch, capsys):
    """`optrush ARGUMENTS` in this process: exit code, what it printed and said."""

    def called(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["optrush", *arguments])
        with pytest.raises(SystemExit) as left:
            app.main()
        return int(left.value.code or 0), *capsys.readouterr()

    return called


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("beside", [{}, {"nf4": {}, "bf16": {}}], ids=["float32", "nf4+bf16"])
def test_stopped_resumed_exported_and_asked(tmp_path, monkeypatch, call, deterministic, beside):
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "stopped"):
        run = {**RUN, "output": name, "with": {**RUN["with"], **beside}}
        Path(f"{name}.yaml").write_text(yaml.safe_dump(run))
    code, _, said = call("train", "whole.yaml")
    assert code == 0, said
    with monkeypatch.context() as patch:
        begin = runs.set_step

        def told(trainer: Trainer, n: int, steps: int) -> None:
            assert trainer.world.device.type == DEVICE.type
            begin(trainer, n, steps)
            if n == 3:
                signal.raise_signal(signal.SIGTERM)

        patch.setattr(runs, "set_step", told)
        code, _, said = call("train", "stopped.yaml")
    assert code == 143 and [f.name for f in Path("stopped/checkpoints").glob("step-*")] == ["step-000003"], said
    assert not Path("stopped/adapter").exists()
    code, _, said = call("train", "stopped.yaml", "--resume", "auto")
    assert code == 0, said
    one, other = (Path(name, "adapter/adapter_model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other
    lines = [json.loads(line) for line in Path("stopped/metrics.jsonl").read_text().splitlines()]
    losses = [m["loss"] for m in lines if "loss" in m]
    assert len(losses) == 6 and losses[-1] < losses[0]

    code, out, said = call("export", "stopped", "--out", "merged", "--json")
    assert code == 0 and json.loads(out)["step"] == 6, said
    talk = next(iter(conversations(1, seed=0)))
    Path("asked.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    flags = ("--against", "tiny", "--greedy", "--max-tokens", "8", "--out", "said.jsonl")
    code, out, said = call("generate", "merged", "--prompts", "asked.jsonl", *flags, "--json")
    assert code == 0 and json.loads(out)["rows"] == 1, said
    row = json.loads(Path("said.jsonl").read_text())
    assert row["tokens"] and row["other_tokens"] and row["answer"] != row["other"], row
