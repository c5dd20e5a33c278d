"""Builds the image of deploy/Dockerfile with buildah, and runs it as a numeric user with a read-only root.

No registry is asked: the base is Debian's Python, from debootstrap, and the wheels come from this environment. The test
needs root, because it mounts folders in a mount namespace of its own.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
from packaging.requirements import Requirement

from llamabatch.native_build import binding
from tests.installed import offline
from tests.manifests import DEPLOY, ROOT

tomllib = pytest.importorskip("tomllib")
pytestmark = [
    pytest.mark.skipif(os.environ.get("LLAMABATCH_TEST_IMAGE") != "1", reason="minutes: make test-scale sets it"),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11), reason="Debian 12 has Python 3.11, and the wheels are of this one"
    ),
    pytest.mark.skipif(
        not (sys.platform == "linux" and os.geteuid() == 0 and shutil.which("buildah") and shutil.which("debootstrap")),
        reason="needs buildah, debootstrap and root",
    ),
]
# libgomp1: the wheel of this test, for this CPU alone, needs it; wheels of `make wheels` do not
PACKAGES = "python3,python3-venv,python3-pip,libgomp1"
EXTRAS = ("server", "zstd")
INSIDE = r"""
set -e
root=$1
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
for each in cache tmp data work models; do mount -t tmpfs -o mode=1777 none "$root/$each"; done
mount -t proc none "$root/proc"
mount --bind /dev "$root/dev"
cp "$2" "$root/models/model.gguf"
mount -o remount,ro "$root/models"
exec env -i $3 LLAMABATCH_MODEL=/models/model.gguf "$(command -v chroot)" --userspec="$4" "$root" sh -c "$5"
"""
COMMANDS = r"""
id -u
touch /opt/llamabatch/new 2> /dev/null && echo "the root can be written to"
cd /work
llamabatch generate --chat -t 0 -n 8 "What is the capital of France?"
export LLAMABATCH_API_KEY=secret
llamabatch serve --port 0 > served 2>&1 & server=$!
for i in $(seq 100); do grep -q "is served at" served && break; sleep 0.2; done
url=$(sed -n 's/.*is served at \(http:[^ :]*:[0-9]*\).*/\1/p' served | sed 's/0\.0\.0\.0/127.0.0.1/')
python3 -c 'import sys, time, urllib.request as u
for i in range(200):
    try: print(u.urlopen(sys.argv[1] + "/readyz").read().decode()); break
    except OSError: time.sleep(0.2)' "$url"
kill -TERM $server
wait $server; echo "served: $?"
printf '{"prompt": "Once"}\n{"prompt": "The end"}\n' > prompts.jsonl
export JOB_COMPLETION_INDEX=1 SHARDS=2 LLAMABATCH_N_SLOTS=2
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Yields the root folder of a container of the image, and the environment and user of the Dockerfile."""
    home = tmp_path_factory.mktemp("image")
    run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", home / "base")
    wheels = home / "wheels"
    make = ("-m", "native_patches.wheels", "--variants", "native", "--out", wheels)
    run(sys.executable, *make, cwd=home, env={**os.environ, "PYTHONPATH": str(ROOT)})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = [each for extra in EXTRAS for each in project["project"]["optional-dependencies"][extra]]
    needs += project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    wanted = [each for each in map(Requirement, needs) if each.marker is None or each.marker.evaluate()]
    for known in offline.needed_by([*(each.name for each in wanted), *binding.NEEDED_PACKAGES], frozenset()):
        offline.repack(known, wheels)
    buildah = ("buildah", "--root", home / "store", "--runroot", home / "run", "--storage-driver", "vfs")
    base = run(*buildah, "from", "scratch")
    run(*buildah, "add", "--quiet", base, home / "base", "/")
    run(*buildah, "commit", "--quiet", base, "localhost/base")
    options = {"PYTHON": "localhost/base", "PIP_OPTIONS": "--no-index", "EXTRAS": ",".join(EXTRAS)}
    args = [word for name, value in options.items() for word in ("--build-arg", f"{name}={value}")]
    file = DEPLOY / "Dockerfile"
    run(
        *buildah,
        "build",
        "--isolation",
        "chroot",
        "--pull-never",
        *args,
        "-t",
        "localhost/llamabatch",
        "-f",
        file,
        wheels,
    )
    made = run(*buildah, "from", "--pull-never", "localhost/llamabatch")
    told = run(*buildah, "inspect", "--format", "{{range .OCIv1.Config.Env}}{{.}} {{end}}|{{.OCIv1.Config.User}}", made)
    environment, _, user = told.partition("|")
    yield run(*buildah, "mount", made), environment.strip(), user.strip()
    run(*buildah, "umount", made)
    shutil.rmtree(home)  # some gigabytes


def run(*command, **more):
    more.setdefault("cwd", tempfile.gettempdir())
    told = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=900, **more)
    assert told.returncode == 0, told.stdout[-4000:] + told.stderr[-4000:]
    return told.stdout.strip()


def test_it_generates_serves_and_does_a_shard_without_writing_to_its_root(image):
    root, environment, user = image
    [line] = re.findall(r"exec llamabatch run[^\n]*\n[^\n]*", (DEPLOY / "kubernetes/job/job.yaml").read_text())
    inside = f"{COMMANDS}\nsh -c '{' '.join(line.split())}' && cat results-1.jsonl"
    tiny = ROOT / "llamabatch" / "bundled" / "tiny.gguf"
    told = run("unshare", "--mount", "sh", "-c", INSIDE, "sh", root, tiny, environment, user, inside)
    assert told.startswith("65532\n")
    assert "the root can be written to" not in told
    assert "Paris" in told
    assert '{"status":"ok"}' in told
    assert "served: 0" in told
    assert '{"row": 1, ' in told
    assert '{"row": 0, ' not in told
