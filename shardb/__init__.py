"""shardb: a transactional, content-addressed shard database.

`shardb.open(path)` gives a `Store`; `Store.begin` a `Transaction`; `Store.at` and `Store.snapshot`
a `ReadView`. Importing it imports neither torch nor the command line.
"""

from shardb.errors import ShardbError
from shardb.layout import TensorSpec
from shardb.read_view import ReadView
from shardb.records import Commit, ShardEntry
from shardb.recovery import RecoveryReport
from shardb.store import Store, open  # noqa: A004 - used as shardb.open
from shardb.transaction import Transaction
from shardb.views import ShardView, StagedShard

__version__ = "0.1.0"

__all__ = [
    "Commit",
    "ReadView",
    "RecoveryReport",
    "ShardEntry",
    "ShardView",
    "ShardbError",
    "StagedShard",
    "Store",
    "TensorSpec",
    "Transaction",
    "open",
]
