"""Runs programs written by a model: isolated by bubblewrap or sandlock, with limits on time, memory, processes and output."""

from stages.sandbox.execution import Outcome, Program, TestResult, Tests
from stages.sandbox.sandbox import Sandbox
from stages.sandbox.server import SandboxError
from stages.sandbox.settings import SandboxSettings

__all__ = ["Outcome", "Program", "Sandbox", "SandboxError", "SandboxSettings", "TestResult", "Tests"]
