"""Last chapter: what exactly ran. Parameters and hashes; no dates and no places, so that the same run gives the same page."""

from __future__ import annotations

import yaml

from stages.records.sections import params_hash
from stages.reporting.blocks import Code, Section, Table
from stages.reporting.inputs import Inputs

INTRO = (
    "The same parameters on the same kind of machine give the same bytes. The hashes name what was compared: two runs with the "
    "same panel hash were evaluated on the same tasks, and a comparison across different panels is refused."
)


def policy_hashes(inputs: Inputs) -> list[list[str]]:
    """[domain, source, hash] of the policies that made the stored episodes, sorted."""
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
        Table("Parameters", ("what", "hash"), [["params.yaml, resolved", params_hash(inputs.params)]], text_columns=2),
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
        section.blocks.append(
            Table("Evaluated models", ("model", "hash of the weights"), [list(item) for item in models], text_columns=2)
        )
    if policies:
        shown = 12
        title = "Policies behind the stored episodes" + (
            f" (the first {shown} of {len(policies)})" if len(policies) > shown else ""
        )
        section.blocks.append(Table(title, ("domain", "source", "hash"), policies[:shown], text_columns=3))
    values = inputs.params.model_dump(mode="json")
    # Domains in their order, so that the order of keys in the file does not show.
    values["per_domain"] = {domain: values["per_domain"][domain] for domain in inputs.params.domains}
    text = yaml.safe_dump(values, sort_keys=False, width=110)
    section.blocks.append(Code("params.yaml as it resolves", text))
    return section
