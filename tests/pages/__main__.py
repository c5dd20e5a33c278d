"""`make test-pages`: runs the Python of each page of docs/ in an environment with only the packages that it names.

python -m tests.pages [PAGE ...], for example json serve_api. Environments stay in build/pages, one for each list of
packages. A page names its packages with `pip install …` before its first block of Python; otherwise it needs llamabatch
alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.model.test_docs import PAGES, QUOTES, write_files

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "pages"
_INSTALL = re.compile(r"pip install ([^`\n]+)")


def packages(page: Path) -> tuple[str, ...]:
    """Returns the packages that a page tells its reader to install. If it has a sentence "The examples need `pip
    install …`", that one counts; otherwise the first `pip install`."""
    text = page.read_text(encoding="utf-8").partition("```python")[0]
    found = re.search(r"examples need\s+`pip install ([^`]+)`", text) or _INSTALL.search(text)
    return tuple(shlex.split(found[1])) if found else ("llamabatch",)


def environment(wanted: tuple[str, ...], native: str) -> Path:
    """Returns the Python of an environment with only llamabatch and these packages. Makes a new environment if the
    project has changed.

    Args:
        native: path of the llama-cpp-python wheel.
    """
    project = (ROOT / "pyproject.toml").read_bytes()
    digest = hashlib.sha256(" ".join((sys.version, native, *wanted)).encode() + project).hexdigest()[:12]
    folder = FOLDER / digest
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / "made").exists():
        print(f"installing {' '.join(wanted)}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "--no-deps", native], check=True)
        subprocess.run([*pip, "--editable", *(each.replace("llamabatch", str(ROOT)) for each in wanted)], check=True)
        (folder / "made").touch()
    return python


def main() -> int:
    pages = [page for page, blocks in PAGES.items() if blocks and page.name not in QUOTES]
    named = sys.argv[1:]
    if unknown := {*named} - {page.stem for page in pages}:
        print(f"no page with Python: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wheel = [sys.executable, "-m", "native_patches.local_wheel"]
    native = subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    failed = []
    for page in (page for page in pages if not named or page.stem in named):
        python = environment(packages(page), native)
        with tempfile.TemporaryDirectory(prefix="llamabatch-pages-") as folder:
            write_files(page, Path(folder))
            command = [str(python), "-c", "\n".join(PAGES[page])]
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
        print(f"{page.stem}: {'passed' if done.returncode == 0 else 'failed'}", flush=True)
        if done.returncode:
            failed.append(page.stem)
            print(done.stderr[-2000:], file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
