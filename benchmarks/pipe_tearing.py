"""
How often lines tear when several processes write to one pipe: why a mirrored line has at most 4,096 bytes.

    python benchmarks/pipe_tearing.py [--writers 8] [--lines 2000]

POSIX promises that a write of up to PIPE_BUF bytes (4,096 on Linux) goes into a pipe whole. Each process writes lines
of one letter of its own, with one ``write`` a line; a line that holds two letters, or has another length, was torn.
"""

from __future__ import annotations

import argparse
import os
import select
import string

LENGTHS = (1_000, 4_096, 4_097, 5_000, 16_384)


def write(pipe: int, letter: str, length: int, lines: int) -> None:
    """Write lines of so many bytes, newline included."""
    line = letter.encode() * (length - 1) + b"\n"
    for _ in range(lines):
        rest = line
        while rest:
            rest = rest[os.write(pipe, rest) :]


def torn(length: int, writers: int, lines: int) -> float:
    """Share of lines on the pipe that are not as one process wrote them."""
    reader, writer = os.pipe()
    for letter in string.ascii_letters[:writers]:
        if os.fork() == 0:
            write(writer, letter, length, lines)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.readlines()
    for _ in range(writers):
        os.wait()
    whole = sum(line == line[:1] * (length - 1) + b"\n" for line in found)
    return 1 - whole / len(found)


def main() -> None:
    """Measure every length and print the share of torn lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--lines", type=int, default=2_000, help="of each writer")
    given = parser.parse_args()
    print(f"{given.writers} processes, {given.lines} lines each; PIPE_BUF is {select.PIPE_BUF}")
    for length in LENGTHS:
        print(f"{length:>7,} bytes a line: {torn(length, given.writers, given.lines):6.2%} torn")


if __name__ == "__main__":
    main()
