"""What the operators raise for a wrong plan, report, region or memory of a tensor."""

from __future__ import annotations

import torch

# Torch 2.15 makes a RuntimeError of all that a kernel throws.
REFUSED = ValueError if torch.__version__ < "2.15" else RuntimeError
