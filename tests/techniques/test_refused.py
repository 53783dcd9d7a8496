"""What techniques refuse before a run begins, a row each: what stands in its way, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from optrush.decide import changed, decide
from optrush.errors import ConfigError, ConflictError, NeedsError
from optrush.hardware import CPU, NAMED

from golden.make_golden import CASES
from trials import KNOWN, assembled, golden_run, shaped


@dataclass(frozen=True)
class Refused:
    with_: str  # as in a configuration
    found: str  # in what the error has found
    do: str = ""  # in what it says to do
    ranks: int = 1
    on: str = ""  # one of NAMED; "": a CPU
    sets: str = ""  # as --set takes them, with spaces between; {box}: the golden folder
    chat: bool = False
    packed: bool = True
    shape: str = ""  # a published one, in place of the golden model
    error: Any = NeedsError

    def __str__(self) -> str:
        return f"{self.with_}-{self.sets or self.shape}-{self.ranks}{self.on}"


R = Refused
THEIRS = "model.implementation=transformers"
TIED = "model.path={box}/tied"
MOE = "model.path={box}/moe"
WHOLE = "optim.clip=null batch.micro_tokens=384"
BUILT = [
    R("lora: {targets: [q_prj]}", "no linear is called q_prj", "did you mean `q_proj`"),
    R("lora: {targets: [q_proj, v_prj]}", "no linear is called v_prj", "did you mean `v_proj`"),
    R("lora: {targets: .*vision.*}", "it matches no linear of this model"),
    R("lora: {targets: dense}", "a model without linears of the set dense"),
    R("lora: {targets: [q_proj, experts]}", "a model without linears of the set experts"),
    R("lora: {targets: mpl}", "no linear is called mpl"),
    R("lora: {targets: []}", "no linears to choose from"),
    R("lora: {save: [lm_haed]}", "is called lm_haed", "did you mean `lm_head`"),
    R("lora: {save: [lm_head]}", "one weight", "name both, embed_tokens and lm_head", sets=TIED),
    R("lora: {save: [q_norm]}", "no such module is called q_norm"),
    R("lora: {targets: [c_attn]}", "no linear is called c_attn", sets=THEIRS),
    R("lora: {save: [embed_tokens]}", "one weight", "name both", sets=f"{TIED} {THEIRS}"),
    R("lora: {init: /nowhere}", "no adapter_config.json there"),
    R("lora: {dropout: 0.1}, cuda-graphs: {}", "replays are not proved to draw"),
    R("lora: {dtype: bfloat16}, amp: {}", "updates rounded to nearest"),
    R("lora: {dtype: bfloat16}, bf16: {rounding: kahan}, fused-adamw: {}", "rounded with Kahan summation"),
    R("lora: {dtype: bfloat16, dora: true}, bf16: {}", "dora: true, which uses the lengths"),
    R("lora: {dtype: bfloat16, init: olora}, bf16: {}", "init=olora"),
    R("ia3: {targets: [k_prj]}", "no linear is called k_prj", "did you mean `k_proj`"),
    R("ia3: {targets: [gate_proj], feedforward: [gate_proj]}", "one matmul computes gate_proj, up_proj"),
    R("ia3: {feedforward: [dwn_proj]}", "dwn_proj is not a target"),
    R("ia3: {feedforward: [dwn_proj]}", "dwn_proj is not a target", sets=THEIRS),
    R("ia3: {targets: [k_proj], feedforward: [down_proj]}", "down_proj is not", "k_proj, or add it to the targets"),
    R("ia3: {targets: [c_attn]}", "no linear is called c_attn", sets=THEIRS),
    R("ia3: {init: /nowhere}", "no adapter_config.json there"),
    R("update-in-backward: {}, amp: {dtype: fp16}", "fp16", "bf16", sets=WHOLE),
    *(
        R("wrap: {}", "no document is too long", "take packing", error=ConfigError, sets=f"data.too_long={how}")
        for how in ("drop", "truncate")
    ),
]
PLANNED = [
    R("ia3: {feedforward: [o_proj]}", "o_proj is not a target"),
    R("lora: {}, ia3: {}", "adapters beside frozen weights", error=ConflictError),
    R("lora: {save: [input_layernorm]}, bf16: {}, fsdp: {}", "input_layernorm in bf16", ranks=2),
    *(R(f"lora: {{alpha: {alpha}}}", alpha.strip("."), "a", error=ConfigError) for alpha in (".inf", ".nan", "0.0")),
    *(R(f"{name}: {{}}", "trained", "add --with lora or --with ia3") for name in ("nf4", "int8")),
    *(R(f"{name}: {{}}, fp8: {{}}", "blocks' linears", error=ConflictError) for name in ("nf4", "int8")),
    # How work is shared.
    R("fsdp: {replicate: 2}", "3 ranks", "ranks", 3),
    R("fsdp: {replicate: 2}", "2 ranks in 2 groups", "ranks", 2),
    R("fsdp: {replicate: 2}", "one rank", "ranks"),
    R("fsdp: {}", "one rank", "ranks"),
    R("pipeline: {}", "one rank", "--ranks 2"),
    R("pipeline: {}", "3 ranks", "--ranks 2", 3),
    R("pipeline: {}", "no technique shares the work", "--with ddp", 4),
    R("pipeline: {}", "through transformers", "leave pipeline out", 2, sets=THEIRS),
    R("pipeline: {size: 3}", "2 blocks", "smaller size", 3),
    R("pipeline: {schedule: interleaved}", "2 blocks", "smaller size", 2),
    R("pipeline: {}", "1 micro-batch per step", "batch.tokens to 768", 2, sets="batch.micro_tokens=384"),
    R("pipeline: {schedule: interleaved}", "2 blocks", "smaller size", 2, sets="batch.tokens=1056"),
    R("pipeline: {}, pad: {}", "its own width", "packing", 2),
    R("pipeline: {}, fsdp: {sync: each}", "once per window", "leave sync out", 4),
    R("pipeline: {}, update-in-backward: {}", "sums gradients over ranks", "leave one", 2, sets=WHOLE),
    R("pipeline: {}, compile: {scope: model}", "several ranks", "scope=blocks", 2),
    R("pipeline: {}", "pairs", "leave pipeline out", 2, sets="objective=dpo", chat=True),
    R("pipeline: {}, lora: {init: pissa}", "publishes all adapters", "leave one of the two out", 2),
    R("pipeline: {}", "a model with experts", ranks=2, on="h100", shape="qwen3-30b-a3b"),
    R("pipeline: {}, offload-activations: {}", "saved activations", ranks=2, on="h100", shape="llama-3.2-1b"),
    R("pipeline: {}, cuda-graphs: {}", "over several ranks", ranks=2, on="h100", shape="llama-3.2-1b"),
    R("tensor: {size: 4}", "2 key/value heads", ranks=4),
    R("tensor: {}", "not a multiple of 2", ranks=2, sets="batch.seq=47 batch.tokens=376 batch.micro_tokens=47"),
    R("tensor: {}, pad: {}", "its own width", ranks=2),
    R("tensor: {}, nf4: {}, lora: {}", "quantized weights", ranks=2),
    R("tensor: {}, muon: {}", "shards them over the ranks", ranks=2),
    R("tensor: {}, adam8bit: {}", "by columns", ranks=2),
    R("tensor: {}, adam4bit: {}", "by columns", ranks=2),
    R("tensor: {}, update-in-backward: {}", "over ranks", ranks=2, sets=WHOLE),
    R("tensor: {}, compile: {scope: model}", "several ranks", ranks=2),
    R("tensor: {}", "through transformers", ranks=2, sets=THEIRS),
    R("tensor: {}", "3 ranks", ranks=3),
    R("tensor: {}", "one rank"),
    R("tensor: {}", "no technique shares the work", ranks=4),
    R("context: {}, ddp: {}", "3 ranks", "--ranks 2", 3),
    R("context: {}, ddp: {}", "seq: 47", "of 2", 2, sets="batch.seq=47 batch.tokens=376 batch.micro_tokens=94"),
    R("context: {kind: gather}, ddp: {}", "seq: 46", "of 4", 2,
      sets="batch.seq=46 batch.tokens=368 batch.micro_tokens=92"),
    R("context: {size: 3}, ddp: {}", "4 query heads, 2 key and value heads", "kind: gather", 3),
    R("context: {}, ddp: {}", "through transformers", "another model", 2, sets=THEIRS),
    R("context: {}, ddp: {}, pad: {}", "its own width", "packing", 2),
    R("context: {kind: ring}, ddp: {}", "several documents into a row", "gather or ulysses", 2),
    R("context: {kind: ring}, ddp: {}, pad: {}, attention: {}", "its own width", "packing", 2),
    R("context: {kind: ring}, ddp: {}, attention: {}", "another kernel", ranks=2, packed=False),
    R("context: {kind: ring}, ddp: {}, compile: {}", "as one graph", ranks=2, packed=False),
    R("context: {}, ddp: {}, update-in-backward: {}", "sums gradients over ranks", "leave one", 2, sets=WHOLE),
    R("context: {}, ddp: {}", "pairs", "leave context out", 2, sets="objective=dpo", chat=True),
    R("experts: {}, ddp: {}", "a model without experts", ranks=2),
    R("compile: {scope: model}, ddp: {}", "over several ranks", "take scope=blocks", 2),
    R("quantised-links: {weights: none}, fsdp: {}", "nothing to compress", ranks=2),
    R("quantised-links: {}, ddp: {}", "with its own collectives", ranks=2),
    R("quantised-links: {}, fsdp: {}, lora: {}, nf4: {}", "are sent quantized anyway", ranks=2),
    R("quantised-links: {gradients: int8}, fsdp: {}, lora: {}", "whose gradients are small", ranks=2),
    R("quantised-links: {}, fsdp: {}", "a model with experts", ranks=2, sets=MOE),
    # DeepSpeed.
    R("deepspeed: {stage: 3}", "one rank", "--ranks 2"),
    R("deepspeed: {stage: 3}, tensor: {}", "one group of 2 ranks", "--ranks 2", 2),
    R("deepspeed: {stage: 3}, tensor: {}", "parts of matrices", "fsdp", 4),
    R("deepspeed: {stage: 3}, pipeline: {}", "blocks", "fsdp", 4),
    R("deepspeed: {stage: 3}, context: {}", "parts of rows", "fsdp", 4),
    R("deepspeed: {stage: 3}, compile: {}", "one graph", "leave compile out", 2),
    R("deepspeed: {stage: 2}, bf16: {}", "bfloat16", "take amp", 2),
    R("deepspeed: {stage: 1}, amp: {}", "another optimizer", "stage: 2", 2),
    R("deepspeed: {stage: 2}, micro-batch: {}", "micro_tokens: auto", "a number", 2),
    R("deepspeed: {stage: 2}", "pairs", "fsdp", 2, sets="objective=dpo", chat=True),
    R("deepspeed: {stage: 2}, amp: {}", "through transformers", "leave amp out", 2, sets=THEIRS),
    R("deepspeed: {stage: 2, offload: all}", "stage: 2", "stage: 3", 2),
    R("deepspeed: {stage: 2, hpz: 2}", "stage: 2", "stage: 3", 2),
    R("deepspeed: {stage: 3, hpz: 3}", "2 ranks", "divisor", 2),
    R("deepspeed: {}", "a model with experts", ranks=2, on="h100", shape="qwen3-30b-a3b"),
    R("deepspeed: {}, offload-activations: {}", "saved activations", ranks=2, on="h100", shape="llama-3.2-1b"),
    R("deepspeed: {}, fp8: {}, amp: {}, compile: {}", "one graph", ranks=2, on="h100", shape="llama-3.2-1b"),
    R("deepspeed: {}, fused-kernels: {mlp: quack}, amp: {}", "changes the layout of weights", ranks=2, on="h100",
      shape="llama-3.2-1b"),
    R("deepspeed: {}, cuda-graphs: {}", "over several ranks", ranks=2, on="h100", shape="llama-3.2-1b"),
    *(R(f"deepspeed: {{}}, {other}: {{}}", "both own", f"--without {other}", 2, sets="batch.tokens=1536",
        error=ConflictError)
      for other in ("ddp", "fsdp", "fused-adamw", "adam8bit", "adam4bit", "muon", "update-in-backward")),
    # What is kept, and where.
    R("selective-recompute: {ops: products, budget: 0.5}, compile: {}", "both, ops=products and budget=0.5",
      "give one of the two"),
    R("selective-recompute: {budget: 0.5}", "no compiled blocks", "add --with compile"),
    *(R(f"selective-recompute: {{{given}}}, lora: {{}}, compile: {{}}", "summed in place", "take ops=attention")
      for given in ("", "ops: products", "budget: 0.5")),
    *(R(f"selective-recompute: {{{given}}}", found, error=ConfigError) for given, found in
      (("budget: 0.0", "0.0"), ("budget: 1.5", "1.5"), ("budget: half", "half"), ("ops: norms", "norms"))),
    R("quantised-activations: {}, compile: {}", "compiled blocks"),
    R("quantised-activations: {}, recompute: {}", "recomputes blocks"),
    R("quantised-activations: {}, selective-recompute: {}", "recomputes blocks"),
    R("quantised-activations: {}, fp8: {}", "already have 8 bits"),
    R("quantised-activations: {}, offload-activations: {}", "where that is kept", error=ConflictError),
    R("quantised-activations: {}", "runs through transformers", sets=THEIRS),
    R("quantised-activations: {}", "a model with experts", sets=MOE),
    *(R(f"{name}: {given}", "a CPU only", "use such a device") for name, given in (
        ("offload-activations", {}), ("paged-states", {}), ("cuda-graphs", {}), ("loader", "{pinned: true}"))),
    *(R(f"offload-activations: {{keep: {keep}}}", "2 blocks", "from 0 to 1", on="h200") for keep in (2, 3)),
    R("offload-activations: {}, compile: {}", "run inside the graph", "leave compile out", on="h200", sets=THEIRS),
    # Kernels and attention.
    R("fused-kernels: {}", "runs through transformers", sets=THEIRS),
    R("fused-kernels: {mlp: none}", "nothing is left to fuse"),
    R("longlora: {group: 10}", "groups of 10"),
    R("longlora: {group: 3}", "groups of 3"),
    R("longlora: {group: 48}", "groups of 48"),
    R("longlora: {}, context: {}, ddp: {}", "shards rows or heads", ranks=2),
    R("longlora: {}, tensor: {}", "shards rows or heads", ranks=2),
    R("longlora: {}", "runs through transformers", sets=THEIRS),
    R("fp8: {}, bf16: {}, compile: {}", "A100-SXM4-80GB, capability (8, 0)", on="a100-80"),
    R("fp8: {}, compile: {}", "weights and matmuls in float32", on="h200"),
    R("fp8: {}, bf16: {}", "no `compile`", on="h200"),
    R("fp8: {}, amp: {}, compile: {}", "98 slots", on="h200",
      sets="batch.seq=49 batch.tokens=784 batch.micro_tokens=98"),
    R("fp8: {}, amp: {}", "runs through transformers", on="h200", sets=THEIRS),
    R("cuda-graphs: {}", "whose code may synchronize with the GPU", on="h200", sets=THEIRS),
    R("cuda-graphs: {}, ddp: {}", "over several ranks", ranks=2, on="h200"),
    R("cuda-graphs: {}, recompute: {}", "recomputes blocks", on="h200"),
    R("cuda-graphs: {}, pad: {}", "gives each micro-batch its own", on="h200"),
    # Optimizers and updates.
    R("update-in-backward: {}", "8 micro-batches per step", "micro_tokens to 384", sets="batch.micro_tokens=48"),
    R("update-in-backward: {}", "`optim.clip: 0.5`", "optim.clip to null", sets="optim.clip=0.5"),
    R("update-in-backward: {}, ddp: {}", "sums gradients over ranks", "leave one", 2,
      sets="batch.micro_tokens=192 optim.clip=null"),
    R("ema: {}, update-in-backward: {}", "outside the optimizer's step", "leave one of the two out", sets=WHOLE),
    R("ema: {}, paged-states: {}, adam8bit: {}", "keeps", on="h200"),
    R("ema: {}, deepspeed: {}", "outside the optimizer's step", ranks=2),
    R("muon: {}, fsdp: {}", "shards them over the ranks", "take ddp instead", 2),
    R("muon: {momentum: 1.0}", "1.0", "below 1", error=ConfigError),
    R("muon: {momentum: 0.0}", "0.0", "above 0", error=ConfigError),
    R("muon: {iterations: 0}", "0", "at least 1", error=ConfigError),
    R("apollo: {rank: 0}", "0", "at least 1", error=ConfigError),
    R("apollo: {}, paged-states: {}", "a technique that keeps them elsewhere", on="h200"),
    R("apollo: {}, lora: {}", "a technique that freezes them", on="h200"),
    R("apollo: {}, tensor: {}", "by columns", ranks=2, on="h200"),
    R("apollo: {}, muon: {}", "the optimizer", error=ConflictError),
    # What is frozen.
    R("freeze: {}", "neither `layers` nor `names`"),
    R("freeze: {layers: 0-7}", "layers 0 to 1", "below 2"),
    R("freeze: {layers: 1-0}", "the range 1-0 is empty"),
    R("freeze: {layers: first}", "no numbers", '"0-3,7"'),
    R('freeze: {layers: ""}', "no numbers"),
    R("freeze: {layers: [-1]}", "layers 0 to 1", "below 2"),
    R("freeze: {names: [no_such]}", "no parameter of that name", "q_proj"),
    R("freeze: {layers: 0, names: [o_proj, k_prog]}", "no parameter"),
    R("freeze: {names: [q_proj]}", "one tensor", "k_proj, v_proj"),
    R('freeze: {names: ["*"]}', "nothing is left"),
    R("freeze: {names: [lm_head]}", "tied", "embed_tokens", sets=TIED),
    R("freeze: {layers: 0}, lora: {}", "which parameters are trained", error=ConflictError),
    R("freeze: {layers: 0}, ia3: {}", "which parameters are trained", error=ConflictError),
    R("freeze: {layers: 0}, nf4: {}", "it is for adapters", "leave one of the two out"),
]  # fmt: skip


def refused(box, row, build):
    with_ = yaml.safe_load(f"{{{row.with_}}}")
    if row.shape:
        run = changed(shaped(row.shape, rows=1, windows=4), {"with": with_})
    else:
        case = CASES["chat" if row.chat else "untied"]
        run = golden_run(box, case, packed=row.packed, sets=row.sets.format(box=box).split(), **with_)
    with pytest.raises(row.error) as caught:
        build(run)
    error = caught.value
    assert error.asked and row.found in error.found and error.do and row.do in error.do, str(error)


@pytest.mark.parametrize("row", PLANNED, ids=str)
def test_what_a_plan_refuses(box, row):
    refused(box, row, lambda run: decide(run, KNOWN, ranks=row.ranks, device=NAMED[row.on] if row.on else CPU))


@pytest.mark.parametrize("row", BUILT, ids=str)
def test_what_building_refuses(box, row):
    refused(box, row, assembled)
