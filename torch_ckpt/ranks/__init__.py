"""Ranks: the processes that save, load or consolidate together, and how they agree.

ranks.py is what others use, exchange.py one exchange, links.py the connections.
"""

from torch_ckpt.ranks.exchange import portable
from torch_ckpt.ranks.ranks import TIMEOUT_S, Ranks, rank_and_size

__all__ = ["TIMEOUT_S", "Ranks", "portable", "rank_and_size"]
