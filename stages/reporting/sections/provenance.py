"""Last chapter: resolved parameters and hashes, without dates and paths."""

from __future__ import annotations

import yaml

from stages.agent.model_names import evaluated_domains
from stages.records.sections import params_hash
from stages.reporting.blocks import Code, Section, Table
from stages.reporting.inputs import Inputs

INTRO = (
    "The same parameters on the same type of machine give the same bytes. Runs with the same panel hash were evaluated on the "
    "same tasks; runs with different ones are never compared."
)


def policy_hashes(inputs: Inputs) -> list[list[str]]:
    """[domain, source, hash] of the policies of the sample episodes, sorted."""
    found = {
        (domain, source, row["policy_hash"])
        for domain, given in inputs.domains.items()
        for source, rows in given.episodes.items()
        for row in rows
    }
    return [list(item) for item in sorted(found)]


def provenance_section(inputs: Inputs) -> Section:
    section = Section("parameters", "Parameters and hashes", INTRO)
    panels = [[domain, str(digest)] for domain, digest in sorted(inputs.evaluation["panels"].items())]
    policies = policy_hashes(inputs)
    section.blocks += [
        Table("Parameters", ("file", "hash"), [["params.yaml, resolved", params_hash(inputs.params)]], text_columns=2),
        Table("Evaluation panels", ("domain", "hash"), panels, text_columns=2),
    ]
    models = sorted(
        {
            (name, row["policy_hash"])
            for name, by_domain in inputs.evaluation["models"].items()
            for row in by_domain.values()
            if "policy_hash" in row
        }
    )
    if models:
        rows = [list(item) for item in models]
        section.blocks.append(Table("Evaluated models", ("model", "hash of the weights"), rows, text_columns=2))
    if policies:
        shown = 12
        title = "Policies of the episodes" + (f" (first {shown} of {len(policies)})" if len(policies) > shown else "")
        section.blocks.append(Table(title, ("domain", "source", "hash"), policies[:shown], text_columns=3))
    values = inputs.params.model_dump(mode="json")
    # Domains in the order of `domains`, whatever the order of keys in the file.
    values["per_domain"] = {domain: values["per_domain"][domain] for domain in evaluated_domains(inputs.params)}
    text = yaml.safe_dump(values, sort_keys=False, width=110)
    section.blocks.append(Code("params.yaml, resolved", text))
    return section
