"""The comparison of loss curves by precision."""

from pathlib import Path

import pytest

from benchmarks.precision_curves import compare, losses, trained


def test_runs_are_compared_with_the_first(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.precision_curves.SEQUENCE", 32)
    (tmp_path / "data").symlink_to(prepared)
    found = {name: trained(tmp_path, name, 3 * 32 * 32) for name in ("float32", "float16")}
    assert [len(losses(each)) for each in found.values()] == [3, 3]
    float32, float16 = compare(found)
    assert (float32["difference"], float32["overflows"], float16["overflows"]) == (0, 0, 0)
    assert float16["loss_scale"] == 65536
    # Losses of about 6 have relative errors of some 2^-11; see tests/training/test_loss_scale.py.
    assert 0 < abs(float16["difference"]) < 6 * 2**-11
