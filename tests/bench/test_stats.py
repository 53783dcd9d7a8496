"""Medians, noise, the proof's tolerances, and each rule that makes a rung red."""

import base64

import numpy as np
import pytest
import yaml

from optrush import config
from optrush.benchmark import results
from optrush.benchmark.results import Figures
from optrush.technique import Numerics
from optrush.techniques import ALL

from toy import document

MIB = 2**20


def figures(*repeats, spread=0.001, peak=1000, kind="cuda_allocated", **more):
    """Repeats of five steps around a speed each; the peak in MiB."""
    speeds = [[speed * (1 + spread * n) for n in (-2, -1, 0, 1, 2)] for speed in repeats]
    predicted = {"predicted_peak_bytes": more["peak_"] * MIB} if "peak_" in more else {}
    if "speed_" in more:
        predicted["predicted_tokens_per_s"] = more["speed_"]
    return Figures(speeds, int(peak * MIB), kind, **predicted)


def run(**changes):
    return config.parse_config(yaml.safe_dump(document(**changes)), "run.yaml")


def test_medians_and_quartiles():
    found = Figures([[1.0, 2.0, 9.0], [4.0, 5.0]], 0, "rss")
    assert (found.tokens_per_s, found.repeats) == (4.0, [2.0, 4.5])
    assert found.quartiles == (2.0, 5.0)
    assert Figures([[3.0]], 0, "rss").quartiles == (3.0, 3.0)


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (figures(110, 111, 112), figures(100, 101, 102), True),
        (figures(100, 111, 112), figures(101, 102, 103), False),  # one repeat of the faster is slower
        (figures(100.5, 100.6), figures(100, 100.1), False),  # by less than a percent
        (figures(110), figures(100), True),
        (figures(110, spread=0.1), figures(100, spread=0.1), False),  # the quartiles overlap
        (figures(110), figures(100, 101), True),
        (figures(90), figures(100), False),
    ],
)
def test_a_difference_is_more_than_noise(a, b, answer):
    assert results.faster(a, b) is answer


# --- the proof


def test_tolerances():
    base, adamw = run(), run(**{"with": {"fused-adamw": {}}})
    amp, bf16 = run(**{"with": {"amp": {}}}), run(**{"with": {"bf16": {}}})
    assert results.tolerances(base, adamw, ALL) is results.FLOAT32
    assert results.tolerances(base, amp, ALL) is results.LOWER
    assert results.tolerances(amp, amp, ALL) is results.LOWER
    assert results.tolerances(base, bf16, ALL) is results.DIFFERENT
    lora = run(**{"with": {"amp": {}, "lora": {}}})
    quack = run(**{"with": {"amp": {}, "lora": {}, "fused-kernels": {"mlp": "quack"}}})
    assert results.tolerances(lora, quack, ALL) is results.ADAPTED
    assert results.tolerances(lora, lora, ALL) is results.tolerances(quack, quack, ALL) is results.LOWER
    assert results.tolerances(amp, lora, ALL) is results.DIFFERENT
    assert results.tolerances(*[run(**{"with": {"lora": {}}})] * 2, ALL) is results.FLOAT32
    native = run(model={"path": "toy", "implementation": "transformers"})
    assert results.weakest(base, native, ALL) is Numerics.SAME_MATHS
    assert results.weakest(base, run(**{"with": {"recompute": {}}}), ALL) is Numerics.EXACT
    assert results.weakest(adamw, run(**{"with": {"bf16": {}}}), ALL) is Numerics.DIFFERENT_MATHS


def series(losses, norms):
    return {"losses": losses, "gradient norms": norms}


@pytest.mark.parametrize(("cosine", "allowed", "ok"), [
    (1 - 9e-7, results.FLOAT32, True), (1 - 2e-6, results.FLOAT32, False), (0.98, results.LOWER, True),
    (0.96, results.LOWER, False), (0.5, results.DIFFERENT, True), (None, results.FLOAT32, True),
])  # fmt: skip
def test_gradients_must_point_where_the_baselines_do(cosine, allowed, ok):
    base = series([4.0, 2.0], [1.0, 1.0])
    found = results.compare_series(base, base, allowed, cosine)
    assert found["ok"] is ok
    if not ok:
        assert found["of"] == "gradients" and found["worst"] == pytest.approx(1 - (cosine or 0))
        red = results.mismatch_reason({**found, "against": "first"}, [4.0, 2.0])
        assert red is not None and red.startswith("wrong: gradients differ by ") and "from `first`" in red


def test_the_proof_takes_what_is_worst():
    base = series([4.0, 2.0], [1.0, 1.0])
    assert results.compare_series(series([4.0, 2.0001], [1.0, 1.0]), base, results.FLOAT32) == {
        "of": "losses", "tolerance": 1e-4, "worst": pytest.approx(5e-5), "ok": True,
    }  # fmt: skip
    found = results.compare_series(
        series([4.0, 2.0], [1.0, 0.5]), base, results.LOWER
    )  # a divisor: AdamW hides it in the losses
    assert (found["of"], found["worst"], found["ok"]) == ("gradient norms", 0.5, False)
    found = results.compare_series(series([4.0, None], [1.0, 1.0]), base, results.DIFFERENT)
    assert (found["worst"], found["ok"]) == (None, False)


