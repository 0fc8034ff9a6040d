"""The launcher's request for FSDP: which settings recipes support, and how it is taken.

Accelerate 1.15 shards on GPUs only, and silently ignores the request on a CPU. So recipes hide the
request from Accelerate, and shard networks themselves: see `common.training.sharding.networks`.
"""

import os

from common.errors import UserError
from common.system.launch_variables import TRUE_WORDS

# The only supported value of each FSDP setting of a launcher. Recipes also use it if the launcher
# leaves the setting out: without a version they use FSDP2, while Accelerate would use FSDP1.
SUPPORTED_SETTINGS = {
    **dict.fromkeys(("RESHARD_AFTER_FORWARD", "SYNC_MODULE_STATES", "USE_ORIG_PARAMS"), "true"),
    **dict.fromkeys(("FORWARD_PREFETCH", "OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING"), "false"),
    **dict.fromkeys(("BACKWARD_PREFETCH", "IGNORED_MODULES", "TRANSFORMER_CLS_TO_WRAP"), ""),
    "VERSION": "2",
    "SHARDING_STRATEGY": "full_shard",
    "STATE_DICT_TYPE": "sharded_state_dict",
    "AUTO_WRAP_POLICY": "transformer_based_wrap",
}


def take_fsdp_request() -> bool:
    """Return whether the launcher asks for FSDP, and hide the request from Accelerate.

    Raises:
        UserError: the launcher asks for a kind of FSDP that recipes do not support.
    """
    is_requested = os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() in TRUE_WORDS
    if not is_requested:
        return False
    for name, supported in SUPPORTED_SETTINGS.items():
        value = os.environ.get(f"FSDP_{name}", supported).lower()
        if value == supported:
            continue
        launcher = "the launcher's configuration"
        advice = (
            f"set it to {supported} in {launcher}" if supported else f"remove it from {launcher}"
        )
        if name == "ACTIVATION_CHECKPOINTING":
            advice += ", and pass --gradient-checkpointing when you start a new run"
        setting = f"fsdp_{name.lower()}={value}"
        raise UserError(
            f"the launcher's setting {setting} is not supported by recipes", advice=advice
        )
    return True
