"""Files of pictures."""

from __future__ import annotations

import contextlib
import os
import secrets

from torch_ckpt.errors import InvalidArgumentError


def check_picture_name(path: str, ending: str) -> None:
    """Raises InvalidArgumentError for one without the ending: a picture must not replace what is
    none, a file of a checkpoint say."""
    if not path.endswith(ending):
        raise InvalidArgumentError(f"the name of this picture must end with {ending}", file=path)


def write_picture(path: str, picture: bytes) -> None:
    """All of it or, with OSError, nothing: a picture that was there stays then."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}-{secrets.token_hex(4)}")
    try:
        try:
            with open(beside, "xb") as file:
                file.write(picture)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