def test_different_maths_may_lag_but_not_stand_still_or_go_elsewhere():
    base = series([4.0, 2.0], [1.0, 1.5])
    found = results.compare_series(series([4.0, 3.8], [1.0, 1.0]), base, results.DIFFERENT)
    assert not found["ok"] and found["of"] == "progress"
    assert "its loss falls by 10% of the fall" in (
        results.mismatch_reason({**found, "against": "first"}, [4.0, 3.8]) or ""
    )
    assert not results.compare_series(series([4.0, 4.0], [1.0, 1.0]), base, results.DIFFERENT)["ok"]
    flat = series([4.0, 4.0], [1.0, 1.0])
    assert results.compare_series(flat, flat, results.DIFFERENT)["ok"], "nothing to learn, nothing to lag behind"
    assert results.compare_series(series([4.0, 3.0], [1.0, 1.2]), base, results.DIFFERENT)["ok"]
    assert not results.compare_series(series([4.0, 4.1], [1.0, 1.0]), base, results.DIFFERENT)["ok"]  # it unlearns
    assert not results.compare_series(series([4.0, 1.9], [1.0, 1.5]), base, results.DIFFERENT)["ok"]
    assert not results.compare_series(series([4.0, 3.0], [1.2, 1.2]), base, results.DIFFERENT)[
        "ok"
    ]  # before any update
    assert not results.compare_series(series([4.0, 4.0], [1.0, 1.0]), base, results.LOWER)["ok"]


def test_adapters_may_lose_a_share_of_the_fall_to_rounding():
    base = series([12.6056, 12.5146, 12.2665, 11.9282, 11.5619], [0.981, 0.982, 1.013, 1.048, 1.085])  # as on an H200
    kept = series([12.6036, 12.3392, 12.0584, 11.7574, 11.4334], [0.982, 0.982, 1.012, 1.046, 1.082])
    for one, other in ((base, kept), (kept, base)):
        assert results.compare_series(one, other, results.ADAPTED, 0.99)["ok"]
        assert not results.compare_series(one, other, results.LOWER, 0.99)["ok"]
    assert not results.compare_series(kept, base, results.ADAPTED, 0.96)["ok"]
    still = series([12.6056] * 5, base["gradient norms"])
    assert not results.compare_series(still, base, results.ADAPTED)["ok"], "it does not learn"
    off = series([12.5, *base["losses"][1:]], base["gradient norms"])
    assert not results.compare_series(off, base, results.ADAPTED)["ok"], "another loss before any update"


def test_wrong():
    bad = {"of": "losses", "tolerance": 1e-4, "worst": 0.5, "ok": False, "against": "base"}
    assert results.mismatch_reason(bad, [1.0]) == "wrong: losses differ by 0.5 (relative) from `base`, allowed 1e-04"
    assert results.mismatch_reason({**bad, "ok": True}, [1.0]) is None and results.mismatch_reason(None, [1.0]) is None
    assert results.mismatch_reason(None, [1.0, None]) == "wrong: a loss is not finite"
    assert "not finite" in str(results.mismatch_reason({**bad, "worst": None}, [1.0]))


# --- red


def test_slower_than_predicted():
    before = figures(100, 100, speed_=100)
    assert results.slowdown_reason(figures(50, 50, speed_=120), before, False) == (
        "slower than it may be: 0.50x of `since`, predicted 1.20x"
    )
    assert (
        results.slowdown_reason(figures(85, 85, speed_=120), before, False) is None
    )  # within what a prediction may miss
    assert results.slowdown_reason(figures(50, 50, speed_=55), before, False) is None  # as predicted
    assert results.slowdown_reason(figures(79, 79, speed_=300), before, False)  # held to no more than the speed before
    assert results.slowdown_reason(figures(60, 100, speed_=120), before, False) is None  # noise
    assert results.slowdown_reason(figures(40, 40, speed_=55), before, True)
    assert results.slowdown_reason(figures(51, speed_=120), before, False) is None  # once, it may have been the host
    assert results.slowdown_reason(figures(49, speed_=120), before, False)


def test_slower_without_a_prediction():
    before = figures(100, 100)
    assert results.slowdown_reason(figures(49, 49), before, False)
    assert results.slowdown_reason(figures(51, 51), before, False) is None
    assert results.slowdown_reason(figures(49, 49, peak=880), before, False) is None  # it is smaller instead
    assert results.slowdown_reason(figures(49, 49), before, True) is None  # one technique less: nobody knows


def test_no_effect_on_memory():
    before = figures(100, peak=1000, peak_=1000)
    assert results.no_effect_reason(figures(100, peak=990, peak_=800), before) == (
        "no effect: the peak changed by -10 MiB, predicted -200 MiB"
    )
    assert results.no_effect_reason(figures(100, peak=1100, peak_=800), before)  # the other way
    assert results.no_effect_reason(figures(100, peak=940, peak_=800), before) is None
    assert results.no_effect_reason(figures(100, peak=1000, peak_=950), before) is None  # little was promised
    assert results.no_effect_reason(figures(100, peak=1010, peak_=1300), before)  # larger was promised
    assert results.no_effect_reason(figures(100, peak=1000), before) is None  # nothing was predicted


