"""Recognises secrets in text, and masks them.

A command line with a secret is refused. A secret in source code or a patch is masked before a run
keeps the text.
"""

import re
from collections.abc import Collection

MASK = "***"
# Matches what looks like a token of the Hub, of W&B or of GitHub.
TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}|wandb_v\d_\w{20,}|gh[pousr]_\w{30,}|github_pat_\w{20,}")
# Matches a password or token before a host: https://user:TOKEN@host, https://TOKEN@host,
# user:TOKEN@host.
SECRET_OF_ADDRESS = re.compile(r":(//)?[^/\s]*@")
# Matches a value that source code assigns to a name such as `api_key`.
ASSIGNED_SECRET = re.compile(
    r"""((?:api_?key|secret|password|passwd|credential|(?:access|auth|hf|hub|bearer)_?token)\w*"""
    r"""["']?\s*[:=]\s*[a-z]{0,2}["'])([^"'\s]{8,})(?=["'])""",
    re.IGNORECASE,
)
# Matches a key of W&B in source code: a number of 40 digits, as in `wandb.login(key="...")`.
KEY_ARGUMENT = re.compile(r"""(\bkey["']?\s*[:=]\s*["'])([0-9a-f]{40})(?=["'])""")
USER_OF_ADDRESS = re.compile(r"""(://)([^/\s"'@]+)(?=@)""")
PRIVATE_KEY = "PRIVATE KEY-----"  # the end of the first line of a private key's file


def has_secret(text: str) -> bool:
    """Whether a text contains a token, or an address that contains a user's name or password."""
    return SECRET_OF_ADDRESS.search(text) is not None or TOKEN.search(text) is not None


def without_tokens(text: str) -> str:
    """Return a text with `MASK` instead of each token, for a file that others may read."""
    return TOKEN.sub(MASK, text)


def without_secrets(text: str, known_secrets: Collection[str]) -> str:
    """Return lines of source code or of a patch with `MASK` instead of what looks like a secret.

    The secrets are tokens, values that are assigned to names such as `api_key`, and users and
    passwords in addresses. The whole text is masked if it has a private key.

    Args:
        known_secrets: such as those in the environment.
    """
    if PRIVATE_KEY in text:
        return MASK
    text = without_tokens(text)
    for pattern in (ASSIGNED_SECRET, KEY_ARGUMENT, USER_OF_ADDRESS):
        text = pattern.sub(rf"\1{MASK}", text)
    # The longest comes first, because another secret may be its beginning.
    for secret in sorted(known_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text
