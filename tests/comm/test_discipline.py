"""The roll call says whether a rank is late or the store has failed."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from optimus.comm import CollectiveError
from optimus.comm.discipline import RollCall


class Lost(dist.HashStore):
    """A store whose process has gone."""

    def wait(self, *_: Any) -> None:
        raise dist.DistNetworkError("failed to recv, got 0 bytes")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (lambda _: dist.HashStore(), "not all ranks have returned within 0.01 s"),
        (lambda folder: dist.FileStore(str(folder / "store"), 2), "not all ranks have returned within 0.01 s"),
        (lambda _: Lost(), "roll call hook: the store failed: failed to recv, got 0 bytes"),
    ],
)
def test_a_late_rank_is_told_from_a_store_that_fails(
    store: Callable[[Any], dist.Store], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    made = store(tmp_path)
    made.set_timeout(timedelta(seconds=10))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    with pytest.raises(CollectiveError) as caught:
        RollCall("hook", 2, 0.02)(0.5)
    assert str(caught.value) == message
