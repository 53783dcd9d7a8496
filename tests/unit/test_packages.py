"""Packages that techniques call: not installed, or without a package that they need themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from optrush import technique
from optrush.errors import NeedsError
from optrush.technique import missing, refuse_unmet
from optrush.techniques.fused_loss import FusedLoss


@pytest.mark.parametrize("needed", ["numpy>=2", "nvidia-of-nowhere==4.5", "elsewhere; extra == 'dev'"])
def test_a_package_without_one_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: str
) -> None:  # fmt: skip
    folder = tmp_path / "quack_kernels-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: quack-kernels\nVersion: 9\nRequires-Dist: {needed}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    technique._metadata.cache_clear()
    try:
        if "nowhere" not in needed:
            return refuse_unmet(missing(FusedLoss(impl="quack")))
        with pytest.raises(NeedsError) as caught:
            refuse_unmet(missing(FusedLoss(impl="quack")))
        assert caught.value.found == "the package quack-kernels is installed without nvidia-of-nowhere"
        assert caught.value.do == "python -m pip install 'optrush[kernels]'"
    finally:
        technique._metadata.cache_clear()
