"""Refuses a command line that contains a secret."""

from common.errors import UserError
from common.system.text_secrets import has_secret

# Flags that name data or models of the Hub, so that a user may pass an address.
FLAGS_WITH_ADDRESSES = ("--dataset", "--init-from", "--model")


def refuse_credentials(words: list[str]) -> None:
    """Raise a `UserError` if a command line contains a secret.

    This comes first, before any message or file can repeat the secret.

    Args:
        words: the arguments of the command line, without the program.
    """
    for word_before, word in zip(["", *words], words, strict=False):
        if not has_secret(word):
            continue
        # The message names the flag, but must not repeat the value. The flag is a part of the same
        # word, as in --dataset=VALUE, or it is the word before.
        flag_and_value = word if word.startswith("--") else word_before
        flag = flag_and_value.split("=")[0]
        advice = "leave it out of the command"
        if flag.replace("_", "-") in FLAGS_WITH_ADDRESSES:
            advice = (
                "pass a Hub id, such as USER/NAME, or a local folder; for private data, put the "
                "token into the environment variable HF_TOKEN"
            )
        # The word before may be another value, as in --tags first SECRET.
        is_flag = flag.startswith("--") and not has_secret(flag)
        place = flag if is_flag else "the command line"
        raise UserError(
            f"{place} seems to contain an access token, or an address with a user name or password",
            advice=advice,
        )
