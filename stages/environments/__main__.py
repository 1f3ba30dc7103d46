"""`python -m stages.environments check NAME` plays the contract of an environment through."""

from stages.checking import run_checks
from stages.environments.check import check

main = run_checks("environment", check)

if __name__ == "__main__":
    raise SystemExit(main())
