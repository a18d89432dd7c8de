"""python -m docs.site [--serve | --pages]: assemble the pages, then let MkDocs build or serve them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from . import assemble, check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site at 127.0.0.1:8000 instead of building it")
    parser.add_argument("--pages", action="store_true", help="write the pages to out/docs and stop")
    parser.add_argument("--quick", action="store_true", help="do not run the notebooks")
    arguments = parser.parse_args()
    assemble.assemble(run_notebooks=not arguments.quick)
    if arguments.pages:
        return 0
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, "-m", "mkdocs", "serve" if arguments.serve else "build", "--strict"]
    done = subprocess.run(command, cwd=assemble.ROOT, env=environment)
    if done.returncode or arguments.serve:
        return done.returncode
    faults = check.faults(assemble.ROOT / "out" / "site")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
