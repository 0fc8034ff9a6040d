"""How the processes of a run were started: checks of the launcher, the meeting, other programs."""
