"""The runner is a module of its own, so that worker processes can import it."""

import sys

from tests.fuzz.runner import main

sys.exit(main())
