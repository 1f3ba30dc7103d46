"""Discounted linear-quadratic control: exact values by Riccati's equation, exact costs of any linear controller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ITERATIONS = 2000
CONVERGED = 1e-12


@dataclass(frozen=True)
class LinearSystem:
    """x' = A x + B u, cost x'Q x + u'R u, discounted by gamma."""

    a: Array
    """[S, S]."""
    b: Array
    """[S, U]."""
    q: Array
    """[S, S]."""
    r: Array
    """[U, U]."""
    gamma: float

    def gain(self, value: Array) -> Array:
        """K [U, S] of the best controller u = -K x, where the cost to go is x'P x with `value` P."""
        inner = self.r + self.gamma * self.b.T @ value @ self.b
        return np.linalg.solve(inner, self.gamma * self.b.T @ value @ self.a)

    def value(self) -> Array:
        """P [S, S] of the best controller, by value iteration from 0, which converges for any system that can be stabilised under
        the discount."""
        found = np.zeros_like(self.q)
        for _ in range(ITERATIONS):
            new = self.q + self.gamma * self.a.T @ found @ (self.a - self.b @ self.gain(found))
            new = (new + new.T) / 2
            if np.abs(new - found).max() < CONVERGED * max(1.0, np.abs(new).max()):
                return new
            found = new
        return found

    def cost(self, gain: Array, spread: Array) -> float:
        """Mean discounted cost of u = -K x from states of covariance `spread` [S, S]; infinite if it diverges."""
        closed = np.sqrt(self.gamma) * (self.a - self.b @ gain)
        if np.abs(np.linalg.eigvals(closed)).max() >= 1.0:
            return float("inf")
        per_step = self.q + gain.T @ self.r @ gain
        size = len(closed)
        value = np.linalg.solve(np.eye(size**2) - np.kron(closed.T, closed.T), per_step.ravel()).reshape(size, size)
        return float((value * spread).sum())


def distracted(distractors: int, gamma: float) -> LinearSystem:
    """A mass that is pushed along a line (position, speed), and `distractors` / 2 oscillators that nothing depends on."""
    size = 2 + distractors
    a, b, q = np.eye(size), np.zeros((size, 1)), np.zeros((size, size))
    a[0, 1], b[1, 0] = 0.2, 0.2
    for number, place in enumerate(range(2, size, 2)):
        angle = 0.1 + 0.2 * number
        a[place : place + 2, place : place + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    q[:2, :2] = np.eye(2)
    return LinearSystem(a, b, q, 0.1 * np.eye(1), gamma)
