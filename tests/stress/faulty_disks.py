"""Real file systems that fill up, close, or lose their disk while a run saves.

Mounted in a mount namespace of their own, which goes with the process that made them: nothing of
them is seen elsewhere or stays. Without the right to do so they are skipped, with the reason.
"""

import ctypes
import errno
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .fault_injection import NUMBERS
from .faulty_saves import MAKES, Fault

PAGE = 4096
NOBODY = 65534
BIND, REMOUNT, READ_ONLY, REC, PRIVATE = 4096, 32, 1, 16384, 1 << 18
DETACH = 2
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount, as by the system call."""
    words = [text.encode() or None for text in (source, str(target), kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None):
        raise OSError(ctypes.get_errno(), f"mount {kind} {target}")


def own_mounts() -> str | None:
    """Give this process mounts of its own; why it cannot have them, if so."""
    users = [] if os.geteuid() == 0 else [0x10000000]  # a namespace of users, where we are root
    uid, gid = os.getuid(), os.getgid()
    try:
        if libc.unshare(sum([0x20000, *users])):
            raise OSError(ctypes.get_errno(), "unshare")
        if users:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        mount("none", Path("/"), "", REC | PRIVATE)
    except OSError as error:
        return f"this process may not mount: {error}"
    return None


@dataclass
class DiskFault(Fault):
    """A trouble that no call is refused for: the system does it."""

    error: int = errno.ENOSPC
    folder: Path = Path()
    """An empty folder; runs are in `place`."""

    def __post_init__(self) -> None:
        """Prepare the place."""
        self.place = self.folder / "place"
        self.place.mkdir(parents=True)
        self.struck = True

    def __str__(self) -> str:
        return type(self).__name__

    @property
    def names(self) -> set[str]:
        """Only what marks the beginning of a save."""
        return MAKES & NUMBERS.keys()

    def strikes(self, call: object) -> bool:
        """Nothing is refused."""
        return False


@dataclass
class FullDisk(DiskFault):
    """A small tmpfs, with so many pages left."""

    def __post_init__(self) -> None:
        """Mount it."""
        super().__post_init__()
        mount("tmpfs", self.place, "tmpfs", options="size=8m,mode=755")

    def begin(self, point: int) -> None:
        """Fill it."""
        left = os.statvfs(self.place).f_bavail
        with open(self.place / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (left - point) * PAGE)

    def end(self) -> None:
        """Make room."""
        (self.place / "ballast").unlink(missing_ok=True)


@dataclass
class SmallDisk(DiskFault):
    """A tmpfs of so many megabytes, which a run fills by itself."""

    megabytes: int = 2

    def __post_init__(self) -> None:
        """Mount it."""
        super().__post_init__()
        mount("tmpfs", self.place, "tmpfs", options=f"size={self.megabytes}m,mode=755")

    def end(self) -> None:
        """Make room."""
        mount("tmpfs", self.place, "tmpfs", REMOUNT, "size=64m")


@dataclass
class NoNames(DiskFault):
    """A tmpfs with so many inodes left."""

    ballast: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Mount it."""
        super().__post_init__()
        mount("tmpfs", self.place, "tmpfs", options="size=8m,nr_inodes=200,mode=755")

    def begin(self, point: int) -> None:
        """Use them up."""
        for number in range(os.statvfs(self.place).f_favail - point):
            self.ballast.append(self.place / f"ballast-{number}")
            self.ballast[-1].touch()

    def end(self) -> None:
        """Free them."""
        while self.ballast:
            self.ballast.pop().unlink()


@dataclass
class ReadOnly(DiskFault):
    """The folder of checkpoints becomes a read-only file system."""

    error: int = errno.EROFS
    at: Path | None = None

    def begin(self, point: int) -> None:
        """Close it."""
        self.at = max(self.place.glob("run-*"), key=os.path.getmtime) / "checkpoints"
        mount(str(self.at), self.at, flags=BIND)
        mount("none", self.at, flags=BIND | REMOUNT | READ_ONLY)

    def end(self) -> None:
        """Open it."""
        if self.at:
            libc.umount2(str(self.at).encode(), DETACH)
            self.at = None


@dataclass
class NoRights(DiskFault):
    """The folder of checkpoints can no longer be written to, by ranks that are not root."""

    error: int = errno.EACCES
    at: Path | None = None

    def prepare(self) -> None:
        """Root may do everything: be somebody else."""
        if os.geteuid() == 0:
            run = max(self.place.glob("run-*"), key=os.path.getmtime)
            if os.environ.get("RANK", "0") == "0":
                os.chown(run, NOBODY, NOBODY)
            while run.stat().st_uid != NOBODY:
                pass
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)

    def begin(self, point: int) -> None:
        """Take the right."""
        self.at = max(self.place.glob("run-*"), key=os.path.getmtime) / "checkpoints"
        self.at.chmod(0o555)

    def end(self) -> None:
        """Give it back."""
        if self.at:
            self.at.chmod(0o755)


@dataclass
class ThinDisk(DiskFault):
    """ext4 on a device that promises more than there is: what is synced fails."""

    errors = (errno.ENOSPC, errno.EIO)

    def __post_init__(self) -> None:
        """A file on a small tmpfs, as a disk, with a file system that has no journal to abort."""
        super().__post_init__()
        below = self.folder / "below"
        below.mkdir()
        mount("tmpfs", below, "tmpfs", options="size=32m")
        disk = below / "disk"
        with open(disk, "wb") as file:
            file.truncate(256 << 20)
        make = ["mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard"]
        subprocess.run([*make, str(disk)], check=True, timeout=60)
        options = ["-o", "loop,errors=continue,nodelalloc"]
        subprocess.run(["mount", *options, str(disk), str(self.place)], check=True, timeout=60)

    def begin(self, point: int) -> None:
        """Leave so many pages to what is below."""
        os.sync()
        below = self.folder / "below"
        left = os.statvfs(below).f_bavail
        with open(below / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (left - point) * PAGE)

    def end(self) -> None:
        """Mend it."""
        (self.folder / "below/ballast").unlink(missing_ok=True)


KINDS: dict[type[DiskFault], tuple[int, ...]] = {
    FullDisk: (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89),
    NoNames: (0, 1, 2, 3),
    ReadOnly: (0,),
    NoRights: (0,),
    ThinDisk: (0, 1, 3, 8, 20),
}
"""Each with how much is left."""
