"""The `bank` domain: customers' situations, and the bank's documents that answer them, from the benchmark tau2.

An episode: "... never missed a payment, and a delinquency was reported. ...", `search delinquency credit bureau`, "1 Disputing a
report ...", `open 1`, `answer`. It has test tasks alone, for evaluate.transfer. The documents are imported, not shipped.
"""

from stages.environments.bank.domain import BankDomain
from stages.environments.bank.environment import BankEnvironment
from stages.environments.bank.settings import BankSettings

__all__ = ["BankDomain", "BankEnvironment", "BankSettings"]