def test_a_resident_set_moves_by_itself():
    before = figures(100, peak=400, peak_=400, kind="rss")
    assert results.no_effect_reason(figures(100, peak=400, peak_=340, kind="rss"), before) is None  # 60 MiB
    assert results.no_effect_reason(figures(100, peak=400, peak_=330, kind="rss"), before)


def test_no_effect_on_speed():
    before = figures(100, peak=1000, speed_=100)
    assert results.no_effect_reason(figures(100, peak=1000, speed_=150), before)
    assert results.no_effect_reason(figures(90, peak=1000, speed_=150), before)
    assert results.no_effect_reason(figures(110, peak=1000, speed_=150), before) is None  # faster, if less so
    assert results.no_effect_reason(figures(100, peak=900, speed_=150), before) is None  # it did something
    assert results.no_effect_reason(figures(100, peak=1000, speed_=120), before) is None  # little was promised
    busy = figures(100, peak=1000, speed_=100, kind="rss")  # a CPU, once: it may have been the host
    assert results.no_effect_reason(figures(100, peak=1000, speed_=150, kind="rss"), busy) is None
    twice = figures(100, 100, peak=1000, speed_=100, kind="rss")
    assert results.no_effect_reason(figures(100, 100, peak=1000, speed_=150, kind="rss"), twice)


def judged(after, before, wrong=None, **more):
    verdict, red = results.judge(after, before, wrong, **{"only_load": False, "alone": False, **more})
    assert (verdict == "red") == bool(red)
    return verdict


def test_verdicts():
    before = figures(100)
    assert judged(before, None) == "baseline"
    assert judged(figures(120, peak=900), before) == "faster"
    assert judged(figures(80, peak=900), before) == "smaller"
    assert judged(figures(80), before) == "slower"
    assert judged(figures(100, peak=990), before) == "noise"
    assert judged(figures(100, peak=960, kind="rss"), figures(100, kind="rss")) == "noise"
    assert judged(figures(120), before, "wrong: so") == "red"
    assert judged(figures(100), None, "wrong: so") == "red"
    assert judged(figures(40), before) == "red"
    assert judged(figures(40), before, only_load=True) == "slower"
    assert judged(figures(40), before, alone=True) == "slower"
    assert judged(figures(40), before, "wrong: so", only_load=True) == "red"


def test_verdicts_of_longest_rows():
    def judged(reached, before, peak=1000, red=None):
        return results.judge_longest(reached, figures(100, peak=peak), before, 1.1, red)[0]

    before = 1000, figures(100)
    assert judged(1000, None) == "baseline" and judged(1101, before) == "longer" and judged(909, before) == "shorter"
    assert judged(1000, before) == judged(1000, before, 985) == judged(1100, before, 500) == "noise"
    assert judged(1000, before, 975) == "smaller" and judged(2000, before, red="wrong: so") == "red"


def test_timed_steps_must_learn():
    assert results.dead_step_reason([2.0, 1.9], [1.0, 1.0]) is None
    assert (
        results.dead_step_reason([2.0, None], [1.0, 1.0]) == "wrong: a timed step's loss or gradient norm is not finite"
    )
    assert results.dead_step_reason([2.0, 1.9], [1.0, 0.0]) == "wrong: a timed step has no gradient"


def test_whoever_behaves_while_watched_is_watched_again():
    proof = {"losses": [2.0, 1.5], "grad_norms": [1.0, 0.9]}
    assert results.drift_reason(proof, results.FLOAT32) is None, "records of before know no second look"
    same, other = {"losses": [2.0], "grad_norms": [1.0]}, {"losses": [2.0], "grad_norms": [0.5]}
    assert results.drift_reason({**proof, "again": same}, results.FLOAT32) is None
    assert "gradient norms differ" in (results.drift_reason({**proof, "again": other}, results.FLOAT32) or "")
    assert results.drift_reason({**proof, "again": {"losses": [None], "grad_norms": [1.0]}}, results.FLOAT32)
    east, north = ({"of": "x", "sums": base64.b64encode(np.float32(v).tobytes()).decode()} for v in ([1, 0], [0, 1]))
    first, turned = {**proof, "gradient": east}, {**same, "gradient": north}
    assert results.drift_reason({**first, "again": {**same, "gradient": east}}, results.FLOAT32) is None
    assert "its gradients differ" in (results.drift_reason({**first, "again": turned}, results.LOWER) or "")
    assert results.drift_reason({**first, "again": turned}, results.LOWER, 0.9)
    assert results.drift_reason({**first, "again": turned}, results.LOWER, 1.0) is None, (
        "as far as it lies from the baseline"
    )
    assert results.drift_reason({**first, "again": turned}, results.DIFFERENT) is None
