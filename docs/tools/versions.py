"""Sites of releases beside the newest one, and the list that the pages show: `python docs/tools/versions.py SITE`.

SITE is the folder of the site that `make docs` has built. Each of the last releases (tags such as v0.3.0) is built in a
folder of its own name inside it. versions.json is the list; without it, pages show no choice of versions.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = 3
"""How many releases have a site."""


def releases(tags: list[str]) -> list[str]:
    """Return the last tags of releases, the newest first.

    >>> releases(["v0.9.0", "v0.10.0", "nightly", "v0.2.0", "v0.3.0rc1", "v0.1.0"])
    ['v0.10.0', 'v0.9.0', 'v0.2.0']
    """
    found = [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    return sorted(found, key=lambda tag: [int(number) for number in tag[1:].split(".")], reverse=True)[:KEPT]


def write_list(site: Path) -> None:
    """Write versions.json: the site itself, and the releases that are inside it."""
    inside = releases([path.name for path in site.iterdir() if (path / "index.html").exists()])
    listed = [{"name": "newest", "folder": "./"}, *({"name": tag[1:], "folder": f"{tag}/"} for tag in inside)]
    (site / "versions.json").write_text(json.dumps(listed, indent=1), encoding="utf-8")


def build(tag: str, site: Path) -> None:
    """Build the site of a release from its tag."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "--detach", folder, tag], check=True)
        subprocess.run(["make", "-C", folder, "docs"], check=True)
        shutil.copytree(Path(folder, "docs/_build/html"), site / tag)
        subprocess.run(["git", "worktree", "remove", "--force", folder], check=True)


def main() -> None:
    site = Path(sys.argv[1])
    tags = subprocess.run(["git", "tag", "--list"], check=True, capture_output=True, text=True).stdout.split()
    for tag in releases(tags):
        build(tag, site)
    write_list(site)


if __name__ == "__main__":
    main()
