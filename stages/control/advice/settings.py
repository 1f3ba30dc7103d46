"""Settings of the text grid with an adviser; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle


class Score(Section):
    """How well the agent follows its guidance, by the similarity of the two texts."""

    kind: Literal["logistic_cosine", "binary"] = "logistic_cosine"
    """logistic_cosine: 1 / (1 + exp(-slope (cos - centre))); binary: whether that is at least 1/2."""
    slope: Positive = 10.0
    centre: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.1


class Decision(Section):
    """What proposes the next sub-goal."""

    kind: Literal["scripted", "model"] = "scripted"
    """scripted: a planner that names the right goal more often if the analysis says what is missing; model: a language model
    that is asked for one of the goals."""
    informed: Share = 0.9
    """scripted: probability of the right goal after a right analysis; otherwise the goal is random."""
    uninformed: Share = 0.2
    """scripted: the same without a right analysis."""
    model: str = "data/base"
    """model: a `save_pretrained` folder, read only. The goal is drawn by the model's probabilities of the goals' texts, so that
    it is always one of them."""
    temperature: Positive = 1.0
    """model: of that draw."""
    subgoals: Annotated[int, Field(ge=1, le=8)] = 1
    """Different goals that one answer names, the first to be pursued first; the reference code's has 3, of about 31."""
    records: str | None = None
    """model: a JSON Lines file of requests and answers. What it holds is not asked again; new answers are added."""

    @model_validator(mode="after")
    def _idle(self) -> Decision:
        scripted, model = (self.kind == "scripted", "kind: scripted"), (self.kind == "model", "kind: model")
        needs = {"informed": scripted, "uninformed": scripted, "model": model, "temperature": model, "records": model}
        refuse_idle(self, "decision.", needs)
        return self


Part = Literal["state", "score", "surroundings", "last_action", "guidance"]


class Adapter(Section):
    """What reads the agent's state and score, and tells the decision what is missing: a multinomial logistic model of eight
    analyses, fitted by maximum likelihood after every stage."""

    target: Literal["filtered", "own_outputs"] = "filtered"
    """own_outputs: all its own analyses, as in the reference code; filtered, ours: those after which the agent achieved something
    new before the next one."""
    use_score: bool = True
    """false: the score in its prompt is constant."""
    reads: list[Part] = ["state", "score"]
    """Parts of its prompt. state: inventory, tools and achievements; the other texts as hashed bags of words: surroundings, the
    last action, the guidance. The reference code's prompt has all of them."""
    pairs: str | None = None
    """A JSON Lines file that all prompts and analyses of the training are written to, with what was gained after them."""
    learning_rate: Positive = 0.05
    steps: Count = 200
    """Of the fit after each stage."""
    weight_decay: NonNegative = 0.001
    """Towards the weights before the fit."""
    held_out: Annotated[float, Field(gt=0.0, lt=0.9)] = 0.1
    """Share of a stage's pairs, the last ones, that the fit is evaluated on."""
    first_stage: Count = 1
    """The first stage after which it is fitted."""
    every: Count = 1
    """Fit after every so many stages, on all pairs since the last fit."""

    @model_validator(mode="after")
    def _parts(self) -> Adapter:
        if not self.reads or len(set(self.reads)) < len(self.reads):
            raise ValueError(f"reads must name each part once, and at least one: {self.reads}")
        if not self.use_score and "score" not in self.reads:
            raise ValueError("use_score: false has no effect where reads has no score; remove one of them")
        return self


class Advice(Section):
    """An agent in a grid with a technology tree, trained by PPO with the sub-goals of an adviser among its inputs
    (stages/control/advice/rladapter.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    guidance: Literal["none", "fixed", "llm_only", "rladapter"] = "rladapter"
    """none: plain PPO; fixed: one text for all states; llm_only: sub-goals of the decision alone; rladapter: with the adapter's
    analyses."""
    query_interval: Count = 20
    """Steps of an episode's environment between requests for guidance, in training; the reference code's 100 are half an episode
    here."""
    test_interval: Count = 10
    """The same in the second of the evaluations."""
    history: Count = 20
    """Last actions that the score compares with the guidance."""
    observe: Literal["all", "surroundings"] = "all"
    """What the agent's network reads. surroundings: not what it carries and has achieved, which the adviser reads all the same;
    advice then tells it something."""
    reset_guidance: bool = True
    """Begin episodes without history and guidance; false: with those of the episode before, as in the reference code."""
    score: Score = Score()
    decision: Decision = Decision()
    adapter: Adapter = Adapter()
    stages: Count = 5
    """Parts of the training, after each of which the adapter is fitted."""
    size: Annotated[int, Field(ge=5, le=32)] = 9
    """Of the map."""
    episode_steps: Count = 200
    environments: Count = 16
    """Played side by side."""
    steps: Count = 61_440
    """Of all environments together."""
    rollout: Count = 2048
    """Steps between updates, of all environments together."""
    batch: Count = 128
    epochs: Count = 4
    gamma: Share = 0.95
    lam: Share = 0.65
    clip: Positive = 0.2
    learning_rate: Positive = 1e-3
    entropy: NonNegative = 0.01
    value_coef: NonNegative = 0.5
    max_grad_norm: Positive = 0.5
    width: Annotated[int, Field(ge=4)] = 64
    """Of the two hidden layers, and of what guidance is mapped to."""
    encoder: Annotated[int, Field(ge=8)] = 64
    """Dimensions of the texts' hashed bags of words."""
    evaluate_episodes: Count = 64

    @model_validator(mode="after")
    def _fits(self) -> Advice:
        if self.rollout % self.environments:
            raise ValueError(f"rollout {self.rollout} must be a multiple of environments {self.environments}")
        if self.steps % (self.rollout * self.stages):
            raise ValueError(
                f"steps {self.steps} must be a multiple of rollout * stages ({self.rollout} * {self.stages}), since the adapter "
                f"is fitted after whole rollouts"
            )
        guided, asked = self.guidance != "none", self.guidance in ("llm_only", "rladapter")
        needs = dict.fromkeys(("query_interval", "test_interval", "reset_guidance"), (guided, "guidance other than none"))
        needs |= {"decision": (asked, "guidance: llm_only or rladapter"), "encoder": (guided, "guidance other than none")}
        needs |= dict.fromkeys(("adapter",), (self.guidance == "rladapter", "guidance: rladapter"))
        needs |= dict.fromkeys(("score", "history"), (asked, "guidance: llm_only or rladapter"))
        refuse_idle(self, "", needs)
        if self.adapter.first_stage > self.stages:
            raise ValueError(
                f"adapter.first_stage {self.adapter.first_stage} is after the last of {self.stages} stages; lower it"
            )
        if not self.adapter.use_score and self.score.model_fields_set:
            raise ValueError("score has no effect with adapter.use_score: false; remove it")
        if "score" not in self.adapter.reads and self.guidance == "rladapter" and self.score.model_fields_set:
            raise ValueError("score has no effect where adapter.reads has no score; remove it")
        return self
