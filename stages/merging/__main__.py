"""`python -m stages.merging check NAME` plays the contract of a merge method through."""

from stages.checking import run_checks
from stages.merging.check import check

main = run_checks("merge method", check)

if __name__ == "__main__":
    raise SystemExit(main())
