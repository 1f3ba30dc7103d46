"""Finds the trace of an episode in MLflow, by its REST interface: importing MLflow would take seconds."""

from __future__ import annotations

import os

import httpx

EXPERIMENT = "bellwether"
MLFLOW_URL = "BELLWETHER_MLFLOW_URL"
"""Environment variable: the address of MLflow's UI."""
TIMEOUT_S = 5.0


def server() -> str | None:
    """MLflow's address; None without one."""
    found = os.environ.get(MLFLOW_URL) or os.environ.get("MLFLOW_TRACKING_URI", "")
    return found.rstrip("/") if found.startswith("http") else None


def trace_address(episode: str, source: str) -> str | None:
    """The page of the newest trace of an episode; None if it has none or MLflow does not answer."""
    address = server()
    if address is None or "'" in episode + source:
        return None
    try:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            named = client.get(f"{address}/api/2.0/mlflow/experiments/get-by-name", params={"experiment_name": EXPERIMENT})
            experiment = named.raise_for_status().json()["experiment"]["experiment_id"]
            wanted = {
                "locations": [{"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": experiment}}],
                "filter": f"tags.episode = '{episode}' AND tags.source = '{source}'",
                "order_by": ["timestamp_ms DESC"],
                "max_results": 1,
            }
            found = client.post(f"{address}/api/3.0/mlflow/traces/search", json=wanted).raise_for_status().json()
        trace = found["traces"][0]["trace_id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError):
        return None
    return f"{address}/#/experiments/{experiment}/traces?selectedEvaluationId={trace}"
