"""What a job of very many ranks asks of each process: fewer connections, and room for them.

gloo, over which the host sides agree, connects every rank with every other as a group is made. That
is a descriptor per rank and group in each process, where 1,024 in all is a common limit; and each
looks up all others in the ranks' store, whose one thread is then what the start waits for.
"""

import logging
import os
import resource

log = logging.getLogger(__name__)
MANY = 128  # ranks; with fewer all connections are made in a second or two
GROUPS = 4  # of gloo that a rank is in, and one to spare
OTHERS = 1024  # descriptors for everything else


def make_room(ranks: int) -> None:
    """Prepare this process for a job of `ranks`, before it joins a process group.

    From MANY ranks on gloo connects those that talk to each other, when they first do: rank 0 with
    all, others with a few. Unless TORCH_GLOO_LAZY_INIT is in the environment, and says otherwise.
    """
    if ranks < MANY:
        return
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    wanted = OTHERS + GROUPS * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < wanted:
        log.warning(
            "%d ranks may need %d open files in a process, and no more than %d are allowed: have "
            "the hard limit raised (ulimit -H -n)",
            *(ranks, wanted, hard),
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
