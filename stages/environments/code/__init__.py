"""The `code` domain: write a Python function; unit tests in the sandbox decide.

An episode: "f(a): the sum of the numbers in a above 3; f([4, 5, 2]) is 9, f([1, 9]) is 9", `sum(b for b in a if b>3)`, "passed.".
With repair, a failure is shown in between: "f([4, 5, 2]) is 11, not 9". `code_folder` reads problems from files in the format of
MBPP or HumanEval.
"""

from stages.environments.code.domain import CodeDomain, CodeFolderDomain
from stages.environments.code.environment import CodeEnvironment
from stages.environments.code.settings import CodeSettings, FolderSettings

__all__ = ["CodeDomain", "CodeEnvironment", "CodeFolderDomain", "CodeSettings", "FolderSettings"]
