"""The entry of the demo: ``python examples/demo/run.py [--quick] [--workdir DIR] [--json FILE]``.

It only looks whether everything is installed; the demo itself is in demo.py, and docs/demo.md
explains what it shows.
"""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("click", "rich", "tokenizers", "torch", "torch_ckpt", "transformers")


def main() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"These Python packages are not installed: {', '.join(missing)}.\n"
            "`./dev demo` installs everything the demo needs and runs it."
        )
    if sys.platform != "linux":
        sys.exit("The demo runs on Linux only, as torch_ckpt does.")
    from demo import command

    command()


if __name__ == "__main__":
    main()
