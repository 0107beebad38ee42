# A restore hashes several files at once, so a rank that has much to write divides it.
LARGE = 32 << 20  # bytes that are worth a file of their own
FILES = 4  # of a rank
# With a single process DCP warns at each save that there is only one. For good, and not around the
# save: that runs in a thread of its own, and filters are the process's.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")


class DcpSaver:
    """Writes the checkpoints of one run; all ranks call `write` together."""

    def __init__(self, group: Group, threads: int = 0) -> None:
        self.group, self.threads = group, threads
        self.cache = uuid.uuid4().hex  # the name of this run's plans in DCP's cache
        self.forms: list[Any] | None = None
        """Names, shapes and dtypes that this rank wrote last; None if that save failed."""

    def write(self, folder: Path, tensors: Tensors) -> list[str]:
        """Write this rank's tensors; the names of its files.

        To be called inside `Group.agree`: only a rank that failed raises.
        """
        forms = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        last, self.forms = self.forms, None
        # DCP compares plans by all but the dtype, and a save that failed may have left half a plan.
        changed = self.group.agree(lambda: forms != last)
        if self.group.from_first(lambda: any(changed)):
            forget_plans(self.cache)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = self.cache
        size = sum(parallel.local_part(tensor).nbytes for tensor in tensors.values())
        files = self.threads or max(1, min(size // LARGE, FILES, len(tensors)))
        writer, group = DcpWriter(folder, files), self.group.process_group
        options: Any = {"process_group": group, "no_dist": group is None}
        try:
            dcp.save(nested(tensors), storage_writer=writer, planner=planner, **options)
            self.forms = forms
        except dcp.CheckpointException as error:  # no Exception; raised on all ranks
            if failure := error.failures.get(self.group.rank):
                kind = type(failure[0]).__name__
                raise CheckpointError(f"writing {folder}: {kind}: {failure[0]}") from error
        return writer.names


class DcpWriter(dcp.FileSystemWriter):
    """DCP's writer; keeps the errors that its threads would lose.

    Their files would be missing from a checkpoint that counts as saved.
    """

    def __init__(self, folder: Path, files: int) -> None:
        # The publisher syncs the files. Copying ahead would make the training stream wait.
        super().__init__(folder, sync_files=False, thread_count=files, per_thread_copy_ahead=0)
        cast(Any, self.fs).create_stream = self.create
        self.errors: list[Exception] = []
        self.names: list[str] = []

    @contextlib.contextmanager
    def create(self, path: Any, mode: str) -> Iterator[Any]:
        """Create a file; an error is kept, and DCP continues."""
        stream = None
        try:
            with naming(path), path.open(mode) as stream:
                yield stream
        except Exception as error:
            if path.name.startswith(DCP_INDEX):  # which no thread writes
                raise
            self.errors.append(error)
            if stream is None:
                yield io.BytesIO()  # DCP needs a stream to continue
        else:
            self.names.append(path.name.removesuffix(".tmp"))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's files."""
        results = super().write_data(plan, planner)
        if self.errors:
            raise self.errors[0]
        if len(results.value()) < len(plan.items):
            raise CheckpointError("a thread of DCP did not end its file")
        return results


def forget_plans(cache: str) -> None:
    """Remove what DCP has cached under a name."""
    for kept in (
        *(SavePlanner._cached_save_plan, SavePlanner._cached_final_save_plan),
        *(SavePlanner._cached_all_plans, SavePlanner._cached_global_plan),
        SavePlanner._cached_metadata,
    ):
        kept.pop(cache, None)


def write_tensors(folder: Path, tensors: Tensors, group: Group) -> list[str]:
    """Write tensors once; the names of this rank's files. All ranks call it together."""
    return DcpSaver(group).write(folder, tensors)


def share_of(tensors: Tensors, rank: int, size: int) -> Tensors:
    """What this rank has to write: a near-equal part of what it and other ranks hold alike."""
    loads: dict[int, list[int]] = {}
    mine = set()
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        copies, place = parallel.replicas(tensor, rank, size)
        load = loads.setdefault(copies, [0] * copies)
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes + 4096  # a small tensor has its cost too
        if lightest == place:
            mine.add(name)
    return {name: tensor for name, tensor in tensors.items() if name in mine}
