"""The curriculum: phases that end early once accuracy is high enough."""

from __future__ import annotations

from stages.pretraining.job import SETTLED, PretrainJob
from stages.pretraining.settings import Phase, Settings
from stages.runtime.resources import Resources
from stages.training.common.loop import make_processes


def make_job() -> PretrainJob:
    phases = (Phase(steps=40, until=0.5, families={"words": 1.0}), Phase(steps=30, families={"words": 1.0}))
    settings = Settings(layers=1, hidden=32, intermediate=32, heads=1, phases=phases, decay=0.1)
    return PretrainJob([], settings, 300, make_processes(Resources()))


def step(job: PretrainJob, right: float) -> dict[str, float]:
    return job.finish(0, {"policy": {"loss": 1.0, "right/words": right, "answers/words": 4.0}})


def test_phase_ends_once_its_accuracy_exceeds_until() -> None:
    """Contract: after SETTLED steps with mean accuracy above `until` the next phase begins, with an empty average."""
    job = make_job()
    for _ in range(SETTLED):
        assert job.place < 40
        row = step(job, 3.0)
    assert row["accuracy/words"] == 0.75
    assert row["phase"] == 1.0
    assert job.place == 40
    assert job.recent == []
    for _ in range(30):
        assert not job.finished()
        row = step(job, 4.0)
    assert row["phase"] == 2.0
    assert job.finished()


def test_phase_below_its_threshold_ends_after_its_steps() -> None:
    """Contract: `steps` is the limit."""
    job = make_job()
    for _ in range(40):
        step(job, 2.0)
    assert job.place == 40
    assert step(job, 2.0)["phase"] == 2.0


def test_restart_keeps_the_position_in_the_curriculum() -> None:
    """Contract: everything that decides when a phase ends is part of the job's state."""
    job, other = make_job(), make_job()
    for _ in range(10):
        step(job, 3.0)
    other.load_state_dict(job.state_dict())
    for _ in range(SETTLED - 10):
        step(job, 3.0)
        step(other, 3.0)
    assert job.place == other.place == 40


def test_learning_rate_follows_the_position_in_the_curriculum() -> None:
    """Contract: the learning rate falls over the last tenth of the corpus even if phases ended early."""
    job = make_job()
    job.place = 40
    assert job.learners["policy"].learning_rate == 1e-3
    job.place = 69
    assert 1e-4 < job.learners["policy"].learning_rate < 3e-4
