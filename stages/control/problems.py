"""The problems of lane control: what an experiment's `environment` runs, with which settings. Light to import."""

from __future__ import annotations

from dataclasses import dataclass

from stages.control.advice.settings import Advice
from stages.control.calls.settings import PlantedCalls
from stages.control.exact.settings import CoalitionGame, LinearPvi, LipschitzModel, TabularQ
from stages.control.games.settings import DrivingGame, Goofspiel, MatrixGame
from stages.control.linear.settings import LinearModel
from stages.control.off_policy.dqn_settings import DeepQ
from stages.control.off_policy.settings import OffPolicy
from stages.control.offline.settings import Offline
from stages.control.on_policy.settings import Ppo
from stages.control.pursuit.settings import Pursuit
from stages.control.reach.settings import Reach
from stages.control.settings import OfflineQ
from stages.control.soft_q.settings import DetourTask, JointActions, SoftQTask
from stages.runtime.validation import Section


@dataclass(frozen=True)
class Problem:
    """module: run as `python -m MODULE --settings FILE --result FILE`. settings: its section, with a key `seed`. metrics: what
    every run stores. random: what differs between seeds, in a sentence for readers."""

    module: str
    settings: type[Section]
    metrics: tuple[str, ...]
    random: str

    @property
    def file(self) -> str:
        """The file that defines the settings."""
        return self.settings.__module__.replace(".", "/") + ".py"


PROBLEMS = {
    "guessing": Problem(
        "stages.control.offline_q",
        OfflineQ,
        ("offline.win_rate", "offline.value_rmse", "offline.overestimation"),
        "each seed has its own dataset of games",
    ),
    "linear_mdp": Problem(
        "stages.control.exact.r2pvi",
        LinearPvi,
        tuple(f"control.return_{percent}" for percent in ("mean", 0, 30, 60, 90, 100)),
        "each seed has its own episodes of a random player; policies are evaluated exactly",
    ),
    "lipschitz_model": Problem(
        "stages.control.exact.lipschitz_models",
        LipschitzModel,
        ("control.value_error", "control.bound", "control.wasserstein", "control.slope", "control.suboptimality"),
        "each seed has its own samples; values are compared with the exact ones",
    ),
    "gymnasium": Problem(
        "stages.control.off_policy.training",
        OffPolicy,
        ("control.return_end", "control.return_mean", "control.overestimation"),
        "each seed has its own networks, draws and episodes",
    ),
    "deep_q": Problem(
        "stages.control.off_policy.deep_q",
        DeepQ,
        ("control.return_end", "control.return_mean"),
        "each seed has its own networks, draws and episodes",
    ),
    "on_policy": Problem(
        "stages.control.on_policy.training",
        Ppo,
        ("control.return_end", "control.return_mean"),
        "each seed has its own networks, draws and episodes",
    ),
    "offline": Problem(
        "stages.control.offline.training",
        Offline,
        ("control.return_end", "control.return_mean", "control.behaviour"),
        "each seed has its own networks and batches; the data set is the same",
    ),
    "tabular": Problem(
        "stages.control.exact.tabular",
        TabularQ,
        ("control.return", "control.suboptimality", "control.value_error"),
        "each seed has its own episodes; policies are evaluated exactly",
    ),
    "markov_game": Problem(
        "stages.control.games.goofspiel",
        Goofspiel,
        ("control.exploitability", "control.value", "control.return", "control.value_error"),
        "each seed has its own draws; strategies are evaluated exactly",
    ),
    "reach": Problem(
        "stages.control.reach.ravl",
        Reach,
        ("control.return", "control.suboptimality", "control.overestimation", "control.leaves"),
        "each seed has its own first values and rollouts; policies are evaluated exactly",
    ),
    "joint_actions": Problem(
        "stages.control.soft_q.joint_actions",
        JointActions,
        ("control.greedy_reward", "control.soft_reward", "control.value_error"),
        "each seed has its own dataset, networks and batches",
    ),
    "detour": Problem(
        "stages.control.soft_q.detour",
        DetourTask,
        ("control.success", "control.hits", "control.return_end", "control.return_mean"),
        "each seed has its own demonstrations, networks and episodes",
    ),
    "soft_q": Problem(
        "stages.control.soft_q.online",
        SoftQTask,
        ("control.return_end", "control.return_mean", "control.least_advantage"),
        "each seed has its own networks, draws and episodes; the demonstrations are the same",
    ),
    "matrix_game": Problem(
        "stages.control.games.matrix_games",
        MatrixGame,
        ("control.payoff", "control.spread", "control.safe", "control.exploitability", "control.first_action"),
        "each seed has its own first beliefs; play is deterministic",
    ),
    "driving_game": Problem(
        "stages.control.games.psro",
        DrivingGame,
        ("control.return", "control.crashes", "control.return_unseen", "control.crashes_unseen", "control.exploitability"),
        "each seed has its own episodes, of learning, of the meta-game and of the evaluation",
    ),
    "linear_control": Problem(
        "stages.control.linear.limited_models",
        LinearModel,
        ("control.cost_ratio", "control.log_cost_ratio", "control.model_error", "control.value_error"),
        "each seed has its own transitions and first model; controllers are evaluated exactly",
    ),
    "text_grid": Problem(
        "stages.control.advice.rladapter",
        Advice,
        ("control.score", "control.score_test", "control.return", "control.return_training", "control.right_goals"),
        "each seed has its own maps, first weights, draws and advice",
    ),
    "pursuit": Problem(
        "stages.control.pursuit.contributions",
        Pursuit,
        ("control.rank_correlation", "control.team", "control.efficiency_gap", "control.standard_error", "control.switched_off"),
        "each seed has its own episodes and sampled coalitions",
    ),
    "coalition_game": Problem(
        "stages.control.exact.estimators",
        CoalitionGame,
        ("control.squared_error", "control.squared_bias", "control.variance", "control.evaluations"),
        "each seed has its own game and sampled coalitions; its values are known",
    ),
    "calls": Problem(
        "stages.control.calls.planted",
        PlantedCalls,
        (
            *("control.replaceable_share", "control.cost_per_call", "control.kept", "control.right", "control.rand_index"),
            *("control.fallback_before", "control.fallback_after", "control.leaks"),
        ),
        "each seed has its own log, clusters and training order; the small model's first weights are the same",
    ),
}
"""By name."""
