"""Make a virtual environment with Breadbox, its tools and torch in it.

Usage: python scripts/setup_venv.py .venv
       python scripts/setup_venv.py --torch-only PYTHON    (into an interpreter that exists)

Standard library only, and readable by old Pythons: it runs before anything is installed, and it is
what tells that a Python is too old. With `uv` on the path, uv installs, else pip does.

Torch comes first and on its own, because PyPI's build for Linux brings gigabytes of CUDA along,
which neither the demo nor the tests need: from the wheel folders that pip is configured with, if
they hold it; else, on Linux, from PyTorch's own index of CPU builds, if that answers within seconds
and pip is not configured with another index than PyPI; else from where pip takes everything. The
index in BREADBOX_TORCH_INDEX_URL, where it is set, comes before all of these.
"""

import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON_MINIMUM = (3, 11)
WANTED = ".".join(map(str, PYTHON_MINIMUM))
IS_RECENT = f"import sys; sys.exit(sys.version_info < {PYTHON_MINIMUM})"
PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
"""Tried in this order where the Python that runs this is too old."""
TORCH = "torch>=2.4"
CPU_INDEX_URL = "https://download.pytorch.org/whl/cpu"
PYPI = "pypi.org"
ANSWER_S = 5.0
"""Seconds that PyTorch's index gets to answer."""
QUIET_S = 5.0
"""Seconds after which a step that prints nothing is said to be going on."""
TAIL_LINES = 60
"""Lines of what was not shown that are shown when a step fails."""
SHOWN = re.compile(rb"\x1b|\xe2\x94\x81|^ *(Downloading|ERROR|error)")
"""Of pip's lines: what is downloaded, progress bars and errors; the rest only if it fails."""


def say(text: str) -> None:
    """Tell the user what is going on."""
    print("setup: " + text, flush=True)


def succeeds(*command: str) -> bool:
    """Whether a command ends well; what it prints is of no interest."""
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


class Step:
    """A command whose output is passed on, so that no one has to wonder whether it goes on.

    Where this process writes to a terminal, so does the command, and draws its progress bars.

    Args:
        what: Names the step in lines that say that it goes on.
        scratch: Folder for the command's temporary files; its size tells how far a download is.
        shows: Whether to show a line of the command's output.
    """

    def __init__(self, what: str, scratch: str, shows: "re.Pattern[bytes] | None" = None) -> None:
        self._what = what
        self._scratch = scratch
        self._shows = shows
        self._hidden = deque(maxlen=TAIL_LINES)  # type: deque[bytes]
        self._began_at = time.monotonic()
        self._received = 0

    def run(self, command: "list[str]", environment: "dict[str, str]") -> bool:
        """Run the command to its end; False when it fails, and then all it said last is shown."""
        reading, writing = _terminal() if sys.stdout.isatty() else os.pipe()
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
            )
        except OSError as error:
            os.close(reading)
            say(f"{command[0]}: {error.strerror}")
            return False
        finally:
            os.close(writing)
        try:
            self._pass_on(reading)
            failed = process.wait() != 0
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            os.close(reading)
        if failed:
            _write(b"".join(self._hidden))
        return not failed

    def _pass_on(self, reading: int) -> None:
        rest = b""
        told_at = time.monotonic()
        while True:
            # What is not shown is silence, too.
            if time.monotonic() - told_at >= QUIET_S:
                self._say_that_it_goes_on()
                told_at = time.monotonic()
            left_s = max(0.0, told_at + QUIET_S - time.monotonic())
            if not select.select([reading], [], [], left_s)[0]:
                continue
            try:
                data = os.read(reading, 65536)
            except OSError:  # How Linux tells that nobody has the terminal's other side any more.
                data = b""
            # A bar is drawn again after each carriage return.
            *lines, rest = re.split(rb"(?<=[\r\n])", rest + data)
            if not data:
                lines.append(rest)
            for line in lines:
                if self._shows is None or self._shows.search(line):
                    _write(line)
                    told_at = time.monotonic()
                else:
                    self._hidden.append(line)
            if not data:
                return

    def _say_that_it_goes_on(self) -> None:
        """Tell for how long, and how much is in the temporary folder: that is what was received."""
        spent_s = time.monotonic() - self._began_at
        received = size_bytes(self._scratch)
        so_far = ""
        if received > 1e6:
            is_more = received > self._received
            so_far = f", {received / 1e6:.0f} MB received" if is_more else ", installing"
        self._received = received
        say(f"{self._what}: still at it, {spent_s:.0f} s{so_far}")


