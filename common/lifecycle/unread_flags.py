"""Refuses flags that were set and that nothing has used by the end of the first update.

Otherwise, the user would believe in an effect that a flag does not have. Four modules share the
work, because no single one can tell for every flag:

- `common.command_line.flag_reads` notes which flags code has read so far.
- `common.command_line.flag_uses` finds the lines of the recipe that may use a flag later.
- This module asks both after the first update, and refuses the flags that neither knows.
- `common.data.unused_flags` refuses flags on data, as soon as the data are loaded. The library
  reads all of them to find the data, so reading is no use; a data set states those that it uses.
"""

from pathlib import Path

from common.command_line.flag_reads import unread_flags, unused_flag_error
from common.command_line.flag_uses import find_flag_uses
from common.console import say
from common.flags import spelled
from common.lifecycle.stages import Context
from common.ranks.agreement import gather_from_ranks
from common.run_directory.records import Flags


def refuse_unread_flags(context: Context, given_flags: Flags) -> None:
    """End the run if the user stated a flag that nothing uses; called on all ranks.

    By the end of the first update, the run has used most flags. If the recipe's source has a line
    that may use a flag later, the run goes on. A message then names the line, because the recipe
    may never reach it.

    Args:
        given_flags: all flags of the first start, before any was resolved.

    Raises:
        UserError: no rank has used a flag, and no line of the recipe may use it.
    """
    unread_on_rank = unread_flags(context.config, given_flags)
    unread_on_ranks = gather_from_ranks(context.accelerator, unread_on_rank)
    unread_on_all_ranks = set.intersection(*map(set, unread_on_ranks))
    unread = [name for name in unread_on_rank if name in unread_on_all_ranks]
    if not unread:
        return
    uses = find_flag_uses(Path(context.recipe_file))
    for name in unread:
        place = uses.place_of(name)
        if place is None:
            raise unused_flag_error(context.config, name, f"{context.recipe}.py")
        say(
            f"{spelled(name)} was set, but the first update did not use it: check that {place} is "
            f"reached later, or leave {spelled(name)} out"
        )
