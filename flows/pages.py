"""Addresses of the report and of MLflow, for links."""

from __future__ import annotations

import os

import httpx

REPORT_URL, MLFLOW_URL = "BELLWETHER_REPORT_URL", "BELLWETHER_MLFLOW_URL"
"""Environment variables that flows/serve.py sets for flow runs."""
EXPERIMENT = "bellwether"


def mlflow_page(lifecycle: str) -> str | None:
    """Address of the lifecycle's run in MLflow's UI, of the experiment if nothing ran, None without a UI."""
    server = os.environ.get(MLFLOW_URL) or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not server.startswith("http"):
        return None
    api = f"{server.rstrip('/')}/api/2.0/mlflow"
    try:
        with httpx.Client(timeout=5.0) as client:
            found = client.get(f"{api}/experiments/get-by-name", params={"experiment_name": EXPERIMENT})
            experiment = found.raise_for_status().json()["experiment"]["experiment_id"]
            wanted = {"experiment_ids": [experiment], "filter": f"tags.lifecycle = '{lifecycle}'", "max_results": 1}
            runs = client.post(f"{api}/runs/search", json=wanted).raise_for_status().json().get("runs", [])
    except (httpx.HTTPError, KeyError, ValueError):
        return server
    page = f"{server.rstrip('/')}/#/experiments/{experiment}"
    return f"{page}/runs/{runs[0]['info']['run_id']}" if runs else f"{page}/runs"