def _terminal() -> "tuple[int, int]":
    """Both sides of a terminal of our own terminal's size."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    columns, lines = shutil.get_terminal_size()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return ours, theirs


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def size_bytes(folder: str) -> int:
    """Bytes of all files below a folder; what goes meanwhile does not count."""
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                found += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue
    return found


class Installer:
    """Installs into one interpreter, with uv or with pip.

    Args:
        python: The interpreter.
        uv: Path of uv; empty: pip of that interpreter.
        scratch: Folder for temporary files. Not the system's, which may be memory of a few
            gigabytes.
    """

    def __init__(self, python: str, uv: str, scratch: str) -> None:
        self.python = python
        self._uv = uv
        self._scratch = scratch

    def install(self, what: str, *arguments: str) -> bool:
        """Install, with uv first where it is there; False when that failed."""
        environment = dict(os.environ, TMPDIR=self._scratch, PYTHONUNBUFFERED="1")
        if self._uv:
            command = [self._uv, "pip", "install", "--python", self.python]
            command += [*configured_for_uv(self.settings()), *arguments]
            if Step(what, self._scratch).run(command, environment):
                return True
            say(f"{what}: uv failed; trying pip")
        command = [self.python, "-m", "pip", "--disable-pip-version-check", "install"]
        # An older release that needs no compiler comes before a newer one that does.
        command += ["--prefer-binary", *arguments]
        return Step(what, self._scratch, SHOWN).run(command, environment)

    def settings(self) -> "dict[str, str]":
        """What pip is configured with, by environment or files: values by option (index-url)."""
        for python in (self.python, sys.executable):
            done = subprocess.run(
                [python, "-m", "pip", "--disable-pip-version-check", "config", "list"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if done.returncode == 0:
                listed = done.stdout.decode(errors="replace")
                found = re.findall(r"^(.+)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
                # What stands later here wins, as in pip.
                sections = ("global", "install", ":env:")
                return {name: value for each in sections for at, name, value in found if at == each}
        names = ("index-url", "extra-index-url", "find-links", "no-index")
        values = {name: os.environ.get("PIP_" + name.replace("-", "_").upper()) for name in names}
        return {name: value for name, value in values.items() if value}


def configured_for_uv(settings: "dict[str, str]") -> "list[str]":
    """Arguments that tell uv, which does not read pip's settings, where pip would look."""
    found = []
    if settings.get("index-url"):
        found += ["--default-index", settings["index-url"]]
    for name, option in (("extra-index-url", "--index"), ("find-links", "--find-links")):
        for value in re.split(r"\s+|\\n", settings.get(name, "")):
            found += [option, value] if value else []
    if settings.get("extra-index-url"):
        # As pip does: the best of all indexes, not what the first one has that knows the name.
        found += ["--index-strategy", "unsafe-best-match"]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        found.append("--no-index")
    return found


def answers(url: str, within_s: float = ANSWER_S) -> bool:
    """Whether a web page can be had within a time, however long names take to be looked up."""
    found = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=within_s):
                found.set()
        except (OSError, ValueError):
            return

    threading.Thread(target=ask, daemon=True).start()
    return found.wait(within_s)


def install_torch(installer: Installer) -> bool:
    """Install torch from the best place there is; False when there is none."""
    if succeeds(installer.python, "-c", "import torch"):
        return True
    wanted = [TORCH]
    if succeeds(installer.python, "-c", "import importlib.metadata as m; m.version('torch')"):
        say("torch: an installation was interrupted; making it whole")
        wanted.append("--force-reinstall")
    index_url = os.environ.get("BREADBOX_TORCH_INDEX_URL")
    if index_url:
        say("torch: from BREADBOX_TORCH_INDEX_URL")
        return installer.install("torch", "--index-url", index_url, *wanted)
    settings = installer.settings()
    pip = (installer.python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *wanted)
    if settings.get("find-links") and succeeds(*pip):
        say("torch: taken from pip's configured wheel folder")
        return True
    has_own_index = PYPI not in settings.get("index-url", PYPI)
    if sys.platform == "linux" and not has_own_index and "no-index" not in settings:
        say("torch: asking PyTorch's own index for a CPU build (about 200 MB)")
        if answers(CPU_INDEX_URL + "/torch/"):
            if installer.install("torch", "--index-url", CPU_INDEX_URL, *wanted):
                return True
            say("torch: that did not work; taking it from where pip takes everything")
        else:
            say("torch: it does not answer here; taking it from PyPI, with all of CUDA:")
            say("torch: about 3 GB to download, 6 GB on the disk, minutes on a fast line")
    else:
        say("torch: from where pip takes everything (75 to 200 MB; 3 GB if that brings CUDA)")
    if installer.install("torch", *wanted):
        return True
    say("torch cannot be installed; what the installer said is above. PyTorch has builds for Linux")
    say("(glibc, x86-64 and ARM) and for macOS on Apple's own processors.")
    return False


