"""python automodel_killed.py FOLDER FIRST STRIDE: runs of AutoModel that are killed, each a little
later than the one before, at a call that changes the file system. Each is a fork of this process.

After each kill what is there must load and be whole; the next run goes on from it. Prints how many
kills there were.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from automodel_recipe import Recipe

import torch_ckpt
from torch_ckpt.integrations.automodel import install

_CHANGES = {
    *("os.rename", "os.mkdir", "os.symlink", "os.remove", "os.rmdir", "os.link", "os.chmod"),
    "shutil.rmtree",
}


def kill_at(number: int) -> None:
    """Kill this process at the call of this number that changes the file system."""
    count = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
        if event in _CHANGES or writes:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def forked(work: Callable[[], None]) -> int:
    """The exit status of a fork that does `work`; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def recipe_of(root: Path, is_async: bool) -> Recipe:
    recipe = Recipe(root, 3, is_async=is_async, save_consolidated="every", max_recent_checkpoints=2)
    recipe.load_checkpoint()
    return recipe


def go_on(root: Path, is_async: bool, kill: int | None) -> None:
    recipe = recipe_of(root, is_async)
    if kill is not None:
        kill_at(kill)
    for _ in range(2):
        recipe.train(1)
        recipe.save(val_loss={"default": 1.0 / recipe.step_scheduler.step})
    recipe.checkpointer.finalize()


def check(root: Path, is_async: bool, at_least: int) -> None:
    recipe = recipe_of(root, is_async)
    step = recipe.step_scheduler.step
    assert step >= at_least, f"step {step} is the newest, and {at_least} was there"
    directory = root / f"epoch_0_step_{step}"
    if step:
        for part in ("model", "optim", "model/consolidated"):
            torch_ckpt.open(directory / part).verify()
    (root.parent / "step").write_text(str(step))


def main() -> None:
    torch.set_num_threads(1)
    folder, kill, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    install()
    kills = 0
    for is_async in (False, True):
        root, number, newest = folder / f"run-{is_async}", kill, 0
        while True:
            status = forked(lambda root=root, a=is_async, n=number: go_on(root, a, n))  # type: ignore[misc]
            assert status in (0, -signal.SIGKILL), f"kill {number}, async {is_async}: {status}"
            checked = forked(lambda root=root, a=is_async, n=newest: check(root, a, n))  # type: ignore[misc]
            assert checked == 0, f"after kill {number}, async {is_async}: {checked}"
            newest = int((folder / "step").read_text())
            if status == 0:
                break
            kills += 1
            number += stride
        assert forked(lambda root=root, a=is_async: go_on(root, a, None)) == 0  # type: ignore[misc]
        names = sorted(os.listdir(root))
        assert names == ["LATEST", "LOWEST_VAL", *names[2:]] and len(names) == 4, names
    print(kills)


if __name__ == "__main__":
    main()
