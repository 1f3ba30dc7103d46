"""`python -m stages.algorithms check NAME` runs a method through its contract."""

from stages.algorithms.check import check
from stages.runtime.checking import run_checks

main = run_checks("method", check)

if __name__ == "__main__":
    raise SystemExit(main())
