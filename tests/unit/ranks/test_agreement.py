"""Agreement of ranks on the outcome of work that each of them does."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UserError
from common.ranks import agreement
from common.ranks.agreement import do_on_each_rank
from tests.ranks import gather_from_ranks, on_ranks


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_gets_its_own_result(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work without a mistake returns on each rank what it computed there."""
    monkeypatch.setattr(agreement, "gather_from_ranks", gather_from_ranks)

    def work(accelerator: Any) -> int:
        return do_on_each_rank(accelerator, lambda: 10 * accelerator.process_index)

    assert on_ranks(world_size, work) == [10 * rank for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_mistake_on_one_rank_ends_all(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the mistake of the last one, with its advice."""
    monkeypatch.setattr(agreement, "gather_from_ranks", gather_from_ranks)

    def fail_on_the_last(accelerator: Any) -> None:
        if accelerator.process_index == world_size - 1:
            raise UserError("the file is damaged", advice="copy it again")

    def work(accelerator: Any) -> str:
        with pytest.raises(UserError) as raised:
            do_on_each_rank(accelerator, lambda: fail_on_the_last(accelerator))
        return raised.value.message

    assert on_ranks(world_size, work) == ["the file is damaged: copy it again"] * world_size
