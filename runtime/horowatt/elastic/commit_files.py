# SPDX-License-Identifier: Apache-2.0
"""The files of durable commits: one whole, checked file per commit, in a folder that only its user writes.

A file is, in this order: 16 bytes of magic; the parts, one after another; an index (JSON) with place,
size and CRC-32 of each part; a trailer with place, size and CRC-32 of the index. The index comes last so
that a file can be written in one pass, and a file that was cut has no trailer.

Tensors are parts of their own, raw, and are read as numbers only. What holds them (dictionaries, lists,
plain values) is a pickle. Pickles can run code, so what protects a reader is that nothing is read but
plain files of its own user in a folder of its own user that nobody else may write.
"""

import errno
import io
import os
import pickle
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from horowatt.errors import InvalidInput, NeedsOperator, NotAllowed

FORMAT_VERSION = 1
KEPT = 2
"""How many commits of one state are kept."""
CHUNK_BYTES = 16 << 20
"""Checksummed and written at once: long enough that taking turns with Python code costs nothing."""

_MAGIC = b"horowatt commit\n"
_TRAILER = struct.Struct("<QQII16s")
_FLUSH_BYTES = 256 << 20
_BUFFER_BYTES = 1 << 20
_NAME = re.compile(r"commit-(\d{1,4})-(\d{1,18})")
_DAMAGED_SUFFIX = ".damaged"
_TEMPORARY = re.compile(r"\.commit-\d+-\d+\.\d+\.tmp")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_READ_ONLY_NOFOLLOW = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Abandoned(Exception):
    """A write was given up because the process ends; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One tensor of a commit.

    Attributes:
        dtype: Name in ``torch``, such as ``"float32"``.
        device: Kind of device it was on, such as ``"cpu"``.
        num_bytes: Size in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One named thing of a commit: what a handler of the state saved, or one attribute of the state.

    Attributes:
        kind: ``"handler"`` or ``"attribute"``.
        type_name: Class of what it describes, without its module.
    """

    kind: str
    name: str
    type_name: str
    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class CommitIndex:
    """What a commit is and where its parts are.

    Attributes:
        run: Which state of the script it is: 0 for the first one that went into ``hvd.elastic.run``.
        number: How many commits the job had made, this one included; the same on all ranks.
        at_s: When the commit was made, Unix seconds.
        world_size: Workers at that time.
        steps: Optimizer steps of the worker that wrote it, since that worker started.
    """

    version: int
    run: int
    number: int
    at_s: float
    world_size: int
    steps: int
    tensors: tuple[TensorPart, ...]
    objects: tuple[ObjectPart, ...]