def make_environment(folder: str, uv: str) -> bool:
    """Make the virtual environment, unless there is one that works; False when that failed."""
    python = os.path.join(folder, "bin", "python")
    if succeeds(python, "-c", f"import pip; {IS_RECENT}"):
        return True
    is_broken = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    say(f"making {folder}" + (" again: what is there does not work" if is_broken else ""))
    environment = dict(os.environ)
    if uv:
        # With pip in it, for whoever expects it there.
        command = [uv, "venv", "--seed", "--python", _python_for_uv()]
        command += ["--clear"] if is_broken else []
        if Step("making " + folder, folder).run([*command, folder], environment):
            return True
        say("uv could not; trying without it")
    if sys.version_info < PYTHON_MINIMUM:
        return False
    command = [sys.executable, "-m", "venv", *(["--clear"] if is_broken else []), folder]
    if Step("making " + folder, folder).run(command, environment):
        return True
    say("this Python cannot make virtual environments; on Debian and Ubuntu the package")
    say(f"python{sys.version_info[0]}.{sys.version_info[1]}-venv is missing")
    return False


def _python_for_uv() -> str:
    if sys.version_info >= PYTHON_MINIMUM:
        return sys.executable
    return f">={WANTED}"


def newer_python() -> str:
    """Path of a Python that is new enough; empty: none is on the path."""
    for name in PYTHONS:
        found = shutil.which(name)
        if found and succeeds(found, "-c", IS_RECENT):
            return found
    return ""


def set_up(folder: str, uv: str) -> int:
    """Make an environment with everything in it; the exit status."""
    folder = os.path.abspath(folder)
    if not make_environment(folder, uv):
        return 1
    scratch = os.path.join(folder, "tmp")
    os.makedirs(scratch, exist_ok=True)
    try:
        installer = Installer(os.path.join(folder, "bin", "python"), uv, scratch)
        if not install_torch(installer):
            return 1
        say("installing breadbox and its tools: about 100 packages, 260 MB to download")
        if not installer.install("breadbox and its tools", "-e", ".[dev]"):
            say("that failed; what the installer said is above. Running it again goes on from here")
            return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    with open(os.path.join(folder, ".ready"), "w"):
        pass
    say(f"{folder} is ready")
    return 0


def main() -> int:
    """Make the environment named on the command line."""
    uv = shutil.which("uv") or ""
    if len(sys.argv) == 3 and sys.argv[1] == "--torch-only":
        installer = Installer(sys.argv[2], "", os.environ.get("TMPDIR", "/tmp"))
        # Nothing else brings what torch needs: where it came from a folder, it came alone.
        pip = (installer.python, "-m", "pip", "install", "-q", "torch")
        return int(not (install_torch(installer) and succeeds(*pip)))
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    if sys.version_info < PYTHON_MINIMUM and not uv:
        newer = newer_python()
        if newer:
            say(f"{sys.executable} is {sys.version.split()[0]}; taking {newer}")
            os.execv(newer, [newer, *sys.argv])
        say(f"Python {WANTED} or newer is needed; this is {sys.version.split()[0]}.")
        say(f"Install one (the system's package python{WANTED}, python.org; or uv, which then")
        say(
            "fetches a Python by itself) and run the same again. One that is not on the path can be"
        )
        say(f"named: `make PYTHON=/path/to/python{WANTED} ...`.")
        return 2
    try:
        return set_up(sys.argv[1], uv)
    except KeyboardInterrupt:
        say("interrupted; running it again goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
