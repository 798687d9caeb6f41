"""Words by which kernels that run at the same time tell each other how far they are.

A flag for every step of a machine, set once its block is there, or there is none to come; how many steps each machine
has begun; a flag for every tile of the state that a machine leaves to the next one; and two counters, of chunks and of
machines. All are zero in front of a call.
"""

from ..config import COUNTERS, LINE, TILES_OF_MACHINE, flag_words


def ready_flag(flags, number):
    """Returns the flag of a step: machine * share + step."""
    return flags.iterator + number * LINE


def progress_of(flags, machines, share, machine):
    """Returns where a machine says how many steps it has begun."""
    return flags.iterator + (machines * share + machine) * LINE


def carried_flag(flags, machines, share, machine, tile):
    """Returns the flag of a tile of the state that a machine leaves to the next one."""
    return flags.iterator + machines * (share + 1) * LINE + TILES_OF_MACHINE * machine + tile


def counter_at(flags, machines, share, which):
    """Returns a counter: 0 of chunks that are prepared, 1 of machines."""
    return flags.iterator + (flag_words(machines, share) - COUNTERS) + which