@dataclass(slots=True)
class Snapshot:
    """A commit before it is a file: encoded objects, and tensors that nobody changes any more."""

    run: int
    number: int
    at_s: float
    world_size: int
    steps: int
    objects: list[tuple[str, str, str, bytes]] = field(default_factory=list)
    """Kind, name, type name and pickle of each."""
    tensors: list[Any] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    """Kind of device that each tensor was on; the tensor itself may be moved to the host."""
    _saved: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes that it will take in a file, without the index."""
        tensors: int = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
        return tensors + sum(len(data) for *_, data in self.objects)

    def add(self, kind: str, name: str, type_name: str, value: Any, *, live: bool) -> None:
        """Encode ``value`` now.

        Args:
            live: The script goes on changing it, so its tensors are copied; others are only referred to.

        Raises:
            InvalidInput: ``HW-COMMIT-007`` when it cannot be pickled; the snapshot is of no use then.
        """
        # Equal views of one memory, such as tied weights, are stored once. What is live may be freed
        # after this call, and its memory hold something else.
        known: dict[tuple[Any, ...], int] = {} if live else self._saved

        def refer(tensor: Any) -> int:
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
            index = known.get(key, -1) if tensor.numel() else -1
            if index < 0:
                index = known[key] = len(self.tensors)
                kept = tensor.detach().clone() if live else tensor.detach()
                self.tensors.append(kept.requires_grad_(tensor.requires_grad))
                self.devices.append(tensor.device.type)
            return index

        try:
            data = _dump(value, refer)
        except Exception as error:
            raise InvalidInput(
                "HW-COMMIT-007",
                f"the state cannot be stored: {kind} {name!r} cannot be pickled",
                because=f"{type(error).__name__}: {error}",
                hint="keep files, locks, generators and the like out of the state, or give their class "
                "__getstate__; until then the job restarts from an older commit, or from the beginning",
                fields={"name": name},
            ) from error
        self.objects.append((kind, name, type_name, data))


# ------------------------------------------------------------------------------------- encoding


def tensor_part(_index: int) -> Any:
    """Stand for a tensor in a pickle; a reader of commits puts the tensor there."""
    raise pickle.UnpicklingError("only a reader of commits knows the tensors")


def _dump(value: Any, refer: Callable[[Any], int]) -> bytes:
    import torch

    def reduce(obj: Any) -> Any:
        # Parameters, subclasses, sparse and quantized tensors know best how to store themselves.
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        if obj.device.type == "meta" or obj.is_conj() or obj.is_neg():
            return NotImplemented
        return tensor_part, (refer(obj),)

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            return reduce(obj)

    stream = io.BytesIO()
    try:
        Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Horovod itself sends the state between workers like this, so it is there.
        import cloudpickle

        class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                reduced = reduce(obj)
                return super().reducer_override(obj) if reduced is NotImplemented else reduced

        stream = io.BytesIO()
        CloudPickler(stream).dump(value)
    return stream.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensor: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == (__name__, tensor_part.__name__):
            return self._tensor
        return super().find_class(module_name, global_name)


# -------------------------------------------------------------------------------------- folders


@contextmanager
def open_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the folder of commits.

    Args:
        create: Make the folder, not its parents: where they are missing, something is not mounted.

    Raises:
        NotAllowed: ``HW-COMMIT-002`` when it is another user's, or others may write to it.
        OSError: when it is not there or cannot be opened.
    """
    if create:
        path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_own(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def _require_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE:
        return
    why = f"user {status.st_uid} owns it" if status.st_uid != os.geteuid() else "other users may write to it"
    raise NotAllowed(
        "HW-COMMIT-002",
        f"commits are neither read from nor written to {path}",
        because=f"{why}, and reading a commit of somebody else could run their code",
        hint="use a folder of your own: 'mkdir -m 700 FOLDER', or 'chmod go-w FOLDER'",
        fields={"path": str(path)},
    )


def file_name(run: int, number: int) -> str:
    """Return the name of a commit's file in its folder."""
    return f"commit-{run}-{number:012d}"


def number_of(run: int) -> Callable[[str], int | None]:
    """Return what tells the number of a commit of one state by its file's name; None for other files."""

    def number(name: str) -> int | None:
        match = _NAME.fullmatch(name)
        return int(match[2]) if match is not None and int(match[1]) == run else None

    return number


def list_commits(folder: int, run: int) -> list[int]:
    """Return the numbers of the commits of one state, newest first, whole or not."""
    found = map(number_of(run), os.listdir(folder))
    return sorted((number for number in found if number is not None), reverse=True)


def open_commit(folder: int, path: Path, name: str) -> int:
    """Open a commit's file for reading and return its descriptor.

    Raises:
        FileNotFoundError: when it is gone.
        NotAllowed: ``HW-COMMIT-002`` when it is a link or no plain file, another user's, or others may
            write to it.
    """
    try:
        descriptor = os.open(name, _READ_ONLY_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        descriptor = -1
    try:
        status = os.fstat(descriptor) if descriptor >= 0 else None
        if status is None or not stat.S_ISREG(status.st_mode):
            raise NotAllowed(
                "HW-COMMIT-002",
                f"{path / name} is not read",
                because="it is not a plain file",
                hint="the folder of commits is written by Horowatt; do not put anything else there",
                fields={"path": str(path / name)},
            )
        _require_own(status, path / name)
    except NotAllowed:
        if descriptor >= 0:
            os.close(descriptor)
        raise
    return descriptor


def set_aside(folder: int, name: str) -> bool:
    """Rename a damaged file out of the way; True when this call did it and no other process."""
    try:
        os.rename(name, name + _DAMAGED_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        return False
    return True


def prune(folder: int, run: int, newest: int) -> None:
    """Keep the last two commits up to ``newest``; later ones belong to a course that was given up."""
    numbers = list_commits(folder, run)
    kept = [number for number in numbers if number <= newest][:KEPT]
    doomed = [file_name(run, number) for number in numbers if number not in kept]
    if len(kept) == KEPT:
        doomed += [name for name in os.listdir(folder) if _is_damaged(name, run)]
    for name in doomed:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _is_damaged(name: str, run: int) -> bool:
    return name.endswith(_DAMAGED_SUFFIX) and number_of(run)(name.removesuffix(_DAMAGED_SUFFIX)) is not None


def remove_leftovers(folder: int) -> None:
    """Remove what writers that were killed left half written; only the holder of the lock may."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


# -------------------------------------------------------------------------------------- writing


def write_commit(folder: int, snapshot: Snapshot, given_up: Callable[[], bool] = lambda: False) -> int:
    """Write a commit so that it is whole or absent, whatever happens, and return its size in bytes.

    Nearly all of it runs without the interpreter's lock. The file is on disk when this returns.

    Args:
        given_up: Asked between chunks; when it answers True, the write is undone.

    Raises:
        Abandoned: when ``given_up`` said so.
        OSError: when it cannot be written; what was there stays.
    """
    name = file_name(snapshot.run, snapshot.number)
    temporary = f".{name}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES) as stream:
            size = _Output(stream, given_up).write(snapshot)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)
    return size


class _Output:
    def __init__(self, stream: BinaryIO, given_up: Callable[[], bool]) -> None:
        self._stream = stream
        self._given_up = given_up
        self._offset = 0
        self._unflushed = 0

    def write(self, snapshot: Snapshot) -> int:
        self._part(memoryview(_MAGIC))
        tensors = []
        for tensor, device in zip(snapshot.tensors, snapshot.devices, strict=True):
            offset, size, crc32 = self._part(_bytes_of(tensor))
            tensors.append(
                TensorPart(
                    str(tensor.dtype).removeprefix("torch."),
                    tuple(tensor.shape),
                    device,
                    tensor.requires_grad,
                    offset,
                    size,
                    crc32,
                )
            )
        objects = []
        for kind, name, type_name, data in snapshot.objects:
            objects.append(ObjectPart(kind, name, type_name, *self._part(memoryview(data))))
        index = CommitIndex(
            FORMAT_VERSION,
            snapshot.run,
            snapshot.number,
            snapshot.at_s,
            snapshot.world_size,
            snapshot.steps,
            tuple(tensors),
            tuple(objects),
        )
        place = self._part(memoryview(msgspec.json.encode(index)))
        self._part(memoryview(_TRAILER.pack(*place, FORMAT_VERSION, _MAGIC)))
        return self._offset

    def _part(self, data: memoryview) -> tuple[int, int, int]:
        begin, crc32 = self._offset, 0
        for at in range(0, len(data), CHUNK_BYTES):
            if self._given_up():
                raise Abandoned
            chunk = data[at : at + CHUNK_BYTES]
            crc32 = zlib.crc32(chunk, crc32)
            self._stream.write(chunk)
            self._unflushed += len(chunk)
            if self._unflushed >= _FLUSH_BYTES:
                # Little by little: the kernel makes everybody wait when too much is unwritten.
                self._stream.flush()
                os.fdatasync(self._stream.fileno())
                self._unflushed = 0
        self._offset += len(data)
        return begin, len(data), crc32


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


# -------------------------------------------------------------------------------------- reading


class Source(Protocol):
    """Where a commit's bytes come from."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` from ``offset`` on; False when there are not so many bytes."""


class FileSource:
    """A commit's file, which stays open for as long as this object is used; close it with ``close``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` from ``offset`` on; False when the file is too short.

        Raises:
            OSError: when the disk cannot be read.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done : done + CHUNK_BYTES]], offset + done)
            if count == 0:
                return False
            done += count
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class MemorySource:
    """A commit that another rank sent."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` from ``offset`` on; False when there are not so many bytes."""
        if offset + len(buffer) > self.size:
            return False
        buffer[:] = self._data[offset : offset + len(buffer)]
        return True


class StoredCommit:
    """A commit that was read whole and whose checksums are right."""

    def __init__(self, index: CommitIndex, tensors: list[Any], objects: dict[str, bytes]) -> None:
        self.index = index
        self._tensors = tensors
        self._objects = objects

    def names(self, kind: str) -> dict[str, str]:
        """Return the type names of the objects of one kind, by name."""
        return {part.name: part.type_name for part in self.index.objects if part.kind == kind}

    def load(self, kind: str, name: str, *, to_device: bool = False) -> Any:
        """Return one object; the same tensors are returned each time.

        Args:
            to_device: Put tensors on the kind of device they were on, where there is one.

        Raises:
            Exception: whatever its classes raise; ``AttributeError`` and ``ImportError`` when they are gone.
        """
        return _Unpickler(
            self._objects[f"{kind} {name}"],
            self._on_device if to_device else self._tensors.__getitem__,
        ).load()

    def _on_device(self, index: int) -> Any:
        kind = self.index.tensors[index].device
        tensor = self._tensors[index]
        if kind == "cpu":
            return tensor
        try:
            return tensor.detach().to(kind).requires_grad_(tensor.requires_grad)
        except (RuntimeError, AssertionError):
            return tensor


def read_commit(source: Source, path: Path) -> StoredCommit:
    """Read a commit and check every byte of it.

    Args:
        path: Named in errors.

    Raises:
        NeedsOperator: ``HW-COMMIT-003`` when it is damaged, ``HW-COMMIT-008`` when another version of
            Horowatt wrote it.
        OSError: when the disk cannot be read.
    """
    index = _read_index(source, path)
    tensors = []
    for number, part in enumerate(index.tensors):
        tensor = _read_tensor(source, part)
        if tensor is None:
            raise _damaged(path, f"tensor {number} of {len(index.tensors)} is not what was written")
        tensors.append(tensor)
    objects = {}
    for item in index.objects:
        data = _read_part(source, item.offset, item.num_bytes, item.crc32)
        if data is None:
            raise _damaged(path, f"{item.kind} {item.name!r} is not what was written")
        objects[f"{item.kind} {item.name}"] = bytes(data)
    return StoredCommit(index, tensors, objects)


def _damaged(path: Path, why: str) -> NeedsOperator:
    return NeedsOperator(
        "HW-COMMIT-003",
        f"the commit {path} is damaged",
        because=why,
        hint="nothing to do if an older commit is used instead; check the disk of that folder if it "
        "happens again",
        fields={"path": str(path)},
    )


def _read_index(source: Source, path: Path) -> CommitIndex:
    head, tail = bytearray(len(_MAGIC)), bytearray(_TRAILER.size)
    end = source.size - len(tail)
    if end < len(head) or not source.read_into(0, memoryview(head)):
        raise _damaged(path, "it was cut")
    if not source.read_into(end, memoryview(tail)):
        raise _damaged(path, "it was cut")
    offset, size, crc32, version, magic = _TRAILER.unpack(tail)
    if bytes(head) != _MAGIC or magic != _MAGIC:
        raise _damaged(path, "its beginning or its end is missing")
    if version != FORMAT_VERSION:
        raise NeedsOperator(
            "HW-COMMIT-008",
            f"the commit {path} cannot be read by this version of Horowatt",
            because=f"its format is {version}, this version reads {FORMAT_VERSION}",
            hint="continue with the version that wrote it, or move the folder away to start afresh",
            fields={"path": str(path)},
        )
    data = _read_part(source, offset, size, crc32) if offset + size == end else None
    if data is None:
        raise _damaged(path, "its index is not what was written")
    try:
        return msgspec.json.decode(data, type=CommitIndex)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(path, f"its index cannot be understood: {error}") from error


def _read_part(source: Source, offset: int, size: int, crc32: int) -> bytearray | None:
    if min(offset, size) < 0 or offset + size > source.size:
        return None
    data = bytearray(size)
    whole = source.read_into(offset, memoryview(data)) and zlib.crc32(data) == crc32
    return data if whole else None


def _read_tensor(source: Source, part: TensorPart) -> Any:
    import torch

    dtype = getattr(torch, part.dtype, None)
    if not isinstance(dtype, torch.dtype) or min((*part.shape, part.num_bytes, part.offset), default=0) < 0:
        return None
    count = 1
    for length in part.shape:
        count *= length
    if count * dtype.itemsize != part.num_bytes or part.offset + part.num_bytes > source.size:
        return None
    flat = torch.empty(count, dtype=dtype)
    if count:
        buffer = memoryview(flat.view(torch.uint8).numpy())
        if not source.read_into(part.offset, buffer) or zlib.crc32(buffer) != part.crc32:
            return None
    tensor = flat.reshape(part.shape)
    return tensor.requires_grad_() if part.requires_grad else tensor
