"""What more than one verb can be told: each argument with its help, once."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import Parameter

#: A switch: there is nothing to say but its name.
SWITCH: Final = Parameter(negative=(), show_default=False)

Path = Annotated[
    str,
    Parameter(
        name="PATH",
        allow_leading_hyphen=True,
        help="A run directory, a directory of runs (the newest is read), a journal, the text log of a start, or -"
        " for standard input.",
    ),
]
PlanOrPath = Annotated[
    str | None,
    Parameter(
        name="NAME",
        allow_leading_hyphen=True,
        help="A plan; or a PATH, whose own plan is drawn with the edges that were taken.",
    ),
]
Json = Annotated[bool, SWITCH, Parameter(help="Data for a program instead of a page.")]
Markdown = Annotated[bool, SWITCH, Parameter(help="For pasting into an issue.")]
Retries = Annotated[int | None, Parameter(help="How often a start may go back and size a smaller KV cache.")]
AllowEager = Annotated[bool, SWITCH, Parameter(help="Whether a start whose capture failed goes on without graphs.")]
