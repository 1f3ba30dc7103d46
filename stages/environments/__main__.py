"""`python -m stages.environments check NAME` tests an environment against the contract (protocol.py)."""

from stages.environments.check import check
from stages.runtime.checking import run_checks

main = run_checks("environment", check)

if __name__ == "__main__":
    raise SystemExit(main())
