"""Rotary positions with another base or scale, for rows longer than those of pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from optrush.errors import ConfigError, NeedsError
from optrush.models.families import FAMILIES
from optrush.models.rope_config import rope_kind, rope_settings
from optrush.technique import Environment, Numerics, Technique


@dataclass(frozen=True)
class Rope(Technique):
    """Changes the rotary positions in the model's config.json; training and the exported model use them.

    base: other wavelengths, with `base` as theta. linear: every position is divided by `factor`. yarn: long waves are
    divided by it, short ones kept, those between interpolated, and attention is sharpened. dynamic: a document of more
    tokens than the model has positions gets a larger base, the others are unchanged.
    With linear and yarn the model has `factor` times as many positions.

    Source: Chen et al., https://arxiv.org/abs/2306.15595 (linear); Peng et al., https://arxiv.org/abs/2309.00071 (yarn,
        and dynamic in its appendix); Xiong et al., https://arxiv.org/abs/2309.16039 (base)
    Memory: unchanged for the same rows.
    Work: unchanged.
    Differs from the source: nothing is searched for; `dynamic` acts only after training, since rows are at most as long
        as the positions.
    """

    kind: Literal["base", "linear", "yarn", "dynamic"] = "yarn"
    factor: Annotated[float, Field(gt=1)] | None = None
    base: Annotated[float, Field(gt=1)] | None = None

    name = "rope"
    summary = "changes the base or scale of rotary positions for longer rows (linear, yarn, dynamic)"
    source = "https://arxiv.org/abs/2309.00071"
    numerics = Numerics.DIFFERENT_MATHS
    verified_on = ("cpu",)
    searched = False
    sample = {"factor": 2.0}  # noqa: RUF012

    def quality(self, env: Environment) -> str:
        return f"positions of kind {self.kind}"

    def config(self, hf: dict[str, Any]) -> int:
        """Write the scaled rotary positions into the model's config `hf`, in place; return 1."""
        self._check_options()
        given = self._checked(hf)
        theta = self.base if self.base is not None else given.pop("rope_theta", hf.get("rope_theta"))
        scaled = {**given, "rope_type": given.pop("rope_type", given.pop("type", "default"))}
        scaled.pop("type", None)
        if self.kind != "base":
            scaled = {"rope_type": self.kind, "factor": self.factor}
            if "partial_rotary_factor" in given:
                scaled["partial_rotary_factor"] = given["partial_rotary_factor"]
        if self.kind == "yarn":
            scaled["original_max_position_embeddings"] = hf["max_position_embeddings"]
        if self.factor is not None and self.kind != "dynamic":
            hf["max_position_embeddings"] = round(hf["max_position_embeddings"] * self.factor)
        if theta is not None:
            scaled["rope_theta"] = theta
        for key in ("rope_scaling", "rope_theta"):  # keys of transformers 4; version 5 has one mapping
            hf.pop(key, None)
        hf["rope_parameters"] = scaled
        return 1

    def _check_options(self) -> None:
        asked = f"`rope: kind: {self.kind}`"
        if self.kind == "base":
            if self.base is None:
                raise ConfigError(asked, "no base", "set base, for example 500000")
            if self.factor is not None:
                raise ConfigError(asked, f"factor: {self.factor}, which `base` does not use", "leave factor out")
        elif self.factor is None:
            raise ConfigError(asked, "no factor", "set factor to at least the rows' length over the model's positions")

    def _checked(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings of a model, or raise NeedsError if this kind cannot change them."""
        family, given = hf.get("model_type"), rope_settings(hf)
        asked, do = f"`rope` in a model of type {family!r}", "leave rope out, or take another model"
        if not given and "rope_theta" not in hf and family not in FAMILIES:
            raise NeedsError(asked, "no rotary positions in its config.json", do)
        by_layer = family in FAMILIES and FAMILIES[family].by_layer
        if by_layer or any(isinstance(value, Mapping) for value in given.values()):
            raise NeedsError(asked, "RoPE parameters that differ between layers", do)
        if (kind := rope_kind(hf)) != "default" and self.kind != "base":
            do = "take kind: base, or leave rope out"
            raise NeedsError(f"`rope: kind: {self.kind}` scales positions", f"RoPE type {kind!r} already", do)
        if (spec := FAMILIES.get(str(family))) and spec.rope_renamed and self.kind not in ("base", *spec.rope_kinds):
            found = f"a model of type {family!r}, which has {', '.join(spec.rope_kinds)}"
            raise NeedsError(f"`rope: kind: {self.kind}`", found, "take kind: base, or leave rope out")
        if not hf.get("max_position_embeddings"):
            raise NeedsError(asked, "no max_position_embeddings in its config.json", do)
        return given
