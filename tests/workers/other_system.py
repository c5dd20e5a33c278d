"""A program for Linux that imports and uses the package as on Windows or macOS: `other_system win32 FOLDER`.

Only the modules of llamabatch see this `sys.platform`. They do not see modules, names and kernel files that the other
system lacks. The standard library and other packages are unchanged. The program prints the number of imported modules
as JSON.
"""

import builtins
import fcntl
import importlib
import json
import os
import pkgutil
import queue
import random
import sys
import types
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

# From typeshed's stubs: modules and names that exist on Linux and not on the other system, if programs may use them.
NO_MODULES = {
    "win32": "fcntl grp posix pty pwd readline resource syslog termios tty",
    "darwin": "msvcrt",
}
NO_NAMES = {
    "win32": {
        "os": "CLD_EXITED EX_USAGE F_LOCK O_CLOEXEC O_DIRECT O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC "
        "O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED PRIO_PROCESS P_PID RTLD_GLOBAL "
        "RTLD_LAZY RTLD_LOCAL RTLD_NOW SCHED_BATCH SEEK_DATA SEEK_HOLE WCOREDUMP WEXITSTATUS WIFEXITED WIFSIGNALED "
        "WIFSTOPPED WNOHANG WTERMSIG WUNTRACED chown chroot confstr copy_file_range ctermid environb fchdir fchmod "
        "fchown fdatasync fork forkpty fpathconf fstatvfs fwalk get_blocking getegid geteuid getgid getgroups "
        "getloadavg getpgid getpgrp getpriority getrandom getsid getuid getxattr initgroups killpg lchown listxattr "
        "lockf major memfd_create minor mkfifo mknod nice openpty pathconf pidfd_open pipe2 posix_fadvise "
        "posix_fallocate posix_spawn posix_spawnp pread preadv pwrite pwritev readv register_at_fork "
        "sched_getaffinity sched_setaffinity sched_yield sendfile set_blocking setgid setpgid setpriority setsid "
        "setuid setxattr splice statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname wait wait3 wait4 waitid "
        "writev",
        "signal": "ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL "
        "SIGPIPE SIGPOLL SIGPROF SIGQUIT SIGRTMAX SIGRTMIN SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG "
        "SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause "
        "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo",
        "socket": "AF_UNIX AF_NETLINK AF_PACKET AF_VSOCK CMSG_LEN CMSG_SPACE MSG_CMSG_CLOEXEC MSG_DONTWAIT "
        "MSG_NOSIGNAL SCM_CREDENTIALS SCM_RIGHTS SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_REUSEPORT TCP_CORK "
        "TCP_QUICKACK TCP_USER_TIMEOUT recv_fds send_fds",
        "select": "EPOLLIN PIPE_BUF POLLIN POLLHUP epoll poll",
        "time": "CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID CLOCK_REALTIME CLOCK_THREAD_CPUTIME_ID clock_getres "
        "clock_gettime clock_gettime_ns pthread_getcpuclockid tzset",
        "mmap": "MADV_DONTNEED MADV_HUGEPAGE MADV_SEQUENTIAL MADV_WILLNEED MAP_ANONYMOUS MAP_POPULATE MAP_PRIVATE "
        "MAP_SHARED PROT_EXEC PROT_READ PROT_WRITE",
        "asyncio": "open_unix_connection start_unix_server",
        "sys": "abiflags getdlopenflags setdlopenflags",
    },
    "darwin": {
        "os": "O_DIRECT O_PATH O_TMPFILE POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED SCHED_BATCH "
        "copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise "
        "posix_fallocate sched_getaffinity sched_getparam sched_setaffinity setxattr splice",
        "signal": "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
        "socket": "AF_NETLINK AF_PACKET AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED TCP_CORK TCP_QUICKACK "
        "TCP_USER_TIMEOUT",
        "select": "EPOLLIN epoll",
        "time": "CLOCK_BOOTTIME pthread_getcpuclockid",
        "mmap": "MADV_DONTFORK MADV_HUGEPAGE MAP_POPULATE",
        "sys": "",
    },
}
NO_FUNCTIONS = ("prctl", "malloc_trim", "sched_setaffinity")  # functions of Linux's C library
NO_FILES = ("/proc/", "/sys/")


class Seen(types.ModuleType):
    """A module as on the other system: without some names, and with added ones."""

    def __init__(self, real, missing, added):
        super().__init__(real.__name__)
        vars(self).update(_real=real, _missing=frozenset(missing.split()), **added)

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"{self.__name__}.{name} is not on {PLATFORM}")
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


def locking(fd, mode, n_bytes):
    """Stands for msvcrt.locking: locks a byte, and raises PermissionError if another process has the lock."""
    assert (mode, n_bytes) == (0, 1)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


def added(name):
    if name == "sys":
        return {"platform": PLATFORM}
    if name == "subprocess" and PLATFORM == "win32":
        return {"CREATE_NEW_PROCESS_GROUP": 0}
    return {}


def seen_import(name, *rest):
    if name.partition(".")[0] in NO_MODULES[PLATFORM].split():
        raise ModuleNotFoundError(f"{name} is not on {PLATFORM}", name=name)
    if name == "msvcrt":
        return types.SimpleNamespace(LK_NBLCK=0, locking=locking)
    real = builtins.__import__(name, *rest)
    return SEEN.get(real.__name__, real)


class Loader(SourceFileLoader):
    def exec_module(self, module):
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": seen_import}
        super().exec_module(module)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name.partition(".")[0] == "llamabatch" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def asked_by_llamabatch():
    """Returns True if code of llamabatch makes the call. If psutil is called by llamabatch, psutil counts: it reads
    /proc here."""
    frame = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in ("llamabatch", "psutil"):
            return package == "llamabatch"
        frame = frame.f_back
    return False


