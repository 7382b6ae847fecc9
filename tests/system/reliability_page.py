"""The text of docs/reliability.md, around the table that the fault matrix fills."""

# ruff: noqa: E501  (a row of a table is one line)

from collections.abc import Sequence

HEAD = """\
# Reliability

What happens when something dies, hangs or fails, and how that is tested.
`tests/system/fault_matrix.py` writes this page (`make reliability`) and
`tests/system/test_fault_matrix.py` compares it, so do not edit it by hand.

## The fault matrix

A real client process stops at the step of the row, with a real daemon; the fault of the column
strikes; whoever still lives goes on. *holds* means that afterwards, in each cell:

- **Values.** All KV that anybody got is, byte for byte, what its tokens stand for. What was flushed
  is served by the daemon or its successor. What was not committed is not findable (P4); what was
  answered `stored` is there while its daemon lives.
- **Service.** The daemon, or its successor, serves. The surviving client's call ended within its
  timeout, as a miss or a decline if need be, and the same client was served again afterwards without
  being restarted (C4). Beside a hung client the others are served. While the disk fails RAM goes on
  alone, `flush` and `status` say so, and writing is resumed by itself (D7).
- **Nothing is left.** Leases, pins, claims, puts, waiting requests, reads and writes under way, bytes
  of each state in both tiers, entries, connections, descriptors, shared memory, and temporary,
  cleared and quarantined files are as before the cell. Threads stay within their limits, and in the
  end are as many as at the start.

A client that *hangs* is stopped (SIGSTOP) while the others are watched, and then killed (SIGKILL). A
daemon is *stopped* until the client's call has ended, and then continued or killed. The *disk fails*
by a file that stands where the directory of all images was. Requests that are *sent* are in the
socket of a daemon that has not read them yet.
"""

TAIL = """\

Peek, contains, list, explain and the questions of `top` hold nothing and are like status; a claim, a
pin and a put that the client gives up itself end as those that it loses.

## Other tests of the same kind

| what dies or fails | how | where |
|---|---|---|
| the daemon, at each named point of the write order | SIGKILL from within | `tests/system/test_crash_points.py` |
| the machine, at any call of the file system | writes that were not synced are kept, lost or garbled | `tests/actors/test_store_crashes.py` |
| any call of the file system | an error, once or for good | `tests/actors/test_store_faults.py`, `tests/actors/test_failing_disk.py` |
| a file: cut to each length, each bit flipped | | `tests/actors/test_store_damage.py` |
| a process in the middle of a prefill that others wait for | SIGKILL | `tests/system/test_single_flight.py` |
| everything at once | the soak, below | `tests/system/test_soak.py` |

## The soak

`make soak` runs 16 clients in four processes for 30 minutes (`SOAK_SECONDS`, `SOAK_SEED`; the slow
tests run two minutes of it) against a daemon whose tiers are far smaller than what is stored. They
take, put, prefetch, keep and leave objects, pins, leases and unfinished puts, clear and flush; every
byte that they get is checked. Meanwhile clients are killed and hung; the daemon is killed, stopped,
frozen; the memory pressure changes; the disk fails; files are damaged and deleted, and the whole
directory too. Four times a second the caps are checked from outside: the shared memory of the
daemon's descriptors, and the blocks of all files below its directory. In the second half the daemon
is not ended, so that its own memory can be compared over time. In the end all clients leave, and
nothing of theirs is left.

Thirty minutes on two cores on 2026-11-30 (seed 7): 481,000 calls; 35,701 hits and 5,796 objects, 18.9 GiB
in which every byte was right; 36 daemons and 66 clients killed, the disk broken 50 times, 117 files damaged
or deleted, the whole directory 20 times. Shared memory reached 23.7 of 24 MiB and the disk 64.0 of 64 MiB;
the daemon's own memory was 55.3 MiB in the median and 56.0 MiB at the end.

## Schedules

`tests/system/test_schedules.py` runs the actors under many orders of Trio's scheduler, each
repeatable by its seed, and prints the tree of all tasks where one of them hangs.
`tests/system/test_actor_arrows.py` checks that no actor waits for another that may wait for it.
"""


def render(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the page. A row is a step and, by column, "holds" or why not."""
    lines = ["| step | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {step} | " + " | ".join(cells) + " |" for step, cells in rows]
    return f"{HEAD}\n" + "\n".join(lines) + f"\n{TAIL}"
