"""python -m docs.site [--serve | --pages | --quick]: check the sources, assemble the pages, let MkDocs build or serve them.

A build fails for a public name without docstring, shapes, example or what raises, a page without translation or out of step with it,
code that prints something else than its page shows, a broken link or anchor, and an address of another machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from . import assemble, check, markdown, reference, translation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the site at 127.0.0.1:8000 instead of building it")
    parser.add_argument("--pages", action="store_true", help="write the pages to out/docs and stop")
    parser.add_argument("--quick", action="store_true", help="do not run the code of pages, docstrings and notebooks")
    arguments = parser.parse_args()
    if not (arguments.serve or arguments.quick) and _print(source_faults()):
        return 1
    assemble.assemble(run_notebooks=not arguments.quick)
    if arguments.pages:
        return 0
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    command = [sys.executable, "-m", "mkdocs", "serve" if arguments.serve else "build", "--strict"]
    done = subprocess.run(command, cwd=assemble.ROOT, env=environment)
    if done.returncode or arguments.serve:
        return done.returncode
    site = assemble.ROOT / "out" / "site"
    return _print(check.faults(site) + check.unreferenced(site, reference.public_names()))


def source_faults() -> list[str]:
    """What is wrong before a page is built: translations, docstrings and their examples, the code of pages."""
    pages = [assemble.DOCS / "en" / page for page in assemble.handwritten("en")]
    outputs = [fault for page in pages for fault in markdown.output_faults(page)]
    return translation.faults() + reference.faults() + outputs


def _print(faults: list[str]) -> int:
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
