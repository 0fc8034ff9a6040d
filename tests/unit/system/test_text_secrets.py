"""Secrets are left out of texts that are printed or kept."""

from __future__ import annotations

import pytest

from common.system.text_secrets import has_secret, without_secrets, without_tokens


@pytest.mark.parametrize("beginning", ["hf_", "wandb_v1_", "ghp_", "ghs_", "github_pat_"])
def test_refused_token_is_also_left_out_of_texts(beginning: str) -> None:
    """What the command line refuses is not kept in a file either."""
    token = beginning + "aB3" * 12
    assert has_secret(f"--notes={token}")
    assert without_tokens(f"login('{token}')") == "login('***')"
    short = f"{beginning}small"
    assert not has_secret(short)
    assert without_tokens(short) == short


@pytest.mark.parametrize("secrets", [("hunter2", "hunter2-long"), ("hunter2-long", "hunter2")])
def test_secret_that_begins_like_another_hides_neither_in_part(secrets: tuple[str, str]) -> None:
    assert without_secrets("a = 'hunter2-long', b = 'hunter2'", secrets) == "a = '***', b = '***'"
