"""Finds a Vulkan to build and run with: the machine's own, or one with a driver that computes on the CPU.

Debian 12's own packages are too old. There, packages of later releases are unpacked into the cache, and the system
stays as it is.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from llamabatch.native_build import machine
from llamabatch.native_build.tools import SetupFailure, cache_dir, lock, make_folder, run_logged, say

CHOICE = "GGML_VK_VISIBLE_DEVICES"
"""ggml takes a driver that computes on the CPU only where this names its number."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR = "http://deb.debian.org/debian"
SUITES = ("bookworm", "bookworm-backports", "trixie")
PACKAGES = (
    "mesa-vulkan-drivers/bookworm-backports", "libdrm2/bookworm-backports", "libdrm-amdgpu1/bookworm-backports",
    "libvulkan1/bookworm", "libvulkan-dev/trixie", "spirv-headers/trixie", "glslc/bookworm", "libshaderc1/bookworm",
)  # fmt: skip
"""Those of trixie hold headers alone: its programs need a newer libc."""
LIBRARIES = Path("usr", "lib", "x86_64-linux-gnu")
DRIVER = "libvulkan_lvp.so"


def environment() -> dict[str, str]:
    """Returns the variables with which Vulkan builds and runs. Its compiled shaders stay in the cache.

    Raises:
        SetupFailure: this machine has no Vulkan, and Debian's packages do not fit it.
    """
    home = make_folder(cache_dir() / "vulkan")
    kept = {
        "MESA_SHADER_CACHE_DIR": str(make_folder(home / "shaders")),
        "MESA_SHADER_CACHE_MAX_SIZE": "4G",
        "GALLIVM_PERF": "nopt",  # for drivers on the CPU: shaders compile in a fraction of the time
    }
    try:
        machine.require_vulkan()
        return kept
    except SetupFailure as missing:
        if not _takes_debian_packages():
            raise
        why = str(missing).partition(": install")[0]
    with lock(home / "lock"):
        unpacked = home / "debian"
        if not (unpacked / "lvp.json").is_file():
            say(f"{why} here.")
            _unpack(home, unpacked)
    return kept | _variables(unpacked)


def _takes_debian_packages() -> bool:
    try:
        is_bookworm = platform.freedesktop_os_release().get("VERSION_CODENAME") == "bookworm"
    except OSError:
        return False
    tools = all(map(shutil.which, ("apt-get", "dpkg-deb", "ldd")))
    return is_bookworm and platform.machine() == "x86_64" and tools and KEYRING.is_file()


def _unpack(home: Path, target: Path) -> None:
    say(f"Unpacking Mesa's driver for CPUs, the Vulkan headers and glslc from Debian's packages into {target}")
    log = make_folder(cache_dir() / "logs") / "vulkan.log"
    log.write_bytes(b"")
    with tempfile.TemporaryDirectory(dir=home, prefix="unpack-", ignore_cleanup_errors=True) as temporary:
        place = Path(temporary)
        ready = place / "debian"
        for folder in ("lists/partial", "archives/partial"):
            make_folder(place / folder)
        (place / "sources.list").write_text(
            "".join(f"deb [signed-by={KEYRING}] {MIRROR} {suite} main\n" for suite in SUITES)
        )
        settings = (
            f"Dir::Etc::sourcelist={place / 'sources.list'}", "Dir::Etc::sourceparts=-",
            f"Dir::State::lists={place / 'lists'}", f"Dir::Cache={place}", "APT::Sandbox::User=root",
        )  # fmt: skip
        apt = ["apt-get", "-qq", *(part for setting in settings for part in ("-o", setting))]
        fetch = f"cd {shlex.quote(str(place))} && {shlex.join([*apt, 'download', *PACKAGES])}"
        for title, command in (("reading the lists", [*apt, "update"]), ("downloading", ["sh", "-c", fetch])):
            if run_logged(command, log, title) != 0:
                raise SetupFailure(f"Debian's packages are not to be had from {MIRROR}: {title} failed (log: {log}).")
        for package in sorted(place.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, ready], cwd=place, check=True)
        driver = ready / LIBRARIES / DRIVER
        linked = subprocess.run(["ldd", driver], cwd=place, capture_output=True, text=True, check=True).stdout
        lacking = sorted({line.split()[0] for line in linked.splitlines() if "not found" in line})
        if lacking:
            raise SetupFailure(
                f"Mesa's driver needs {', '.join(lacking)}: apt install mesa-vulkan-drivers brings them."
            )
        (ready / "lvp.json").write_text(
            json.dumps(
                {
                    "file_format_version": "1.0.0",
                    "ICD": {"api_version": "1.4.0", "library_path": str(target / LIBRARIES / DRIVER)},
                }
            )
        )
        shutil.rmtree(target, ignore_errors=True)
        os.replace(ready, target)


def _variables(unpacked: Path) -> dict[str, str]:
    def before(name: str, *added: Path) -> str:
        return os.pathsep.join(filter(None, (*map(str, added), os.environ.get(name))))

    description = str(unpacked / "lvp.json")
    return {
        "PATH": before("PATH", unpacked / "usr" / "bin"),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", unpacked / LIBRARIES),
        "CMAKE_PREFIX_PATH": before("CMAKE_PREFIX_PATH", unpacked / "usr"),
        "VK_DRIVER_FILES": description,
        "VK_ICD_FILENAMES": description,  # the name in older loaders
        CHOICE: "0",
    }
