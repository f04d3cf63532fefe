"""What docker does for a service of a compose file, done with Linux namespaces.

A process gets a mount namespace with a read-only root, an empty /tmp, and its volumes; it runs as a
user without a name, without capabilities, and cannot gain privileges.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Its place inside, its folder, and "ro" or "rw".
Volume = tuple[str, Path, str]
USER = 10001
# Volumes lie in /mnt: the root has no folders of their names.
INSIDE = "/mnt"
# Python may lie in a closed home folder, which then is an empty one with Python alone.
BASE = Path(sys.base_prefix)
CLOSED = next((p for p in reversed(BASE.parents) if not p.stat().st_mode & 1), "")
SCRIPT = f"""
set -e
mount -t tmpfs tmpfs {INSIDE}
if [ -n "{CLOSED}" ]; then
    mkdir {INSIDE}/python
    mount --bind "{BASE}" {INSIDE}/python
    mount -t tmpfs -o mode=755 tmpfs "{CLOSED}"
    mkdir -p "{BASE}"
    mount --bind {INSIDE}/python "{BASE}"
fi
while [ "$1" != -- ]; do
    mkdir -p "{INSIDE}$1"
    mount --bind "$2" "{INSIDE}$1"
    if [ "$3" = ro ]; then mount -o remount,bind,ro "{INSIDE}$1"; fi
    shift 3
done
shift
mount -t tmpfs -o mode=1777,size=1g tmpfs /tmp
mount -o remount,bind,ro /
exec setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all --inh-caps=-all \\
    --no-new-privs "$@"
"""


def contained(command: Sequence[str], volumes: Sequence[Volume]) -> list[str]:
    """The command line that runs a command in such a process."""
    mounts = [word for inside, folder, how in volumes for word in (inside, str(folder), how)]
    shell = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"]
    return [*shell, *mounts, "--", *command]


@cache
def can_contain() -> bool:
    """Whether this machine allows namespaces and lets that user run this Python."""
    if (
        sys.platform != "linux"
        or os.geteuid()
        or not all(map(shutil.which, ("unshare", "setpriv")))
    ):
        return False
    # Twice: the first exec has still the right to pass closed folders.
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'], check=True)"
    )
    done = subprocess.run(contained([sys.executable, "-c", code], []), check=False)
    return done.returncode == 0


def expanded(text: str, given: Mapping[str, str]) -> str:
    """A text of a compose file with its variables: ${NAME} or ${NAME:-default}."""

    def value(match: re.Match[str]) -> str:
        return given.get(match[1], match[2] or "")

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, text)


def volumes_of(
    service: Mapping[str, Any], places: Mapping[str, Path]
) -> list[tuple[str, Path, str]]:
    """A service's volumes with the folders of this machine: places by the file's own names."""
    split = [volume.split(":") for volume in service["volumes"]]
    return [(inside, places[outside], *(how or ["rw"])) for outside, inside, *how in split]  # type: ignore[misc]