def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(NO_FILES) and asked_by_llamabatch():
        raise FileNotFoundError(2, f"not on {PLATFORM}", arguments[0])
    if event == "ctypes.dlsym" and arguments[1] in NO_FUNCTIONS:
        raise AttributeError(f"{arguments[1]} is not on {PLATFORM}")
    if event == "ctypes.dlopen" and arguments[0] is None and PLATFORM == "win32" and asked_by_llamabatch():
        raise TypeError("CDLL(None) is not on Windows")


def import_all():
    """Imports all modules of the package, and returns their number. Modules for missing frameworks are left out."""
    import llamabatch

    count = 0
    for module in pkgutil.walk_packages(llamabatch.__path__, "llamabatch."):
        if module.name.endswith(".libllamabatch"):  # the compiled sampler is not a Python module
            continue
        try:
            importlib.import_module(module.name)
        except llamabatch.SetupError as error:
            if "is not installed" not in str(error):
                raise
            continue
        count += 1
    return count


def generate():
    """Checks texts of a fake LLM, and outputs of the scheduler with a fake runner."""
    from llamabatch.request.sampling_params import SamplingParams
    from llamabatch.scheduler.policies import POLICIES
    from llamabatch.scheduler.scheduler import Limits, Scheduler
    from llamabatch.testing import FakeLLM
    from tests.unit import fakes

    with FakeLLM(answers=["one", "two"]) as llm:
        assert llm.generate("Count:", SamplingParams(max_tokens=4))[0].text == "one"
        assert llm.chat([{"role": "user", "content": "Go on."}])[0].text == "two"
    limits = Limits(n_slots=4, n_batch=64, n_ubatch=64, prefill_budget=32)
    scheduler, rng = Scheduler(POLICIES["batched"], limits), random.Random(1)
    prompts = {f"r{number}": fakes.random_prompt(rng) for number in range(10)}
    for name, prompt in prompts.items():
        scheduler.add(fakes.sequence(name, prompt, 20))
    found = fakes.drain(scheduler, fakes.FakeModelRunner(limits))
    assert set(found) == set(prompts)


def generate_in_a_child():
    """Checks the text of a fake engine in a child process, over the kind of connection that this system has."""
    from llamabatch.client.supervisor import Supervisor
    from llamabatch.config import EngineConfig
    from llamabatch.request.request import Request
    from llamabatch.request.sampling_params import SamplingParams
    from llamabatch.utils import system

    assert (PLATFORM != "win32") == system.INHERITS_SOCKETS
    program = "tests.workers.loopback_worker" if PLATFORM == "win32" else "tests.workers.fake_worker"
    child, outputs = Supervisor(EngineConfig(model="fake"), program=program), queue.SimpleQueue()
    child.start()
    child.wait_until_ready()
    child.submit([Request("r", (1, 2), SamplingParams(max_tokens=4), prompt="a b")], outputs.put)
    finished = outputs.get(timeout=60)[-1].finished
    assert (finished.error, finished.text) == (None, "From the child.")
    child.end()


def run_a_job(folder):
    """Runs a job with a fake engine. A second job must find the output locked."""
    from llamabatch.errors import OutputBusyError
    from llamabatch.jobs import Settings, job, run
    from tests.unit.jobs_fakes import FakeClient

    rows = folder / "in.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(20)))
    settings, busy = Settings(str(rows), str(folder / "out.jsonl")), []

    def connect(config):
        try:
            run(settings)
        except OutputBusyError as error:
            busy.append(str(error))
        return FakeClient()

    job.connect = connect
    assert run(settings).counts.ok == 20
    assert len((folder / "out.jsonl").read_text().splitlines()) == 20
    assert len(busy) == 1


def serve_and_measure(folder):
    """Uses code that depends on the system: facts of the machine, a server's sockets, a grammar's child process."""
    from llamabatch.errors import ConfigError
    from llamabatch.planning import cpu
    from llamabatch.planning.machine import Machine
    from llamabatch.sampling.grammar_compiler import Trial
    from llamabatch.server.http.protocol import allow_open_files
    from llamabatch.server.options import ServerOptions
    from llamabatch.server.run import listen
    from llamabatch.utils import interrupts, lifetime

    machine = Machine.here()
    assert machine.cores >= 1
    assert machine.available_bytes > 0
    assert cpu.cpu_name()
    allow_open_files(100)
    for each in listen(ServerOptions(host="127.0.0.1", port=0)):
        each.close()
    path, refused = str(folder / "s.sock"), False
    try:
        for each in listen(ServerOptions(host=path)):
            each.close()
    except ConfigError:
        refused = True
    assert refused == (PLATFORM == "win32"), "UNIX sockets"
    trial = Trial([])
    trial._start()
    trial.close()
    interrupts.guard()
    interrupts.careful()
    lifetime.leave_signals_to_parent()
    lifetime.end_with_parent()


PLATFORM = sys.argv[1]
SEEN = {name: Seen(importlib.import_module(name), names, added(name)) for name, names in NO_NAMES[PLATFORM].items()}
SEEN["subprocess"] = Seen(importlib.import_module("subprocess"), "", added("subprocess"))


def main():
    here = Path(sys.argv[2])
    os.environ["LLAMABATCH_CACHE"] = str(here / "cache")
    assert not any(name.partition(".")[0] == "llamabatch" for name in sys.modules)
    sys.meta_path.insert(0, Finder)
    importlib.import_module("ctypes")  # its import needs names that `refuse` removes
    sys.addaudithook(refuse)
    count = import_all()
    generate()
    generate_in_a_child()
    run_a_job(here)
    serve_and_measure(here)
    print(json.dumps(count))


if __name__ == "__main__":
    main()
