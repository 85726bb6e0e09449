"""``python -m startup_fsm``: the command line."""

import sys

from startup_fsm.cli import main

sys.exit(main())
