"""A pool of priced tools that answer questions: retrievers, models and servers behind one call.

A call's cost is the tool's price times the tokens of its reply; a retriever's tokens are words.
"""

from stages.environments.pool.pool import Pool
from stages.environments.pool.reply import Reply
from stages.environments.pool.settings import Member

__all__ = ["Member", "Pool", "Reply"]
