"""Makes the settings of a judge from the config."""

from __future__ import annotations

from pathlib import Path

from hotseat.config import Config
from hotseat.config.presence import has_judge
from hotseat.config.resolved import judge_length
from hotseat.config.urls import as_list
from hotseat.planning.role_specs import engine_slots
from hotseat.rewards.addresses import bearer_token
from hotseat.rewards.rubrics import TOKEN, JudgeEngine, JudgeSettings

VERDICTS = "judge.jsonl"


def judge_of(config: Config, run_dir: Path | None) -> JudgeSettings | None:
    """Return the settings of the run's judge; None without one. run_dir: for the file of verdicts."""
    judge = config.reward.judge
    if not has_judge(config):
        return None
    assert judge.rubric is not None
    assert judge.model is not None
    usual = 0.0 if judge.votes == 1 else 1.0
    return JudgeSettings(
        urls=tuple(as_list(judge.url)),
        model=judge.model,
        rubric=Path(judge.rubric).expanduser().read_text(encoding="utf-8"),
        name=judge.name,
        weight=judge.weight,
        pattern=judge.pattern,
        scale=judge.scale,
        choices={word.lower(): verdict for word, verdict in (judge.choices or {}).items()},
        votes=judge.votes,
        combine=judge.combine,
        temperature=usual if judge.temperature is None else judge.temperature,
        max_tokens=judge.max_tokens,
        request=judge.request,
        timeout_s=judge.timeout_s,
        retries=judge.retries,
        max_open=judge.max_open_requests,
        token=bearer_token(name=TOKEN) if judge.url is not None else None,
        engine=JudgeEngine(judge_length(config), engine_slots(config, "judge")) if judge.url is None else None,
        cache=None if run_dir is None else str(run_dir.absolute() / VERDICTS),
    )
