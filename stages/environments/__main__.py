"""`python -m stages.environments check NAME` plays the contract of an environment through."""

from stages.environments.check import check
from stages.runtime.checking import run_checks

main = run_checks("environment", check)

if __name__ == "__main__":
    raise SystemExit(main())
