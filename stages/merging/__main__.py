"""`python -m stages.merging check NAME` checks that a merge method fulfils its contract."""

from stages.merging.check import check
from stages.runtime.checking import run_checks

main = run_checks("merge method", check)

if __name__ == "__main__":
    raise SystemExit(main())
